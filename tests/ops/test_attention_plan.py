"""The work list of attention covers everything once, in shares of equal cost; variants fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.errors import BadValueError
from cupaged.ops.attention_plan import (
    HEAD_DIMS,
    WorkPlan,
    choose_variant,
    max_work_items,
    partial_row_bytes,
    plan_work,
    workspace_bytes,
)

SPLIT = 256
WHOLE, HEAD, REST = 0, 1, 2


@dataclass(frozen=True)
class Step:
    """New tokens and context of each sequence, and how they are attended to."""

    num_new: list[int]
    context_len: list[int]
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 128
    window: int = 0
    rows: int = 64
    num_blocks: int = 8
    max_partial_rows: int = 1 << 40

    @property
    def query_start(self) -> NDArray[np.int32]:
        return np.cumsum([0, *self.num_new], dtype=np.int32)

    def plan(self) -> WorkPlan:
        return plan_work(
            self.query_start, np.array(self.context_len, np.int32),
            num_q_heads=self.heads[0], num_kv_heads=self.heads[1], head_dim=self.head_dim,
            rows_per_tile=self.rows, num_blocks=self.num_blocks,
            max_partial_rows=self.max_partial_rows, window=self.window,
        )  # fmt: skip

    def positions(self, s: int, first_row: int, num_rows: int) -> tuple[int, int]:
        """Positions from the first to behind the last that some of the rows see."""
        group = self.heads[0] // self.heads[1]
        start = self.context_len[s] - self.num_new[s]
        first, last = start + first_row // group, start + (first_row + num_rows - 1) // group
        return max(0, first - self.window + 1) if self.window else 0, last + 1


def check_cover(step: Step) -> WorkPlan:
    """Every row of every KV head over every split that it sees, exactly once."""
    plan, group = step.plan(), step.heads[0] // step.heads[1]
    assert plan.block_work[0] == 0 and plan.block_work[-1] == len(plan.work)
    assert len(plan.block_work) == step.num_blocks + 1 and (np.diff(plan.block_work) >= 0).all()
    seen: dict[tuple[int, int, int], list[int]] = {}  # row of a sequence and KV head: its splits
    partial: dict[int, tuple[int, int, int, int]] = {}  # partial row: where it comes from
    whole = set()
    for s, h, first_row, num_rows, first, end, partial_row, kind in plan.work.tolist():
        assert 0 < num_rows <= step.rows and first_row % step.rows == 0 and first < end
        begin, behind = step.positions(s, first_row, num_rows)
        assert begin // SPLIT <= first and end <= -(-behind // SPLIT)
        results = {WHOLE: 0, HEAD: 1, REST: end - first}[kind]
        for row in range(first_row, first_row + num_rows):
            splits = seen.setdefault((s, h, row), [])
            if kind == REST:  # a tile's items come in order
                assert splits and splits[-1] + 1 == first
            else:
                assert not splits and first == begin // SPLIT
            splits += range(first, end)
            for part in range(results):
                number = partial_row + part * num_rows + row - first_row
                assert number not in partial
                partial[number] = (s, h, row, first + part)
            if kind == WHOLE:
                assert end == -(-behind // SPLIT)
                whole.add((s, h, row))
    rows = {
        (s, h, row)
        for s, n in enumerate(step.num_new)
        for h in range(step.heads[1])
        for row in range(n * group)
    }
    assert seen.keys() == rows
    for (s, _, row), splits in seen.items():
        first_row = row // step.rows * step.rows
        num_rows = min(step.rows, step.num_new[s] * group - first_row)
        begin, behind = step.positions(s, first_row, num_rows)
        assert splits == list(range(begin // SPLIT, -(-behind // SPLIT)))
    assert sorted(partial) == list(range(plan.num_partial_rows))
    assert plan.num_partial_rows <= step.max_partial_rows

    merged = set()
    for out_row, number, stride, parts in plan.merge_rows.tolist():
        token, head = divmod(out_row, step.heads[0])
        s = int(np.searchsorted(step.query_start, token, side="right")) - 1
        h, query_head = divmod(head, group)
        row = (token - int(step.query_start[s])) * group + query_head
        read = [partial.pop(number + i * stride) for i in range(parts)]
        assert [r[:3] for r in read] == [(s, h, row)] * parts and parts >= 2
        assert [r[3] for r in read] == sorted({r[3] for r in read})
        merged.add((s, h, row))
    assert not partial and merged == rows - whole
    return plan


RANDOM = np.random.default_rng(0)


def random_step(seed: int) -> Step:
    rng = np.random.default_rng(seed)
    context = rng.integers(1, [2, 300, 3000, 9000][seed % 4], rng.integers(1, 9))
    new = [int(rng.choice([1, min(c, 17), min(c, 300), 0])) for c in context]
    return Step(
        new,
        context.tolist(),
        heads=[(1, 1), (6, 2), (8, 8), (20, 1)][seed // 4 % 4],
        head_dim=[64, 256][seed % 2],
        window=[0, 0, 1, 100, 700][seed % 5],
        rows=[16, 32, 64][seed % 3],
        num_blocks=int(rng.choice([1, 2, 7, 132])),
        max_partial_rows=int(rng.choice([0, 500, 1 << 40])),
    )


@pytest.mark.parametrize("seed", range(60))
def test_every_row_and_split_is_done_once(seed: int) -> None:
    check_cover(random_step(seed))


@pytest.mark.parametrize("length", [1, 255, 256, 257, 5000, 200_000])
@pytest.mark.parametrize("num_blocks", [1, 8, 264])
def test_one_sequence_of_any_length(length: int, num_blocks: int) -> None:
    plan = check_cover(Step([1], [length], heads=(32, 8), num_blocks=num_blocks))
    # Eight heads are a whole number of tiles for one block and for eight, and 257 positions are
    # not worth the merge; 5000 positions are 160 splits in all, fewer than there are blocks.
    if num_blocks <= 8 or length <= 257:
        assert len(plan.work) == 8 and not plan.num_partial_rows
    elif length == 5000:
        assert len(plan.work) == 160
    else:
        assert 264 <= len(plan.work) <= 264 + 8


def test_an_empty_step() -> None:
    plan = check_cover(Step([0, 0], [5, 300]))
    assert not plan.block_work.any() and plan.work.shape == (0, 8)
    assert plan.merge_rows.shape == (0, 4)


def test_a_small_step_by_hand() -> None:
    """One token of 600 positions, two blocks: ten tiles of 64 keys, three splits, cut at one."""
    plan = Step([1], [600], heads=(4, 1), num_blocks=2).plan()
    assert plan.block_work.tolist() == [0, 1, 2]
    assert plan.work.tolist() == [[0, 0, 0, 4, 0, 1, 0, HEAD], [0, 0, 0, 4, 1, 3, 4, REST]]
    assert plan.merge_rows.tolist() == [[0, 0, 4, 3], [1, 1, 4, 3], [2, 2, 4, 3], [3, 3, 4, 3]]
    assert plan.num_partial_rows == 12


def costs(step: Step, plan: WorkPlan) -> tuple[list[float], float]:
    """Of each block, and of the largest piece that cannot be cut: a split of a tile of work."""
    tile, of_items, largest = 64 if step.head_dim <= 128 else 32, [], 0.0
    for s, _, first_row, num_rows, first, end, _, _ in plan.work.tolist():
        begin, behind = step.positions(s, first_row, num_rows)
        low, high = max(first * SPLIT, begin) // tile, -(-min(end * SPLIT, behind) // tile)
        weight = 2 + -(-num_rows // 16)
        of_items.append(weight * (high - low) + 4)
        largest = max(largest, weight * SPLIT / tile + 4)
    ends = np.concatenate([[0], np.cumsum(of_items)])
    return np.diff(ends[plan.block_work]).tolist(), largest


@pytest.mark.parametrize(
    ("num_new", "context_len"),
    [
        ([1], [8000]),
        ([1], [200_000]),
        ([1] * 64, [8000] * 64),
        ([1] * 37, list(range(100, 37_100, 1000))),
        ([2048], [2048]),
        ([512, *[1] * 32], [30_000, *range(500, 16_500, 500)]),
        ([300, 7, 1, 100], [300, 1000, 77, 4100]),
    ],
)
@pytest.mark.parametrize("window", [0, 1000])
def test_blocks_have_equal_shares(num_new: list[int], context_len: list[int], window: int) -> None:
    """No block has more than its share and one piece: half a piece at either end. Six more is what
    the launch of the second kernel costs, which may be saved."""
    step = Step(num_new, context_len, heads=(32, 8), num_blocks=264, window=window)
    of_blocks, largest = costs(step, step.plan())
    assert max(of_blocks) <= sum(of_blocks) / 264 + largest + 6


def test_little_workspace_divides_what_fits() -> None:
    """Tiles of 100 and 90 splits: half of both is behind split 95. One partial result of four rows
    for the first 95, one each for the last five: 24 rows."""
    step = Step([1, 1], [100 * SPLIT, 90 * SPLIT], heads=(4, 1), num_blocks=2, max_partial_rows=24)
    plan = check_cover(step)
    assert plan.work[:, 5].tolist() == [95, 100, 90]
    assert plan.work[:, 7].tolist() == [HEAD, REST, WHOLE]
    assert plan.num_partial_rows == 24
    assert (check_cover(replace(step, max_partial_rows=23)).work[:, 7] == WHOLE).all()
    # Of two cuts the one that takes less is kept.
    step = Step([1, 1], [100 * SPLIT, 90 * SPLIT], heads=(4, 1), num_blocks=3)
    assert (check_cover(step).work[:, 7] == HEAD).sum() == 2
    plan = check_cover(replace(step, max_partial_rows=200))
    assert plan.work[plan.work[:, 7] != WHOLE, 0].tolist() == [0, 0]


def test_the_merge_must_be_worth_it() -> None:
    """Two blocks, one tile of work: 9 tiles of keys in 3 splits take 31, or 24 in two parts."""
    assert len(Step([1], [257], heads=(4, 1), num_blocks=2).plan().work) == 1
    assert len(Step([1], [512], heads=(4, 1), num_blocks=2).plan().work) == 2


@pytest.mark.parametrize("seed", range(8))
def test_arrays_made_once_hold_any_step(seed: int) -> None:
    step = random_step(seed)
    group = step.heads[0] // step.heads[1]
    most = max_work_items(
        sum(step.num_new), len(step.num_new), group, step.rows, step.heads[1], step.num_blocks
    )
    assert len(step.plan().work) <= most


# ---- variants and workspace ----------------------------------------------------------------------


@pytest.mark.parametrize("shared_kib", [99, 163, 227])  # sm_86, 89, 120; sm_80; sm_90, 100
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_variant_fits_every_gpu(head_dim: int, itemsize: int, shared_kib: int) -> None:
    """KN-06: for every context, since shared memory does not grow with it."""
    variant = choose_variant(head_dim, itemsize, shared_kib << 10)
    assert variant.row_tiles in (1, 2, 4) and 2 <= variant.slots <= 4 and variant.blocks in (1, 2)
    # By hand: slots, queries and weights with 16 bytes of padding a row; nine words a row.
    positions, rows = (64 if head_dim <= 128 else 32), 16 * variant.row_tiles
    row = head_dim * itemsize + 16
    needed = variant.slots * positions * row + rows * row
    needed += rows * (positions * itemsize + 16) + rows * 9 * 4
    assert variant.shared_bytes == needed
    assert variant.blocks * (needed + 1024) <= (shared_kib + 1) << 10


def test_common_variants() -> None:
    def sizes(head_dim: int, itemsize: int, kib: int) -> tuple[int, int, int]:
        variant = choose_variant(head_dim, itemsize, kib << 10)
        return variant.row_tiles, variant.slots, variant.blocks

    assert [sizes(128, 2, kib) for kib in (99, 163, 227)] == [(4, 4, 1), (4, 3, 2), (4, 4, 2)]
    assert [sizes(64, 2, kib) for kib in (99, 163, 227)] == [(4, 3, 2), (4, 4, 2), (4, 4, 2)]
    assert [sizes(256, 2, kib) for kib in (99, 163, 227)] == [(2, 4, 1), (2, 3, 2), (2, 4, 2)]
    assert [sizes(256, 4, kib) for kib in (99, 163, 227)] == [(1, 2, 1), (1, 4, 1), (1, 2, 2)]


def test_too_little_shared_memory_is_refused() -> None:
    assert choose_variant(128, 2, 48 << 10).row_tiles == 1
    with pytest.raises(BadValueError, match=r"head_dim 256 must be 86080 or more, got 65536"):
        choose_variant(256, 4, 64 << 10)


@pytest.mark.parametrize("num_blocks", [8, 264])
@pytest.mark.parametrize("length", [1, 256, 13_000, 40_000, 200_000])
def test_the_workspace_is_enough_for_decoding(length: int, num_blocks: int) -> None:
    """One sequence of any length, or 64 of common length: nothing stays whole for want of it."""
    rows = workspace_bytes(32, 128, length, num_blocks) // partial_row_bytes(128)
    for num_seqs, context_len in ((1, length), (64, min(length, 13_000))):
        step = Step([1] * num_seqs, [context_len] * num_seqs, (32, 8), num_blocks=num_blocks)
        assert step.plan().num_partial_rows <= rows
    assert partial_row_bytes(128) == 520
    assert workspace_bytes(32, 128, 200_000, 264) == 264 * 256 * 520
    assert workspace_bytes(32, 128, 200_000, 8) == 32 * 782 * 520
