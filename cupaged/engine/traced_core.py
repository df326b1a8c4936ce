"""An engine core that tells what happens to it: `TracedCore`, chosen when the engine is built.

It does what `EngineCore` does, and hands a record to a sink after every step, arrival and abort. A
core that is not traced has no trace of this in its code: the parts here are subclasses and a
wrapper around the runner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.engine.kv_memory import HoldsKV
from cupaged.engine.runner import Runner, StepOutput
from cupaged.engine.scheduler import Scheduler
from cupaged.engine.step_events import (
    FAILED,
    INTERRUPTED,
    AbortEvent,
    AddEvent,
    Collected,
    Ended,
    EventSink,
    PlanEvents,
    PoolCounts,
    ResetEvent,
    StepEvents,
    TableWatch,
    Taken,
    Told,
)
from cupaged.outputs import CoreOutput, FinishReason
from cupaged.request import CoreRequest, Sequence


class StepLog:
    """The record of the step that is being made.

    step: filled by scheduler, runner and core, in the order of what they do.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self.step = StepEvents(0)

    def now_us(self) -> int:
        """Microseconds since the trace began."""
        return round((self._clock() - self._began) * 1e6)


class TracedScheduler(Scheduler):
    """Notes every plan that does something, and every fork."""

    log: StepLog
    watch: TableWatch

    def schedule(self) -> StepPlan:
        """Plan a step and note it."""
        began = self.log.now_us()
        return self._noted(super().schedule(), began)

    def schedule_suspect(self) -> StepPlan:
        """Plan a step of a suspect and note it."""
        began = self.log.now_us()
        return self._noted(super().schedule_suspect(), began)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """Make a sibling and note its row."""
        child = super().fork(parent, index)
        self.log.step.forked.append(self._taken(child))
        return child

    def _noted(self, plan: StepPlan, began: int) -> StepPlan:
        if not plan.sequences and not plan.preempted:
            return plan
        manager = self.block_manager
        pool = PoolCounts(
            manager.num_used_blocks,
            manager.num_shared_blocks,
            manager.prefix_cache.num_evictable_blocks,
            manager.num_quarantined_blocks,
        )
        self.log.step.plans.append(
            PlanEvents(
                plan.step_id,
                plan.rows,
                plan.start,
                plan.num_new,
                plan.num_samples,
                [self._taken(s) for s in plan.admitted],
                [s.order for s in plan.preempted],
                [self._taken(s) for s in plan.swapped_in],
                plan.swap_out,
                plan.swap_in,
                plan.copies,
                self.watch.changes(),
                pool,
                len(self.running),
                self.num_waiting,
                schedule_us=self.log.now_us() - began,
            )
        )
        return plan

    def _taken(self, sequence: Sequence) -> Taken:
        return Taken(*sequence.order, self.block_manager.row(sequence.order))


class TracedRunner:
    """Notes what the runner gives, how long it takes, and its failures."""

    def __init__(self, runner: Runner, log: StepLog) -> None:
        self._runner = runner
        if isinstance(runner, HoldsKV):
            self.kv_memory = runner.kv_memory
        self._log = log
        self._in_flight: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> int:
        """Start a step."""
        noted, began = self._log.step.plans[-1], self._log.now_us()
        try:
            handle = self._runner.submit(plan)
        except BaseException as error:
            noted.outcome = _outcome(error)
            raise
        finally:
            noted.submit_us = self._log.now_us() - began
        self._in_flight.append(plan)
        return handle

    def collect(self, handle: int) -> StepOutput:
        """Wait for the oldest step."""
        plan = self._in_flight.popleft()
        noted, began = Collected(plan.step_id), self._log.now_us()
        self._log.step.collected = noted
        try:
            output = self._runner.collect(handle)
        except BaseException as error:
            noted.outcome = _outcome(error)
            raise
        finally:
            noted.collect_us = self._log.now_us() - began
        lists = output.token_ids
        noted.num_tokens = np.array(list(map(len, lists)), np.int32)
        noted.tokens = np.array(list(chain.from_iterable(lists)), np.int32)
        told = output.prompt_logprobs
        noted.num_prompt_logprobs = np.array([len(positions) for positions in told], np.int32)
        if output.logprobs:
            noted.told = Told.of(output.logprobs, _samples_of_beams(plan))
        return output


def _samples_of_beams(plan: StepPlan) -> list[int]:
    """Samples of the step whose candidates decide what comes next."""
    ends = np.cumsum(plan.num_samples).tolist()
    return [
        i
        for sequence, start, end in zip(plan.sequences, [0, *ends], ends, strict=False)
        if sequence.request.core.beams is not None
        for i in range(start, end)
    ]


def _outcome(error: BaseException) -> str:
    return FAILED if isinstance(error, Exception) else INTERRUPTED


class TracedCore(EngineCore):
    """An `EngineCore` whose events go to a sink. For the arguments see there."""

    scheduler_class = TracedScheduler

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        sink: EventSink,
        *,
        clock: Callable[[], float] = perf_counter,
        **strategies: Any,
    ) -> None:
        self._log = StepLog(clock)
        super().__init__(config, TracedRunner(runner, self._log), clock=clock, **strategies)
        assert isinstance(self.scheduler, TracedScheduler)
        self._watch = TableWatch(self.block_manager)
        self.scheduler.log, self.scheduler.watch = self._log, self._watch
        self._sink = sink

    @property
    def plans(self) -> list[PlanEvents]:
        """Of the step that is being made, or was made last."""
        return self._log.step.plans

    def add_request(self, core_request: CoreRequest) -> None:
        """Note a request when it was accepted."""
        super().add_request(core_request)
        self._sink.write(AddEvent(self._log.now_us(), core_request))

    def abort(
        self, request_id: str, index: int | None = None, *, reason: FinishReason = "abort"
    ) -> bool:
        """Note an abort that did something."""
        self._log.step = StepEvents(self._log.now_us())
        aborted = super().abort(request_id, index, reason=reason)
        if aborted:
            step = self._log.step
            event = AbortEvent(step.time_us, request_id, index, reason, step.finished)
            self._sink.write(event)
        return aborted

    def reset_prefix_cache(self) -> int:
        """Note the reset."""
        num_blocks = super().reset_prefix_cache()
        self._sink.write(ResetEvent(self._log.now_us(), num_blocks))
        return num_blocks

    def step(self) -> list[CoreOutput]:
        """Make a step and note it, unless there is nothing to do."""
        if not self.has_unfinished_requests:
            return super().step()
        step = self._log.step = StepEvents(self._log.now_us())
        try:
            return super().step()
        except BaseException as error:
            if not step.has_failure:
                step.broken = type(error).__name__
            raise
        finally:
            step.table = self._watch.changes()
            step.total_us = self._log.now_us() - step.time_us
            self._sink.write(step)

    def _count_end(self, order: tuple[int, int], reason: FinishReason) -> None:
        super()._count_end(order, reason)
        self._log.step.finished.append(Ended(*order, reason))
