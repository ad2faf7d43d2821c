"""Who gives its blocks up, and what becomes of their contents."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from ..core.block_manager import BlockCopy, BlockManager
from ..core.scheduler import SchedulerConfig
from ..core.scheduling_policy import PreemptionMode
from .entry import Entry
from .policy_guard import PolicyGuard

logger = logging.getLogger("jackfield")


class Preemption:
    """Chooses victims and modes, and takes the blocks.

    In mode ``auto`` a victim is swapped if most of its blocks are its own. Bringing the keys and
    values of a token back over the bus takes less time than computing them anew on all but the
    smallest models, but blocks that others hold too, or that the prefix cache may still have, need
    not be computed: swapping would copy them out and give each its own copy on return. A victim
    that fills no block yet is computed anew.
    """

    def __init__(self, config: SchedulerConfig, manager: BlockManager, guard: PolicyGuard) -> None:
        self._manager = manager
        self._guard = guard
        self._configured = config.preemption_mode
        self._can_swap = "swap" in manager.powers and manager.config.num_host_blocks > 0
        self._has_warned = False

    def victims(
        self, beneficiary: Entry, running: Mapping[str, Entry]
    ) -> Iterator[tuple[Entry, PreemptionMode | None]]:
        """Who is to give way for ``beneficiary``, best victim first: the policy's, then the most
        recently admitted. One that would free no block is passed over while there are others.

        Args:
            beneficiary: has no room; may be a victim too.
            running: who may be preempted, in order of admission; shrinks as victims are taken.
                Ends when nobody but one is left.
        """
        reported = False
        if len(running) > 1:
            for victim, mode in self._guard.victims(beneficiary.request_id, running):
                if self._helps(victim, beneficiary):
                    yield victim, mode
                else:
                    reported = True  # it did name one, who was of no use
                if len(running) == 1:
                    return
        while len(running) > 1:
            last_first = list(running.values())[::-1]
            useful = [entry for entry in last_first if self._helps(entry, beneficiary)]
            if useful and not reported:
                self._guard.report(
                    f"victims names too few for {beneficiary.request_id!r}: the most recently "
                    "admitted request gives way"
                )
                reported = True
            yield (useful or last_first)[0], None

    def take(
        self, entry: Entry, wished: PreemptionMode | None
    ) -> tuple[PreemptionMode, tuple[BlockCopy, ...]]:
        """Take the blocks of a running request.

        Args:
            entry: the request.
            wished: how; None is as configured.

        Returns:
            How it was done, and what must be copied to host memory.
        """
        if self._mode(entry, wished) is PreemptionMode.SWAP:
            copies = self._manager.swap_out(entry.request_id)
            if copies is not None:
                entry.num_host_blocks = len(copies)
                return PreemptionMode.SWAP, copies
            self._say_once(len(self._manager.block_table(entry.request_id)))
        self._manager.free(entry.request_id)
        return PreemptionMode.RECOMPUTE, ()

    def _helps(self, victim: Entry, beneficiary: Entry) -> bool:
        return victim is beneficiary or self._manager.reclaimable(victim.request_id) > 0

    def _mode(self, entry: Entry, wished: PreemptionMode | None) -> PreemptionMode:
        if wished is PreemptionMode.SWAP and not self._can_swap:
            self._guard.report(
                f"{entry.request_id!r} is to be swapped and is recomputed: there is no swap space"
            )
        if wished is not None:
            return wished if self._can_swap else PreemptionMode.RECOMPUTE
        if not self._can_swap or self._configured == "recompute":
            return PreemptionMode.RECOMPUTE
        if self._configured == "swap" or self._is_worth_keeping(entry):
            return PreemptionMode.SWAP
        return PreemptionMode.RECOMPUTE

    def _is_worth_keeping(self, entry: Entry) -> bool:
        manager = self._manager
        if entry.request.num_computed_tokens < manager.config.block_size:
            return False
        held = len(manager.block_table(entry.request_id))
        return 2 * manager.reclaimable(entry.request_id) > held

    def _say_once(self, num_blocks: int) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        usage = self._manager.usage()
        logger.warning(
            "the swap space has no room for the %d blocks of a preempted request (%d of %d are in "
            "use): requests that do not fit are computed anew; raise swap_space to keep more of "
            "them (said once)",
            num_blocks,
            usage.host_used,
            usage.host_total,
        )
