"""The end of a story: all requests leave, both pools are filled, and the calls are made again."""

from __future__ import annotations

from collections.abc import Callable

from ...core.block_manager import AllocationStatus, BlockManager
from ..stateful.laws import StatefulLaw
from . import laws
from .calls import Call, Made, Outcome, make, replay
from .inspection import Inspector

#: Tokens of the requests that fill the pools begin above those of prompts, so that nothing hits.
_UNSEEN = 10
Caller = Callable[..., Outcome]


class Ending(Inspector):
    """Laws that show when a request, or all of them, have gone."""

    def need_alone(self, num_tokens: int) -> int | None:
        """Blocks that a request takes on a new manager; None if it is refused there."""
        known: dict[int, int | None] = self.__dict__.setdefault("_needs", {})
        if num_tokens not in known:
            call = Call("allocate", ("alone", (_UNSEEN,) * num_tokens, num_tokens))
            table = make(self.new_manager(), call).table
            known[num_tokens] = None if table is None else len(table)
        return known[num_tokens]

    def exclusive(self, table: tuple[int, ...]) -> int:
        """How many of these blocks nobody holds."""
        return len(set(table) - self.owned())

    def release(self, name: str) -> None:
        """Free a request, and see what it gives back."""
        before, table = self.seen.usage.available, self.live[name].table
        self.right_call("free", name)
        code = self.story[-1].call.code()
        del self.live[name]
        self.changed()
        self.judge_gain(name, code, self.exclusive(table), before)

    def judge_gain(self, name: str, code: str, expected: int, before: int) -> None:
        """Blocks that a request gave up are available now."""
        gain = self.seen.usage.available - before
        self.check(
            laws.Reclaimable,
            gain == expected,
            lambda: f"{name!r} alone held {expected} device blocks; {code} made {gain} available",
            lambda: [f"assert manager.usage().available == {before + expected}, manager.usage()"],
        )

    def finish(self) -> None:
        """The last checks of a story."""
        if not hasattr(self, "manager"):
            return
        for name in list(self.live):
            self.release(name)
        usage = self.seen.usage
        self.check(
            laws.NoLeak,
            usage.used == 0 and usage.host_used == 0 and usage.available == usage.total,
            lambda: f"all requests have gone, and usage() says {usage}",
            lambda: [
                "usage = manager.usage()",
                "assert usage.used == usage.host_used == 0, usage",
                "assert usage.available == usage.total, usage",
            ],
        )
        self._largest()
        self._fill()
        self._again()

    def _largest(self) -> None:
        largest, limit = self.ask("largest_request"), self.config.max_model_len
        count = max(0, min(largest, limit))
        tokens = (_UNSEEN,) * (count + 1)
        if count:
            whole = self.right_call("allocate", "whole", tokens[:count], count)
            self.demand(
                laws.LargestRequest,
                whole.value is not None,
                lambda: f"largest_request() is {largest}; alone, {count} tokens are refused",
            )
            self.right_call("free", "whole")
            grown = self.right_call("allocate", "grown", tokens[:1], 1)
            if grown.value is not None:
                grown = self.right_call("append", "grown", count)
            self.demand(
                laws.LargestRequest,
                grown.value is not None,
                lambda: (
                    f"largest_request() is {largest}; alone, a request with one token is refused, "
                    f"or cannot grow to {count}"
                ),
            )
            self.right_call("free", "grown")
        if largest < limit:
            status = self.right_call("can_allocate", tokens, count + 1).value
            self.check(
                laws.LargestRequest,
                status is AllocationStatus.NEVER,
                lambda: (
                    f"largest_request() is {largest}; can_allocate says {status} of "
                    f"{count + 1} tokens"
                ),
            )

    def _fill(self) -> None:
        """As many requests as fit, in both pools; on a new manager there are no more."""
        here = self._filled(self.right_call)
        fresh = self.new_manager()
        there = self._filled(lambda method, *arguments: _make(fresh, method, *arguments))
        self.check(
            laws.NoLeak,
            here == there,
            lambda: (
                f"filled after everything was freed, the manager hands out {here[0]} device "
                f"blocks and {here[1]} host blocks; a new one {there[0]} and {there[1]}"
            ),
            lambda: [
                "here, there = fill(manager), fill(build())",
                "assert here == there, (here, there)",
            ],
        )

    def _filled(self, caller: Caller) -> tuple[int, int]:
        """Device blocks and host blocks that can be handed out, those of the watermark too."""
        config = self.config
        on_host = 0
        blocks: set[int] = set()
        length = min(config.block_size, config.max_model_len)
        for index in range(config.num_host_blocks):
            caller("allocate", f"host{index}", (_UNSEEN + index,) * length, length)
            copies = caller("swap_out", f"host{index}").value
            on_host += len(copies or ())
            if copies is None:
                caller("free", f"host{index}")
                break
        names: list[str] = []
        while len(names) <= config.num_blocks:
            name, token = f"fill{len(names)}", _UNSEEN + 50 + len(names)
            outcome = caller("allocate", name, (token,) * length, length)
            if outcome.table is None:
                break
            names.append(name)
            blocks.update(outcome.table)
        for name in names:
            for end in range(length, config.max_model_len + 1, config.block_size):
                outcome = caller("append", name, end)
                blocks.update(outcome.table or ())
                if outcome.value is None:
                    break
        for index in range(config.num_host_blocks):
            caller("free", f"host{index}")
        for name in names:
            caller("free", name)
        return len(blocks), on_host

    def _again(self) -> None:
        """The same calls on new managers, all of them and those that changed something only."""
        story = [made for made in self.story if made.call.method != "note"]
        asked = [made for made in story if not made.call.is_probe]
        first = self._compare(laws.Probes, asked, without_idle=False)
        if first is not None:
            # Did the probes change something, or is it different every time?
            second = self._compare(laws.Probes, asked, without_idle=False)
            text, law = first, laws.Probes if first == second else laws.Determinism
            self.demand(law, False, lambda: text)
        self.checked |= {laws.Probes.name, laws.Determinism.name}
        changed = [made for made in asked if not made.idle]
        last = self._compare(laws.AllOrNothing, changed, without_idle=True)
        self.check(laws.AllOrNothing, last is None, lambda: str(last))
        self.session.keep((self.subject, self.config, asked))

    def _compare(
        self, law: type[StatefulLaw], story: list[Made], *, without_idle: bool
    ) -> str | None:
        """What differs if these calls alone are made on a new manager; None if nothing does."""
        what = (
            "without the calls that were refused"
            if without_idle
            else "without the questions in between"
        )
        try:
            again = replay(self.new_manager(), story)
        except Exception as error:
            return f"{what}, the same calls end with {type(error).__name__}: {error}"
        for made, outcome in zip(story, again, strict=True):
            if made.outcome.told() != outcome.told():
                return (
                    f"{made.call.code()} gave {_told(made.outcome)}; {what}, the same calls on a "
                    f"new manager give {_told(outcome)}"
                )
        return None


def _told(outcome: Outcome) -> str:
    value, error, table = outcome.told()
    text = str(error if error is not None else value)
    return text if table is None else f"{text} with the table {list(table)}"


def _make(manager: BlockManager, method: str, *arguments: object) -> Outcome:
    return make(manager, Call(method, arguments))
