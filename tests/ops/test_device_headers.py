"""The host branches of `ptx.cuh` and `reduce.cuh` against the layouts that the PTX manual gives.

Here the emulator stands in for instructions, so its own reading of their layouts is tested: the
fragments are laid out by the formulas of the PTX ISA 8.x ("Matrix Fragments for mma.m16n8k16" and
"for mma.m16n8k32", "ldmatrix"), written down a second time in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.emulator.errors import (
    KernelError,
    MisalignedError,
    OutOfBoundsError,
    UndefinedBehaviourError,
    WarpMaskError,
)
from cupaged.emulator.module import EmulatedModule

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "cuda"
DEFINES = {"DTYPE": "f32"}
RNG = np.random.default_rng(7)

# The kernels of the GPU's smoke run, and those that misuse the wrappers.
SOURCE = (
    (ROOT / "bench" / "gpu_smoke_primitives.cu").read_text()
    + r"""
extern "C" __global__ void odd_row(unsigned* out) {
  __shared__ uint4 tile[33];
  for (int i = threadIdx.x; i < 33; i += 32) tile[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  unsigned mine[4];
  ldmatrix_x4(mine, reinterpret_cast<unsigned*>(tile + threadIdx.x) + (threadIdx.x == 9));  // ODD
  out[threadIdx.x] = mine[0];
}

extern "C" __global__ void global_row(unsigned* out) {
  unsigned mine[1];
  ldmatrix_x1(mine, out);  // GLOBAL
  out[threadIdx.x] = mine[0];
}

extern "C" __global__ void half_warp(float* out) {
  if (threadIdx.x >= 16) return;
  out[threadIdx.x] = warp_sum(out[threadIdx.x]);  // HALF
}

extern "C" __global__ void odd_copy(unsigned* out, const unsigned* in) {
  __shared__ uint4 tile[32];
  copy_async<16>(&tile[threadIdx.x], in + 1);  // COPY
  copy_async_wait_all();
  out[threadIdx.x] = tile[threadIdx.x].x;
}

extern "C" __global__ void warps(float* sums, float* exchanged, float* largest, const float* x) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  sums[i] = warp_sum(x[i]);
  largest[i] = warp_max(x[i]);
  float value = x[i];
  for (int distance = 16; distance > 0; distance /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(ALL_LANES, value, distance));
  }
  exchanged[i] = value;
}

extern "C" __global__ void blocks(float* sums, float* largest, const float* x) {
  __shared__ float partial[MAX_WARPS];
  __shared__ float partial_largest[MAX_WARPS];
  sums[threadIdx.x] = block_sum(x[threadIdx.x], partial);
  largest[threadIdx.x] = block_max(x[threadIdx.x], partial_largest);
}
"""
)

Launch = Callable[..., None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("headers") / "headers.cu"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def launch(source: Path) -> Launch:
    module = EmulatedModule(source, DEFINES, include_dirs=[CUDA])

    def run(name: str, *args: Any, threads: int = 32, blocks: int = 1) -> None:
        module.get_function(name)((blocks,), (threads,), args)

    return run


def line_of(text: str) -> int:
    """The one line of SOURCE that has the text."""
    (number,) = [i + 1 for i, line in enumerate(SOURCE.split("\n")) if text in line]
    return number


# mma: element i of a fragment, by the manual's formulas.

LANE = np.arange(32)[:, None]
GROUP, MEMBER = LANE // 4, LANE % 4


def places_16(i: NDArray[Any], operand: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Row and column of elements i of m16n8k16."""
    if operand == "a":
        row = GROUP + 8 * ~((i < 2) | ((i >= 4) & (i < 6)))
        return row, MEMBER * 2 + (i & 1) + 8 * (i >= 4)
    if operand == "b":
        return MEMBER * 2 + (i & 1) + 8 * (i >= 2), GROUP + 0 * i
    return GROUP + 8 * (i >= 2), MEMBER * 2 + (i & 1)


def places_32(i: NDArray[Any], operand: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Row and column of elements i of m16n8k32 of bytes."""
    if operand == "a":
        row = GROUP + 8 * ~((i < 4) | ((i >= 8) & (i < 12)))
        return row, MEMBER * 4 + (i & 3) + 16 * (i >= 8)
    if operand == "b":
        return MEMBER * 4 + (i & 3) + 16 * (i >= 4), GROUP + 0 * i
    return GROUP + 8 * (i >= 2), MEMBER * 2 + (i & 1)


def registers(matrix: NDArray[Any], places: tuple[NDArray[Any], NDArray[Any]]) -> NDArray[Any]:
    """uint32 [32, registers]."""
    return np.ascontiguousarray(matrix[places]).view(np.uint32)


@pytest.mark.parametrize(
    ("name", "dtype"), [("mma_f16", np.float16), ("mma_bf16", ml_dtypes.bfloat16)]
)
def test_products_of_sixteen_bits(launch: Launch, name: str, dtype: Any) -> None:
    a = RNG.standard_normal((16, 16)).astype(dtype)
    b = RNG.standard_normal((16, 8)).astype(dtype)
    c = RNG.standard_normal((16, 8)).astype(np.float32)
    sums = np.ascontiguousarray(c[places_16(np.arange(4), "c")])
    a_registers = registers(a, places_16(np.arange(8), "a"))
    launch(f"{name}_of", sums, a_registers, registers(b, places_16(np.arange(4), "b")))
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)) + np.abs(c)
    got = np.empty((16, 8), np.float32)
    got[places_16(np.arange(4), "c")] = sums
    assert (np.abs(got - exact) <= 1e-6 * size).all()


def test_products_of_sixteen_bits_keep_rows_apart(launch: Launch) -> None:
    """A row has the same bits whatever the other rows are, NaN too."""
    a = RNG.standard_normal((16, 16)).astype(np.float16)
    b = registers(RNG.standard_normal((16, 8)).astype(np.float16), places_16(np.arange(4), "b"))
    alone = np.full_like(a, np.nan)
    alone[5] = a[5]
    results = []
    for matrix in (a, alone):
        sums = np.zeros((32, 4), np.float32)
        launch("mma_f16_of", sums, registers(matrix, places_16(np.arange(8), "a")), b)
        got = np.empty((16, 8), np.float32)
        got[places_16(np.arange(4), "c")] = sums
        results.append(got)
    assert (results[0][5] == results[1][5]).all()
    assert np.isnan(np.delete(results[1], 5, axis=0)).all()


def test_products_of_bytes(launch: Launch) -> None:
    a = RNG.integers(-128, 128, (16, 32)).astype(np.int8)
    b = RNG.integers(-128, 128, (32, 8)).astype(np.int8)
    c = RNG.integers(-(2**31), 2**31, (16, 8)).astype(np.int32)
    c[0, 0] = 2**31 - 1
    sums = np.ascontiguousarray(c[places_32(np.arange(4), "c")])
    b_registers = registers(b, places_32(np.arange(8), "b"))
    launch("mma_s8_of", sums, registers(a, places_32(np.arange(16), "a")), b_registers)
    got = np.empty((16, 8), np.int32)
    got[places_32(np.arange(4), "c")] = sums
    assert (got == (a.astype(np.int64) @ b.astype(np.int64) + c).astype(np.int32)).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_from_shared_memory(launch: Launch, count: int, transposed: bool) -> None:
    rows = RNG.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    out = np.zeros((32, count), np.uint32)
    launch(f"ldmatrix_x{count}{'_trans' if transposed else ''}_of", out, rows.view(np.uint32))
    matrices = rows.transpose(0, 2, 1) if transposed else rows
    for matrix in range(count):  # lane l holds row l / 4, elements 2 (l % 4) and the next
        expected = np.ascontiguousarray(matrices[matrix]).view(np.uint32).reshape(32)
        assert (out[:, matrix] == expected).all()


# Asynchronous copies.


@pytest.mark.parametrize("size", [4, 8, 16])
def test_copies(launch: Launch, size: int) -> None:
    data = RNG.integers(0, 256, 32 * size).astype(np.uint8)
    out = np.zeros_like(data)
    launch(f"copy_{size}", out, data)
    assert (out == data).all()


@pytest.mark.parametrize("size", [4, 8, 16])
def test_copies_fill_with_zeros(launch: Launch, size: int) -> None:
    data = RNG.integers(1, 256, (32, size)).astype(np.uint8)
    counts = (np.arange(32) % (size + 1)).astype(np.int32)
    out = np.full_like(data, 99)
    launch(f"copy_or_zero_{size}", out, data, counts)
    assert (out == np.where(np.arange(size) < counts[:, None], data, 0)).all()


def test_groups_of_copies(launch: Launch) -> None:
    data = np.arange(1, 65, dtype=np.uint32)
    out = np.zeros_like(data)
    launch("two_groups", out, data)
    assert (out == data).all()


# Sums and maxima.


def test_a_warp_sums_by_the_butterfly(launch: Launch) -> None:
    x = (RNG.standard_normal((4, 64)) * 10.0 ** RNG.integers(-6, 6, (4, 64))).astype(np.float32)
    sums, exchanged, largest = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    launch("warps", sums, exchanged, largest, x, threads=64, blocks=4)
    lanes = x.reshape(8, 32)
    expected = lanes.copy()
    for distance in (16, 8, 4, 2, 1):
        expected = expected + expected[:, np.arange(32) ^ distance]
    assert (sums.reshape(8, 32) == expected).all()
    assert (exchanged == sums).all()
    assert (largest.reshape(8, 32) == lanes.max(1, keepdims=True)).all()


@pytest.mark.parametrize("threads", [32, 96, 1024])
def test_a_block_sums_its_warps(launch: Launch, threads: int) -> None:
    x = RNG.standard_normal(threads).astype(np.float32) - 3
    sums, largest = np.empty_like(x), np.empty_like(x)
    launch("blocks", sums, largest, x, threads=threads)

    def butterfly(values: NDArray[np.float32]) -> np.float32:
        for distance in (16, 8, 4, 2, 1):
            values = values + values[np.arange(32) ^ distance]
        return np.float32(values[0])

    warps = [butterfly(warp) for warp in x.reshape(-1, 32)]
    expected = butterfly(np.array(warps + [0] * (32 - len(warps)), np.float32))
    assert (sums == expected).all() and (largest == x.max()).all()


# What is found.


@pytest.mark.parametrize(
    ("name", "error", "comment", "message"),
    [
        ("odd_row", MisalignedError, "ODD", "ldmatrix_x4"),
        ("global_row", OutOfBoundsError, "GLOBAL", "not in shared memory"),
        ("half_warp", WarpMaskError, "HALF", "warp_sum"),
    ],
)
def test_misuse_is_found(
    launch: Launch, name: str, error: type[KernelError], comment: str, message: str
) -> None:
    out = np.zeros(32, np.float32 if name == "half_warp" else np.uint32)
    with pytest.raises(error, match=message) as caught:
        launch(name, out)
    assert caught.value.line == line_of(f"// {comment}")


def test_a_misaligned_copy_is_found(launch: Launch) -> None:
    with pytest.raises(MisalignedError) as caught:
        launch("odd_copy", np.zeros(32, np.uint32), np.zeros(64, np.uint32))
    assert caught.value.line == line_of("// COPY")


def test_a_copy_of_more_than_there_is_is_found(launch: Launch) -> None:
    counts = np.full(32, 4, np.int32)
    counts[3] = 5
    data = np.zeros((32, 4), np.uint8)
    with pytest.raises(UndefinedBehaviourError, match="5 of 4 bytes") as caught:
        launch("copy_or_zero_4", np.zeros_like(data), data, counts)
    assert (caught.value.line, caught.value.thread) == (
        line_of("copy_async_or_zero<BYTES>"),
        (3, 0, 0),
    )
