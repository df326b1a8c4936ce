"""The engine core: requests of token ids in, tokens out, one step at a time.

It checks requests at the door, lets the scheduler plan, hands plans to the runner, appends the
tokens, forks samples and stops sequences. It knows no text and no files, its clock is
given to it, and what goes in and out are plain dataclasses.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import ClassVar, NoReturn, TypeVar

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.beams import BeamGroups
from cupaged.engine.block_manager import BlockManager
from cupaged.engine.door import check_request
from cupaged.engine.host_pool import HostPool
from cupaged.engine.kv_sanitizer import SanitizedRunner
from cupaged.engine.offloading import Offloading
from cupaged.engine.preemption import PreemptionStrategy, make_strategy
from cupaged.engine.prefix_cache import NoPrefixCache, PrefixCache, PrefixStrategy
from cupaged.engine.radix_cache import RadixCache
from cupaged.engine.runner import Runner
from cupaged.engine.scheduler import Scheduler
from cupaged.engine.scheduling_policy import FirstComeFirstServed, SchedulingPolicy
from cupaged.engine.step_results import StepResults
from cupaged.engine.swapping import Swapping
from cupaged.errors import EngineError, KVSanitizerError, QueueFullError
from cupaged.outputs import CoreOutput, EngineStats, FinishReason
from cupaged.request import CoreRequest, Request, Sequence, SequenceStatus

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class EngineCore:
    """Continuous batching over a paged KV pool.

    Args:
        config: the limits.
        runner: computes the steps.
        policy: order of waiting and victims of preemption; first come, first served by default.
        prefix_cache: finds what others have computed; by default as the config says.
        preemption: who is swapped out when blocks run out; by default whoever fits into the
            host's blocks, if there are any.
        clock: seconds, monotonic.
    """

    scheduler_class: ClassVar[type[Scheduler]] = Scheduler

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        policy: SchedulingPolicy | None = None,
        prefix_cache: PrefixStrategy | None = None,
        preemption: PreemptionStrategy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        if prefix_cache is None:
            prefix_cache = _make_prefix_cache(config)
        if policy is None:  # an empty policy is false
            policy = FirstComeFirstServed()
        if preemption is None:
            preemption = make_strategy(config, None)
        host_pool = HostPool(config.num_host_blocks)
        self.offloading = Offloading(prefix_cache, host_pool, preemption, config.block_size)
        self.block_manager = BlockManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=config.max_blocks_per_seq,
            prefix_cache=prefix_cache,
            evict=self.offloading.evict if config.num_host_blocks else None,
        )
        self.swapping = Swapping(self.block_manager, host_pool, preemption)
        self.scheduler = self.scheduler_class(config, self.swapping, self.offloading, policy)
        self._schedule: Callable[[], StepPlan] = self.scheduler.schedule  # or that of suspects
        self._runner = (
            SanitizedRunner(runner, self.block_manager) if config.kv_sanitizer else runner
        )
        self._beams = BeamGroups(self.scheduler, self._count_end)
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._results = StepResults(
            self.scheduler, self._beams, self._finish, self._forget_if_finished
        )
        self._in_flight: deque[tuple[StepPlan, int]] = deque()
        self.num_admitted = 0  # requests that were scheduled for the first time
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self.num_computed_tokens = 0  # in all steps, recomputed ones too
        self._finished: Counter[str] = Counter()

    # ---- requests ------------------------------------------------------------------------------

    def add_request(self, core_request: CoreRequest) -> None:
        """Check a request and queue it. On an error nothing has changed.

        Raises:
            InvalidParameterError: the id is in use, `n` exceeds max_num_seqs, a stop or EOS token
                id is outside the vocabulary, or another field cannot be served.
            PromptError: the prompt is empty, too long, or has ids outside the vocabulary.
            CapacityError: prompt and output can never fit into the KV pool.
            QueueFullError: too much waits already.
        """
        max_tokens = check_request(core_request, self.config, self._requests)
        self._check_queue(len(core_request.prompt_token_ids))
        request = Request(core_request, arrival=self._num_arrivals, max_tokens=max_tokens)
        self._num_arrivals += 1
        self._num_prompt_tokens += request.num_prompt_tokens
        self._requests[core_request.request_id] = request
        self.scheduler.add(request.sequences[0])

    def abort(
        self, request_id: str, index: int | None = None, *, reason: FinishReason = "abort"
    ) -> bool:
        """End a request, or only its sample `index`; its blocks are given back.

        Returns False, and does nothing, if there is no such unfinished request or sample. Beams
        are no samples: they end together.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        if index is not None and request.core.beams is not None:
            return False  # beams end together
        if index is not None and not request.has_forked:
            return self._cancel(request, index, reason)
        ending = [s for s in request.unfinished() if index is None or s.index == index]
        for sequence in ending:
            self._finish(sequence, reason)
        self._forget_if_finished(request)
        return bool(ending)

    def holds(self, request_id: str) -> bool:
        """True while the request is unfinished."""
        return request_id in self._requests

    def was_scheduled(self, request_id: str) -> bool:
        """True if a step has computed a part of the unfinished request."""
        return self._requests[request_id].first_scheduled_time is not None

    def unfinished_samples(self, request_id: str) -> list[int]:
        """Indices of the samples of a request that have not ended; empty if it is unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        if request.has_forked:
            return [s.index for s in request.unfinished()]
        return [i for i in range(request.core.params.n) if i not in request.cancelled]

    def best_so_far(self, request_id: str) -> list[CoreOutput]:
        """The outputs that a request of beams would have if it were aborted now, best first.

        Empty for other requests, which give their tokens as they come.
        """
        request = self._requests.get(request_id)
        return [] if request is None else self._beams.outputs(request, "abort")

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, as after new weights; what runs goes on.

        Returns:
            KV blocks that were given back.
        """
        return self.scheduler.reset_prefix_cache()

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that were drawn and kept, of all requests."""
        return self._results.num_generated_tokens

    @property
    def has_priorities(self) -> bool:
        """True when the scheduling policy looks at the priorities of requests."""
        return self.scheduler.policy.has_priorities

    @property
    def has_unfinished_requests(self) -> bool:
        """True while a step is worth making."""
        return bool(self._requests) or bool(self._in_flight)

    # ---- steps ---------------------------------------------------------------------------------

    def step(self) -> list[CoreOutput]:
        """Submit a step if there is room in flight, collect the oldest one, give its tokens.

        Raises:
            EngineError: the runner failed for one request alone; it is gone, all others go on.
            KVSanitizerError: a step misused the KV pool; all requests are gone, and each later step
                raises the same.
        """
        while len(self._in_flight) < self.config.max_steps_in_flight:
            plan = self._schedule()
            self._num_preemptions += len(plan.preempted)
            if not plan.sequences:
                if plan.preempted:
                    continue  # that made room
                break
            for sequence in plan.admitted:
                if sequence.request.first_scheduled_time is None:
                    sequence.request.first_scheduled_time = self._clock()
                    self.num_admitted += 1
            handle = self._attempt(plan, partial(self._runner.submit, plan))
            if handle is not None:
                self._in_flight.append((plan, handle))
        if not self._in_flight:
            assert not self._requests, "no request can be scheduled, though some are unfinished"
            return []
        plan, handle = self._in_flight.popleft()
        output = self._attempt(plan, partial(self._runner.collect, handle))
        if output is None:
            return []
        self._num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        return self._results.apply(plan, output, self.scheduler.complete(plan))

    def stats(self) -> EngineStats:
        """A snapshot; costs time in proportion to the blocks in use."""
        running, manager, swapping = self.scheduler.running, self.block_manager, self.swapping
        waiting = [
            s
            for request in self._requests.values()
            for s in request.sequences
            if s.status in (SequenceStatus.PREEMPTED, SequenceStatus.SWAPPED)
        ]
        return EngineStats(
            num_running=len(running),
            num_waiting=self.scheduler.num_waiting - len(waiting),
            num_preempted=len(waiting),
            num_preemptions_total=self._num_preemptions,
            num_blocks=manager.num_blocks,
            num_used_blocks=manager.num_used_blocks,
            num_shared_blocks=manager.num_shared_blocks,
            kv_utilisation=manager.kv_utilisation(
                self.scheduler.table.records["num_computed_tokens"]
            ),
            num_steps=self._num_steps,
            prompt_tokens_total=self._num_prompt_tokens,
            generation_tokens_total=self.num_generated_tokens,
            finished_total=dict(self._finished),
            num_queued_tokens=self.scheduler.num_queued_tokens,
            prefix_cache_queries_total=manager.prefix_cache.num_query_tokens,
            prefix_cache_hits_total=manager.prefix_cache.num_hit_tokens,
            num_swapped=len(swapping.swapped),
            num_host_blocks=swapping.host_pool.num_blocks,
            num_used_host_blocks=swapping.host_pool.num_used_blocks,
            num_swap_preemptions_total=swapping.num_preemptions,
            blocks_swapped_out_total=swapping.num_blocks_out,
            blocks_swapped_in_total=swapping.num_blocks_in,
            num_kept_host_blocks=swapping.host_pool.num_kept_blocks,
            blocks_offloaded_total=self.offloading.num_blocks_out,
            blocks_loaded_total=self.offloading.num_blocks_in,
        )

    def audit(self) -> None:
        """Check both pools, and that exactly the running sequences hold blocks."""
        self.block_manager.audit()
        self.scheduler.table.audit(self.scheduler.running)
        unfinished = [s for r in self._requests.values() for s in r.unfinished()]
        self.swapping.audit(unfinished)
        running = [s for s in unfinished if s.status is SequenceStatus.RUNNING]
        keys = [self.scheduler.policy.key(s) for s in self.scheduler.running]
        assert keys == sorted(map(self.scheduler.policy.key, running)), "running is out of order"
        waiting = [s for s in unfinished if s.status is SequenceStatus.WAITING]
        queued = (len(waiting), sum(s.num_tokens for s in waiting))
        counted = (self.scheduler.num_queued_reqs, self.scheduler.num_queued_tokens)
        assert counted == queued, f"{counted} requests and tokens are counted, {queued} wait"
        for sequence in unfinished:
            blocks = self.block_manager.blocks_of(sequence.order)
            held = self.block_manager.holds_blocks(sequence.order)
            assert held == (sequence.status is SequenceStatus.RUNNING), "who holds blocks is wrong"
            self.block_manager.prefix_cache.audit_sequence(sequence, blocks)
            computed = self.block_manager.blocks_for(sequence.num_computed_tokens)
            is_swapped = sequence.status is SequenceStatus.SWAPPED
            assert is_swapped or len(blocks) >= computed, f"{sequence.order} lacks a block"
        parked = [s for s in unfinished if s.status is SequenceStatus.PARKED]
        num_waiting = len(unfinished) - len(running) - len(parked)
        assert self.scheduler.num_waiting == num_waiting, "a sequence is lost"
        rows_in_use = self.config.max_num_seqs - self.block_manager.num_free_rows
        assert rows_in_use == len(running), "a finished sequence holds a row"

    # ---- inside --------------------------------------------------------------------------------

    def _check_queue(self, num_tokens: int) -> None:
        """An empty queue always takes one more request, however long."""
        scheduler, config = self.scheduler, self.config
        waiting = scheduler.num_queued_reqs
        if not waiting:
            return
        for what, value, limit in (
            ("requests", waiting + 1, config.max_num_queued_reqs),
            (
                "prompt tokens",
                scheduler.num_queued_tokens + num_tokens,
                config.max_num_queued_tokens,
            ),
        ):
            if limit is not None and value > limit:
                raise QueueFullError(
                    f"the queue is full: with this request {value} {what} would wait, "
                    f"at most {limit} may; {waiting} requests wait now"
                )

    def _cancel(self, request: Request, index: int, reason: FinishReason) -> bool:
        """Remember to end a sample when it is forked; the last one ends the request now."""
        if index in request.cancelled or not 0 <= index < request.core.params.n:
            return False
        request.cancelled[index] = reason
        if len(request.cancelled) == request.core.params.n:
            self._finish(request.sequences[0], reason)
            self._forget_if_finished(request)
        return True

    def _attempt(self, plan: StepPlan, action: Callable[[], _T]) -> _T | None:
        """What the runner gives; None if it fails for a step of several requests.

        These wait to be tried one by one, so that only the guilty ones are lost: which tokens are
        drawn does not depend on the step they are drawn in.
        """
        try:
            return action()
        except KVSanitizerError as error:
            self._condemn(error)
        except BaseException as error:
            self.scheduler.give_up(plan)
            requests = dict.fromkeys(s.request for s in plan.sequences)
            if isinstance(error, Exception) and len(requests) > 1:
                _logger.warning(
                    "step %d of %d requests failed, each is tried alone: %s",
                    plan.step_id,
                    len(requests),
                    error,
                )
                self.scheduler.set_aside(plan)
                self._schedule = self._schedule_suspect
                return None
            for request in requests:
                for sequence in request.unfinished():
                    self._finish(sequence, "error")
                self._forget_if_finished(request)
            if isinstance(error, Exception):
                raise EngineError(f"step {plan.step_id} failed: {error}") from error
            raise

    def _condemn(self, error: KVSanitizerError) -> NoReturn:
        """Who holds which block is wrong: nothing here can be trusted or tidied up any more."""
        self._requests.clear()
        self._in_flight.clear()
        self._schedule = partial(self._condemn, error)
        raise error

    def _schedule_suspect(self) -> StepPlan:
        """Plan a step of one suspect; when none is left, as usual again."""
        plan = self.scheduler.schedule_suspect()
        if plan.sequences or self.scheduler.has_suspects:
            return plan
        self._schedule = self.scheduler.schedule
        return self._schedule()

    def _finish(self, sequence: Sequence, reason: FinishReason, stop: int | None = None) -> None:
        if reason == "error":
            self.scheduler.distrust(sequence)
        self.scheduler.remove(sequence)
        sequence.finish(reason, stop)
        self._count_end(sequence.order, reason)

    def _count_end(self, order: tuple[int, int], reason: FinishReason) -> None:
        """A sample, (arrival, index), has ended."""
        self._finished[reason] += 1

    def _forget_if_finished(self, request: Request) -> None:
        request_id = request.core.request_id
        if request.finished and self._requests.get(request_id) is request:  # ids are used again
            self._beams.forget(request)
            del self._requests[request_id]
            request.sequences.clear()  # no cycle of references: its memory is free at once


def _make_prefix_cache(config: EngineConfig) -> PrefixStrategy:
    """What the config says. A radix tree gives up to 1/512 of a large pool at once."""
    if not config.enable_prefix_caching:
        return NoPrefixCache()
    if config.prefix_cache == "hash":
        return PrefixCache(config.block_size)
    return RadixCache(config.block_size, max(1, config.num_blocks // 512))
