"""First come, first served: the policy that wants nothing in particular."""

from __future__ import annotations

from typing import ClassVar

from ..core.scheduling_policy import SchedulingPolicy


class FcfsPolicy(SchedulingPolicy):
    """Requests start in the order of their arrival; when blocks run out, the most recently
    admitted one gives way. These are the defaults of the contract."""

    name: ClassVar[str] = "fcfs"
    may_ask_for_swap: ClassVar[bool] = False
