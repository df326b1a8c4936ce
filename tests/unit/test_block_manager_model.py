"""Random use of the block manager against a model of memory."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cupaged.engine.block_manager import BlockManager

KEYS = st.sampled_from("abcd")


class BlocksAgainstAModel(RuleBasedStateMachine):
    """Every slot is a cell of memory; whatever a sequence wrote, it must read back."""

    @initialize(num_blocks=st.integers(1, 9), block_size=st.sampled_from([1, 2, 4]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=4,
            max_blocks_per_seq=num_blocks,
        )
        self.memory: dict[int, list[int]] = {b: [0] * block_size for b in range(num_blocks)}
        self.written: dict[str, list[int]] = {}
        self.steps: dict[int, list[tuple[int, int]]] = {}
        self.copies: list[tuple[int, int]] = []
        self.clock = 0

    @rule(key=KEYS, count=st.integers(1, 9))
    def write(self, key: str, count: int) -> None:
        manager, tokens = self.manager, self.written.get(key, [])
        free, held = manager.num_free_blocks, len(manager.blocks_of(key))
        copies = manager.allocate(key, len(tokens), count)
        if copies is None:
            most = manager.blocks_for(len(tokens) + count) - held + 1  # one copy at most
            assert most > free or any(self.steps.values()), "refused though there is room"
            return
        self.copies += copies
        for source, destination in copies:
            self.memory[destination] = self.memory[source].copy()
        blocks = manager.blocks_of(key)
        for position in range(len(tokens), len(tokens) + count):
            self.clock += 1
            block, offset = divmod(position, manager.block_size)
            self.memory[blocks[block]][offset] = self.clock
            tokens = [*tokens, self.clock]
        self.written[key] = tokens

    @rule(parent=KEYS, child=KEYS)
    def fork(self, parent: str, child: str) -> None:
        if parent in self.written and child not in self.written:
            self.manager.fork(parent, child)
            self.written[child] = self.written[parent]

    @rule(key=KEYS)
    def free(self, key: str) -> None:
        self.manager.free(key)
        self.manager.free(key)
        self.written.pop(key, None)

    @rule(key=KEYS, keep=st.integers(0, 20))
    def trim(self, key: str, keep: int) -> None:
        if key in self.written:
            self.manager.trim(key, keep)
            self.written[key] = self.written[key][:keep]

    @rule()
    def submit(self) -> None:
        self.clock += 1
        self.manager.step_submitted(self.clock, self.copies)
        self.steps[self.clock] = self.copies
        self.copies = []

    @rule(oldest=st.booleans())
    def complete(self, oldest: bool) -> None:
        if self.steps:
            step = min(self.steps) if oldest else max(self.steps)
            del self.steps[step]
            self.manager.step_completed(step)

    @invariant()
    def everything_reads_back(self) -> None:
        manager = self.manager
        manager.audit()
        for key, tokens in self.written.items():
            cells = [cell for block in manager.blocks_of(key) for cell in self.memory[block]]
            assert cells[: len(tokens)] == tokens
        total = manager.num_free_blocks + manager.num_quarantined_blocks + manager.num_used_blocks
        assert total == manager.num_blocks
        assert self.steps or manager.num_quarantined_blocks == 0


TestBlocksAgainstAModel = BlocksAgainstAModel.TestCase
TestBlocksAgainstAModel.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
