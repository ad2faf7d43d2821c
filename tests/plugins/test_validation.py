"""Values, bounds and options in words."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from jackfield import PartOptions
from jackfield.backends.triton_paged.tiles import TritonOptions
from jackfield.plugins.validation import fields_of, problems


class Inner(BaseModel):
    """A part of the options."""

    rows: int = Field(ge=16, le=256)
    speed: float | None = Field(default=None, gt=0.5)


class Outer(PartOptions):
    """Options with an object in them."""

    inner: Inner | None = Field(default=None, description="What to work on.")
    share: float = Field(default=0.1, ge=0, lt=1)
    kind: Literal["a", "b"] = "a"


def test_an_option_that_is_an_object_is_described_by_its_fields() -> None:
    inner, share, kind = fields_of(Outer)
    assert inner.allowed == (
        "an object with rows (an integer that is at least 16 and at most 256, required), speed "
        "(a number that is above 0.5, or none), or none"
    )
    assert inner.description == "What to work on."
    assert share.allowed == "a number that is at least 0 and below 1"
    assert str(kind) == "kind ('a' or 'b'; default 'a')"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"share": 2}, "field 'share' is 2, it must be a number that is at least 0 and below 1"),
        ({"kind": "c"}, "field 'kind' is 'c', it must be 'a' or 'b'"),
        ({"inner": 3}, "field 'inner' is 3, it must be an object with rows"),
    ],
)
def test_what_would_be_right_is_said_once(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(values)
    (said,) = problems(caught.value, Outer)
    assert said.startswith(sentence)
    assert said.count("below") <= 1


def test_the_options_of_triton_tell_what_tiles_are() -> None:
    for option in fields_of(TritonOptions):
        assert "a value of its type" not in option.allowed
        assert "keys (an integer that is at least 16 and at most 256, required)" in option.allowed
        assert option.description


class Node(PartOptions):
    """A model that holds itself."""

    depth: int = Field(default=1, ge=1)
    child: Node | None = None


class Holder(PartOptions):
    """Options with such a model among them."""

    node: Node | None = None


def test_a_model_that_holds_itself_is_described_once() -> None:
    (node,) = fields_of(Holder)
    inside = "depth (an integer that is at least 1), child (an object, or none)"
    assert node.allowed == f"an object with {inside}, or none"
    depth, child = fields_of(Node)
    assert depth.allowed == "an integer that is at least 1"
    assert child.allowed == f"an object with {inside}, or none"


class Bounded(PartOptions):
    """Bounds that are no plain numbers."""

    wait: timedelta = Field(default=timedelta(seconds=1), gt=timedelta(0))
    price: Decimal = Field(default=Decimal(2), gt=Decimal("1.0"))
    far: float = Field(default=0.0, lt=1e30)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"wait": timedelta(-1)}, "above 0 seconds"),
        ({"price": Decimal(1)}, "above 1"),
        ({"far": 1e31}, "below 1e+30"),
    ],
)
def test_any_bound_can_be_said(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Bounded.model_validate(values)
    (said,) = problems(caught.value, Bounded)
    assert words in said
