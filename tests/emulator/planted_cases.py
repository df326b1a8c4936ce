"""The planted bugs: which kernel, how it is launched, and what the emulator must say of it.

A table and nothing else; test_planted_bugs.py runs it. It says what is known beforehand: the
class, a fragment of the text, and argument, element, block, thread where only one can be.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.emulator.errors import (
    AsyncCopyError,
    DataRaceError,
    DeadlockError,
    DeviceAssertError,
    DivergentBarrierError,
    EmulatorError,
    EndlessLoopError,
    MisalignedError,
    OutOfBoundsError,
    ReadOnlyError,
    StackOverflowError,
    UndefinedBehaviourError,
    UninitializedReadError,
    WarpMaskError,
)
from tests.emulator.program_cases import Planted, f32, i32

F16, F32, F64, I8, I32, I64, U32 = (
    np.float16,
    np.float32,
    np.float64,
    np.int8,
    np.int32,
    np.int64,
    np.uint32,
)
ENTRY = np.dtype([("weights", F32, (5,)), ("id", I32)])


def zeros(*shape: int, dtype: Any = F32) -> Any:
    return np.zeros(shape, dtype)


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def case(
    file: str, kernel: str, error: type[EmulatorError], *args: Any, **expected: Any
) -> Planted:
    """A case from example arguments, of which each launch gets its own copies."""

    def fresh() -> list[Any]:
        return [
            read_only(a.copy()) if isinstance(a, np.ndarray) and not a.flags.writeable else a.copy()
            for a in args
        ]

    return Planted(file, kernel, error, fresh, **expected)


def bounds(kernel: str, *args: Any, **expected: Any) -> Planted:
    return case("bounds.cu", kernel, OutOfBoundsError, *args, **expected)


def shared(kernel: str, error: type[EmulatorError], *args: Any, **expected: Any) -> Planted:
    return case("shared_memory.cu", kernel, error, *args, **expected)


def race(kernel: str, size: tuple[int, ...], *args: Any, **expected: Any) -> Planted:
    return case("races.cu", kernel, DataRaceError, *args, size=size, **expected)


def barrier(kernel: str, error: type[EmulatorError], *args: Any, **expected: Any) -> Planted:
    return case("barriers.cu", kernel, error, *args, **expected)


def warp(kernel: str, *args: Any, **expected: Any) -> Planted:
    return case("warps.cu", kernel, WarpMaskError, *args, **expected)


def copies(kernel: str, error: type[EmulatorError], *args: Any, **expected: Any) -> Planted:
    return case("async_copies.cu", kernel, error, *args, **expected)


# fmt: off
GLOBAL_BOUNDS = [
    bounds("scale_past_end", zeros(40), f32(41), F32(2), I32(40), grid=(2,), argument="out",
           element=40, block=(1, 0, 0), thread=(8, 0, 0)),
    bounds("mean_before_start", zeros(40), f32(40), I32(40), grid=(2,), argument="in", element=-1,
           block=(0, 0, 0), thread=(0, 0, 0)),
    bounds("mean_past_end", zeros(40), f32(40), I32(40), grid=(2,), argument="in", element=40,
           block=(1, 0, 0), thread=(7, 0, 0)),
    bounds("rotate_before_start", zeros(32, dtype=I32), i32(*range(32)), I32(32), argument="out",
           element=-1, thread=(0, 0, 0)),
    bounds("axpy_short_y", f32(32), f32(31), F32(2), I32(32), argument="y", element=31,
           thread=(31, 0, 0)),
    bounds("embed_negative_id", zeros(3, 8), f32(4, 8), i32(0, -1, 3), I32(8), grid=(3,),
           size=(1,), argument="table", element=-8, block=(1, 0, 0)),
    bounds("copy_float4_tail", zeros(10), f32(10), I32(10), argument="in", thread=(2, 0, 0)),
    bounds("double_half2_tail", zeros(7, dtype=F16), I32(7), argument="values", thread=(3, 0, 0)),
    bounds("dequantize_uint4_tail", zeros(40), zeros(40, dtype=I8), I32(40), argument="in",
           thread=(2, 0, 0)),
    bounds("sum_bytes_inclusive", zeros(1, dtype=I32), zeros(37, dtype=I8), I32(37),
           argument="in", element=37, thread=(5, 0, 0)),
    bounds("histogram_bin_past_end", zeros(8, dtype=I32), i32(1, 2, 8, 3), I32(4),
           argument="counts", element=8, thread=(2, 0, 0)),
    bounds("shift_entries", zeros(5, dtype=ENTRY), zeros(5, dtype=ENTRY), I32(5), argument="in",
           element=5, thread=(4, 0, 0)),
    bounds("copy_rows_memcpy", zeros(5, 8), zeros(4, 8), I32(4), I32(8), I32(64), argument="in",
           thread=(3, 0, 0)),
    bounds("paged_sum_stale_block", zeros(4), f32(3, 4, 4), i32(2, 0, 99), I32(8), I32(4), I32(4),
           size=(1,), argument="cache", element=99 * 16, thread=(0, 0, 0)),
    bounds("wild_offset", zeros(32), f32(32), I64(1 << 40), size=(1,), argument=None,
           thread=(0, 0, 0)),
    bounds("swapped_strides", zeros(3, 2, 4), I32(3), I32(2), I32(4), grid=(1, 1, 3), size=(4, 2),
           argument="out", block=(0, 0, 1)),
    bounds("ldg_past_end", zeros(32), f32(32), I32(32), argument="in", element=32,
           thread=(31, 0, 0)),
    bounds("null_bias", zeros(32), f32(32), I32(0), message="null"),
    bounds("atomic_half2_tail", zeros(7, dtype=F16), I32(7), argument="sums", thread=(3, 0, 0)),
]

WRITES_AND_ALIGNMENT = [
    case("bounds.cu", "write_through_const", ReadOnlyError, zeros(32), F32(1), argument="x"),
    case("bounds.cu", "atomic_through_const", ReadOnlyError, zeros(4, dtype=I32), i32(2),
         size=(1,), argument="counts", element=2),
    case("bounds.cu", "fill", ReadOnlyError, read_only(zeros(32)), F32(1), size=(1,),
         argument="out", element=0),
    case("bounds.cu", "load_float4_shifted", MisalignedError, zeros(4), f32(20), size=(4,),
         argument="in"),
    case("bounds.cu", "row_sum_float4", MisalignedError, zeros(2), f32(2, 30), I32(30), grid=(2,),
         size=(1,), argument="in", element=30, block=(1, 0, 0)),
    case("bounds.cu", "load_half2_odd", MisalignedError, zeros(1), zeros(8, dtype=F16), I32(3),
         size=(1,), argument="in", element=3),
    case("bounds.cu", "store_longlong_odd", MisalignedError, zeros(4, dtype=I32), size=(1,),
         argument="out", element=1),
    case("bounds.cu", "atomic_longlong_odd", MisalignedError, zeros(4, dtype=I32), size=(1,),
         argument="header", element=1),
    shared("carved_misaligned", MisalignedError, zeros(3, dtype=F64), I32(3), size=(3,),
           shared_mem=36),
]

SHARED_MEMORY = [
    shared("tile_past_end", OutOfBoundsError, zeros(64), f32(64), size=(64,), thread=(63, 0, 0)),
    shared("tile_before_start", OutOfBoundsError, zeros(64), f32(64), size=(64,),
           thread=(0, 0, 0)),
    shared("tile_through_pointer", OutOfBoundsError, zeros(64), f32(64), size=(64,),
           thread=(63, 0, 0)),
    shared("dynamic_past_end", OutOfBoundsError, zeros(32), f32(32), I32(32), shared_mem=128,
           thread=(0, 0, 0)),
    shared("carved_past_end", OutOfBoundsError, zeros(8, dtype=F64), I32(8), size=(8,),
           shared_mem=64 + 8),
    shared("transpose_past_row", OutOfBoundsError, zeros(16, 16), f32(16, 16), size=(16, 16)),
    shared("shared_bin_past_end", OutOfBoundsError, zeros(32, dtype=I32), i32(*range(1, 33)),
           thread=(31, 0, 0)),
    shared("shared_float4_past_end", OutOfBoundsError, zeros(8), f32(30), thread=(7, 0, 0)),
    shared("local_past_end", OutOfBoundsError, zeros(4), f32(6), I32(6), size=(1,)),
    shared("local_before_start", OutOfBoundsError, zeros(3), f32(6), I32(6), size=(1,)),
    shared("local_through_pointer", OutOfBoundsError, zeros(1), f32(1), size=(1,),
           message="local array"),
    shared("bins_not_cleared", UninitializedReadError, zeros(32, dtype=I32), i32(*range(32)),
           message="bins"),
    shared("maximum_not_set", UninitializedReadError, zeros(1), f32(4), I32(4), message="best",
           thread=(0, 0, 0)),
    shared("dynamic_half_filled", UninitializedReadError, zeros(16), f32(16), I32(32), size=(16,),
           shared_mem=128),
    shared("matmul_tail_not_zeroed", UninitializedReadError, zeros(8, 8), f32(8, 5), f32(5, 8),
           I32(8), I32(8), I32(5), size=(8, 8), message="tile_a"),
    shared("filled_by_first_block", UninitializedReadError, zeros(64), f32(32), grid=(2,),
           message="table", block=(1, 0, 0)),
    shared("warp_sums_not_written", UninitializedReadError, zeros(1), f32(96), size=(96,),
           message="warp_sums"),
]

RACES = [
    race("sum_missing_step_barrier", (256,), zeros(1), f32(256), message="cells"),
    race("warps_share_one_cell", (128,), zeros(1), f32(128), message="result"),
    race("matmul_missing_second_barrier", (16, 16), zeros(16, 16), f32(16, 32), f32(32, 16),
         I32(32), message="tile_"),
    race("warp_sum_without_syncwarp", (32,), zeros(1), f32(64), message="cells"),
    race("half_warp_sync_too_small", (32,), zeros(32, dtype=I32), i32(*range(32)),
         message="cells"),
    race("half_neighbours", (64,), zeros(64, dtype=F16), zeros(64, dtype=F16), message="cells"),
    race("scan_missing_barrier", (128,), zeros(128, dtype=I32), i32(*range(128)),
         message="cells"),
    race("shared_histogram_plain", (64,), zeros(16, dtype=I32), i32(*range(64)), message="bins"),
    race("atomic_total_read_early", (64,), zeros(1, dtype=I32), i32(*range(64)), message="total"),
    race("broadcast_slot_reused", (64,), zeros(64), f32(64), message="slot"),
    race("carved_overlap", (32,), zeros(32), f32(32), I32(32), shared_mem=256),
    race("double_buffer_same_side", (64,), zeros(64, dtype=I32), i32(*range(64)), I32(4),
         message="buffer"),
    race("vector_over_scalars", (64,), zeros(64), f32(64), message="packs"),
    race("reset_among_atomics", (64,), zeros(64, dtype=I32), i32(*range(64)), message="count"),
    race("bytes_of_next_warp", (64,), zeros(64, dtype=I8), zeros(64, dtype=I8), message="row"),
]

# The reader runs before the writer here, so that the cell counts as not yet written.
READER_FIRST = [
    case("races.cu", "sum_missing_first_barrier", UninitializedReadError, zeros(1), f32(128),
         size=(128,), message="which no thread of the block has written"),
    case("races.cu", "reverse_missing_barrier", UninitializedReadError, zeros(64, dtype=I32),
         i32(*range(64)), size=(64,), message="which no thread of the block has written"),
    case("races.cu", "transpose_missing_barrier", UninitializedReadError, zeros(16, 16),
         f32(16, 16), size=(16, 16), message="which no thread of the block has written"),
]

# With global_races=True.
GLOBAL_RACES = [
    race("blocks_share_one_cell", (32,), zeros(1), f32(4), grid=(4,), argument="out", element=0),
    race("global_histogram_plain", (32,), zeros(8, dtype=I32), i32(*[3] * 64), grid=(2,),
         argument="counts", element=3),
    race("smooth_in_place", (32,), f32(96), I32(96), grid=(3,), argument="x"),
    race("last_block_plain_counter", (1,), zeros(1, dtype=I32), zeros(4, dtype=I32),
         zeros(1, dtype=I32), grid=(4,), argument="counter", element=0),
    race("exchange_in_global", (64,), zeros(128), I32(64), argument="x"),
]

BARRIERS = [
    barrier("barrier_in_if", DivergentBarrierError, zeros(64), f32(64), I32(40), size=(64,)),
    barrier("barrier_in_both_branches", DivergentBarrierError, zeros(64, dtype=I32), size=(64,)),
    barrier("barrier_in_ragged_loop", DivergentBarrierError, zeros(64), f32(100), I32(100),
            size=(64,)),
    barrier("break_before_barrier", DivergentBarrierError, zeros(32, dtype=I32), I32(3)),
    barrier("different_barrier_kinds", DivergentBarrierError, zeros(32, dtype=I32),
            i32(*[0, 1] * 16)),
    barrier("syncthreads_against_syncwarp", DeadlockError, zeros(32, dtype=I32)),
    barrier("syncthreads_against_shuffle", DeadlockError, zeros(64, dtype=I32), size=(64,)),
]

FEW_STEPS = {"max_steps": 1_000_000}

LOOPS_AND_STACK = [
    barrier("endless_bisection", EndlessLoopError, zeros(1, dtype=U32), U32(10), size=(1,),
            options=FEW_STEPS),
    barrier("endless_list", EndlessLoopError, zeros(1, dtype=I32), i32(1, 2, 3, 1), size=(1,),
            options=FEW_STEPS),
    barrier("lock_never_released", EndlessLoopError, zeros(1, dtype=I32), zeros(1, dtype=I32),
            options=FEW_STEPS),
    barrier("wait_for_other_block", EndlessLoopError, zeros(1, dtype=I32), zeros(1, dtype=I32),
            grid=(2,), size=(1,), options=FEW_STEPS),
    barrier("endless_recursion", StackOverflowError, zeros(2, dtype=I32), I32(7), size=(1,)),
    barrier("huge_local_array", StackOverflowError, zeros(1), I32(4096), size=(1,)),
]

UNDEFINED = [
    barrier("shift_by_width", UndefinedBehaviourError, zeros(32, dtype=U32), thread=(31, 0, 0),
            message="shift"),
    barrier("shift_by_negative", UndefinedBehaviourError, zeros(9, dtype=I32), i32(-1), I32(9),
            size=(1,), message="shift"),
    barrier("divide_by_zero", UndefinedBehaviourError, zeros(4, dtype=I32), i32(1, 2, 3, 4),
            i32(1, 1, 0, 1), size=(4,), thread=(2, 0, 0), message="zero"),
    barrier("remainder_by_zero", UndefinedBehaviourError, zeros(4, dtype=I32), i32(1, 2, 3, 4),
            I32(0), size=(4,), message="zero"),
    barrier("failing_assert", DeviceAssertError, zeros(4, dtype=I32), i32(0, 1, 9, 2), I32(9),
            size=(4,), thread=(2, 0, 0), message="id < limit"),
]

WARPS = [
    warp("lane_not_in_mask", zeros(32, dtype=I32), i32(*range(32))),
    warp("syncwarp_not_in_mask", zeros(32, dtype=I32), i32(*range(32))),
    case("warps.cu", "lanes_in_other_branch", DeadlockError, zeros(32, dtype=I32),
         i32(*range(32)), message="__any_sync"),
    case("warps.cu", "lanes_never_come", DeadlockError, zeros(32, dtype=U32), i32(*[0, 9] * 16),
         message="__ballot_sync"),
    warp("reads_exited_lane", zeros(32, dtype=I32), i32(*range(32)), I32(24), message="lane"),
    warp("reads_missing_lane", zeros(48), f32(48), size=(48,), message="lane"),
    warp("source_not_in_mask", zeros(32, dtype=I32), i32(*range(32)), message="lane 20"),
    warp("bad_shuffle_width", zeros(32, dtype=I32), i32(*range(32)), message="12"),
    warp("vote_with_empty_mask", zeros(32, dtype=I32), i32(*[1] * 31, 0), thread=(31, 0, 0)),
    warp("masks_disagree", zeros(32, dtype=I32), i32(*range(32))),
]

ASYNC = [
    copies("copy_without_wait", AsyncCopyError, zeros(32), f32(128)),
    copies("wait_for_wrong_group", AsyncCopyError, zeros(32), f32(256)),
    copies("wait_without_commit", AsyncCopyError, zeros(32), f32(128)),
    copies("wait_without_barrier", DataRaceError, zeros(64), f32(256), size=(64,),
           message="tile"),
    copies("barrier_before_wait", AsyncCopyError, zeros(64), f32(256), size=(64,),
           message="tile"),
    copies("refill_while_read", DataRaceError, zeros(64), f32(768), I32(3), size=(64,),
           message="tile"),
    copies("async_source_past_end", OutOfBoundsError, zeros(30), f32(30), I32(30), argument="in",
           thread=(7, 0, 0)),
    copies("async_destination_past_end", OutOfBoundsError, zeros(32), f32(128)),
    copies("async_source_misaligned", MisalignedError, zeros(4), f32(4, 30), I32(30),
           argument="in"),
    copies("async_zeros_misaligned", MisalignedError, zeros(32), f32(128), argument="in",
           element=1),
    copies("store_under_copy", AsyncCopyError, zeros(32), f32(128)),
    copies("ldmatrix_past_end", OutOfBoundsError, zeros(128, dtype=U32), zeros(256, dtype=F16)),
    copies("ldmatrix_misaligned", MisalignedError, zeros(128, dtype=U32), zeros(256, dtype=F16)),
    copies("ldmatrix_half_warp", DeadlockError, zeros(64, dtype=U32), zeros(256, dtype=F16),
           message="ldmatrix_x2"),
    copies("ldmatrix_under_copy", AsyncCopyError, zeros(128, dtype=U32), zeros(256, dtype=F16)),
]

CASES = [
    *GLOBAL_BOUNDS, *WRITES_AND_ALIGNMENT, *SHARED_MEMORY, *RACES, *READER_FIRST, *BARRIERS,
    *LOOPS_AND_STACK, *UNDEFINED, *WARPS, *ASYNC,
]
# fmt: on
