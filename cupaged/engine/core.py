"""The engine core: requests of token ids in, tokens out, one step at a time.

It checks requests at the door, lets the scheduler plan, hands plans to the runner, appends the
tokens, forks samples and stops sequences. It knows no text and no files, its clock is
given to it, and what goes in and out are plain dataclasses.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TypeVar

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.block_manager import BlockManager
from cupaged.engine.door import check_request
from cupaged.engine.runner import FAILED_TOKEN, Runner, StepOutput
from cupaged.engine.scheduler import Scheduler
from cupaged.engine.scheduling_policy import FirstComeFirstServed, SchedulingPolicy
from cupaged.errors import EngineError, QueueFullError
from cupaged.outputs import CoreOutput, EngineStats, FinishReason, TokenLogprobs
from cupaged.request import CoreRequest, Request, Sequence, SequenceStatus

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class EngineCore:
    """Continuous batching over a paged KV pool.

    Args:
        config: the limits.
        runner: computes the steps.
        policy: order of waiting and victims of preemption; first come, first served by default.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        policy: SchedulingPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.block_manager = BlockManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=config.max_blocks_per_seq,
        )
        if policy is None:  # an empty policy is false
            policy = FirstComeFirstServed()
        self.scheduler = Scheduler(config, self.block_manager, policy)
        self._schedule = self.scheduler.schedule  # another one while suspects are tried
        self._runner = runner
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[StepPlan, int]] = deque()
        self.num_admitted = 0  # requests that were scheduled for the first time
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self.num_computed_tokens = 0  # in all steps, recomputed ones too
        self.num_generated_tokens = 0
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

        Returns False, and does nothing, if there is no such unfinished request or sample.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
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
        """
        while len(self._in_flight) < self.config.max_steps_in_flight:
            plan = self._schedule()
            self._num_preemptions += len(plan.preempted)
            if not plan.scheduled:
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
        self.scheduler.complete(plan)
        return self._apply(plan, output)

    def stats(self) -> EngineStats:
        """A snapshot; costs time in proportion to the blocks in use."""
        running, manager = self.scheduler.running, self.block_manager
        waiting = [
            s
            for request in self._requests.values()
            for s in request.sequences
            if s.status is SequenceStatus.PREEMPTED
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
                {s.order: s.num_computed_tokens for s in running}
            ),
            num_steps=self._num_steps,
            prompt_tokens_total=self._num_prompt_tokens,
            generation_tokens_total=self.num_generated_tokens,
            finished_total=dict(self._finished),
            num_queued_tokens=self.scheduler.num_queued_tokens,
        )

    def audit(self) -> None:
        """Check the block manager, and that exactly the running sequences hold blocks."""
        self.block_manager.audit()
        unfinished = [s for r in self._requests.values() for s in r.unfinished()]
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
            computed = self.block_manager.blocks_for(sequence.num_computed_tokens)
            assert len(blocks) >= computed, f"{sequence.order} has tokens without a block"
        assert self.scheduler.num_waiting == len(unfinished) - len(running), "a sequence is lost"
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
        except BaseException as error:
            self.scheduler.complete(plan)
            requests = dict.fromkeys(e.sequence.request for e in plan.scheduled)
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

    def _schedule_suspect(self) -> StepPlan:
        """Plan a step of one suspect; when none is left, as usual again."""
        plan = self.scheduler.schedule_suspect()
        if plan.scheduled or self.scheduler.has_suspects:
            return plan
        self._schedule = self.scheduler.schedule
        return self._schedule()

    def _apply(self, plan: StepPlan, output: StepOutput) -> list[CoreOutput]:
        """Fork where a prompt is done, append the drawn tokens, stop what has to stop."""
        outputs: list[CoreOutput] = []
        told = output.logprobs or [None] * len(output.token_ids)
        drawn = zip(output.token_ids, told, strict=True)
        for i, entry in enumerate(plan.scheduled):
            samples = list(islice(drawn, entry.num_samples))
            parent, request = entry.sequence, entry.sequence.request
            if parent.status is not SequenceStatus.RUNNING:
                continue  # aborted while in flight
            if output.prompt_logprobs:
                request.prompt_logprobs += output.prompt_logprobs[i]
            if not samples:
                continue  # a chunk in the middle of the tokens
            tells_prompt = request.prompt_logprobs and not parent.num_output_tokens
            first = len(outputs)
            if len(samples) == 1:
                outputs.append(self._append(parent, *samples[0]))
            else:
                outputs += self._fork(parent, samples)
            if tells_prompt and first < len(outputs):
                outputs[first].prompt_logprobs = request.prompt_logprobs
            if len(samples) > 1 or parent.finish_reason is not None:
                self._forget_if_finished(request)
        return outputs

    def _fork(
        self, parent: Sequence, samples: list[tuple[list[int], list[TokenLogprobs] | None]]
    ) -> Iterator[CoreOutput]:
        """Make a sequence of each sample, with its tokens; some may have been cancelled before."""
        parent.num_pending_samples = 1
        cancelled = parent.request.cancelled
        siblings = [self.scheduler.fork(parent, j) for j in range(1, len(samples))]
        for sequence, (tokens, logprobs) in zip([parent, *siblings], samples, strict=True):
            if sequence.index in cancelled:
                self._finish(sequence, cancelled.pop(sequence.index))
            else:
                yield self._append(sequence, tokens, logprobs)

    def _append(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None
    ) -> CoreOutput:
        """Append drawn tokens up to the first that ends the sequence."""
        accepted: list[int] = []
        request, token_ids = sequence.request, sequence.token_ids
        for token in tokens:
            if token == FAILED_TOKEN:
                self._finish(sequence, "error")
                break
            accepted.append(token)
            token_ids.append(token)
            if token in request.ending_ids or len(token_ids) >= request.max_length:
                self._stop_if_due(sequence, token)
                if sequence.status is SequenceStatus.FINISHED:
                    break
        self.num_generated_tokens += len(accepted)
        return CoreOutput(
            request.core.request_id,
            sequence.index,
            accepted,
            None if logprobs is None else logprobs[: len(accepted)],
            [],
            request.num_preemptions,
            request.first_scheduled_time,
            sequence.finish_reason,
            sequence.stop_reason,
        )

    def _stop_if_due(self, sequence: Sequence, token: int) -> None:
        core, params = sequence.request.core, sequence.request.core.params
        if sequence.num_output_tokens >= params.min_tokens:
            if token in params.stop_ids:
                return self._finish(sequence, "stop", token)
            if token in core.eos_token_ids and not params.ignore_eos:
                return self._finish(sequence, "stop")
        if sequence.num_output_tokens >= sequence.request.max_tokens:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: FinishReason, stop: int | None = None) -> None:
        self.scheduler.remove(sequence)
        sequence.finish(reason, stop)
        self._finished[reason] += 1

    def _forget_if_finished(self, request: Request) -> None:
        request_id = request.core.request_id
        if request.finished and self._requests.get(request_id) is request:  # ids are used again
            del self._requests[request_id]
            request.sequences.clear()  # no cycle of references: its memory is free at once
