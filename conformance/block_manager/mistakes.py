"""Calls that have to be refused: wrong ones, and those of powers that are not declared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.errors import UnsupportedError
from . import laws
from .moves import Moves

_CALL_OF_POWER: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "fork": [("fork", ("r1", "r99"))],
    "swap": [("swap_out", ("r1",)), ("swap_in", ("r1",))],
    "prefix_caching": [("reset_prefix_cache", ())],
}
_SETTING_OF_POWER: dict[str, dict[str, Any]] = {
    "prefix_caching": {"enable_prefix_caching": True},
    "swap": {"num_host_blocks": 2},
    "lookahead": {"num_lookahead_tokens": 1},
}
#: Kinds of mistakes.
NUM_MISTAKES = 9


class Mistakes(Moves):
    """Does what nobody may do."""

    def err(self, kind: int, index: int) -> None:
        """One kind of mistake; ``index`` says with which request."""
        powers = self.subject.manager.powers
        names = list(self.live)
        name = names[index % len(names)] if names else "r98"
        request = self.live.get(name)
        swapped = request is not None and request.swapped
        if kind == 0 and request is not None:
            self.wrong_call(ValueError, "allocate", name, (0, 0, 0), 2)
        elif kind == 1:
            for count in (0, -1, 4):
                self.wrong_call(ValueError, "can_allocate", (0, 0, 0), count)
                self.wrong_call(ValueError, "allocate", "r99", (0, 0, 0), count)
        elif kind == 2:
            self.missing("append", name if swapped else "r99", 1)
        elif kind == 3:
            self.missing("block_table", "r99")
            self.missing("reclaimable", "r99")
        elif kind == 4:
            self.right_call("free", "r99")
            self.unchanged(laws.FreeAgain)
        elif kind == 5 and "fork" in powers:
            self.missing("fork", name if swapped else "r99", "r97")
            if request is not None and not swapped:
                self.wrong_call(ValueError, "fork", name, names[0])
        elif kind == 6 and "swap" in powers:
            self.missing("swap_out", name if swapped else "r99")
            self.missing("swap_in", "r99" if swapped else name)
        elif kind == 7:
            self.undeclared_calls()
        elif kind == 8:
            self.undeclared_settings()

    def undeclared_calls(self) -> None:
        """Methods of powers that the manager does not have."""
        powers = self.subject.manager.powers
        for power, calls in _CALL_OF_POWER.items():
            for method, arguments in calls if power not in powers else ():
                outcome = self.call(method, *arguments)
                error, code = outcome.error, self.story[-1].call.code()
                self.demand(
                    laws.Refusals,
                    isinstance(error, UnsupportedError) and power in str(error),
                    lambda power=power, error=error, code=code: (  # type: ignore[misc]
                        f"{code} must raise UnsupportedError with {power!r} in its text, since "
                        f"the power is not declared; it gave {error!r}"
                    ),
                    lambda power=power, code=code: _refused(code, power),  # type: ignore[misc]
                )
                self.unchanged(laws.Refusals)
        self.checked.add(laws.Refusals.name)

    def undeclared_settings(self) -> None:
        """Configurations that ask for powers that the manager does not have."""
        powers = self.subject.manager.powers
        for power, settings in _SETTING_OF_POWER.items():
            if power in powers:
                continue
            refusal: Exception | None = None
            try:
                self.subject.build(replace(self.config, **settings))
            except Exception as error:
                refusal = error
            self.demand(
                laws.Refusals,
                isinstance(refusal, UnsupportedError) and power in str(refusal),
                lambda power=power, settings=settings, refusal=refusal: (  # type: ignore[misc]
                    f"a configuration with {settings} must be refused by UnsupportedError with "
                    f"{power!r} in its text, since the power is not declared; it gave {refusal!r}"
                ),
                lambda power=power, settings=settings: [  # type: ignore[misc]
                    "from dataclasses import replace",
                    f"CONFIG = replace(CONFIG, **{settings})",
                    *_refused("build()", power),
                ],
            )
        self.checked.add(laws.Refusals.name)


def _refused(code: str, power: str) -> list[str]:
    """A proof that this is not refused by name."""
    return [
        "from jackfield.core.errors import UnsupportedError",
        "",
        "try:",
        f"    got = {code}",
        "except UnsupportedError as error:",
        f"    assert {power!r} in str(error), error",
        "else:",
        '    raise AssertionError(f"it was not refused, but gave {got}")',
    ]
