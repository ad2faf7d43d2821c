"""Mutants of arrivals, ends, and what is noted after a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....core.errors import RequestError
from ....core.request import FinishReason, Request
from ....core.scheduler import ScheduledRequest, SchedulerStats
from ....core.scheduling_policy import Progress
from ..plain_limits import Limits
from ..plain_scheduler import PlainScheduler
from .registry import mutant


@mutant("leak_on_abort", "A request that is aborted keeps its blocks.")
class _LeakOnAbort(PlainScheduler):
    def finish(self, request_id: str) -> bool:
        self.release = lambda name: None  # type: ignore[method-assign]
        try:
            return super().finish(request_id)
        finally:
            del self.release


@mutant("leak_on_abort_of_swapped", "A swapped request that is aborted keeps its host blocks.")
class _LeakOnAbortOfSwapped(PlainScheduler):
    def release(self, name: str) -> None:
        if name not in self.swapped:
            super().release(name)


@mutant("leak_at_the_end", "A request that generated all its tokens keeps its blocks.")
class _LeakAtTheEnd(PlainScheduler):
    def release(self, name: str) -> None:
        request = self.live[name]
        if request.num_tokens < request.max_total_tokens:
            super().release(name)


@mutant("end_told_twice", "The end of a request is handled twice.", ("SGLang#10187",))
class _EndToldTwice(PlainScheduler):
    def tell_of_end(self, name: str) -> None:
        super().tell_of_end(name)
        super().tell_of_end(name)


@mutant("aborted_again_says_true", "finish says True of a request that is not live.")
class _AbortedAgain(PlainScheduler):
    def finish(self, request_id: str) -> bool:
        super().finish(request_id)
        return True


@mutant("prompt_of_any_length_taken", "A request that can never fit waits for ever.")
class _AnyLength(PlainScheduler):
    def check_size(self, request: Request) -> None:
        pass


@mutant("longest_request_refused", "A request that fits exactly is refused.")
class _LongestRefused(PlainScheduler):
    def check_size(self, request: Request) -> None:
        super().check_size(request)
        if request.max_total_tokens - 1 >= self.block_manager.largest_request():
            request.max_total_tokens = 10**6
            super().check_size(request)


@mutant("id_in_use_taken", "A second request with an id in use takes the place of the first.")
class _IdInUse(PlainScheduler):
    def add(self, request: Request, now: float) -> None:
        self.live.pop(request.request_id, None)
        super().add(request, now)


@mutant("refused_request_stays", "A request that the policy refuses stays in the queue.")
class _RefusedStays(PlainScheduler):
    def add(self, request: Request, now: float) -> None:
        try:
            super().add(request, now)
        except Exception:
            if request.request_id not in self.live:
                self.live[request.request_id] = request
                self.enqueue(request.request_id)
            raise


@mutant("stop_token_overrun", "A stop token does not end a request.")
class _StopOverrun(PlainScheduler):
    def note(self, item: ScheduledRequest, sampled: Mapping[str, int]) -> FinishReason | None:
        reason = super().note(item, sampled)
        return None if reason is FinishReason.STOP else reason


@mutant("one_token_too_few", "A request ends one token before its last.")
class _TooFew(PlainScheduler):
    def note(self, item: ScheduledRequest, sampled: Mapping[str, int]) -> FinishReason | None:
        reason = super().note(item, sampled)
        request = self.live[item.request_id]
        short = item.samples and request.num_tokens + 1 == request.max_total_tokens
        return FinishReason.LENGTH if short else reason


@mutant("computed_not_advanced", "The last token of a chunk is not counted as computed.")
class _NotAdvanced(PlainScheduler):
    def note(self, item: ScheduledRequest, sampled: Mapping[str, int]) -> FinishReason | None:
        reason = super().note(item, sampled)
        if item.num_new_tokens > 1 and not item.samples:
            self.live[item.request_id].num_computed_tokens -= 1
        return reason


@mutant("commit_beyond_computed", "Tokens that are not computed yet are committed to the cache.")
class _CommitBeyond(PlainScheduler):
    def note(self, item: ScheduledRequest, sampled: Mapping[str, int]) -> FinishReason | None:
        reason = super().note(item, sampled)
        request = self.live[item.request_id]
        tokens, slots = request.token_ids, len(self.block_manager.block_table(item.request_id))
        end = min(len(tokens), slots * self.block_manager.config.block_size)
        self.block_manager.commit(item.request_id, tokens, end)
        return reason


@mutant("token_appended_twice", "A sampled token is appended twice.")
class _Twice(PlainScheduler):
    def note(self, item: ScheduledRequest, sampled: Mapping[str, int]) -> FinishReason | None:
        reason = super().note(item, sampled)
        request = self.live[item.request_id]
        if item.samples and reason is None and request.num_tokens % 3 == 0:
            reason = request.append_token(sampled[item.request_id])
        return reason


@mutant("swapped_not_counted", "Swapped requests are missing in stats.")
class _SwappedNotCounted(PlainScheduler):
    def stats(self) -> SchedulerStats:
        stats = super().stats()
        return SchedulerStats(stats.running, stats.waiting, 0, stats.paused)


@mutant("swaps_not_counted", "stats counts no swaps.")
class _SwapsNotCounted(PlainScheduler):
    def stats(self) -> SchedulerStats:
        return replace(super().stats(), num_swaps=0)


@mutant("preemptions_forgotten", "The end of a request takes its preemptions out of stats.")
class _PreemptionsForgotten(PlainScheduler):
    def remove(self, name: str) -> None:
        self.num_preemptions -= self.live[name].num_preemptions
        super().remove(name)


@mutant("cached_tokens_of_the_last_admission", "num_cached_tokens is set at every admission.")
class _CachedOfTheLast(PlainScheduler):
    def try_admit(self, name: str, limits: Limits) -> bool:
        admitted = super().try_admit(name, limits)
        if admitted:
            self.live[name].num_cached_tokens = self.live[name].num_computed_tokens
        return admitted


@mutant("refusal_by_the_policy_ignored", "A request that the policy refuses is taken.")
class _RefusalIgnored(PlainScheduler):
    def add(self, request: Request, now: float) -> None:
        try:
            super().add(request, now)
        except RequestError as error:
            if "was refused" not in str(error):
                raise
            self.live[request.request_id] = request
            self.enqueue(request.request_id)


@mutant(
    "old_plan_for_a_new_request",
    "A plan is carried out for a request that arrived since, with the id of one that ended.",
    ("vllm#10583",),
)
class _OldPlan(PlainScheduler):
    def remove(self, name: str) -> None:
        planned = dict(self.planned)
        super().remove(name)
        self.planned = planned


@mutant("end_frees_a_neighbour", "The end of a request also frees the blocks of the next one.")
class _FreesANeighbour(PlainScheduler):
    def release(self, name: str) -> None:
        super().release(name)
        later = [other for other in self.running if other > name]
        if name in self.running and later and name not in self.preempted:
            super().release(later[0])


@mutant("progress_told_in_part", "on_progress is not told of the last request of a step.")
class _ToldInPart(PlainScheduler):
    def tell_of_progress(self, progress: list[Progress]) -> None:
        super().tell_of_progress(progress[:-1] or progress)


@mutant("token_of_another_request", "Two requests of a step get each other's token.")
class _TokenOfAnother(PlainScheduler):
    def note(self, item: ScheduledRequest, sampled: Mapping[str, int]) -> FinishReason | None:
        names = list(sampled)
        turned = dict(zip(names, [sampled[name] for name in names[::-1]], strict=True))
        return super().note(item, turned)
