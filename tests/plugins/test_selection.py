"""Requested means used: a named part runs or an error says why; only ``auto`` chooses."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from jackfield import KVCacheSpec, NoOptions, PartOptions, SchedulingPolicy, SizeSet
from jackfield.core.errors import ConfigError, PluginError, UnsupportedError
from jackfield.plugins.discovery import PluginHost, discover
from jackfield.plugins.registry import Origin, PartKind
from jackfield.plugins.selection import (
    select_attention_backend,
    select_block_manager,
    select_model,
    select_scheduler,
    select_scheduling_policy,
    validate_options,
)

CPU = torch.device("cpu")


class Options(PartOptions):
    """Options of a test part."""

    chunk: int = Field(default=64, ge=1, le=512, description="Tokens per chunk.")
    mode: str = "fast"


class Tuned(SchedulingPolicy):
    name = "tuned"
    Options = Options


def host_of(make: SimpleNamespace, *backends: Any) -> PluginHost:
    host = PluginHost()
    for backend in backends:
        host.add(
            Origin(f"plugin-{backend.name}"),
            make.plugin(jackfield_attention_backends={backend.name: backend}),
        )
    return host


def choose(host: PluginHost, name: str, *specs: Any, **kwargs: Any) -> Any:
    return select_attention_backend(host, name, specs, CPU, **kwargs)


def test_auto_takes_the_highest_priority_that_can(make: SimpleNamespace) -> None:
    host = host_of(
        make,
        make.backend("windowless", auto_priority=90),
        make.backend("good", auto_priority=50, sliding_window=True),
        make.backend("slow", auto_priority=10, sliding_window=True),
        make.backend("manual", auto_priority=0, sliding_window=True),
        make.backend("absent", auto_priority=99, missing="flash_magic is not installed"),
    )
    chosen = choose(host, "auto", make.spec(sliding_window=8))
    assert chosen.name == "good"
    assert chosen.origin == Origin("plugin-good")
    assert "auto_priority=50 is the highest of 2 usable among 5 registered" in chosen.why
    assert chosen.rejected == {
        "windowless": ("sliding_window=8 is not supported",),
        "absent": ("flash_magic is not installed",),
        "manual": ("auto_priority=0: it is used only when asked for by name",),
        "slow": ("auto_priority=10 is below 50 of 'good'",),
    }
    assert choose(host, "auto", make.spec()).name == "windowless"


def test_the_chosen_class_can_be_built(make: SimpleNamespace) -> None:
    host = host_of(make, make.backend("one", auto_priority=1))
    chosen = choose(host, "one", make.spec())
    spec = make.spec()
    cache = KVCacheSpec(4, chosen.block_size, 2, 16, 16, torch.float32)
    backend = chosen.cls(spec, cache, CPU, chosen.options)
    assert backend.name == "one"
    assert backend.options == NoOptions()


def test_one_backend_serves_all_layers(make: SimpleNamespace) -> None:
    host = host_of(
        make,
        make.backend("plain", auto_priority=9),
        make.backend("windows", auto_priority=1, sliding_window=True),
    )
    layers = [make.spec(), make.spec(sliding_window=4), make.spec(), make.spec(sliding_window=4)]
    chosen = choose(host, "auto", *layers)
    assert chosen.name == "windows"
    assert chosen.rejected["plain"] == ("sliding_window=4 is not supported",)


def test_equal_priorities_are_decided_by_name(make: SimpleNamespace) -> None:
    backends = [make.backend(name, auto_priority=5) for name in "cab"]
    for order in itertools.permutations(backends):
        chosen = choose(host_of(make, *order), "auto", make.spec())
        assert chosen.name == "a"
        assert "comes first by name" in chosen.rejected["b"][0]


def test_auto_without_a_usable_backend_tells_each_reason(make: SimpleNamespace) -> None:
    host = host_of(
        make,
        make.backend("one", auto_priority=9),
        make.backend("two", auto_priority=9, missing="it is not installed"),
    )
    with pytest.raises(UnsupportedError) as caught:
        choose(host, "auto", make.spec(sliding_window=4, logits_soft_cap=30.0))
    message = str(caught.value)
    assert "one: sliding_window=4 is not supported, logits_soft_cap=30.0 is not" in message
    assert "two: it is not installed" in message


def test_a_named_backend_that_cannot_is_never_replaced(make: SimpleNamespace) -> None:
    host = host_of(
        make,
        make.backend("mine", auto_priority=9, head_sizes=SizeSet.of(64, 128)),
        make.backend("other", auto_priority=9, sliding_window=True, preferred_block_size=32),
    )
    with pytest.raises(UnsupportedError) as caught:
        choose(host, "mine", make.spec(sliding_window=4))
    assert caught.value.reasons == (
        "sliding_window=4 is not supported",
        "head_size=16 is not supported (supported: 64, 128)",
    )
    assert "'mine' of plugin plugin-mine" in str(caught.value)
    assert "usable here: 'other' (block_size 32)" in str(caught.value)


def test_without_an_alternative_the_refusal_says_so(make: SimpleNamespace) -> None:
    host = host_of(make, make.backend("mine"))
    with pytest.raises(UnsupportedError, match="no registered backend is usable"):
        choose(host, "mine", make.spec(dtype=torch.float16))


def test_a_priority_of_zero_is_no_obstacle_for_a_named_one(make: SimpleNamespace) -> None:
    host = host_of(make, make.backend("mine", auto_priority=0), make.backend("top", 99))
    assert choose(host, "mine", make.spec()).name == "mine"


def test_block_size_follows_the_backend_or_is_what_was_asked(make: SimpleNamespace) -> None:
    multiples = SizeSet(multiple_of=256, minimum=256)
    host = host_of(
        make,
        make.backend("big", 9, block_sizes=multiples, preferred_block_size=256),
        make.backend("any", 1),
    )
    assert choose(host, "auto", make.spec()).block_size == 256
    assert choose(host, "any", make.spec()).block_size == 16
    assert choose(host, "big", make.spec(), block_size=512).block_size == 512
    chosen = choose(host, "auto", make.spec(), block_size=32)
    assert (chosen.name, chosen.block_size) == ("any", 32)
    assert "block_size=32 is not supported" in chosen.rejected["big"][0]
    with pytest.raises(UnsupportedError, match="block_size=32 is not supported"):
        choose(host, "big", make.spec(), block_size=32)


def test_the_cache_dtype_counts(make: SimpleNamespace) -> None:
    host = host_of(make, make.backend("mine"))
    with pytest.raises(UnsupportedError, match="kv_cache_dtype=bfloat16"):
        choose(host, "mine", make.spec(), kv_dtype=torch.bfloat16)


@pytest.mark.parametrize("told", [RuntimeError("driver too old"), {"cpu": True}])
def test_a_backend_that_cannot_tell_is_passed_over_by_auto_only(
    make: SimpleNamespace, told: Any
) -> None:
    host = host_of(make, make.backend("broken", told=told), make.backend("fine", 1))
    chosen = choose(host, "auto", make.spec())
    assert chosen.name == "fine"
    assert "its capabilities cannot be told" in chosen.rejected["broken"][0]
    with pytest.raises(PluginError, match="'broken' of plugin plugin-broken is broken"):
        choose(host, "broken", make.spec())


def test_a_target_that_does_not_import_is_passed_over_by_auto_only(make: SimpleNamespace) -> None:
    host = host_of(make, make.backend("fine", 1))
    host.add(
        Origin("ghost"), make.plugin(jackfield_attention_backends={"ghost": "no_such_mod:Backend"})
    )
    chosen = choose(host, "auto", make.spec())
    assert chosen.name == "fine"
    assert "no_such_mod" in chosen.rejected["ghost"][0]
    with pytest.raises(PluginError, match="no_such_mod"):
        choose(host, "ghost", make.spec())


def test_auto_never_takes_a_contested_name(make: SimpleNamespace) -> None:
    host = host_of(make, make.backend("hot", 99), make.backend("calm", 1))
    with pytest.raises(PluginError):
        host.add(
            Origin("rival"),
            make.plugin(jackfield_attention_backends={"hot": make.backend("hot", 50)}),
        )
    chosen = choose(host, "auto", make.spec())
    assert chosen.name == "calm"
    assert "plugin-hot and rival" in chosen.rejected["hot"][0]
    with pytest.raises(PluginError, match="plugin-hot and rival"):
        choose(host, "hot", make.spec())


def test_unknown_names_come_with_close_ones(make: SimpleNamespace) -> None:
    host = host_of(make, make.backend("flashy"), make.backend("loop"))
    with pytest.raises(PluginError) as caught:
        choose(host, "flashi", make.spec())
    message = str(caught.value)
    assert "attention_backend='flashi'" in message
    assert "did you mean 'flashy'? Available: flashy, loop." in message
    assert "Installed plugins: plugin-flashy, plugin-loop." in message


def test_options_are_validated_by_the_part(make: SimpleNamespace) -> None:
    host = host_of(make, make.backend("mine", options=Options))
    chosen = choose(host, "mine", make.spec(), options={"chunk": 128})
    assert chosen.options == Options(chunk=128)
    assert choose(host, "mine", make.spec()).options == Options()


def test_auto_takes_no_options(make: SimpleNamespace) -> None:
    host = host_of(make, make.backend("mine", 1, options=Options))
    with pytest.raises(ConfigError, match="'auto' takes none"):
        choose(host, "auto", make.spec(), options={"chunk": 128})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"chunks": 3}, ["'chunks' is unknown", "did you mean 'chunk'", "default 64", "mode"]),
        ({"chunk": 0}, ["'chunk' is 0", "an integer that is at least 1 and at most 512"]),
        ({"chunk": "many"}, ["'chunk' is 'many'", "an integer"]),
        ({"mode": 3, "chunk": 600}, ["'mode' is 3", "a text", "'chunk' is 600"]),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(
    values: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_options(PartKind.SCHEDULING_POLICY, "tuned", Tuned, values)
    message = str(caught.value)
    assert message.startswith("scheduling_policy_options of scheduling policy 'tuned': ")
    assert "\n" not in message
    assert "pydantic" not in message
    for word in words:
        assert word in message


def test_a_part_without_options_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'x' is unknown \(fields: none\)"):
        validate_options(PartKind.SCHEDULER, "s", SchedulingPolicy, {"x": 1})


def test_the_builtin_parts_can_be_selected() -> None:
    host = discover(environ={"JACKFIELD_PLUGINS": ""})
    assert select_scheduler(host, "queue").cls.name == "queue"
    assert select_scheduling_policy(host, "fcfs").cls.name == "fcfs"
    assert select_block_manager(host, "paged").cls.name == "paged"
    assert select_model(host, "LlamaForCausalLM").name == "LlamaForCausalLM"
    with pytest.raises(PluginError, match=r"model='LamaForCausalLM'.*LlamaForCausalLM"):
        select_model(host, "LamaForCausalLM")
    with pytest.raises(PluginError, match=r"scheduler='fcfs'.*Available: queue"):
        select_scheduler(host, "fcfs")


BACKENDS = st.lists(
    st.tuples(st.integers(-1, 3), st.booleans(), st.booleans()), min_size=1, max_size=6
)


@given(
    drawn=BACKENDS,
    window=st.booleans(),
    soft_cap=st.booleans(),
    random=st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_auto_is_the_best_of_the_usable_ones_in_any_order(
    make: SimpleNamespace,
    drawn: list[tuple[int, bool, bool]],
    window: bool,
    soft_cap: bool,
    random: Any,
) -> None:
    names = [f"b{index}" for index in range(len(drawn))]
    backends = [
        make.backend(name, priority, sliding_window=can_window, logits_soft_cap=can_cap)
        for name, (priority, can_window, can_cap) in zip(names, drawn, strict=True)
    ]
    usable = [
        (-priority, name)
        for name, (priority, can_window, can_cap) in zip(names, drawn, strict=True)
        if priority > 0 and can_window >= window and can_cap >= soft_cap
    ]
    random.shuffle(backends)
    host = host_of(make, *backends)
    spec = make.spec(
        sliding_window=4 if window else None, logits_soft_cap=9.0 if soft_cap else None
    )
    if not usable:
        with pytest.raises(UnsupportedError):
            choose(host, "auto", spec)
        return
    chosen = choose(host, "auto", spec)
    assert chosen.name == min(usable)[1]
    assert set(chosen.rejected) == set(names) - {chosen.name}
    assert all(chosen.rejected.values())
