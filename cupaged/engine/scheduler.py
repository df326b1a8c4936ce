"""Decides, at every step, which sequences run and how many new tokens each computes.

There are no phases: a sequence has tokens and a count of those computed, and a step moves that
count on. Prefill, chunked prefill, decode and recomputation after preemption are all that one thing
(iteration-level scheduling, Yu et al., OSDI 2022; preemption by recomputation, Kwon et al., SOSP
2023). The scheduler sees no token values: stopping is the engine core's business.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

import numpy as np
from numpy.typing import NDArray

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.block_manager import BlockCopy
from cupaged.engine.offloading import Offloading
from cupaged.engine.scheduling_policy import SchedulingPolicy
from cupaged.engine.sequence_table import NONE, SequenceTable
from cupaged.engine.swapping import Swapping
from cupaged.request import NEVER, Sequence, SequenceStatus


class Scheduler:
    """Plans steps under a token budget, a sequence budget and the block pool.

    `running` is in the policy's order. A sequence whose step is in flight is passed over until the
    step's output is known, so that steps in flight hold different sequences.
    """

    def __init__(
        self,
        config: EngineConfig,
        swapping: Swapping,
        offloading: Offloading,
        policy: SchedulingPolicy,
    ) -> None:
        self.config = config
        self.swapping = swapping
        self.offloading = offloading
        self.block_manager = block_manager = swapping.block_manager
        self.policy = policy
        self.prefix_cache = block_manager.prefix_cache
        policy.use(self.prefix_cache)
        self.table = SequenceTable(config.max_num_seqs)
        self.running: list[Sequence] = []
        self._rows: NDArray[np.int32] | None = None  # of the running ones; None when out of date
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
            self._leave(sequence)
        elif sequence.status is not SequenceStatus.PARKED:
            self.policy.remove(sequence)
            self._count_queued(sequence, -1)
            self.swapping.forget(sequence)

    def schedule(self) -> StepPlan:
        """Plan a step: running sequences first, then waiting ones. The plan may be empty.

        Where only beams run that wait for siblings, and these have no room, the last of them gives
        way, and the next plan may hold something: an empty plan that preempts is not the last.
        """
        plan = StepPlan(self._next_step_id)
        budget = self._continue_running(plan, self.config.max_num_batched_tokens)
        if not plan.preempted:
            self._admit_waiting(plan, budget)
        if plan.sequences:
            self._submit(plan)
        elif self.running and not self.num_in_flight and not plan.preempted:
            self._preempt(plan, self.running[-1])  # a beam; see above
        if not plan.sequences:
            assert not plan.swap_in, "a group came back without a step"
            self.offloading.give_up(plan)
            self.swapping.take_back(plan)
        return plan

    def complete(self, plan: StepPlan) -> NDArray[np.bool_]:
        """The step's output has arrived: its tokens are computed, its sequences free to go on.

        Blocks that it filled can be found from now on.

        Returns:
            [num_seqs], which of the plan's sequences run still.
        """
        are_running = self._end_flight(plan)
        self.offloading.step_ended(plan)
        rows, records = plan.rows[are_running], self.table.records
        computed = (plan.start + plan.num_new)[are_running]
        records["num_computed_tokens"][rows] = computed
        is_due = np.zeros(len(are_running), np.bool_)
        is_due[are_running] = computed >= records["store_at"][rows]
        for i in np.flatnonzero(is_due).tolist():
            sequence = plan.sequences[i]
            self.block_manager.store(sequence.order, sequence)
        return are_running

    def give_up(self, plan: StepPlan) -> None:
        """The step failed: its sequences have computed nothing in it."""
        self.offloading.give_up(plan)
        self._end_flight(plan)
        self.swapping.give_up(plan.swapped_out)

    def reset_prefix_cache(self) -> int:
        """Forget all prefixes; what running sequences hold is shared with nobody new.

        Returns:
            Blocks that were given back.
        """
        for sequence in self.running:
            sequence.store_at, sequence.num_stored_blocks = NEVER, None
        self.offloading.reset()
        return self.block_manager.reset_prefix_cache()

    def distrust(self, sequence: Sequence) -> None:
        """Something is wrong with a sequence: nobody else shall find what it holds."""
        sequence.store_at, sequence.num_stored_blocks = NEVER, None
        self.offloading.distrust(sequence)
        self.block_manager.forget(sequence.order)

    def set_aside(self, plan: StepPlan) -> None:
        """The step failed, nobody knows through which of its sequences: they wait, as suspects.

        They lose their blocks and stand in the queue as preempted ones do.
        """
        reached = (plan.start + plan.num_new).tolist()
        for sequence, num_tokens in zip(plan.sequences[::-1], reached[::-1], strict=True):
            if sequence.status is SequenceStatus.RUNNING:
                self._suspects.appendleft((sequence, num_tokens))
                self._queue_again(sequence)
        for sequence in plan.swapped_in[::-1]:
            if sequence.status is SequenceStatus.RUNNING:  # it had no token in the step
                self._queue_again(sequence)

    def schedule_suspect(self) -> StepPlan:
        """Plan a step of one suspect alone, until it has computed what it failed with.

        Empty while its step is in flight, and when none is left. One that has no room waits like
        any other.
        """
        plan = StepPlan(self._next_step_id)
        while self._suspects and not plan.sequences:
            sequence, num_tokens = self._suspects[0]
            if sequence.in_flight:
                break
            is_done = sequence.num_computed_tokens >= num_tokens
            if is_done or not self._continue_alone(plan, sequence):
                self._suspects.popleft()
        if plan.sequences:
            self._submit(plan)
        return plan

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A running sibling of a running sequence that shares all its blocks."""
        child = parent.fork(index)
        self.block_manager.fork(parent.order, child.order)
        self._enter(child)
        return child

    def branch(self, parent: Sequence, index: int) -> Sequence:
        """`fork`; or, where the parent holds no blocks or all slots are taken, a parked sibling."""
        if parent.status is SequenceStatus.RUNNING and self._num_free_slots() > 0:
            return self.fork(parent, index)
        child = parent.fork(index)
        child.status = SequenceStatus.PARKED
        child.num_computed_tokens = 0
        return child

    def resume(self, sequence: Sequence) -> None:
        """A beam has a new token: if it is parked, it waits from now on to compute all of them."""
        if sequence.status is SequenceStatus.PARKED:
            sequence.status = SequenceStatus.PREEMPTED
            self.policy.add_preempted(sequence)

    def _continue_running(self, plan: StepPlan, budget: int) -> int:
        """Give each running sequence its next tokens; returns the token budget that is left.

        Nearly all write to their own last block or to a new one. Where one does not, because it
        shares its block or there are too few, those that need a block get it one by one.
        """
        if self._rows is None:
            self._rows = np.array([s.row for s in self.running], np.int32)
        rows = self._rows
        records = self.table.records.take(rows)
        start = records["num_computed_tokens"]
        left = np.where(records["in_flight"], 0, records["num_tokens"] - start)
        wanted = np.minimum(left, self._max_chunk)
        num_new = (budget - np.cumsum(wanted) + wanted).clip(0, wanted).astype(np.int32)
        stop = len(rows)
        manager = self.block_manager
        has_work = num_new > 0
        unready = has_work & ~manager.are_writable(rows, start, start + num_new)
        at_edge = (num_new == 1) & manager.are_at_edge(rows, start)
        num_at_edge = int(np.count_nonzero(at_edge))
        if num_at_edge == np.count_nonzero(unready) and num_at_edge <= manager.num_free_blocks:
            manager.append_blocks(rows[at_edge])
            unready[:] = False
        for i in np.flatnonzero(unready).tolist():
            if i >= len(self.running):
                break  # it was preempted
            copies = self._make_room(plan, self.running[i], num_new.item(i))
            if copies is None:
                stop = i
                break
            plan.copies += copies
        chosen = np.flatnonzero(num_new[: min(stop, len(self.running))])
        num_new = num_new[chosen]
        plan.add([self.running[i] for i in chosen.tolist()], rows[chosen], num_new)
        return budget - int(num_new.sum())

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
            if not self._give_way(plan, sequence) or self._frees_a_copied_block(plan):
                return None

    def _give_way(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Preempt whom the policy puts last; False if `sequence` cannot go on in this step.

        If the victim's group is to be swapped, it leaves as a whole. While a part of it is in the
        plan it stays: it leaves when the first of it needs room. A group that comes first is too
        large for the pool, and is taken apart.
        """
        victim = self.running[-1]
        group = [s for s in victim.request.sequences if s.status is SequenceStatus.RUNNING]
        group.sort(key=self.policy.key)
        first = len(self.running) - len(group)
        if self.running[first:] == group and self.swapping.may_leave(group):
            position = self.running.index(sequence)
            if position > first:
                return False
            if first:
                self._swap_out(plan, group)
                return position < first
        self._preempt(plan, victim)
        return victim is not sequence

    def _swap_out(self, plan: StepPlan, group: list[Sequence]) -> None:
        """Let a group leave with its computed tokens."""
        self.swapping.swap_out(plan, group)
        for sequence in group[::-1]:
            self._leave(sequence)
            sequence.status = SequenceStatus.SWAPPED
            self.policy.add_preempted(sequence)
            sequence.request.num_preemptions += 1
            plan.preempted.append(sequence)

    def _frees_a_copied_block(self, plan: StepPlan) -> bool:
        """True when the plan copies from a block that is free now: it may not be given away yet."""
        ref_counts = self.block_manager.ref_counts
        return any(ref_counts[source] == 0 for source, _ in plan.copies)

    def _admit_waiting(self, plan: StepPlan, budget: int) -> None:
        """Admit waiting sequences in the policy's order while each fits whole."""
        free_slots = self._num_free_slots()
        started: list[Sequence] = []
        num_new: list[int] = []
        while budget > 0 and (sequence := self.policy.peek()) is not None:
            group = self.swapping.group_of(sequence)
            num_samples = sum(s.num_pending_samples for s in group)
            if num_samples > free_slots:
                break
            reserve = self.config.watermark_blocks if self.running else 0
            if sequence.status is not SequenceStatus.SWAPPED:
                if not self._admit(plan, sequence, reserve):
                    break
            elif not self._swap_in(plan, group, reserve):
                if self.running or self.num_in_flight:
                    break
                self.swapping.give_up(group)  # not even the empty pool holds it
                continue
            self.policy.admit(sequence)
            for member in group:
                if member is not sequence:
                    self.policy.remove(member)
                uncached = member.num_tokens - member.num_computed_tokens
                number = min(uncached, budget, self._max_chunk)
                if not number:
                    continue  # it comes with a later step
                if member in plan.swapped_in:  # it may share what it writes
                    copies = self.block_manager.allocate(
                        member.order, member.num_computed_tokens, number
                    )
                    assert copies is not None, "a group came back without room"
                    plan.copies.extend(copies)
                started.append(member)
                num_new.append(number)
                budget -= number
            free_slots -= num_samples
        self._plan(plan, started, num_new)

    def _swap_in(self, plan: StepPlan, group: list[Sequence], reserve: int) -> bool:
        """Let a swapped group run again, if all of it fits. The caller takes it out of the queue.

        It is in flight until the step has ended: before, nobody knows what its blocks hold.
        """
        if not self.swapping.is_ready(group) or not self.swapping.swap_in(plan, group, reserve):
            return False
        for sequence in group:
            sequence.status = SequenceStatus.RUNNING
            self._enter(sequence)
            self.table.records["in_flight"][sequence.row] = True
        return True

    def _admit(self, plan: StepPlan, sequence: Sequence, reserve: int) -> bool:
        """Let a waiting sequence run, from the end of its cached prefix on, if all of it fits.

        The caller takes it out of the queue.
        """
        cached = self.prefix_cache.find(sequence)
        if not self.block_manager.admit(
            sequence.order, cached, sequence.num_tokens, reserve=reserve
        ):
            return False
        kept = self.offloading.find(sequence, len(cached))
        self._count_queued(sequence, -1)
        plan.admitted.append(sequence)
        sequence.num_computed_tokens = (len(cached) + len(kept)) * self.config.block_size
        self.prefix_cache.admitted(sequence, sequence.num_computed_tokens)
        if kept:
            blocks = self.block_manager.blocks_of(sequence.order)
            self.offloading.load(plan, sequence, kept, blocks, len(cached))
        sequence.status = SequenceStatus.RUNNING
        self._enter(sequence)
        return True

    def _continue_alone(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Plan the next tokens of a suspect; False when it has ended or has no room.

        One that runs has room for all its tokens.
        """
        if sequence.status is SequenceStatus.PREEMPTED:
            if sequence.num_pending_samples > self._num_free_slots():
                return False
            if not self._admit(plan, sequence, reserve=0):
                return False
            self.policy.remove(sequence)
        elif sequence.status is not SequenceStatus.RUNNING:
            return False
        left = sequence.num_tokens - sequence.num_computed_tokens
        num_new = min(left, self.config.max_num_batched_tokens, self._max_chunk)
        self._plan(plan, [sequence], [num_new])
        return True

    def _plan(self, plan: StepPlan, sequences: list[Sequence], num_new: list[int]) -> None:
        rows = np.array([s.row for s in sequences], np.int32)
        plan.add(sequences, rows, np.array(num_new, np.int32))

    def _num_free_slots(self) -> int:
        """Sequences that may run beside those that run and those that these will be forked into."""
        records = self.table.records
        taken = int(records["num_pending_samples"][records["serial"] != NONE].sum())
        return self.config.max_num_seqs - taken

    def _enter(self, sequence: Sequence) -> None:
        """The sequence runs; it has blocks."""
        self.table.enter(sequence, self.block_manager.row(sequence.order))
        insort(self.running, sequence, key=self.policy.key)
        self._rows = None

    def _leave(self, sequence: Sequence) -> None:
        """The sequence runs no more: its blocks are given back, others may find what they hold."""
        self.running.remove(sequence)
        self._rows = None
        self.table.leave(sequence)
        leaves_prefix = sequence.num_stored_blocks is not None
        self.block_manager.free(sequence.order, sequence if leaves_prefix else None)
        sequence.store_at, sequence.num_stored_blocks = NEVER, None

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
        has_told = sequence.num_computed_tokens == sequence.num_tokens  # only beams ever have
        self._leave(sequence)
        sequence.status = SequenceStatus.PARKED
        sequence.num_computed_tokens = 0
        if not has_told:
            self.resume(sequence)

    def _end_flight(self, plan: StepPlan) -> NDArray[np.bool_]:
        """Which of the plan's sequences run still."""
        self.num_in_flight -= 1
        self.block_manager.step_completed(plan.step_id)
        are_running = self.table.are_running(plan.rows, plan.records)
        self.table.records["in_flight"][plan.rows[are_running]] = False
        self.swapping.host_pool.step_ended(plan.step_id)
        for sequence in plan.swapped_in:
            if sequence.status is SequenceStatus.RUNNING:
                self.table.records["in_flight"][sequence.row] = False
        return are_running

    def _submit(self, plan: StepPlan) -> None:
        self._next_step_id += 1
        self.offloading.save(plan)
        records = self.table.records
        plan.freeze(records.take(plan.rows))
        records["in_flight"][plan.rows] = True
        width = self.block_manager.blocks_for(int((plan.start + plan.num_new).max()))
        plan.block_tables = (self.block_manager.block_table[plan.rows, :width],)
        self.num_in_flight += 1
        self.block_manager.step_submitted(plan.step_id, [*plan.copies, *plan.swap_out])
