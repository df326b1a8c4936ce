"""How the attention of a step is divided among the blocks of a GPU: pure functions of numbers.

Owns the choice of the kernel's tile sizes and the work list that `cuda/paged_attention.cu` walks.
A tile of work is up to `rows_per_tile` rows (new token x query head) of one sequence and KV head,
against all positions that they see. Tiles are laid end to end and cut into shares of equal cost,
one a block; a cut inside a tile lies on an edge of a split. Nothing here changes a result: the
kernel's arithmetic depends on positions alone. It knows no device and starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from cupaged.errors import BadValueError

__all__ = [
    "HEAD_DIMS",
    "REST",
    "SPLIT",
    "WHOLE",
    "AttentionVariant",
    "WorkPlan",
    "choose_variant",
    "kv_tile",
    "max_work_items",
    "partial_row_bytes",
    "plan_work",
    "workspace_bytes",
]

HEAD_DIMS = tuple(range(16, 257, 16))
SPLIT = 256  # positions of a split, as in the kernel
WHOLE, HEAD, REST = 0, 1, 2  # kinds of items, as in the kernel

_WARPS = 4
_SHARED_UNIT = 128  # shared memory of a block is given out in these,
_RESERVED_SHARED = 1024  # and each block needs this besides, which the largest block leaves free
# Tiles of 16 x 8 results of a warp that fit in registers, twice, by bytes of a number: products of
# float32 take more of them besides.
_MAX_ACCUMULATORS = {2: 16, 4: 8}
_MOST_SLOTS = 4
# Estimates, in the unit of `_Tiles.kv_tile_cost`:
_FIXED_COST = 4  # of an item, whose first loads nothing hides
_MERGE_COST = 6  # of another launch; what it saves must be more

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """Sizes that the kernel is compiled with.

    row_tiles: tiles of 16 rows of a block. slots: tiles of keys or values in shared memory.
    shared_bytes: dynamic shared memory of a block. blocks: that fit on a multiprocessor, at most 2.
    """

    row_tiles: int
    slots: int
    shared_bytes: int
    blocks: int

    @property
    def rows_per_tile(self) -> int:
        """Rows that a block computes at a time."""
        return 16 * self.row_tiles


def kv_tile(head_dim: int) -> int:
    """Positions of a tile of keys, as in the kernel."""
    return 64 if head_dim <= 128 else 32


def choose_variant(head_dim: int, itemsize: int, max_shared_bytes: int) -> AttentionVariant:
    """The most rows that fit; then two blocks a multiprocessor, then the most slots.

    Args:
        head_dim: one of `HEAD_DIMS`.
        itemsize: bytes of a number of the storage type.
        max_shared_bytes: most shared memory of a block.

    Raises:
        BadValueError: no variant fits. Every head_dim has one of 85 KiB or less.
    """
    dim_tiles = -(-head_dim // (8 * _WARPS))
    row_tiles = [r for r in (4, 2, 1) if r * dim_tiles <= _MAX_ACCUMULATORS[itemsize]]
    for rows, blocks in product(row_tiles, (2, 1)):
        for slots in range(_MOST_SLOTS, 1, -1):
            shared = _shared_bytes(head_dim, itemsize, rows, slots)
            taken = -(-shared // _SHARED_UNIT) * _SHARED_UNIT + _RESERVED_SHARED
            if blocks * taken <= max_shared_bytes + _RESERVED_SHARED:
                return AttentionVariant(rows, slots, shared, blocks)
    needed = _shared_bytes(head_dim, itemsize, 1, 2)
    raise BadValueError(
        f"shared memory of a block for head_dim {head_dim}", max_shared_bytes, f"{needed} or more"
    )


def _shared_bytes(head_dim: int, itemsize: int, row_tiles: int, slots: int) -> int:
    """sizeof(Shared) of cuda/attention_tiles.cuh."""
    rows, positions = 16 * row_tiles, kv_tile(head_dim)
    pitch, weight_pitch = head_dim * itemsize + 16, positions * itemsize + 16
    elements = slots * positions * pitch + rows * (pitch + weight_pitch)
    return elements + 4 * rows * (2 * _WARPS + 1)


def partial_row_bytes(head_dim: int) -> int:
    """Workspace of one row of a partial result: its values, maximum and sum."""
    return 4 * (head_dim + 2)


def workspace_bytes(num_q_heads: int, head_dim: int, max_context_len: int, num_blocks: int) -> int:
    """Workspace with which the work of common steps can be divided freely.

    Enough for one sequence of the largest length with one new token, and for `num_blocks` tiles of
    16 rows to be cut after 16 splits. With less, tiles with many rows or splits stay whole.
    """
    longest = num_q_heads * -(-max_context_len // SPLIT)
    return max(longest, num_blocks * 16 * 16) * partial_row_bytes(head_dim)


def max_work_items(num_tokens: int, num_seqs: int, group: int, rows: int, num_kv_heads: int,
                   num_blocks: int) -> int:  # fmt: skip
    """Most items of a step of so many tokens: for arrays that are made once."""
    return (-(-num_tokens * group // rows) + num_seqs) * num_kv_heads + num_blocks


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """What the kernels read.

    block_work: int32 [num_blocks + 1]; block b does the items block_work[b] : block_work[b + 1].
    work: int32 [num_work, 8]: sequence, KV head, first row, rows, first split, end split, first
        partial row, kind.
    merge_rows: int32 [num_merge_rows, 4]: row of out as [num_tokens * Hq, D], its first partial
        row, from one partial row to the next, and how many there are.
    num_partial_rows: rows of the workspace that are used.
    """

    block_work: NDArray[np.int32]
    work: NDArray[np.int32]
    merge_rows: NDArray[np.int32]
    num_partial_rows: int


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of work, in order of sequence, KV head, row. All int64 [num_tiles]."""

    sequence: IntArray
    kv_head: IntArray
    first_row: IntArray
    num_rows: IntArray
    first_kv_tile: IntArray
    num_kv_tiles: IntArray
    kv_tile_cost: IntArray  # of one tile of keys: 2 for the loads, 1 for 16 rows (estimate)
    first_split: IntArray
    end_split: IntArray

    @property
    def cost(self) -> IntArray:
        """Of a whole tile of work."""
        return self.num_kv_tiles * self.kv_tile_cost + _FIXED_COST


def plan_work(
    query_start: NDArray[np.int32],
    context_len: NDArray[np.int32],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rows_per_tile: int,
    num_blocks: int,
    max_partial_rows: int,
    window: int = 0,
) -> WorkPlan:
    """Divide a step among `num_blocks` blocks.

    Args:
        query_start: int32 [num_seqs + 1]. context_len: int32 [num_seqs].
        max_partial_rows: rows that the workspace has.
        window: positions that a token sees, with its own; 0 is all.
    """
    group, positions = num_q_heads // num_kv_heads, kv_tile(head_dim)
    tiles = _tile(query_start, context_len, group, num_kv_heads, rows_per_tile, positions, window)
    if not len(tiles.sequence):
        nothing = np.zeros((0, 8), np.int32)
        return WorkPlan(np.zeros(num_blocks + 1, np.int32), nothing, nothing[:, :4], 0)
    none = np.zeros(len(tiles.sequence), np.bool_)
    whole = _cut(tiles, none, positions, num_blocks)
    items = _cut(tiles, ~none, positions, num_blocks)
    if items.partial_rows.sum() > max_partial_rows:  # leave those whole that would take the most
        taken = np.bincount(items.tile, items.partial_rows, len(none))
        order = np.argsort(taken, kind="stable")
        divisible = none.copy()
        divisible[order] = np.cumsum(taken[order]) <= max_partial_rows
        items = _cut(tiles, divisible, positions, num_blocks)
    if (
        _largest_share(tiles, whole, positions) - _largest_share(tiles, items, positions)
        <= _MERGE_COST
    ):
        items = whole
    return _write_plan(tiles, items, query_start, num_q_heads, group)


def _tile(
    query_start: NDArray[np.int32],
    context_len: NDArray[np.int32],
    group: int,
    num_kv_heads: int,
    rows_per_tile: int,
    positions: int,
    window: int,
) -> _Tiles:
    num_new = (query_start[1:] - query_start[:-1]).astype(np.int64)
    tiles_of = -(-num_new * group // rows_per_tile)  # of a sequence and KV head
    sequence: IntArray = np.repeat(np.arange(len(num_new)), tiles_of * num_kv_heads)
    start = np.cumsum(tiles_of * num_kv_heads) - tiles_of * num_kv_heads
    kv_head, tile = np.divmod(np.arange(len(sequence)) - start[sequence], tiles_of[sequence])
    first_row = tile * rows_per_tile
    num_rows = np.minimum(rows_per_tile, num_new[sequence] * group - first_row)
    first_position = (context_len - num_new)[sequence]
    begin = np.zeros(len(sequence), np.int64)
    if window:
        begin = np.maximum(begin, first_position + first_row // group - window + 1)
    end = first_position + (first_row + num_rows - 1) // group + 1
    first_kv_tile = begin // positions
    return _Tiles(
        sequence=sequence,
        kv_head=kv_head,
        first_row=first_row,
        num_rows=num_rows,
        first_kv_tile=first_kv_tile,
        num_kv_tiles=-(-end // positions) - first_kv_tile,
        kv_tile_cost=2 + (num_rows + 15) // 16,
        first_split=begin // SPLIT,
        end_split=-(-end // SPLIT),
    )


@dataclass(frozen=True, slots=True)
class _Items:
    """Parts of tiles of work, in order. All int64 [num_items], but block_work [num_blocks + 1]."""

    tile: IntArray
    first_split: IntArray
    end_split: IntArray
    kind: IntArray
    partial_rows: IntArray
    block_work: IntArray


def _cut(tiles: _Tiles, divisible: NDArray[np.bool_], positions: int, num_blocks: int) -> _Items:
    """Cut the blocks' shares, each at the place where a cut may be that is nearest to its due."""
    cost = tiles.cost
    ends = np.cumsum(cost)
    due = ends[-1] * np.arange(1, num_blocks) // num_blocks
    tile = np.searchsorted(ends, due, side="right")
    before = due - (ends - cost)[tile]
    at = (tiles.first_kv_tile[tile] + before / tiles.kv_tile_cost[tile]) * positions
    nearer = np.where(2 * before < cost[tile], tiles.first_split[tile], tiles.end_split[tile])
    split = np.where(divisible[tile], np.rint(at / SPLIT).astype(np.int64), nearer)
    split = np.clip(split, tiles.first_split[tile], tiles.end_split[tile])
    is_end = split == tiles.end_split[tile]
    radix = int(tiles.end_split.max()) + 1  # an edge is tile * radix + split
    edges = np.arange(len(ends) + 1) * radix + np.append(tiles.first_split, 0)  # of tiles
    cuts = np.where(is_end, edges[tile + 1], tile * radix + split)
    within = np.unique(cuts[~is_end & (cuts != edges[tile])])
    edges = np.insert(edges[:-1], np.searchsorted(edges, within), within)
    return _between(tiles, edges, cuts, radix)


def _between(tiles: _Tiles, edges: IntArray, cuts: IntArray, radix: int) -> _Items:
    """The items that begin at `edges`; the shares begin at `cuts`, which are edges too."""
    tile, first_split = np.divmod(edges, radix)
    is_first = first_split == tiles.first_split[tile]
    is_last = np.append(is_first, True)[1:]
    end_split = np.where(is_last, tiles.end_split[tile], np.append(first_split, 0)[1:])
    kind = np.where(is_first, np.where(is_last, WHOLE, HEAD), REST)
    results = np.where(kind == REST, end_split - first_split, kind)  # HEAD is 1: one result
    return _Items(
        tile=tile,
        first_split=first_split,
        end_split=end_split,
        kind=kind,
        partial_rows=results * tiles.num_rows[tile],
        block_work=np.concatenate([[0], np.searchsorted(edges, cuts), [len(edges)]]),
    )


def _largest_share(tiles: _Tiles, items: _Items, positions: int) -> int:
    """Cost of the block that has the most to do."""
    of, per_split = items.tile, SPLIT // positions
    behind = (tiles.first_kv_tile + tiles.num_kv_tiles)[of]
    first = np.maximum(items.first_split * per_split, tiles.first_kv_tile[of])
    num_kv_tiles = np.minimum(items.end_split * per_split, behind) - first
    ends = np.cumsum(num_kv_tiles * tiles.kv_tile_cost[of] + _FIXED_COST)
    return int(np.diff(np.append(0, ends)[items.block_work]).max())


def _write_plan(
    tiles: _Tiles, items: _Items, query_start: NDArray[np.int32], num_q_heads: int, group: int
) -> WorkPlan:
    """The items as the kernel reads them, and the rows that are merged afterwards."""
    tile = items.tile
    partial_row = np.cumsum(items.partial_rows) - items.partial_rows
    columns = (
        tiles.sequence[tile], tiles.kv_head[tile], tiles.first_row[tile], tiles.num_rows[tile],
        items.first_split, items.end_split, partial_row, items.kind,
    )  # fmt: skip

    divided = np.flatnonzero(items.kind == HEAD)
    of = tile[divided]
    parts = 1 + tiles.end_split[of] - items.end_split[divided]
    rows = tiles.num_rows[of]
    entry = np.repeat(np.arange(len(of)), rows)  # of each row that is merged
    row = np.arange(len(entry)) - (np.cumsum(rows) - rows)[entry]
    token, head = np.divmod(tiles.first_row[of][entry] + row, group)
    out_row = (query_start[tiles.sequence[of]][entry] + token) * num_q_heads
    out_row += tiles.kv_head[of][entry] * group + head
    merged = (out_row, partial_row[divided][entry] + row, rows[entry], parts[entry])
    return WorkPlan(
        block_work=items.block_work.astype(np.int32),
        work=np.stack(columns, axis=-1).astype(np.int32),
        merge_rows=np.stack(merged, axis=-1).astype(np.int32),
        num_partial_rows=int(items.partial_rows.sum()),
    )
