"""Schedulers that other processes can import, and that are odd in one way each."""

from __future__ import annotations

import os
import sys

from jackfield.conformance.scheduler.plain_scheduler import PlainScheduler
from jackfield.core.request import Request
from jackfield.core.scheduler import StepPlan


class BatchByHash(PlainScheduler):
    """The order of a batch is that of the hashes of texts, which no id and no time changes."""

    name = "batch_by_hash"

    def build(self, number: int) -> StepPlan:
        kept = self.shares
        key = {name: hash(f"number {self.live[name].arrival_index}") for name in kept}
        self.shares = {name: kept[name] for name in sorted(kept, key=key.__getitem__)}
        plan = super().build(number)
        self.shares = kept
        return plan


class Noisy(PlainScheduler):
    """Prints whatever it does, and dies with status 7 of a prompt of five tokens."""

    name = "noisy"

    def add(self, request: Request, now: float) -> None:
        print("add", request.request_id)
        if request.num_prompt_tokens == 5:
            print("a last word", file=sys.stderr, flush=True)
            os._exit(7)
        super().add(request, now)
