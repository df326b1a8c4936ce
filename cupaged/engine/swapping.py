"""Moves groups of sequences between the KV pool and the host's: who goes, and with which blocks.

A group is the running sequences of one request. All of them leave and come back together (Kwon et
al., SOSP 2023, section 4.5), with their computed tokens. Only the pairs of blocks to copy are
written into the plan: the runner copies. Queue and running list are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Hashable

from cupaged.engine.batch import StepPlan
from cupaged.engine.block_manager import BlockManager
from cupaged.engine.host_pool import HostPool
from cupaged.engine.preemption import PreemptionStrategy
from cupaged.request import Sequence, SequenceStatus


class Swapping:
    """The host pool beside the block manager, and the strategy that says who is swapped."""

    def __init__(
        self, block_manager: BlockManager, host_pool: HostPool, strategy: PreemptionStrategy
    ) -> None:
        self.block_manager = block_manager
        self.host_pool = host_pool
        self.strategy = strategy
        self.swapped: dict[Sequence, None] = {}  # sequences on the host
        self.num_preemptions = 0  # of a sequence each, as all that follow
        self.num_blocks_out = 0
        self.num_blocks_in = 0

    def may_leave(self, group: list[Sequence]) -> bool:
        """Whether the running sequences of a request are to be swapped out, if they give way.

        Not beams of which one waits for the others: with nothing to compute it could not come back.
        """
        if not self.host_pool.num_free_blocks:
            return False
        if any(s.num_computed_tokens == s.num_tokens for s in group):
            return False
        blocks = {block for s in group for block in self._computed_blocks(s)}
        fits = 0 < len(blocks) <= self.host_pool.num_free_blocks
        return fits and self.strategy.swaps(group, len(blocks))

    def swap_out(self, plan: StepPlan, group: list[Sequence]) -> None:
        """The plan copies their blocks before it writes to any; the caller frees them."""
        blocks: dict[Hashable, list[int]] = {s.order: self._computed_blocks(s) for s in group}
        pairs = self.host_pool.swap_out(blocks, plan.step_id)
        plan.swap_out += pairs
        plan.swapped_out += group
        self.swapped.update(dict.fromkeys(group))
        self.num_preemptions += len(group)
        self.num_blocks_out += len(pairs)

    def group_of(self, sequence: Sequence) -> list[Sequence]:
        """All swapped sequences of a swapped sequence's request; of another, itself alone."""
        if sequence.status is not SequenceStatus.SWAPPED:
            return [sequence]
        return [s for s in sequence.request.sequences if s.status is SequenceStatus.SWAPPED]

    def is_ready(self, group: list[Sequence]) -> bool:
        """False while the step that swaps one of them out is in flight."""
        return all(self.host_pool.is_written(s.order) for s in group)

    def swap_in(self, plan: StepPlan, group: list[Sequence], reserve: int) -> bool:
        """Give a swapped group blocks for all its tokens; False if that many are not free."""
        pool = self.host_pool
        held: dict[Hashable, list[int]] = {s.order: pool.blocks_of(s.order) for s in group}
        lengths: dict[Hashable, tuple[int, int]] = {
            s.order: (s.num_computed_tokens, s.num_tokens) for s in group
        }
        pairs = self.block_manager.restore(held, lengths, reserve=reserve)
        if pairs is None:
            return False
        plan.swap_in += pairs
        plan.swapped_in += group
        self.num_blocks_in += len(pairs)
        for sequence in group:
            del self.swapped[sequence]
            pool.release(sequence.order, plan.step_id)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Give back what a sequence holds on the host, if anything."""
        if sequence.status is SequenceStatus.SWAPPED:
            self.host_pool.release(sequence.order)
            del self.swapped[sequence]

    def give_up(self, group: list[Sequence]) -> None:
        """Swapped sequences will compute all their tokens again; the others are passed over."""
        for sequence in group:
            if sequence.status is SequenceStatus.SWAPPED:
                self.forget(sequence)
                sequence.status = SequenceStatus.PREEMPTED
                sequence.num_computed_tokens = 0

    def take_back(self, plan: StepPlan) -> None:
        """The plan turned out empty: nobody will copy what it swaps out, so that is lost."""
        self.num_blocks_out -= len(plan.swap_out)
        self.give_up(plan.swapped_out)
        self.host_pool.step_ended(plan.step_id)
        plan.swap_out.clear()
        plan.swapped_out.clear()

    def audit(self, unfinished: list[Sequence]) -> None:
        """Check the pool, and that exactly the swapped sequences hold blocks of it, all they need.

        AssertionError says what is wrong.
        """
        self.host_pool.audit()
        swapped = {s for s in unfinished if s.status is SequenceStatus.SWAPPED}
        assert swapped == self.swapped.keys(), "a swapped sequence is lost, or not swapped"
        assert {s.order for s in swapped} == self.host_pool.holders(), "who holds host blocks"
        for sequence in swapped:
            blocks = self.host_pool.blocks_of(sequence.order)
            computed = self.block_manager.blocks_for(sequence.num_computed_tokens)
            assert len(blocks) == computed, f"{sequence.order} has tokens without a host block"

    def _computed_blocks(self, sequence: Sequence) -> list[int]:
        num_blocks = self.block_manager.blocks_for(sequence.num_computed_tokens)
        return self.block_manager.blocks_of(sequence.order)[:num_blocks]
