"""The radix tree: what is found, where nodes are split, what goes first; by hand and at random."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from random import Random

import pytest

from cupaged.engine.block_manager import BlockManager
from cupaged.engine.radix_cache import RadixCache, RadixNode
from cupaged.request import NEVER, CoreRequest, Request, Sequence
from cupaged.sampling_params import SamplingParams

SIZE = 2
Content = tuple[str | None, tuple[int, ...]]


class Pool:
    """A block manager with a tree, and sequences that come, compute and leave."""

    def __init__(self, num_blocks: int = 32, num_evicted_at_once: int = 1) -> None:
        self.cache = RadixCache(SIZE, num_evicted_at_once)
        self.manager = BlockManager(
            num_blocks=num_blocks, block_size=SIZE, max_num_seqs=16, max_blocks_per_seq=num_blocks,
            prefix_cache=self.cache,
        )  # fmt: skip
        self._num_arrivals = 0

    def waiting(self, prompt: Tokens[int], salt: str | None = None) -> Sequence:
        """A sequence that has not been admitted."""
        core = CoreRequest(
            str(self._num_arrivals), tuple(prompt), SamplingParams(), cache_salt=salt
        )
        self._num_arrivals += 1
        return Request(core, arrival=self._num_arrivals, max_tokens=100).sequences[0]

    def admit(self, sequence: Sequence) -> int | None:
        """Blocks that it found, None if it has no room."""
        found = self.cache.find(sequence)
        if not self.manager.admit(sequence.order, found, sequence.num_tokens):
            return None
        sequence.num_computed_tokens = len(found) * SIZE
        self.cache.admitted(sequence, sequence.num_computed_tokens)
        return len(found)

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Some of its tokens have been computed."""
        sequence.num_computed_tokens += num_tokens
        if sequence.num_computed_tokens >= sequence.store_at:
            self.manager.store(sequence.order, sequence)

    def leave(self, sequence: Sequence) -> None:
        """It ends, and others may find what it has computed."""
        stored = sequence if sequence.num_stored_blocks is not None else None
        self.manager.free(sequence.order, stored)
        sequence.store_at, sequence.num_stored_blocks = NEVER, None

    def serve(self, prompt: Tokens[int], salt: str | None = None) -> int | None:
        """All of it at once; blocks that it found."""
        sequence = self.waiting(prompt, salt)
        found = self.admit(sequence)
        if found is not None:
            self.compute(sequence, len(prompt) - found * SIZE)
            self.leave(sequence)
            self.manager.audit()
        return found

    def runs(self) -> list[tuple[int, ...]]:
        """The tokens of every node's blocks, from the top down."""
        nodes: list[RadixNode] = [*self.cache._top.children.values()]
        for node in nodes:
            nodes += node.children.values()
        return [tuple(memoryview(n.tokens).cast("i")) for n in nodes]


def test_a_prompt_is_one_node_however_it_is_computed() -> None:
    pool = Pool()
    sequence = pool.waiting(range(11))
    assert pool.admit(sequence) == 0
    for count in (3, 1, 5, 2):
        pool.compute(sequence, count)
        pool.cache.audit_sequence(sequence, pool.manager.blocks_of(sequence.order))
    assert pool.runs() == [tuple(range(10))]
    sequence.token_ids += range(11, 17)
    assert pool.manager.allocate(sequence.order, 11, 6) == []
    pool.compute(sequence, 5)
    assert pool.runs() == [tuple(range(10))]  # what is generated waits for the end
    pool.leave(sequence)
    assert pool.runs() == [tuple(range(16))]


def test_a_node_is_split_where_prompts_part() -> None:
    pool = Pool()
    assert pool.serve([0, 1, 2, 3, 4, 5, 6]) == 0
    assert pool.serve([0, 1, 2, 3, 4, 9, 9]) == 2  # inside the third block
    assert pool.runs() == [(0, 1, 2, 3), (4, 5), (4, 9)]
    assert pool.serve([0, 1, 7, 7, 7]) == 1
    assert pool.runs() == [(0, 1), (2, 3), (7, 7), (4, 5), (4, 9)]
    assert pool.serve([0, 1, 2, 3, 4, 9, 8]) == 3
    assert len(pool.runs()) == 5
    assert pool.serve([0, 7, 2, 3, 4, 9, 8]) == 0


def test_a_look_into_the_tree_changes_nothing() -> None:
    pool = Pool()
    pool.serve(range(9))
    assert len(pool.cache.find(pool.waiting([0, 1, 2, 3, 9]))) == 2
    assert pool.runs() == [tuple(range(8))]
    assert pool.cache.num_evictable_blocks == 4


@pytest.mark.parametrize("num_equal", range(20))
def test_the_longest_prefix_is_found_in_a_long_run(num_equal: int) -> None:
    pool = Pool()
    pool.serve(range(41))
    prompt = [*range(num_equal * SIZE), *range(100, 141)][:41]
    assert len(pool.cache.find(pool.waiting(prompt))) == num_equal


def test_leaves_go_first_and_of_these_the_least_recently_used() -> None:
    pool = Pool(num_blocks=8)
    pool.serve([0, 1, 2, 3, 4, 5, 6])  # blocks 0, 1, 2 and a partial one, 3
    pool.serve([0, 1, 2, 3, 7, 7, 7])  # 0, 1 and 4: now 2 is the oldest leaf
    pool.serve([9, 9, 9])  # block 6
    assert pool.serve([0, 1, 5]) == 1  # 0 alone was used again
    assert [pool.cache.evict() for _ in range(5)] == [[2], [4], [1], [6], [0]]
    assert pool.cache.num_evictable_blocks == 0 and pool.runs() == []


def test_several_blocks_of_one_leaf_go_at_once() -> None:
    pool = Pool(num_evicted_at_once=3)
    pool.serve(range(11))  # blocks 0 to 4
    pool.serve([0, 1, 9])
    assert pool.cache.evict() == [4, 3, 2]
    assert pool.cache.evict() == [1]  # a node's blocks only
    assert pool.cache.evict() == [0]


def test_equal_prompts_of_one_step_hold_the_same_blocks_after_it() -> None:
    pool = Pool(num_blocks=10)
    first, second = pool.waiting(range(7)), pool.waiting(range(7))
    for sequence in (first, second):
        assert pool.admit(sequence) == 0
    assert pool.manager.num_used_blocks == 8
    for sequence in (first, second):
        pool.compute(sequence, 7)
    blocks = pool.manager.blocks_of
    assert blocks(first.order)[:3] == blocks(second.order)[:3]
    assert blocks(first.order)[3] != blocks(second.order)[3]
    assert (pool.manager.num_used_blocks, pool.manager.num_free_blocks) == (5, 5)
    pool.manager.audit()


def test_blocks_that_are_freed_twice_while_one_step_is_in_flight() -> None:
    """Both times until the same step; what stands on them is evictable no later than they are."""
    pool = Pool()
    first = pool.waiting([0, 1, 2, 3, 4])
    assert pool.admit(first) == 0
    pool.compute(first, 5)
    pool.manager.step_submitted(1)
    pool.leave(first)
    second = pool.waiting([0, 1, 7, 7, 7])
    assert pool.admit(second) == 1  # out of quarantine
    pool.compute(second, 3)
    pool.leave(second)
    pool.manager.audit()
    pool.manager.step_completed(1)
    pool.manager.audit()
    assert [pool.cache.evict() for _ in range(3)] == [[1], [3], [0]]


def test_salts_part_at_the_top() -> None:
    pool = Pool()
    for salt in (None, "a", "b"):
        assert pool.serve(range(5), salt) == 0
        assert pool.serve(range(5), salt) == 2
    assert pool.runs() == [(0, 1, 2, 3)] * 3


def test_no_salt_that_has_gone_leaves_anything_behind() -> None:
    pool = Pool(num_blocks=3)
    for i in range(20):
        assert pool.serve(range(5), str(i)) == 0
    assert len(pool.cache._top.children) == 1


class Model:
    """What must be found, by content."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.block_of: dict[Content, int] = {}
        self.last_use: dict[int, int] = {}
        self.clock = 0
        self._evict = pool.cache.evict
        pool.manager._evict = self.evict

    def find(self, sequence: Sequence) -> list[int]:
        """Block by block."""
        found: list[int] = []
        while (len(found) + 1) * SIZE < sequence.num_tokens:
            block = self.block_of.get(content(sequence, len(found)))
            if block is None:
                break
            found.append(block)
        return found

    def store(self, sequence: Sequence, num_tokens: int) -> None:
        """Its full blocks up to that token; the first of equal blocks counts, and a sibling's block
        does not come to stand on what the sibling does not hold."""
        first, exchanged = sequence.num_stored_blocks, False
        assert first is not None
        own = self.pool.manager.blocks_of(sequence.order)
        for i, block in enumerate(own[: num_tokens // SIZE]):
            known = self.block_of.get(content(sequence, i))
            if i < first and known != block:
                return  # it could not be stored
            if known is None and exchanged and self.pool.manager.ref_counts[block] > 1:
                return
            exchanged |= known not in (None, block)
            self.block_of[content(sequence, i)] = block if known is None else known
            self.last_use[block if known is None else known] = self.clock

    def evict(self) -> list[int]:
        """Leaves only, least recently used first."""
        evicted = self._evict()
        for block in evicted:
            (gone,) = (c for c, b in self.block_of.items() if b == block)
            del self.block_of[gone]
            salt, tokens = gone
            longer = [t for s, t in self.block_of if s == salt and t[: len(tokens)] == tokens]
            assert not longer, "evicted before what stands on it"
        idle = [b for b in self.block_of.values() if not self.pool.manager.ref_counts[b]]
        uses = [self.last_use[block] for block in idle]
        assert self.last_use[evicted[0]] <= min(uses, default=self.clock), "not the oldest"
        return evicted

    def look(self, running: list[Sequence]) -> None:
        """After every operation."""
        self.clock += 1
        manager = self.pool.manager
        for block in self.block_of.values():
            if manager.ref_counts[block]:
                self.last_use[block] = self.clock
        manager.audit()
        in_tree = {b for node in self.pool.cache._node_at.values() for b in node.blocks}
        assert in_tree == set(self.block_of.values())
        for sequence in running:
            self.pool.cache.audit_sequence(sequence, manager.blocks_of(sequence.order))


def content(sequence: Sequence, index: int) -> Content:
    """What makes a block what it is."""
    return sequence.request.core.cache_salt, tuple(sequence.token_ids[: (index + 1) * SIZE])


@pytest.mark.parametrize("num_evicted_at_once", [1, 3])
@pytest.mark.parametrize("seed", range(25))
def test_the_tree_against_a_model(seed: int, num_evicted_at_once: int) -> None:
    """Sequences of few tokens come, are computed in chunks, fork anywhere, grow, and leave."""
    random = Random(seed)
    pool = Pool(random.choice((12, 16, 30)), num_evicted_at_once)
    model, running = Model(pool), list[Sequence]()
    for _ in range(300):
        kind = random.random()
        if kind < 0.3 and len(running) < 5:
            prompt = random.choices(range(2), k=random.randint(1, 12))
            sequence = pool.waiting(prompt, random.choice((None, None, "a")))
            assert pool.cache.find(sequence) == model.find(sequence)
            if pool.admit(sequence) is not None:
                running.append(sequence)
        elif running and kind < 0.75:
            sequence = random.choice(running)
            left = sequence.num_tokens - sequence.num_computed_tokens
            if not left:
                sequence.token_ids.append(random.randrange(2))
                left = 1
            count = random.randint(1, left)
            if pool.manager.allocate(sequence.order, sequence.num_computed_tokens, count) is None:
                continue
            if sequence.num_computed_tokens + count >= sequence.store_at:
                model.store(sequence, sequence.num_computed_tokens + count)
            pool.compute(sequence, count)
        elif running and kind < 0.85 and len(running) < 8:
            parent = random.choice(running)
            child = parent.fork(len(parent.request.sequences))
            pool.manager.fork(parent.order, child.order)
            running.append(child)
        elif running and kind < 0.98:
            sequence = running.pop(random.randrange(len(running)))
            model.store(sequence, sequence.num_computed_tokens)
            pool.leave(sequence)
        elif kind > 0.99:
            freed = pool.manager.reset_prefix_cache()
            idle = [b for b in model.block_of.values() if not pool.manager.ref_counts[b]]
            assert freed == len(idle)
            model.block_of.clear()
            for sequence in running:
                pool.manager.free(sequence.order)
            running.clear()
        model.look(running)
    assert pool.cache.num_hit_tokens > 0


def test_a_tree_takes_memory_for_its_blocks_not_for_the_prompts_that_share_them() -> None:
    """A long prompt of which eight requests add two blocks each, one of which is evicted."""
    pool = Pool(num_blocks=64)
    prompt = list(range(100, 180))
    for i in range(8):
        pool.serve([*prompt, i, i, i, i, i])
    nodes = [*pool.cache._top.children.values()]
    for node in nodes:
        nodes += node.children.values()
    assert sorted(len(n.tokens) for n in nodes) == [4 * 4] * 8 + [80 * 4]  # bytes
    assert pool.serve([*prompt, *range(50, 68)]) == 40  # 9 more blocks, of which 8 are free
    assert sorted(len(tokens) for tokens in pool.runs()) == [2, *[4] * 7, 18, 80]
