"""Every way of multiplying gives what the definition gives, for any number of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.models.cpu_product import (
    WIDENED_MIN_ROWS,
    PackedProduct,
    Product,
    WidenedProduct,
    product_for,
)
from jackfield.models.layers import Linear

CPU = torch.device("cpu")
ROWS = st.sampled_from([0, 1, WIDENED_MIN_ROWS, 3, 16, 65])
KINDS = [
    (Product, torch.float32),
    (PackedProduct, torch.float32),
    (Product, torch.bfloat16),
    (WidenedProduct, torch.bfloat16),
    (WidenedProduct, torch.float16),
]
if torch.ops.mkldnn._is_mkldnn_bf16_supported():
    KINDS.append((PackedProduct, torch.bfloat16))


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@given(rows=ROWS, inner=st.integers(1, 40), outer=st.integers(1, 40), bias=st.booleans())
@settings(deadline=None, max_examples=40)
def test_product(
    kind: type[Product], dtype: torch.dtype, rows: int, inner: int, outer: int, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + inner * 40 + outer)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, weight, b = draw(rows, inner), draw(outer, inner), draw(outer) if bias else None
    before = x.clone()
    product = kind()
    product.prepare(weight, b)
    out = product(x, weight, b)
    assert out.dtype == dtype
    assert out.shape == (rows, outer)
    exact = x.double() @ weight.double().t()
    exact = exact if b is None else exact + b.double()
    # One rounding of the result, and sums of `inner` products in float32.
    tolerance = exact.abs() * torch.finfo(dtype).eps + inner * 2e-6
    assert ((out.double() - exact).abs() <= tolerance).all()
    assert torch.equal(x, before)


def test_strided_input_gives_the_same() -> None:
    x = torch.randn(7, 12)
    linear = Linear(12, (5, 4), True, torch.float32, CPU)
    torch.nn.init.normal_(linear.weight)
    assert linear.bias is not None
    torch.nn.init.normal_(linear.bias)
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    torch.testing.assert_close(linear(strided), linear(x), atol=1e-5, rtol=1e-5)


def test_a_fused_layer_loads_by_the_names_of_its_parts() -> None:
    linear = Linear(3, (2, 4), True, torch.float32, CPU)
    parts = dict(linear.shards("a", "b"))
    assert {name: tuple(part.shape) for name, part in parts.items()} == {
        "a.weight": (2, 3),
        "b.weight": (4, 3),
        "a.bias": (2,),
        "b.bias": (4,),
    }
    for index, part in enumerate(parts.values()):
        part.fill_(index)
    assert linear.weight[:2].eq(0).all()
    assert linear.weight[2:].eq(1).all()
    assert linear.bias is not None
    assert linear.bias.tolist() == [2, 2, 3, 3, 3, 3]


def test_the_choice_follows_device_and_dtype() -> None:
    assert type(product_for(torch.empty(1, 1, device="meta"))) is Product
    assert type(product_for(torch.empty(1, 1))) is PackedProduct
    assert type(product_for(torch.empty(1, 1, dtype=torch.float64))) is Product


def test_a_packed_layer_gives_its_weight_back_unless_it_is_shared() -> None:
    x = torch.randn(3, 8)
    linear = Linear(8, (5,), False, torch.float32, CPU)
    torch.nn.init.normal_(linear.weight)
    expected = linear(x)
    embedding = torch.nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    tied = Linear.sharing(embedding)
    for layer in (linear, tied):
        layer.finish_loading()
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    assert linear.weight.numel() == 0
    assert tied.weight is embedding
    assert embedding.numel() == 40
