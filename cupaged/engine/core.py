"""The engine core: requests of token ids in, tokens out, one step at a time.

It checks requests at the door, lets the scheduler plan, hands plans to the runner, appends the
tokens, forks samples and stops sequences. It knows no text and no files, its clock is
given to it, and what goes in and out are plain dataclasses.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

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
        self._runner = runner
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[StepPlan, int]] = deque()
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
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
            EngineError: the runner failed; the requests of that step are gone, all others go on.
        """
        while len(self._in_flight) < self.config.max_steps_in_flight:
            plan = self.scheduler.schedule()
            self._num_preemptions += len(plan.preempted)
            if not plan.scheduled:
                break
            for sequence in plan.admitted:
                if sequence.request.first_scheduled_time is None:
                    sequence.request.first_scheduled_time = self._clock()
            with self._dropping_on_failure(plan):
                self._in_flight.append((plan, self._runner.submit(plan)))
        if not self._in_flight:
            assert not self._requests, "no request can be scheduled, though some are unfinished"
            return []
        plan, handle = self._in_flight.popleft()
        with self._dropping_on_failure(plan):
            output = self._runner.collect(handle)
        self._num_steps += 1
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
            generation_tokens_total=self._num_generated_tokens,
            finished_total=dict(self._finished),
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

    @contextmanager
    def _dropping_on_failure(self, plan: StepPlan) -> Iterator[None]:
        """End the requests of a step whose runner fails, so that the others can go on."""
        try:
            yield
        except BaseException as error:
            self.scheduler.complete(plan)
            for request in dict.fromkeys(e.sequence.request for e in plan.scheduled):
                for sequence in request.unfinished():
                    self._finish(sequence, "error")
                self._forget_if_finished(request)
            if isinstance(error, Exception):
                raise EngineError(f"step {plan.step_id} failed: {error}") from error
            raise

    def _apply(self, plan: StepPlan, output: StepOutput) -> list[CoreOutput]:
        """Fork where a prompt is done, append the drawn tokens, stop what has to stop."""
        outputs: list[CoreOutput] = []
        told = output.logprobs or [None] * len(output.token_ids)
        drawn = zip(output.token_ids, told, strict=True)
        for i, entry in enumerate(plan.scheduled):
            samples = list(islice(drawn, entry.num_samples))
            parent = entry.sequence
            if parent.status is not SequenceStatus.RUNNING:
                continue  # aborted while in flight
            if output.prompt_logprobs:
                parent.request.prompt_logprobs += output.prompt_logprobs[i]
            if not samples:
                continue  # a chunk in the middle of the tokens
            parent.num_pending_samples = 1
            prompt_logprobs = [] if parent.num_output_tokens else parent.request.prompt_logprobs
            siblings = [self.scheduler.fork(parent, j) for j in range(1, len(samples))]
            for sequence, (tokens, logprobs) in zip([parent, *siblings], samples, strict=True):
                if sequence.index in parent.request.cancelled:
                    self._finish(sequence, parent.request.cancelled.pop(sequence.index))
                else:
                    outputs.append(self._append(sequence, tokens, logprobs))
                    outputs[-1].prompt_logprobs, prompt_logprobs = prompt_logprobs, []
            self._forget_if_finished(parent.request)
        return outputs

    def _append(
        self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None
    ) -> CoreOutput:
        """Append drawn tokens up to the first that ends the sequence."""
        accepted: list[int] = []
        request = sequence.request
        for token in tokens:
            if token == FAILED_TOKEN:
                self._finish(sequence, "error")
                break
            accepted.append(token)
            sequence.token_ids.append(token)
            self._num_generated_tokens += 1
            self._stop_if_due(sequence, token)
            if sequence.status is SequenceStatus.FINISHED:
                break
        return CoreOutput(
            request_id=request.core.request_id,
            index=sequence.index,
            new_token_ids=accepted,
            logprobs=None if logprobs is None else logprobs[: len(accepted)],
            num_preemptions=request.num_preemptions,
            first_scheduled_time=request.first_scheduled_time,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
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
