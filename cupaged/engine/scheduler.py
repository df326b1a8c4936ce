"""Decides, at every step, which sequences run and how many new tokens each computes.

There are no phases: a sequence has tokens and a count of those computed, and a step moves that
count on. Prefill, chunked prefill, decode and recomputation after preemption are all that one thing
(iteration-level scheduling, Yu et al., OSDI 2022; preemption by recomputation, Kwon et al., SOSP
2023). The scheduler sees no token values: stopping is the engine core's business.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from cupaged.config import EngineConfig
from cupaged.engine.batch import ScheduledSequence, StepPlan
from cupaged.engine.block_manager import BlockCopy, BlockManager
from cupaged.engine.scheduling_policy import SchedulingPolicy
from cupaged.request import Sequence, SequenceStatus


class Scheduler:
    """Plans steps under a token budget, a sequence budget and the block pool.

    `running` is in the policy's order. A sequence whose step is in flight is passed over until the
    step's output is known, so that steps in flight hold different sequences.
    """

    def __init__(
        self, config: EngineConfig, block_manager: BlockManager, policy: SchedulingPolicy
    ) -> None:
        self.config = config
        self.block_manager = block_manager
        self.policy = policy
        self.running: list[Sequence] = []
        self.num_in_flight = 0
        self.num_queued_reqs = 0  # requests that have never run
        self.num_queued_tokens = 0  # their prompt tokens
        self._max_chunk = config.max_chunk
        self._suspects: deque[tuple[Sequence, int]] = deque()  # and the tokens to be computed
        self._next_step_id = 0

    @property
    def has_suspects(self) -> bool:
        """True while sequences of a failed step are tried one by one."""
        return bool(self._suspects)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, the preempted ones included."""
        return len(self.policy)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.policy.add(sequence)
        self._count_queued(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take an unfinished sequence out and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self.block_manager.free(sequence.order)
        else:
            self.policy.remove(sequence)
            self._count_queued(sequence, -1)

    def schedule(self) -> StepPlan:
        """Plan a step: running sequences first, then waiting ones. The plan may be empty."""
        plan = StepPlan(self._next_step_id)
        budget = self._continue_running(plan, self.config.max_num_batched_tokens)
        if not plan.preempted:
            self._admit_waiting(plan, budget)
        if plan.scheduled:
            self._submit(plan)
        return plan

    def complete(self, plan: StepPlan) -> None:
        """The step's output has arrived: its tokens are computed, its sequences free to go on."""
        self.num_in_flight -= 1
        self.block_manager.step_completed(plan.step_id)
        for entry in plan.scheduled:
            entry.sequence.in_flight = False
            if entry.sequence.status is SequenceStatus.RUNNING:
                entry.sequence.num_computed_tokens = entry.start + entry.num_tokens

    def set_aside(self, plan: StepPlan) -> None:
        """The step failed, nobody knows through which of its sequences: they wait, as suspects.

        They lose their blocks and stand in the queue as preempted ones do.
        """
        for entry in reversed(plan.scheduled):
            if entry.sequence.status is SequenceStatus.RUNNING:
                self._suspects.appendleft((entry.sequence, entry.start + entry.num_tokens))
                self._queue_again(entry.sequence)

    def schedule_suspect(self) -> StepPlan:
        """Plan a step of one suspect alone, until it has computed what it failed with.

        Empty while its step is in flight, and when none is left. One that has no room waits like
        any other.
        """
        plan = StepPlan(self._next_step_id)
        while self._suspects and not plan.scheduled:
            sequence, num_tokens = self._suspects[0]
            if sequence.in_flight:
                break
            is_done = sequence.num_computed_tokens >= num_tokens
            if is_done or not self._continue_alone(plan, sequence):
                self._suspects.popleft()
        if plan.scheduled:
            self._submit(plan)
        return plan

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A running sibling of a running sequence that shares all its blocks."""
        child = parent.fork(index)
        self.block_manager.fork(parent.order, child.order)
        insort(self.running, child, key=self.policy.key)
        return child

    def _continue_running(self, plan: StepPlan, budget: int) -> int:
        """Give each running sequence its next tokens; returns the token budget that is left."""
        position = 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            if not sequence.in_flight:
                left = len(sequence.token_ids) - sequence.num_computed_tokens
                num_new = min(left, budget, self._max_chunk)
                copies = self._make_room(plan, sequence, num_new)
                if copies is None:
                    break
                plan.copies += copies
                self._schedule(plan, sequence, num_new)
                budget -= num_new
            position += 1
        return budget

    def _make_room(
        self, plan: StepPlan, sequence: Sequence, num_new: int
    ) -> list[BlockCopy] | None:
        """Blocks for a running sequence, at the cost of those behind it, not yet in this plan.

        None when it cannot run now: it was the last one and was preempted itself, or what it needs
        is held by this step or by steps in flight.
        """
        while True:
            copies = self.block_manager.allocate(
                sequence.order, sequence.num_computed_tokens, num_new
            )
            if copies is not None:
                return copies
            if self.num_in_flight:  # what a victim gives back would be in quarantine: wait
                return None
            victim = self.running[-1]
            self._preempt(plan, victim)
            if victim is sequence or self._frees_a_copied_block(plan):
                return None

    def _frees_a_copied_block(self, plan: StepPlan) -> bool:
        """True when the plan copies from a block that is free now: it may not be given away yet."""
        ref_counts = self.block_manager.ref_counts
        return any(ref_counts[source] == 0 for source, _ in plan.copies)

    def _admit_waiting(self, plan: StepPlan, budget: int) -> None:
        """Admit waiting sequences in the policy's order while each fits whole."""
        free_slots = self.config.max_num_seqs - sum(s.num_pending_samples for s in self.running)
        while budget > 0 and (sequence := self.policy.peek()) is not None:
            if sequence.num_pending_samples > free_slots:
                break
            reserve = self.config.watermark_blocks if self.running else 0
            if (
                self.block_manager.allocate(sequence.order, 0, sequence.num_tokens, reserve=reserve)
                is None
            ):
                break
            self.policy.admit(sequence)
            self._count_queued(sequence, -1)
            plan.admitted.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=self.policy.key)
            num_new = min(sequence.num_tokens, budget, self._max_chunk)
            self._schedule(plan, sequence, num_new)
            budget -= num_new
            free_slots -= sequence.num_pending_samples

    def _continue_alone(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Plan the next tokens of a suspect; False when it has ended or has no room.

        One that runs has room for all its tokens.
        """
        if sequence.status is SequenceStatus.PREEMPTED:
            if self.block_manager.allocate(sequence.order, 0, sequence.num_tokens) is None:
                return False
            self.policy.remove(sequence)
            plan.admitted.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=self.policy.key)
        elif sequence.status is not SequenceStatus.RUNNING:
            return False
        left = sequence.num_tokens - sequence.num_computed_tokens
        self._schedule(
            plan, sequence, min(left, self.config.max_num_batched_tokens, self._max_chunk)
        )
        return True

    def _schedule(self, plan: StepPlan, sequence: Sequence, num_new: int) -> None:
        start = sequence.num_computed_tokens
        reaches_end = start + num_new == sequence.num_tokens
        num_samples = sequence.num_pending_samples if reaches_end else 0
        plan.scheduled.append(ScheduledSequence(sequence, start, num_new, num_samples))

    def _count_queued(self, sequence: Sequence, change: int) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self.num_queued_reqs += change
            self.num_queued_tokens += change * sequence.num_tokens

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        """Free a running sequence's blocks; it will compute all its tokens again."""
        self._queue_again(sequence)
        sequence.request.num_preemptions += 1
        plan.preempted.append(sequence)

    def _queue_again(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.block_manager.free(sequence.order)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_computed_tokens = 0
        self.policy.add_preempted(sequence)

    def _submit(self, plan: StepPlan) -> None:
        self._next_step_id += 1
        for entry in plan.scheduled:
            entry.sequence.in_flight = True
        rows = [self.block_manager.row(entry.sequence.order) for entry in plan.scheduled]
        longest = max(entry.start + entry.num_tokens for entry in plan.scheduled)
        width = self.block_manager.blocks_for(longest)
        plan.block_tables = (self.block_manager.block_table[rows, :width],)
        self.num_in_flight += 1
        self.block_manager.step_submitted(plan.step_id, plan.copies)
