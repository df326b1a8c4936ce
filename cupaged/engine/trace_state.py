"""What the records of a trace add up to: the block table after each of them, and figures of steps.

It follows the records in order and believes them: whether they are right is for a replay to say.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from cupaged.config import EngineConfig
from cupaged.engine.pool_usage import utilisation
from cupaged.engine.step_events import (
    OK,
    AbortEvent,
    AddEvent,
    Event,
    PlanEvents,
    PoolCounts,
    ResetEvent,
    StepEvents,
    TableReplica,
)


@dataclass(slots=True)
class StepFigures:
    """One call of `EngineCore.step`.

    step_id: of its first plan, or of the step that it collected.
    began_us: since the trace began. total_us, and in it schedule_us, submit_us, collect_us.
    num_computed, num_drawn: tokens. num_found: tokens that the prefix cache spared the admitted.
    finished: sequences that ended since the step before, by reason; aborts are among them.
    num_handed_out, num_freed: blocks. num_shared: entries of the table that joined other holders.
    pool: as its fullest plan found it; None if it planned nothing. utilisation: share of the slots
        of used blocks that hold a token after that plan.
    notes: what is worth a line of its own.
    """

    step_id: int
    began_us: int
    total_us: int = 0
    schedule_us: int = 0
    submit_us: int = 0
    collect_us: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_computed: int = 0
    num_drawn: int = 0
    num_found: int = 0
    num_admitted: int = 0
    num_preempted: int = 0
    num_copies: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_handed_out: int = 0
    num_freed: int = 0
    num_shared: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    pool: PoolCounts | None = None
    utilisation: float = 1.0
    notes: list[str] = field(default_factory=list)


class TraceState:
    """The block table and what runs, as the records tell it. num_requests: those that arrived."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        width = config.max_blocks_per_seq
        self._replica = TableReplica(config.max_num_seqs, width, config.num_blocks)
        self._num_columns = 0
        self._computed = np.zeros(config.max_num_seqs, np.int64)  # tokens, by row
        self._step_id = 0
        self._running = (0, 0)
        self._finished: Counter[str] = Counter()  # since the last step
        self._notes: list[str] = []
        self.num_requests = 0

    def follow(self, event: Event) -> StepFigures | None:
        """Take the next record; figures if it is a step."""
        if isinstance(event, AddEvent):
            self.num_requests += 1
        elif isinstance(event, AbortEvent):
            self._finished.update(ended.reason for ended in event.finished)
        elif isinstance(event, ResetEvent):
            self._notes.append(f"the prefix cache was reset, {event.num_blocks} blocks given back")
        else:
            return self._follow_step(event)
        return None

    def _follow_step(self, step: StepEvents) -> StepFigures:
        if step.plans:
            self._step_id = step.plans[0].step_id
        elif step.collected is not None:
            self._step_id = step.collected.step_id
        figures = StepFigures(self._step_id, step.time_us, step.total_us)
        figures.finished, self._finished = self._finished, Counter()
        figures.notes, self._notes = self._notes, []
        for plan in step.plans:
            self._follow_plan(plan, figures)
        for taken in step.forked:
            self._computed[taken.row] = 0
        self._note_changes(self._replica.apply(step.table), figures)
        figures.num_running, figures.num_waiting = self._running
        if step.collected is not None:
            figures.num_drawn = len(step.collected.tokens)
            figures.collect_us = step.collected.collect_us
            if step.collected.outcome != OK:
                figures.notes.append(f"step {step.collected.step_id} {step.collected.outcome}")
        figures.finished.update(ended.reason for ended in step.finished)
        if step.broken:
            figures.notes.append(f"the engine was ended by {step.broken}")
        return figures

    def _follow_plan(self, plan: PlanEvents, figures: StepFigures) -> None:
        for taken in plan.admitted:
            figures.num_found += int(plan.start[plan.rows == taken.row].sum())
        self._note_changes(self._replica.apply(plan.table), figures)
        self._num_columns = max(self._num_columns, int(plan.table.columns.max(initial=-1)) + 1)
        self._computed[plan.rows] = plan.start + plan.num_new
        self._running = (plan.num_running, plan.num_waiting)
        figures.schedule_us += plan.schedule_us
        figures.submit_us += plan.submit_us
        figures.num_computed += int(plan.num_new.sum())
        figures.num_admitted += len(plan.admitted)
        figures.num_preempted += len(plan.preempted)
        figures.num_copies += len(plan.copies)
        figures.num_swapped_out += len(plan.swap_out)
        figures.num_swapped_in += len(plan.swap_in)
        if figures.pool is None or plan.pool.used > figures.pool.used:
            figures.pool = plan.pool
            table = self._replica.table[:, : self._num_columns]
            num_held = np.count_nonzero(table >= 0, axis=1)
            size, num_blocks = self._config.block_size, self._config.num_blocks
            figures.utilisation = utilisation(table, num_held, self._computed, size, num_blocks)
        if plan.outcome != OK:
            figures.notes.append(f"step {plan.step_id} {plan.outcome} when it was submitted")

    def _note_changes(self, changed: tuple[int, int, int], figures: StepFigures) -> None:
        handed_out, freed, shared = changed
        figures.num_handed_out += handed_out
        figures.num_freed += freed
        figures.num_shared += shared
