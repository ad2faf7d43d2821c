"""The decision log: what was decided in each step, as one line of JSON.

Counts and request ids only: no times and no addresses, so equal settings, seeds and arrivals give
equal logs, byte for byte, in any process. Fields that are empty are left out::

    {"step":4,"scheduled":[["1",30,1],["2",0,16]],"preempted":[["3","swap"]],"out":2}

``scheduled`` has id, tokens computed before, tokens computed now; ``preempted`` has id and mode;
``swapped_in`` ids; ``forked`` pairs of parent and child; ``prefix_hits`` id and tokens found;
``out``, ``in`` and ``copies`` the blocks moved to host memory, back, and within the device;
``clipped`` how many wishes of the policy were not granted; ``finished`` id and reason; ``aborted``
ids of requests that were ended from outside after the step before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import ConfigError
from .scheduler import MoveKind, StepPlan


def decision_record(
    plan: StepPlan, finished: Mapping[str, str], aborted: Sequence[str] = ()
) -> str:
    """The line of one step.

    Args:
        plan: of the step.
        finished: requests that the step ended, with the reason.
        aborted: requests that were ended from outside since the step before.
    """
    swapped = set(plan.swapped_out)
    fields: dict[str, object] = {
        "scheduled": [
            [item.request_id, item.num_computed_tokens, item.num_new_tokens]
            for item in plan.scheduled
        ],
        "preempted": [
            [name, "swap" if name in swapped else "recompute"] for name in plan.preempted
        ],
        "swapped_in": plan.swapped_in,
        "forked": plan.forked,
        "prefix_hits": plan.prefix_hits,
        "out": plan.num_copies(MoveKind.SWAP_OUT),
        "in": plan.num_copies(MoveKind.SWAP_IN),
        "copies": plan.num_copies(MoveKind.COPY),
        "clipped": len(plan.clipped),
        "finished": list(finished.items()),
        "aborted": aborted,
    }
    record = {"step": plan.step} | {name: value for name, value in fields.items() if value}
    return json.dumps(record, separators=(",", ":"))


class DecisionLog:
    """Writes the lines to a file, which it empties first.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aborted: list[str] = []
        try:
            path.write_text("", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"decision_log={str(path)!r} cannot be written: {error}") from error

    def note_aborted(self, request_ids: Sequence[str]) -> None:
        """Requests have been ended from outside; the next line says so."""
        self._aborted.extend(request_ids)

    def record(self, plan: StepPlan, finished: Mapping[str, str]) -> None:
        """Write the line of a step."""
        line = decision_record(plan, finished, self._aborted)
        self._aborted.clear()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
