"""The second tier of the prefix cache: blocks that the device evicts stay in the host's memory.

What is evicted while a step is planned is copied by that step, before it writes to any block, into
host blocks that no swapped sequence needs. A sequence whose prefix goes on there has those blocks
copied back by the step that begins it. Without host blocks, or without a prefix cache, nothing
here ever happens.
"""

from __future__ import annotations

from cupaged.engine.batch import StepPlan
from cupaged.engine.block_names import name_block
from cupaged.engine.host_pool import HostPool
from cupaged.engine.preemption import PreemptionStrategy
from cupaged.engine.prefix_cache import PrefixStrategy
from cupaged.request import NEVER, Sequence, SequenceStatus


class Offloading:
    """Between the device's prefix cache and the host's pool.

    num_blocks_out, num_blocks_in: blocks that were copied to the host and back.
    """

    def __init__(
        self,
        prefix_cache: PrefixStrategy,
        host_pool: HostPool,
        strategy: PreemptionStrategy,
        block_size: int,
    ) -> None:
        self._cache = prefix_cache
        self._pool = host_pool
        self._strategy = strategy
        self._block_size = block_size
        self._evicted: list[tuple[int, bytes]] = []  # and their names, for the step being planned
        self._loading: dict[Sequence, int] = {}  # in flight; blocks found on the device before
        self.num_blocks_out = 0
        self.num_blocks_in = 0

    def evict(self) -> list[int]:
        """What the prefix cache gives away; the step being planned will save it."""
        names: list[bytes] = []
        blocks = self._cache.evict(names)
        self._evicted += zip(blocks, names, strict=True)
        return blocks

    def find(self, sequence: Sequence, num_found: int) -> list[tuple[bytes, int]]:
        """What the host keeps of a sequence's prefix and is worth its copies: names and blocks.

        Args:
            num_found: blocks of the prefix that the device has; those behind them are looked for.
        """
        found: list[tuple[bytes, int]] = []
        if not self._pool.num_kept_blocks or not sequence.request.uses_prefix_cache:
            return found
        size = self._block_size
        for i in range(num_found, sequence.num_skippable_tokens // size):
            name = name_block(sequence, i, size)
            host_block = self._pool.find(name)
            if host_block is None:
                break
            found.append((name, host_block))
        return found if self._strategy.loads(len(found), len(found) * size) else []

    def load(
        self,
        plan: StepPlan,
        sequence: Sequence,
        kept: list[tuple[bytes, int]],
        blocks: list[int],
        num_found: int,
    ) -> None:
        """The plan fills a sequence's blocks with what was found.

        They count as stored, but nobody finds them before that step has ended well.

        Args:
            kept: what was found on the host.
            blocks: all of the sequence.
            num_found: those of them that it found on the device.
        """
        for (name, host_block), block in zip(kept, blocks[num_found:], strict=False):
            self._pool.use(name, plan.step_id)
            plan.swap_in.append((host_block, block))
        self.num_blocks_in += len(kept)
        self._loading[sequence] = num_found

    def save(self, plan: StepPlan) -> None:
        """The plan is going to be submitted: it copies what was evicted for it."""
        pairs = self._pool.keep(self._evicted, plan.step_id)
        self._evicted.clear()
        plan.swap_out += pairs
        self.num_blocks_out += len(pairs)

    def step_ended(self, plan: StepPlan) -> None:
        """What the plan's step has loaded is stored like what it has computed."""
        for sequence in plan.admitted:
            num_found = self._loading.pop(sequence, None)
            if num_found is not None and sequence.status is SequenceStatus.RUNNING:
                sequence.num_stored_blocks = num_found
                sequence.store_at = 0

    def give_up(self, plan: StepPlan) -> None:
        """The step failed, or there is none: it has saved and loaded nothing."""
        self._evicted.clear()
        self._pool.step_failed(plan.step_id)
        for sequence in plan.admitted:
            self._loading.pop(sequence, None)

    def distrust(self, sequence: Sequence) -> None:
        """Something is wrong with a sequence: nobody shall find what it may have begun with.

        Whoever loads now may load the same, and stores nothing.
        """
        if not sequence.request.uses_prefix_cache:
            return
        for other in self._loading:
            other.store_at, other.num_stored_blocks = NEVER, None
        self._loading.clear()
        if self._pool.num_kept_blocks:
            for i in range(sequence.num_tokens // self._block_size):
                self._pool.drop(name_block(sequence, i, self._block_size))

    def reset(self) -> None:
        """Keep nothing, and store nothing of what is being loaded."""
        self._loading.clear()
        self._pool.drop_all()
