"""The correct programs: how each is launched, and what NumPy says its results are.

A table and nothing else; test_correct_programs.py runs it. Integers and moves are compared exactly,
sums of floats are exact by construction or have a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.program_cases import f32, i32

F16, F32, F64, I8, I32, I64, U32, U64 = (
    np.float16,
    np.float32,
    np.float64,
    np.int8,
    np.int32,
    np.int64,
    np.uint32,
    np.uint64,
)
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One launch: arguments, and what the arguments at some places must hold afterwards."""

    args: Sequence[Any]
    expected: Mapping[int, Array]
    grid: tuple[int, ...] = (1,)
    size: tuple[int, ...] = (32,)
    shared_mem: int = 0
    tolerance: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)


Make = Callable[[], Run]
PROGRAMS: dict[str, tuple[str, str, Make]] = {}


def program(file: str, kernel: str, name: str = "") -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        PROGRAMS[name or make.__name__] = (file, kernel, make)
        return make

    return register


def zeros(*shape: int, dtype: Any = F32) -> Array:
    return np.zeros(shape, dtype)


def random(*shape: int, seed: int = 7) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def integers(low: int, high: int, count: int, seed: int = 5) -> Array:
    return np.random.default_rng(seed).integers(low, high, count).astype(I32)


# --- blocks.cu ---


@program("blocks.cu", "tree_sum")
def tree_sum() -> Run:
    x = f32(3, 128)
    return Run([zeros(3), x], {0: x.sum(1)}, grid=(3,), size=(128,), shared_mem=512)


for _threads in (1, 33, 96, 1000, 1024):

    @program("blocks.cu", "block_sum", f"block_sum_{_threads}")
    def block_sum(threads: int = _threads) -> Run:
        x = integers(-50, 50, threads)
        return Run([zeros(1, dtype=I32), x], {0: x.sum(keepdims=True)}, size=(threads,))


@program("blocks.cu", "warp_synchronous_sum")
def warp_synchronous_sum() -> Run:
    return Run([zeros(1), f32(64)], {0: f32(64).sum(keepdims=True)})


@program("blocks.cu", "early_exit_warps")
def early_exit_warps() -> Run:
    x = integers(0, 99, 96)
    return Run([zeros(96, dtype=I32), x, I32(96)], {0: x[::-1]}, size=(256,))


@program("blocks.cu", "index_3d")
def index_3d() -> Run:
    z, y, x = np.meshgrid(np.arange(5), np.arange(7), np.arange(9), indexing="ij")
    expected = (10000 * z + 100 * y + x).astype(I32)
    return Run(
        [zeros(5, 7, 9, dtype=I32), I32(5), I32(7), I32(9)],
        {0: expected},
        grid=(3, 2, 3),
        size=(4, 5, 2),
    )


@program("blocks.cu", "grid_stride_scale")
def grid_stride_scale() -> Run:
    x = random(1003)
    return Run([x.copy(), F32(3), I32(1003)], {0: x * F32(3)}, grid=(3,), size=(64,))


@program("blocks.cu", "transpose")
def transpose() -> Run:
    x = random(37, 21)
    return Run([zeros(21, 37), x, I32(37), I32(21)], {0: x.T}, grid=(2, 3), size=(16, 16))


@program("blocks.cu", "matmul")
def matmul() -> Run:
    a, b = random(11, 13), random(13, 19, seed=8)
    product = a.astype(F64) @ b.astype(F64)
    return Run(
        [zeros(11, 19), a, b, I32(11), I32(19), I32(13)],
        {0: product},
        grid=(3, 2),
        size=(8, 8),
        tolerance=1e-5,
    )


@program("blocks.cu", "scan_in_place")
def scan_in_place() -> Run:
    x = integers(-9, 9, 256)
    return Run([x.copy()], {0: np.cumsum(x)}, size=(256,), shared_mem=1024)


@program("blocks.cu", "split_dynamic")
def split_dynamic() -> Run:
    x = integers(-9, 9, 40)
    squares = x.astype(F64) ** 2 + np.where(x % 2 == 0, x, 0)
    return Run(
        [zeros(40, dtype=F64), x, I32(40)], {0: squares[::-1]}, size=(40,), shared_mem=40 * 13
    )


@program("blocks.cu", "byte_neighbours")
def byte_neighbours() -> Run:
    x = (2 * np.arange(-32, 32)).astype(I8)
    return Run([zeros(64, dtype=I8), x], {0: np.roll(x // 2, -1)}, size=(64,))


@program("blocks.cu", "stencil")
def stencil() -> Run:
    x = f32(150)
    return Run(
        [zeros(150), x, I32(150)], {0: np.convolve(x, np.ones(5), "same")}, grid=(3,), size=(64,)
    )


@program("blocks.cu", "softmax")
def softmax() -> Run:
    x = random(3, 300)
    weights = np.exp(x.astype(F64) - x.max(1, keepdims=True))
    return Run(
        [zeros(3, 300), x, I32(300)],
        {0: weights / weights.sum(1, keepdims=True)},
        grid=(3,),
        size=(128,),
        tolerance=1e-6,
    )


@program("blocks.cu", "halve_until_small")
def halve_until_small() -> Run:
    x = i32(*range(64))  # 63 -> 31 -> 15 -> 7: three rounds
    return Run([zeros(64, dtype=I32), x, I32(7)], {0: 3000 + x // 8}, size=(64,))


@program("blocks.cu", "block_votes")
def block_votes() -> Run:
    x = i32(*[1, 0, 1, 1] * 12)
    return Run([zeros(3, dtype=I32), x], {0: i32(36, 0, 1)}, size=(48,))


@program("blocks.cu", "producer_consumer")
def producer_consumer() -> Run:
    x = integers(0, 99, 5 * 32)
    return Run([zeros(32, dtype=I32), x, I32(5)], {0: x.reshape(5, 32).sum(0)[::-1]}, size=(64,))


# --- language.cu ---


@program("language.cu", "scale_by<float, 3>", "template_float")
def template_float() -> Run:
    return Run([f32(40), I32(40)], {0: 3 * f32(40)}, grid=(2,))


@program("language.cu", "scale_by<int, -2>", "template_int")
def template_int() -> Run:
    return Run([i32(1, 2, 3), I32(3)], {0: i32(-2, -4, -6)})


@program("language.cu", "square")
def macro_made() -> Run:
    return Run([zeros(40), f32(40), I32(40)], {0: f32(40) ** 2}, grid=(2,))


@program("language.cu", "affine")
def struct_by_value() -> Run:
    map_type = np.dtype([("scale", F32), ("offset", F32), ("n", I32)])
    return Run([zeros(20), f32(20), np.array((2.0, 0.5, 20), map_type)[()]], {0: 2 * f32(20) + 0.5})


@program("language.cu", "filter")
def constant_memory() -> Run:
    taps = [0.5, 0.25, 0.125, 0.125]
    return Run([zeros(20), f32(20), I32(20)], {0: np.convolve(f32(20), taps)[:20]})


@program("language.cu", "recursion")
def recursion() -> Run:
    fibonacci = i32(0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89)
    return Run([zeros(12, dtype=I32)], {0: fibonacci}, size=(12,))


@program("language.cu", "copy_packs")
def copy_packs() -> Run:
    return Run([zeros(203), f32(203), I32(203)], {0: f32(203)})


@program("language.cu", "half2_axpy")
def half2_axpy() -> Run:
    x, y = random(64).astype(F16), random(64, seed=3).astype(F16)
    exact = F64(F16(1.5)) * x.astype(F64) + y.astype(F64)
    return Run([y.copy(), x, F32(1.5)], {0: exact.astype(F16)})


@program("language.cu", "half_neighbours")
def half_neighbours() -> Run:
    x = random(64).astype(F16)
    pairs = x.reshape(32, 2).astype(F32).sum(1).astype(F16)
    return Run([zeros(64, dtype=F16), x], {0: np.repeat(pairs, 2)}, size=(64,))


@program("language.cu", "reverse_records")
def reverse_records() -> Run:
    record = np.dtype([("key", F64), ("id", I32), ("flags", np.int16, (3,))], align=True)
    x = np.zeros(16, record)
    x["key"], x["id"], x["flags"] = np.arange(16), 10 * np.arange(16), np.arange(48).reshape(16, 3)
    return Run([np.zeros(16, record), x], {0: x[::-1]}, size=(16,))


@program("language.cu", "rotate_twice")
def shared_in_template() -> Run:
    x = i32(*range(32))
    return Run([zeros(32, dtype=I32), x], {0: np.roll(x, -2)})


@program("language.cu", "sort_four")
def sort_four() -> Run:
    x = integers(0, 1000, 64).astype(U32).reshape(16, 4)
    flips = (1 << np.arange(28, 32)).astype(U32)
    return Run([zeros(16, 4, dtype=U32), x], {0: np.sort(x, 1) ^ flips}, size=(16,))


@program("language.cu", "paged_gather")
def paged_gather() -> Run:
    cache, slots = random(10, 24), np.array([3, -1, 9, 0, 3], I64)
    expected = np.where(slots[:, None] < 0, F32(0), cache[slots])
    return Run([zeros(5, 24), cache, slots, I32(24)], {0: expected}, grid=(5,))


# --- warps_and_atomics.cu ---

WARPS = "warps_and_atomics.cu"


@program(WARPS, "halves_apart")
def halves_apart() -> Run:
    x, lane = integers(0, 99, 64), np.arange(64)
    source = np.where(lane % 32 < 16, lane ^ 1, lane ^ 2)
    return Run([zeros(64, dtype=I32), x], {0: x[source]}, size=(64,))


@program(WARPS, "segment_sum")
def segment_sum() -> Run:
    x = integers(0, 99, 64)
    return Run([zeros(8, dtype=I32), x], {0: x.reshape(8, 8).sum(1)}, size=(64,))


@program(WARPS, "compact")
def compact() -> Run:
    x = integers(-20, 20, 128)
    kept = x[x > 0]
    return Run(
        [zeros(128, dtype=I32), zeros(1, dtype=I32), x],
        {0: np.pad(kept, (0, 128 - len(kept))), 1: i32(len(kept))},
        size=(128,),
    )


@program(WARPS, "count_equal")
def count_equal() -> Run:
    x = integers(0, 5, 32)
    return Run([zeros(32, dtype=I32), x], {0: np.bincount(x)[x]})


@program(WARPS, "vote_after_exit")
def vote_after_exit() -> Run:
    return Run([zeros(20, dtype=I32), I32(20)], {0: i32(*[10] * 20)})


@program(WARPS, "tile_sum")
def tile_sum() -> Run:
    x = integers(0, 99, 64)
    return Run([zeros(4, dtype=I32), x], {0: x.reshape(4, 16).sum(1)}, size=(64,))


@program(WARPS, "histogram")
def histogram() -> Run:
    x = integers(0, 32, 500)
    return Run(
        [zeros(32, dtype=I32), x, I32(500)],
        {0: np.bincount(x, minlength=32)},
        grid=(3,),
        size=(64,),
    )


@program(WARPS, "spin_lock")
def spin_lock() -> Run:
    return Run(
        [zeros(1, dtype=I32), zeros(1, dtype=I32)],
        {0: i32(0), 1: i32(3 * 48)},
        grid=(3,),
        size=(48,),
    )


@program(WARPS, "last_block_sum")
def last_block_sum() -> Run:
    x = f32(5, 32)
    return Run(
        [zeros(1), zeros(5), zeros(1, dtype=U32), x],
        {0: x.sum(keepdims=True)[0], 1: x.sum(1)},
        grid=(5,),
    )


@program(WARPS, "float_maximum")
def float_maximum() -> Run:
    x = np.abs(random(96))
    return Run([zeros(1), x], {0: x.max(keepdims=True)}, grid=(3,))


@program(WARPS, "all_atomics")
def all_atomics() -> Run:
    t = np.arange(96)
    total = int(t.sum())
    xor = np.bitwise_xor.reduce(1 << (t % 16))
    ints = i32(total, -total, -5, 95, ~255, (1 << 31) - 1, xor, 77, 5)
    start = zeros(9, dtype=I32)
    start[4] = -1
    return Run(
        [start, zeros(3, dtype=U32), zeros(2, dtype=U64), zeros(1), zeros(1, dtype=F64)],
        {
            0: ints,
            1: np.array([96 % 10, -96 % 10, 0x80000000 + 95], U32),
            2: np.array([96 << 32, 95 << 33], U64),
            3: np.array([48.0]),
            4: np.array([24.0]),
        },
        grid=(3,),
    )


# --- pipelines.cu ---


@program("pipelines.cu", "double_buffered_sum")
def double_buffered_sum() -> Run:
    x = f32(5, 256)
    return Run([zeros(64), x, I32(5)], {0: x.sum(0)[::-1][:64]}, size=(64,))


@program("pipelines.cu", "three_stage_sum")
def three_stage_sum() -> Run:
    x = f32(7, 256)
    return Run([zeros(64), x, I32(7)], {0: x.sum(0)[::-1][:64]}, size=(64,))


@program("pipelines.cu", "zero_filled_tail")
def zero_filled_tail() -> Run:
    return Run([zeros(128), f32(53), I32(53)], {0: np.pad(f32(53), (0, 75))})


@program("pipelines.cu", "own_copies_only")
def own_copies_only() -> Run:
    return Run([zeros(32), f32(32)], {0: 2 * f32(32)})


@program("pipelines.cu", "matrix_product")
def matrix_product() -> Run:
    a, b = random(16, 16).astype(F16), random(8, 16, seed=2).astype(F16)
    return Run([zeros(16, 8), a, b], {0: a.astype(F64) @ b.astype(F64).T}, tolerance=1e-5)
