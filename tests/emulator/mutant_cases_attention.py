"""Reference cases for paged attention, sharp enough to tell mutants from the original.

Results are those of a loop over rows in float64. What is not to be read is NaN, outputs and the
workspace begin as NaN, and work that is divided must give the bits of work that is not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.emulator.module import EmulatedFunction, EmulatedModule
from cupaged.ops.attention_plan import WorkPlan, kv_tile, plan_work
from tests.emulator.mutant_cases import F32, I32, MANY_STEPS, Variant
from tests.ops.attention_cases import Sequences
from tests.ops.kernel_arrays import NUMPY, normal
from tests.ops.reference_attention import attention

Array = NDArray[Any]
later = functools.partial(Variant, max_steps=MANY_STEPS, global_races=True)
Parts = Sequence[tuple[int, int, int]]  # sequence, first new token, behind the last one
NO_WINDOW = 2**31 - 1
# Of a result and of the sum of its terms' absolute values: what rounding may come to.
TOLERANCE = {"float32": (2e-6, 3e-6), "float16": (8e-4, 4e-4), "bfloat16": (5e-3, 2e-3)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a variant is compiled with, and its heads."""

    dtype: str
    head_dim: int
    block_size: int
    row_tiles: int
    slots: int
    heads: tuple[int, int]
    flags: bool = False  # WINDOW, SOFTCAP and SINKS

    @property
    def defines(self) -> dict[str, Any]:
        names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
        sizes = {
            "DTYPE": names[self.dtype], "HEAD_DIM": self.head_dim, "BLOCK_SIZE": self.block_size,
            "ROW_TILES": self.row_tiles, "SLOTS": self.slots,
        }  # fmt: skip
        return sizes | dict.fromkeys(("WINDOW", "SOFTCAP", "SINKS"), 1) if self.flags else sizes

    @property
    def shared_bytes(self) -> int:
        """sizeof(Shared) of attention_tiles.cuh."""
        itemsize = 4 if self.dtype == "float32" else 2
        rows, positions = 16 * self.row_tiles, kv_tile(self.head_dim)
        pitch, weight_pitch = self.head_dim * itemsize + 16, positions * itemsize + 16
        return self.slots * positions * pitch + rows * (pitch + weight_pitch + 4 * 9)


@dataclass(frozen=True, slots=True)
class Step:
    """One step over sequences of these lengths.

    first_row: tiles of work before this row are left out.
    tiny: every result is a negative number, too small for its type, and becomes 0.
    """

    sizes: Sizes
    lengths: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...]
    window: int = NO_WINDOW
    first_row: int = 0
    tiny: bool = False

    @property
    def first_token(self) -> int:
        """The first new token of a sequence that is computed."""
        num_q, num_kv = self.sizes.heads
        return self.first_row * num_kv // num_q


SOFTCAP = 3.0
SMALLEST = np.finfo(F32).smallest_subnormal
FIRST_ROW = 2  # place in an item of work


def _first_seen(step: Step, sequence: int) -> int:
    """The first position of a sequence that one of its computed tokens sees."""
    start = min(start for i, start, _ in step.parts if i == sequence)
    return max(0, start + step.first_token - step.window + 1)


@functools.cache
def _sequences(step: Step) -> Sequences:
    """What lies before the window of all new tokens is NaN."""
    sizes = step.sizes
    sequences = Sequences(
        step.lengths, sizes.heads, sizes.head_dim, sizes.dtype, block_size=sizes.block_size, seed=5
    )
    sequences.scale = 0.5
    if sizes.flags:
        sequences.sinks = normal(6, (sizes.heads[0],), sizes.dtype, 2.0)
    for i in range(len(step.lengths)):
        first = _first_seen(step, i)
        sequences.k[i][:first] = sequences.v[i][:first] = np.nan
        if step.tiny:  # equal weights
            sequences.k[i][:] = sequences.v[i][:] = 0
            sequences.v[i][first] = -SMALLEST
    return sequences


@functools.cache
def _expected(step: Step) -> tuple[Array, Array]:
    """Of all parts, one after another: [num_tokens, Hq, D], and the bound."""
    s, flags = _sequences(step), step.sizes.flags
    window = step.window if flags and step.window != NO_WINDOW else 0
    softcap = SOFTCAP if flags else 0.0
    results = [
        attention(s.q[i][start + step.first_token : stop], s.k[i][:stop], s.v[i][:stop], s.scale,
                  window, softcap, s.sinks)
        for i, start, stop in step.parts
    ]  # fmt: skip
    out, bound = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
    return out, bound


@functools.cache
def _inputs(step: Step) -> tuple[Array, ...]:
    """qkv, the caches, the block table, query_start, context_len.

    Blocks that nobody sees are nowhere.
    """
    sequences, (num_q, num_kv) = _sequences(step), step.sizes.heads
    known = [max((stop for i, _, stop in step.parts if i == s), default=0)
             for s in range(len(step.lengths))]  # fmt: skip
    new = np.concatenate([sequences.q[i][start:stop] for i, start, stop in step.parts])
    qkv = np.full((len(new), num_q + 2 * num_kv, step.sizes.head_dim), np.nan, new.dtype)
    qkv[:, :num_q] = new
    batch = sequences.batch(step.parts)
    table = batch.groups[0].block_table
    for row, (i, _, _) in zip(table, step.parts, strict=True):
        row[: _first_seen(step, i) // step.sizes.block_size] = -1
    caches = sequences.caches(known)
    return qkv, *caches, table, batch.query_start, batch.context_len


def _plan(step: Step, num_blocks: int) -> WorkPlan:
    *_, query_start, context_len = _inputs(step)
    num_q, num_kv = step.sizes.heads
    plan = plan_work(
        query_start, context_len, num_q_heads=num_q, num_kv_heads=num_kv,
        head_dim=step.sizes.head_dim, rows_per_tile=16 * step.sizes.row_tiles,
        num_blocks=num_blocks, max_partial_rows=1 << 20,
        window=0 if step.window == NO_WINDOW else step.window,
    )  # fmt: skip
    computed = plan.work[:, FIRST_ROW] >= step.first_row
    ends = np.append(0, np.cumsum(computed)).astype(I32)
    return replace(plan, work=plan.work[computed], block_work=ends[plan.block_work])


def _attend(module: EmulatedModule, step: Step, num_blocks: int) -> tuple[Array, bool]:
    """The output, and whether splits of it were merged."""
    sizes, sequences, plan = step.sizes, _sequences(step), _plan(step, num_blocks)
    inputs, (num_q, num_kv) = _inputs(step), sizes.heads
    out = np.full((len(inputs[0]), num_q, sizes.head_dim), np.nan, NUMPY[sizes.dtype])
    rows = max(1, plan.num_partial_rows)
    workspace = [np.full((rows, sizes.head_dim), np.nan, F32), np.full((rows, 2), np.nan, F32)]
    sinks = [] if sequences.sinks is None else [sequences.sinks]
    limits = [I32(step.window), F32(SOFTCAP)] if sizes.flags else []
    numbers = [I32(num_q), I32(num_kv), I32(inputs[3].shape[1]), *limits, F32(sequences.scale)]
    kernel: EmulatedFunction = module.get_function("paged_attention")
    kernel.max_dynamic_shared_size_bytes = max(48 * 1024, sizes.shared_bytes)
    args = [out, *workspace, *inputs, plan.block_work, plan.work, *sinks, *numbers]
    kernel((num_blocks,), (128,), args, shared_mem=sizes.shared_bytes)
    if len(plan.merge_rows):
        count = np.array([len(plan.merge_rows)], I32)
        args = [out, *workspace, count, plan.merge_rows, *sinks, I32(num_q)]
        module.get_function("merge_attention_splits")((2,), (128,), args)
    return out, len(plan.merge_rows) > 0


def check_step(module: EmulatedModule, step: Step, divided: int = 0) -> None:
    """By one block; and the same bits by `divided` blocks, which leave partial results."""
    out, merged = _attend(module, step, 1)
    assert not merged
    assert np.isnan(out[: step.first_token]).all()
    out = out[step.first_token :]
    expected, bound = _expected(step)
    of_result, of_terms = TOLERANCE[step.sizes.dtype]
    allowed = of_result * np.abs(expected) + of_terms * bound + SMALLEST
    error = np.abs(out.astype(np.float64) - expected)
    assert (error <= allowed).all(), (error / allowed).max()
    assert not step.tiny or not (out.any() or np.signbit(out).any())
    if divided:
        again, merged = _attend(module, step, divided)
        assert merged
        np.testing.assert_array_equal(again.astype(F32), out.astype(F32))


ALL_FLAGS = Sizes("float16", 48, 8, 2, 3, (6, 2), flags=True)
WIDE = Sizes("bfloat16", 144, 128, 1, 2, (2, 1))
NARROW = Sizes("float32", 16, 8, 1, 2, (2, 2))
EVEN = Sizes("float16", 32, 16, 1, 4, (2, 1))
EDGES = Sizes("float32", 16, 8, 2, 2, (2, 2), flags=True)
SINGLE = Sizes("float32", 64, 16, 2, 2, (3, 1))


def check_flags(module: EmulatedModule) -> None:
    """float16 with a window, a softcap and sinks: decode, chunks, several tiles of rows."""
    check_step(module, Step(ALL_FLAGS, (23, 70), ((0, 0, 23), (1, 69, 70), (1, 60, 65)), 20))
    check_step(module, Step(ALL_FLAGS, (300,), ((0, 299, 300),), 200))
    check_step(module, Step(ALL_FLAGS, (600, 40), ((0, 599, 600), (1, 35, 40))), divided=5)


def check_wide(module: EmulatedModule) -> None:
    """bfloat16 with heads so wide that tiles have 32 positions."""
    check_step(module, Step(WIDE, (10, 70), ((0, 0, 10), (1, 69, 70))))
    check_step(module, Step(WIDE, (530,), ((0, 529, 530),)), divided=3)


def check_single(module: EmulatedModule) -> None:
    """float32, where the reference is near enough to see a single key."""
    check_step(module, Step(SINGLE, (17, 70), ((0, 0, 17), (1, 69, 70))))
    check_step(module, Step(SINGLE, (530,), ((0, 520, 530),)), divided=3)
    check_step(module, Step(SINGLE, (6,), ((0, 5, 6),), tiny=True))


def check_narrow(module: EmulatedModule) -> None:
    """Heads with fewer tiles of dimensions than a block has warps."""
    check_step(module, Step(NARROW, (9, 70), ((0, 0, 9), (1, 69, 70))))


def check_even(module: EmulatedModule) -> None:
    """float16 where every warp has as many tiles of dimensions as the others."""
    check_step(module, Step(EVEN, (9, 70), ((0, 0, 9), (1, 69, 70))))


def check_edges(module: EmulatedModule) -> None:
    """float32 with all flags, where a row is a token: rows at edges of tiles.

    In each tile of 16 rows in turn, the last row alone has the first key of a tile of keys, or the
    first row alone lacks its last key; then the same of the window's begin.
    """
    check_step(module, Step(EDGES, (90,), ((0, 40, 90),), 30, first_row=32))
    for last_row, first_row, window in ((64, 62, NO_WINDOW), (100, 162, 100)):
        starts = (last_row - 15, last_row - 31, first_row, first_row - 16)
        stops = (last_row + 1, last_row + 1, first_row + 4, first_row + 4)
        parts = tuple((i, *part) for i, part in enumerate(zip(starts, stops, strict=True)))
        check_step(module, Step(EDGES, stops, parts, window))


ALL_FLAGS_ON = later("paged_attention.cu", check_flags, ALL_FLAGS.defines)
NARROW_ONLY = later("paged_attention.cu", check_narrow, NARROW.defines)
EVEN_ONLY = later("paged_attention.cu", check_even, EVEN.defines)
EDGES_ONLY = later("paged_attention.cu", check_edges, EDGES.defines)
WIDE_ONLY = later("paged_attention.cu", check_wide, WIDE.defines)
F32_ONLY = later("paged_attention.cu", check_single, SINGLE.defines)

ATTENTION: dict[str, list[Variant]] = {
    "attention_products.cuh": [
        F32_ONLY,
        ALL_FLAGS_ON,
        WIDE_ONLY,
        NARROW_ONLY,
        EVEN_ONLY,
        EDGES_ONLY,
    ],
    "attention_rows.cuh": [F32_ONLY, ALL_FLAGS_ON, WIDE_ONLY, NARROW_ONLY, EDGES_ONLY],
    "attention_state.cuh": [F32_ONLY, ALL_FLAGS_ON, EDGES_ONLY],
    "attention_tiles.cuh": [F32_ONLY, ALL_FLAGS_ON, WIDE_ONLY, EDGES_ONLY],
    "paged_attention.cu": [F32_ONLY, ALL_FLAGS_ON, WIDE_ONLY, EDGES_ONLY],
}
