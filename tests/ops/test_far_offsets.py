"""Elements beyond 2^32: where 32 bits would not do, signed or not, every offset is 64 bits wide.

Arrays are larger than the memory of most machines and nearly all of their pages are never touched,
so that they take none; what matters lies at their ends, and zeros wherever an offset that was cut
to 32 bits would lead. That is why these run on the emulator alone. Where the grid covers the whole
array, only its last blocks run. For the cache that attention reads see `test_paged_attention.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.emulator.module import EmulatedModule
from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.cuda_gemm import CudaGemm, CudaWeight
from cupaged.ops.cuda_ops import CudaOps
from cupaged.ops.gemm_plan import choose_launch, chunk_columns
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.kernels import kernel_folder
from cupaged.runtime.protocol import Array, Defines, Kernel, Runtime
from tests import reference
from tests.ops.cuda_sampler import Sampler
from tests.ops.kernel_arrays import NUMPY, normal, same_bits
from tests.ops.reference_gemm import packed
from tests.ops.sampling_oracle import edits_of, rows
from tests.ops.test_attention import make_batch

FAR = (1 << 32) + 1  # elements of every large array, at least


class LastBlocks(HostRuntime):
    """An emulated device that runs the last `count` blocks of a grid's x alone."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self._count = count
        self._late: dict[int, EmulatedModule] = {}

    def load_kernel(self, file: str, name: str, defines: Defines) -> Kernel:
        """The kernel, in a file that lets it begin late."""
        late = EmulatedModule(
            Path(__file__).with_name("last_blocks.cu"),
            {**defines, "KERNEL_FILE": f'"{file}"'},
            include_dirs=[kernel_folder()],
            separated=False,
        )
        kernel = late.get_function(name)
        self._late[id(kernel)] = late
        return kernel

    def launch(self, kernel: Kernel, grid: Sequence[int], *args: Any, **options: Any) -> None:
        """The last blocks."""
        first = max(0, grid[0] - self._count)
        library = ctypes.CDLL(str(self._late[id(kernel)].library))
        ctypes.c_uint.in_dll(library, "first_block").value = first
        super().launch(kernel, (grid[0] - first, *grid[1:]), *args, **options)


def far_rows(columns: int, beyond: int = FAR) -> int:
    """The number of a row that begins beyond so many elements."""
    return -(-beyond // columns)


def zeros_then(runtime: Runtime, last: NDArray[Any], beyond: int = FAR) -> Array:
    """An array of zeros beyond so many elements, which ends with the rows of `last`."""
    far = far_rows(last[0].size, beyond)
    array = runtime.zeros((far + len(last), *last.shape[1:]), last.dtype)
    runtime.copy_to_device(array[far:], last)
    return array


def last_of(runtime: Runtime, array: Array, count: int) -> NDArray[Any]:
    return runtime.to_host(array[len(array) - count :])


def test_an_array_may_be_larger_than_the_memory() -> None:
    """Where the system promises no more than there is, it is asked for no promise."""
    runtime = HostRuntime()
    array = runtime.zeros((2 * runtime.memory_info().total_bytes,), np.uint8)
    runtime.copy_to_device(array[-2:], np.array([3, 4], np.uint8))
    assert runtime.to_host(array[-3:]).tolist() == [0, 3, 4]


# ---- the cache -----------------------------------------------------------------------------------

SPEC = KVCacheSpec(0, 2, 64, 64, "bfloat16", 16)


def test_copy_blocks() -> None:
    ops = CudaOps(HostRuntime(), "bfloat16")
    k, v = (normal(seed, (3, 2, 16, 64), "bfloat16") for seed in (1, 2))
    cache = KVCache(SPEC, zeros_then(ops.runtime, k), zeros_then(ops.runtime, v))
    far = len(cache.k) - 3
    copies = [(far + 1, far), (far + 2, 7)]
    batch = make_batch([(0, 1)], np.zeros((1, 1), np.int32), 16, copies)
    ops.copy_blocks([cache], ops.begin_step(batch))
    for array, half in ((cache.k, k), (cache.v, v)):
        same_bits(last_of(ops.runtime, array, 3), half[[1, 1, 2]])
        same_bits(ops.runtime.to_host(array[7]), half[2])


def test_gather_and_scatter_blocks() -> None:
    ops = CudaOps(HostRuntime(), "bfloat16")
    blocks = normal(3, (3, 2, 16, 64), "bfloat16")
    cache = zeros_then(ops.runtime, blocks)
    far = len(cache) - 3
    staging = ops.runtime.zeros((2, 2, 16, 64), ops.dtype)
    ops.gather_blocks(staging, cache, np.array([far + 2, far], np.int32))
    same_bits(ops.runtime.to_host(staging), blocks[[2, 0]])
    ops.scatter_blocks(cache, staging, np.array([far + 1, far + 2], np.int32))
    same_bits(last_of(ops.runtime, cache, 3), blocks[[0, 2, 0]])


def test_staging_of_gathered_blocks() -> None:
    """The other side of the copies: more blocks than a step ever moves."""
    runtime = LastBlocks()
    last = normal(4, (2, 2, 16, 64), "bfloat16")
    cache, staging = runtime.from_host(last), zeros_then(runtime, last)
    staged, elements = far_rows(2 * 16 * 64) + 2, np.int64(2 * 16 * 64)
    numbers = runtime.zeros((staged,), np.int32)
    runtime.copy_to_device(numbers[staged - 1 :], np.array([1], np.int32))
    defines = {"DTYPE": "bf16"}
    scatter = runtime.load_kernel("kv_cache.cu", "scatter_blocks", defines)
    runtime.copy_to_device(cache, np.zeros_like(last))
    runtime.launch(scatter, (staged,), (256,), (cache, staging, numbers, elements))
    same_bits(runtime.to_host(cache[1]), last[1])
    gather = runtime.load_kernel("kv_cache.cu", "gather_blocks", defines)
    runtime.copy_to_device(cache[1], last[0])
    runtime.launch(gather, (staged,), (256,), (staging, cache, numbers, elements))
    same_bits(last_of(runtime, staging, 1)[0], last[0])


def test_the_cache_that_rope_writes() -> None:
    ops = CudaOps(HostRuntime(), "bfloat16")
    empty = np.zeros((3, 2, 16, 64), NUMPY["bfloat16"])
    cache = KVCache(SPEC, zeros_then(ops.runtime, empty), zeros_then(ops.runtime, empty))
    slots = np.array([16, 5, 47], np.int64)
    batch = make_batch([(0, 3)], np.zeros((1, 8), np.int32), 128)
    batch.groups[0].slot_mapping[...] = slots + (len(cache.k) - 3) * 16
    qkv = ops.runtime.from_host(normal(5, (3, 6 * 64), "bfloat16"))
    table = ops.rotary_table(10.0 ** -np.arange(32.0), 8)
    ops.rope_and_cache(ops.begin_step(batch), qkv, table, cache)
    turned = ops.runtime.to_host(qkv).reshape(3, 6, 64)
    for array, written in ((cache.k, turned[:, 2:4]), (cache.v, turned[:, 4:])):
        expected = empty.copy()
        reference.write_slots(expected, written, slots)
        same_bits(last_of(ops.runtime, array, 3), expected)


# ---- rows ----------------------------------------------------------------------------------------


def test_gather_rows() -> None:
    ops = CudaOps(HostRuntime(), "bfloat16")
    for columns in (1024, 1021):  # moved by packs, and by elements
        last = normal(6, (3, columns), "bfloat16")
        x = zeros_then(ops.runtime, last)
        out = ops.runtime.zeros((3, columns), ops.dtype)
        numbers = len(x) - 3 + np.array([2, 0, 8], np.int32)  # the last one is clipped
        ops.gather_rows(out, x, ops.runtime.from_host(numbers))
        same_bits(ops.runtime.to_host(out), last[[2, 0, 2]])


def outputs_of_rows(ops: CudaOps, x: Array, columns: int) -> list[NDArray[Any]]:
    """The last row of what norms and gates make of x, [n, 2 columns]."""
    runtime, n = ops.runtime, len(x)
    weight = runtime.from_host(normal(8, (2 * columns,), "bfloat16"))
    gated, normed, residual = (
        runtime.zeros((n, size), ops.dtype) for size in (columns, 2 * columns, 2 * columns)
    )
    ops.silu_mul(gated, x)
    outputs = [last_of(runtime, gated, 1)]
    ops.rms_norm(normed, x, weight, 1e-5)
    outputs.append(last_of(runtime, normed, 1))
    ops.layer_norm(normed, x, weight, weight, 1e-5)
    outputs.append(last_of(runtime, normed, 1))
    ops.add_rms_norm(normed, residual, x, weight, 1e-5)
    return [*outputs, last_of(runtime, normed, 1), last_of(runtime, residual, 1)]


@pytest.mark.parametrize("columns", [1024, 1021])
def test_norms_and_gates(columns: int) -> None:
    """The last of more tokens than a step has."""
    near, late = (CudaOps(runtime, "bfloat16") for runtime in (HostRuntime(), LastBlocks()))
    x = normal(7, (1, 2 * columns), "bfloat16")
    expected = outputs_of_rows(near, near.runtime.from_host(x), columns)
    got = outputs_of_rows(late, zeros_then(late.runtime, x), columns)
    for a, b in zip(got, expected, strict=True):
        assert b.any()
        same_bits(a, b)


def test_elements() -> None:
    """relu, by as many blocks as 16 bytes a thread take: more than 2^32 of these."""
    runtime = LastBlocks()
    last = normal(9, (256, 8), "bfloat16")
    x = zeros_then(runtime, last, 8 * FAR).reshape(-1)
    out = runtime.zeros(x.shape, x.dtype)
    kernel = runtime.load_kernel("activation.cu", "relu", {"DTYPE": "bf16"})
    runtime.launch(kernel, (x.size // last.size,), (256,), (out, x, np.int64(x.size)))
    same_bits(last_of(runtime, out, last.size).reshape(last.shape), np.maximum(last, 0))


# ---- weights -------------------------------------------------------------------------------------


def far_weight(runtime: Runtime, last: NDArray[Any]) -> CudaWeight:
    """A packed weight of zeros, 16 rows at a time, and then the rows of `last`."""
    tail = packed(last)
    far = -(-far_rows(tail.shape[1]) // 64) * 64
    matrix = runtime.zeros((far + len(tail), tail.shape[1]), tail.dtype)
    runtime.copy_to_device(matrix[far:], tail)
    features, columns = far + len(last), last.shape[1]
    return CudaWeight(matrix, None, features, columns, chunk_columns(features, columns))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding(dtype: str) -> None:
    gemm = CudaGemm(HostRuntime(), dtype)
    for columns in (1024, 1021):
        last = normal(10, (20, columns), dtype)
        table = far_weight(gemm.runtime, last)
        ids = np.array([3, 0, 11, 21], np.int32)  # the last one is clipped
        out = gemm.runtime.zeros((4, columns), gemm.dtype)
        first = table.out_features - len(last)
        gemm.embedding(out, gemm.runtime.from_host(first + ids), table)
        same_bits(gemm.runtime.to_host(out), last[[3, 0, 11, 19]])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_pack_weight(dtype: str) -> None:
    """A weight packed by one launch, however large."""
    runtime = LastBlocks(4)
    last = np.rint(8 * normal(11, (30, 250), "float32"))
    far = far_rows(250, 8 * FAR) // 16 * 16 + 16  # more than 2^32 times 16 bytes come out
    whole = runtime.zeros((far + 30, 250), np.float32)
    runtime.copy_to_device(whole[far:], last)
    to = runtime.zeros((far + 32, 256), NUMPY["bfloat16" if dtype == "bf16" else "float32"])
    kernel = runtime.load_kernel("gemm_pack.cu", "pack_weight", {"DTYPE": dtype})
    sizes = [np.int32(n) for n in (far + 32, 256, far + 30, 250)]
    runtime.launch(kernel, (-(-to.nbytes // 4096),), (256,), (to, whole, *sizes))
    blocks = 4 * 4096 // to.itemsize // 256  # rows that were packed
    same_bits(last_of(runtime, to, 32)[-blocks:], packed(last.astype(to.dtype))[-blocks:])


# Tokens and columns choose the kernel; outputs lie beyond 2^32 where there are many tokens.
PRODUCTS = {
    "gemm_f32_rows": ("float32", 20, 300),
    "gemm_f32_tiles": ("float32", 330, 300),
    "gemm_rows_8": ("bfloat16", 5, 512),
    "gemm_rows_16": ("bfloat16", 12, 500),
    "gemm_rows_32": ("bfloat16", 40, 512),
    "gemm_tiles_128": ("bfloat16", 520, 500),
    "gemm_tiles_256": ("bfloat16", 520, 512),
}


@pytest.mark.parametrize("kernel", PRODUCTS)
def test_products(kernel: str) -> None:
    """The last tile of y = x W^T. Whole numbers: every order of summation gives the same."""
    dtype, num_tokens, columns = PRODUCTS[kernel]
    gemm = CudaGemm(LastBlocks(), dtype)
    rng = np.random.default_rng(12)
    x, last = (rng.integers(-4, 5, (n, columns)).astype(gemm.dtype) for n in (num_tokens, 37))
    weight = far_weight(gemm.runtime, last)
    features = weight.out_features
    multiprocessors = gemm.runtime.properties.multiprocessors
    launch = choose_launch(num_tokens, features, columns, dtype, multiprocessors)
    assert launch.kernel == kernel
    out = gemm.runtime.zeros((num_tokens, features), np.float32)
    gemm.linear(out, gemm.runtime.from_host(x), weight)
    last_tile = (num_tokens - 1) // 8 * 8
    for token in range(last_tile, num_tokens):
        expected = x[token].astype(np.float64) @ last.astype(np.float64).T
        np.testing.assert_array_equal(gemm.runtime.to_host(out[token, -37:]), expected)


# ---- logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1024, 1021])
def test_draws_and_edits(vocab_size: int) -> None:
    """Edits of far rows leave the logits, and draws give the tokens, of the same rows nearby."""
    runtime = HostRuntime()
    sampler = Sampler(runtime)
    last = normal(13, (3, vocab_size), "float32", 3.0)

    def sample(logits: Array) -> tuple[NDArray[Any], NDArray[Any]]:
        first = len(logits) - 3
        edits = edits_of(
            bias={(first, 3): 2.5, (first + 2, 9): -1.0},
            repetition={(first, 5): 1.5},
            subtracted={(first + 2, 1020): 0.25},
            allowed=[(first + 1, token) for token in range(0, vocab_size, 3)],
            banned=[(first + 2, 1000), (first, int(last[0].argmax()))],
        )
        which = first + np.array([0, 0, 1, 2, 2, 2])
        drawn = rows(
            num=6, logits_row=which, temperature=[0, 1, 1, 0.7, 1, 2], top_k=[0, 0, 0, 40, 0, 0],
            top_p=[1, 1, 0.9, 1, 0.8, 1], seed=range(6), edits=edits,
        )  # fmt: skip
        tokens = runtime.to_host(sampler.draw(logits, drawn))
        return tokens, last_of(runtime, logits, 3)

    tokens, logits = sample(runtime.from_host(last))
    far_tokens, far_logits = sample(zeros_then(runtime, last))
    assert tokens.min() > 0 and np.isneginf(logits).any()
    np.testing.assert_array_equal(far_tokens, tokens)
    same_bits(far_logits, logits)


@pytest.mark.parametrize("vocab_size", [8192, 8191])
def test_logprobs(vocab_size: int) -> None:
    last = normal(14, (1, vocab_size), "float32", 3.0)
    expected = Sampler(HostRuntime()).logprobs(last, [77], 5)
    assert expected[2][0, 0] > 1
    runtime = LastBlocks()
    logits = zeros_then(runtime, last)
    token_ids = runtime.from_host(np.full(len(logits), 77, np.int32))
    for array, row in zip(
        Sampler(runtime).ops.logprobs(logits, token_ids, 5), expected, strict=True
    ):
        same_bits(last_of(runtime, array, 1), row)
