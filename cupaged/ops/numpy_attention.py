"""Paged attention with NumPy: every value is read through the block table.

The work is cut into items: a tile of one sequence's queries against a tile of its keys, whose edges
are multiples of `KV_TILE` positions. All items of a step go through the same few array operations:
their blocks are gathered, two batched products and a softmax make partial results, and these are
merged per query tile by their maxima and sums (online softmax, Milakov and Gimelshein, 2018; splits
as in FlashDecoding). An item's arithmetic does not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch
from cupaged.ops import KVCache

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

KV_TILE = 64  # positions of a tile of keys; a larger block is a tile of its own
QUERY_TILE = 32  # tokens of a tile of queries, for sequences with more than one new token
SCRATCH_BYTES = 64 << 20  # items are processed in groups that fit
MASKED = np.float32(-1e30)  # finite, so that the difference of two masked scores is a number


class Scratch:
    """Named float32 buffers that are kept and only grow."""

    def __init__(self) -> None:
        self._buffers: dict[str, FloatArray] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        """An uninitialised array of that shape, valid until the name is taken again."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.float32)
        return buffer[:size].reshape(shape)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query tiles of one width, and the items that compute them, in order of their tile.

    tokens: [num_tiles, width] flat tokens; past a sequence's last token it is repeated.
    valid: [num_tiles, width], False for such repeats.
    item_tile: [num_items]. item_blocks: [num_items, blocks of a KV tile].
    masked: bool [num_items, 1, width, 1, KV tile], True where the key comes after the query.
    zeroed: ([n], [n]) item and position of keys after all queries of the tile: their values may be
        anything, NaN included.
    """

    tokens: IntArray
    valid: NDArray[np.bool_]
    item_tile: IntArray
    item_blocks: IntArray
    masked: NDArray[np.bool_]
    zeroed: tuple[IntArray, IntArray]


class AttentionPlan:
    """Where the layers of one KV group write and read in one step.

    written: the flat tokens that are written (all but padding); write_blocks, write_offsets: where.
    tiles: one entry for sequences with one new token, one for the others; either may be missing.
    """

    def __init__(self, batch: Batch, group: int, block_size: int) -> None:
        tables = batch.groups[group]
        self.written: IntArray | slice = slice(None)
        if (tables.slot_mapping < 0).any():
            self.written = np.flatnonzero(tables.slot_mapping >= 0)
        slots = tables.slot_mapping[self.written]
        self.write_blocks, self.write_offsets = np.divmod(slots, block_size)
        num_new = np.diff(batch.query_start)
        kv_tile = max(KV_TILE, block_size)
        assert kv_tile % block_size == 0, "a tile of keys is whole blocks"
        self.tiles = [
            _cut(batch, tables.block_table, sequences, width, kv_tile, block_size)
            for sequences, width in (
                (np.flatnonzero(num_new == 1), 1),
                (np.flatnonzero(num_new > 1), QUERY_TILE),
            )
            if len(sequences)
        ]


def _cut(
    batch: Batch,
    block_table: NDArray[np.int32],
    sequences: IntArray,
    width: int,
    kv_tile: int,
    block_size: int,
) -> Tiles:
    """Cut the new tokens of the sequences into query tiles and list the items of each."""
    num_new = np.diff(batch.query_start)[sequences].astype(np.int64)
    tile_sequence, index = _repeat_and_count(sequences, -(-num_new // width))
    last = np.repeat(num_new - 1, -(-num_new // width))
    offset = index[:, None] * width + np.arange(width)  # of each token in its sequence's new ones
    valid = offset <= last[:, None]
    tokens = batch.query_start[tile_sequence][:, None] + np.minimum(offset, last[:, None])
    positions = batch.positions[tokens]
    end = positions[:, -1]  # the last query position of each tile
    item_tile, item_index = _repeat_and_count(np.arange(len(tokens)), end // kv_tile + 1)
    keys = item_index[:, None] * kv_tile + np.arange(kv_tile)
    columns = np.minimum(keys[:, ::block_size] // block_size, block_table.shape[1] - 1)
    blocks = block_table[tile_sequence[item_tile][:, None], columns]
    masked = keys[:, None, :] > positions[item_tile][:, :, None]
    zeroed = np.nonzero(keys > end[item_tile][:, None])
    return Tiles(
        tokens=tokens,
        valid=valid,
        item_tile=item_tile,
        item_blocks=np.maximum(blocks, 0).astype(np.int64),
        masked=masked[:, None, :, None, :],
        zeroed=(zeroed[0], zeroed[1]),
    )


def _repeat_and_count(values: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """[a, b], [2, 3] -> [a, a, b, b, b], [0, 1, 0, 1, 2]."""
    repeated = np.repeat(values, counts)
    return repeated, np.arange(len(repeated)) - np.repeat(np.cumsum(counts) - counts, counts)


def attend(
    plan: AttentionPlan,
    out: FloatArray,
    qkv: FloatArray,
    cache: KVCache,
    scale: float,
    scratch: Scratch,
) -> None:
    """Causal attention of all tokens. out: [T, Hq D]; qkv: [T, (Hq + 2 Hkv) D]."""
    spec = cache.spec
    num_queries = out.shape[1] // spec.v_dim
    per_kv_head = num_queries // spec.num_kv_heads
    q = qkv[:, : num_queries * spec.k_dim].reshape(
        len(qkv), spec.num_kv_heads, per_kv_head, spec.k_dim
    )
    for tiles in plan.tiles:
        merged = _Merged(tiles, q, cache, scale, scratch)
        for first in range(0, len(tiles.item_tile), merged.items_at_once):
            merged.add(first, min(first + merged.items_at_once, len(tiles.item_tile)))
        merged.write(out)


class _Merged:
    """The state of every query tile: running maximum, sum of weights, weighted sum of values.

    Rows are (token of the tile, query head of the KV head): [num_tiles, Hkv, rows(, D)].
    """

    def __init__(
        self, tiles: Tiles, q: FloatArray, cache: KVCache, scale: float, scratch: Scratch
    ) -> None:
        num_tiles, width = tiles.tokens.shape
        _, num_kv_heads, per_kv_head, k_dim = q.shape
        spec = cache.spec
        self._tiles, self._cache, self._scratch = tiles, cache, scratch
        self._width, self._kv_heads = width, num_kv_heads
        self._rows = rows = width * per_kv_head
        self._kv_tile = kv_tile = tiles.masked.shape[-1]
        shape = (num_tiles, num_kv_heads, width, per_kv_head, k_dim)
        queries = scratch.take("queries", shape)
        np.multiply(q[tiles.tokens].transpose(0, 2, 1, 3, 4), np.float32(scale), out=queries)
        self._queries = queries.reshape(num_tiles, num_kv_heads, rows, k_dim)
        state = (num_tiles, num_kv_heads, rows)
        self._maximum = scratch.take("maximum", state)
        self._maximum[...] = MASKED
        self._total = scratch.take("total", state)
        self._total[...] = 0.0
        self._values = scratch.take("values", (*state, spec.v_dim))
        self._values[...] = 0.0
        per_row = k_dim + kv_tile + spec.v_dim
        floats = num_kv_heads * (kv_tile * (k_dim + spec.v_dim) + rows * per_row)
        self.items_at_once = max(1, SCRATCH_BYTES // (4 * floats))

    def add(self, first: int, stop: int) -> None:
        """Compute items [first, stop) and merge them into their tiles."""
        tile = self._tiles.item_tile[first:stop]
        heads = (stop - first, self._kv_heads)
        k = self._gather("k", self._cache.k, first, stop)
        scores = self._scratch.take("scores", (*heads, self._rows, self._kv_tile))
        with np.errstate(invalid="ignore", over="ignore"):  # unwritten slots hold anything
            np.matmul(self._queries[tile], k.swapaxes(-1, -2), out=scores)
        by_token = scores.reshape(*heads, self._width, -1, self._kv_tile)
        np.copyto(by_token, MASKED, where=self._tiles.masked[first:stop])
        maximum = scores.max(axis=-1)
        np.subtract(scores, maximum[..., None], out=scores)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1)
        v = self._gather("v", self._cache.v, first, stop)
        item, position = self._tiles.zeroed
        low, high = np.searchsorted(item, (first, stop))
        v[item[low:high] - first, :, position[low:high]] = 0.0
        values = self._scratch.take("item_values", (*heads, self._rows, v.shape[-1]))
        np.matmul(scores, v, out=values)
        self._merge(tile, maximum, total, values)

    def _gather(self, name: str, pages: FloatArray, first: int, stop: int) -> FloatArray:
        """Key or value tiles of the items, [items, Hkv, KV tile, D], copied block by block."""
        blocks = self._tiles.item_blocks[first:stop]
        num_blocks, num_kv_heads, block_size, dim = pages.shape
        rows = blocks[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[:, None]
        out = self._scratch.take(name, (*rows.shape, block_size * dim))
        flat = pages.reshape(num_blocks * num_kv_heads, block_size * dim)
        np.take(flat, rows, axis=0, out=out, mode="clip")
        return out.reshape(stop - first, num_kv_heads, self._kv_tile, dim)

    def _merge(
        self, tile: IntArray, maximum: FloatArray, total: FloatArray, values: FloatArray
    ) -> None:
        """Items come in order of their tile, so that each tile's items are one segment."""
        starts = np.flatnonzero(np.diff(tile, prepend=-1))
        touched = slice(int(tile[0]), int(tile[-1]) + 1)
        before = self._maximum[touched]
        after = np.maximum(before, np.maximum.reduceat(maximum, starts, axis=0))
        kept = np.exp(before - after)
        weight = np.exp(maximum - after[tile - touched.start])
        np.multiply(values, weight[..., None], out=values)
        self._maximum[touched] = after
        self._total[touched] *= kept
        self._total[touched] += np.add.reduceat(total * weight, starts, axis=0)
        self._values[touched] *= kept[..., None]
        self._values[touched] += np.add.reduceat(values, starts, axis=0)

    def write(self, out: FloatArray) -> None:
        """Divide by the sums and put each token's heads into its row of `out`."""
        np.divide(self._values, self._total[..., None], out=self._values)
        num_tiles, width = self._tiles.tokens.shape
        shape = (num_tiles, self._kv_heads, width, -1, self._values.shape[-1])
        by_token = self._values.reshape(shape).transpose(0, 2, 1, 3, 4)
        valid = self._tiles.valid
        heads = out.reshape(len(out), *by_token.shape[2:])
        heads[self._tiles.tokens[valid]] = by_token[valid]
