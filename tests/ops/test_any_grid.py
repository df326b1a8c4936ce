"""Launches by hand: other grids and blocks than `CudaOps` takes give the same bits.

Most kernels state "any" number of threads or of blocks in their headers; their loops must then
reach every element once. That the runtimes refuse arrays of the host is tested here as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.runtime.protocol import DeviceError, Runtime
from tests.ops.kernel_arrays import Guarded, normal, same_bits
from tests.ops.reference_gemm import packed

F16 = {"DTYPE": "f16"}


def run(
    runtime: Runtime,
    kernel: tuple[str, str, dict[str, Any]],
    grid: tuple[int, ...],
    threads: int,
    out: tuple[int, ...] | NDArray[Any],
    *inputs: Any,
) -> NDArray[Any]:
    """The output after a launch; `out` is its shape, or what is there before."""
    if isinstance(out, tuple):
        target = Guarded(runtime, out, np.float16)
    else:
        target = Guarded.of(runtime, out)
    args = [Guarded.of(runtime, a).array if isinstance(a, np.ndarray) else a for a in inputs]
    runtime.launch(runtime.load_kernel(*kernel), grid, (threads,), [target.array, *args])
    return target.read()


@pytest.mark.parametrize("threads", [32, 33, 96, 256])
@pytest.mark.parametrize("size", [65, 2056])
def test_rows(size: int, threads: int, runtime: Runtime) -> None:
    table = normal(1, (9, size), "float16")
    ids = np.array([8, 0, 3], np.int32)
    counts = (np.int32(9), np.int32(size))
    kernel = ("gather_rows.cu", "gather_rows", F16)
    got = run(runtime, kernel, (3,), threads, (3, size), table, ids, *counts)
    same_bits(got, table[ids])
    weight, sizes = packed(table), (*counts, np.int32(-(-size // 64) * 64))
    kernel = ("embedding_packed.cu", "embedding_packed", F16)
    got = run(runtime, kernel, (3,), threads, (3, size), ids, weight, *sizes)
    same_bits(got, table[ids])


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (1, 256), (3, 64), (7, 33)])
@pytest.mark.parametrize("size", [65, 2056])
def test_gated(size: int, blocks: int, threads: int, runtime: Runtime) -> None:
    gate_up = normal(2, (3, 2 * size), "float16")
    kernel = ("activation.cu", "silu_mul", F16)
    one = run(runtime, kernel, (3, 9), 256, (3, size), gate_up, np.int32(size))
    other = run(runtime, kernel, (3, blocks), threads, (3, size), gate_up, np.int32(size))
    same_bits(other, one)
    assert np.isfinite(one.astype(np.float32)).all()


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (1, 256), (3, 64), (7, 33)])
@pytest.mark.parametrize("count", [1, 9, 2061])
def test_elementwise(count: int, blocks: int, threads: int, runtime: Runtime) -> None:
    x = normal(3, (count,), "float16")
    kernel = ("activation.cu", "relu", F16)
    got = run(runtime, kernel, (blocks,), threads, (count,), x, np.int64(count))
    np.testing.assert_array_equal(got, np.maximum(x, np.float16(0)))


@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (3, 64), (40, 33)])
def test_blocks(blocks: int, threads: int, runtime: Runtime) -> None:
    cache = normal(4, (5, 2 * 8 * 80), "float16")
    numbers = np.array([4, 0, 2], np.int32)
    elements = np.int64(cache.shape[1])
    grid = (3, blocks)
    kernel = ("kv_cache.cu", "gather_blocks", F16)
    away = run(runtime, kernel, grid, threads, (3, cache.shape[1]), cache, numbers, elements)
    same_bits(away, cache[numbers])
    kernel = ("kv_cache.cu", "scatter_blocks", F16)
    back = run(runtime, kernel, grid, threads, np.zeros_like(cache), away, numbers, elements)
    same_bits(back[numbers], cache[numbers])
    assert not back[[1, 3]].any()


@pytest.mark.parametrize("args", [0, 1])
def test_an_array_of_the_host_is_refused(args: int, runtime: Runtime) -> None:
    kernel = runtime.load_kernel("activation.cu", "relu", F16)
    given: list[Any] = [runtime.zeros((8,), np.float16), runtime.zeros((8,), np.float16)]
    given[args] = np.zeros(8, np.float16)
    with pytest.raises(DeviceError, match="ndarray"):
        runtime.launch(kernel, (1,), (32,), [*given, np.int64(8)])


def test_a_kernel_is_loaded_once(runtime: Runtime) -> None:
    first = runtime.load_kernel("activation.cu", "relu", F16)
    assert runtime.load_kernel("activation.cu", "relu", dict(F16)) is first
    assert runtime.load_kernel("activation.cu", "gelu", F16) is not first
