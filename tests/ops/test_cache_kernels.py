"""The kernels that write and move the KV cache, against the reference, on every device there is.

Caches are NaN where nothing was written, with all their bits, and must stay so.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.cuda_ops import CudaOps
from cupaged.runtime.protocol import Runtime
from tests import reference
from tests.ops.kernel_arrays import DTYPES, NUMPY, Guarded, close, normal, same_bits
from tests.ops.test_attention import make_batch

MAX_POSITIONS = 300
TOKENS = [1, 3, 7, 37]

# (storage type, head dim, block size, dimensions that turn): one compiled kernel each.
VARIANTS = [
    ("float32", 64, 16, 64),
    ("float16", 64, 16, 64),
    ("bfloat16", 64, 16, 64),
    ("float32", 32, 8, 32),
    ("bfloat16", 80, 32, 80),
    ("float16", 96, 64, 96),
    ("bfloat16", 128, 128, 128),
    ("float16", 256, 16, 256),
    ("float32", 80, 8, 20),  # halves of 10 elements: packs of 2
]


class CacheCase:
    """A cache of NaN with random keys and values in some blocks."""

    def __init__(
        self, ops: CudaOps, dtype: str, shape: tuple[int, int, int, int], written: list[int]
    ) -> None:
        _, kv_heads, block_size, head_dim = shape
        spec = KVCacheSpec(0, kv_heads, head_dim, head_dim, dtype, block_size)
        num_bytes = math.prod(shape) * np.dtype(NUMPY[dtype]).itemsize
        poison = np.full((2, num_bytes), 0xFF, np.uint8)
        self.host = [half.view(NUMPY[dtype]).reshape(shape) for half in poison]
        for seed, half in enumerate(self.host):
            half[written] = normal(10 + seed, half[written].shape, dtype)
        self.guarded = [Guarded.of(ops.runtime, half) for half in self.host]
        self.cache = KVCache(spec, self.guarded[0].array, self.guarded[1].array)

    def read(self) -> list[NDArray[Any]]:
        return [half.read() for half in self.guarded]


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (7, 1), (3, 3)])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v)))
def test_rope_and_cache(
    variant: tuple[str, int, int, int], heads: tuple[int, int], num_tokens: int, runtime: Runtime
) -> None:
    dtype, head_dim, block_size, rotary_dim = variant
    q_heads, kv_heads = heads
    rng = np.random.default_rng(num_tokens)
    ops = CudaOps(runtime, dtype)
    num_blocks = -(-num_tokens // block_size) + 2
    case = CacheCase(ops, dtype, (num_blocks, kv_heads, block_size, head_dim), [])
    slots = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int64)
    slots[2::5] = -1
    positions = rng.integers(0, MAX_POSITIONS, num_tokens).astype(np.int32)
    positions[-1] = MAX_POSITIONS - 1
    batch = make_batch([(0, num_tokens)], np.zeros((1, 8), np.int32), 128)
    batch.positions[...] = positions
    batch.groups[0].slot_mapping[...] = slots
    frequencies = 10000.0 ** -(np.arange(rotary_dim // 2) / (rotary_dim // 2))
    qkv = normal(1, (num_tokens, q_heads + 2 * kv_heads, head_dim), dtype)
    given = Guarded.of(runtime, qkv.reshape(num_tokens, -1))

    table = ops.rotary_table(frequencies, MAX_POSITIONS)
    ops.rope_and_cache(ops.begin_step(batch), given.array, table, case.cache)

    turned = given.read().reshape(qkv.shape)
    both = qkv[:, : q_heads + kv_heads, :rotary_dim]
    expected = reference.rotate(both, positions, frequencies)
    one, other = np.abs(both.astype(np.float64)), np.abs(np.roll(both, rotary_dim // 2, axis=2))
    close(turned[:, : q_heads + kv_heads, :rotary_dim], expected, one + other, dtype)
    same_bits(
        turned[:, : q_heads + kv_heads, rotary_dim:], qkv[:, : q_heads + kv_heads, rotary_dim:]
    )
    same_bits(turned[:, q_heads + kv_heads :], qkv[:, q_heads + kv_heads :])
    keys, values = case.host
    reference.write_slots(keys, turned[:, q_heads : q_heads + kv_heads], slots)
    reference.write_slots(values, turned[:, q_heads + kv_heads :], slots)
    for got, wanted in zip(case.read(), case.host, strict=True):
        same_bits(got, wanted)


def copying(ops: CudaOps, copies: Any) -> Any:
    """A step that makes these copies of blocks."""
    return ops.begin_step(make_batch([(0, 1)], np.zeros((1, 1), np.int32), 8, copies))


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("copies", [[(0, 1)], [(4, 0), (4, 2), (1, 6)], [(5, 3)]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks(
    dtype: str, copies: list[tuple[int, int]], block_size: int, runtime: Runtime
) -> None:
    ops = CudaOps(runtime, dtype)
    layers = [
        CacheCase(ops, dtype, (7, kv_heads, block_size, head_dim), [0, 1, 4])
        for kv_heads, head_dim in ((1, 2), (3, 80), (2, 128))
    ]
    ops.copy_blocks([layer.cache for layer in layers], copying(ops, copies))
    for layer in layers:
        for got, half in zip(layer.read(), layer.host, strict=True):
            for source, destination in copies:
                half[destination] = half[source]
            same_bits(got, half)


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_leave_and_come_back_elsewhere(
    dtype: str, block_size: int, runtime: Runtime
) -> None:
    ops = CudaOps(runtime, dtype)
    case = CacheCase(ops, dtype, (9, 3, block_size, 80), [1, 3, 4, 7])
    half, cache = case.host[0], case.cache.k
    away = Guarded(runtime, (4, 3, block_size, 80), half.dtype)
    ops.gather_blocks(away.array, cache, np.array([7, 1, 4, 1], np.int32))
    same_bits(away.read(), half[[7, 1, 4, 1]])
    ops.scatter_blocks(cache, away.array, np.array([0, 8, 2, 3], np.int32))
    half[[0, 8, 2, 3]] = half[[7, 1, 4, 1]]
    same_bits(case.read()[0], half)
    same_bits(case.read()[1], case.host[1])


def test_many_blocks_at_once(runtime: Runtime) -> None:
    ops = CudaOps(runtime, "float16")
    case = CacheCase(ops, "float16", (80, 1, 8, 8), list(range(40)))
    copies = np.array([(i, 79 - i) for i in range(37)], np.int32)
    ops.copy_blocks([case.cache], copying(ops, copies))
    for got, half in zip(case.read(), case.host, strict=True):
        half[copies[:, 1]] = half[copies[:, 0]]
        same_bits(got, half)


def test_offsets_beyond_32_bits(runtime: Runtime) -> None:
    """The last block begins at element 2^31. On the host, untouched pages take no memory."""
    ops, dtype = CudaOps(runtime, "bfloat16"), NUMPY["bfloat16"]
    spec = KVCacheSpec(0, 1, 128, 128, "bfloat16", 128)
    shape = (2**31 // (128 * 128) + 1, 1, 128, 128)
    cache = KVCache(spec, runtime.zeros(shape, dtype), runtime.zeros(shape, dtype))
    last = shape[0] - 1
    batch = make_batch([(2 * 128 + 5, 1)], np.array([[0, 1, last]], np.int32), 128)
    qkv = normal(1, (1, 3 * 128), "bfloat16")
    given = runtime.from_host(qkv)
    table = ops.rotary_table(np.zeros(64), MAX_POSITIONS)  # no angle: keys stay as they are
    ops.rope_and_cache(ops.begin_step(batch), given, table, cache)
    ops.copy_blocks([cache], copying(ops, [(last, 3), (last, last - 1)]))
    staging = runtime.zeros((1, 1, 128, 128), dtype)
    ops.gather_blocks(staging, cache.k, np.array([last], np.int32))
    ops.scatter_blocks(cache.v, staging, np.array([last], np.int32))
    expected = np.zeros((2, 128, 128), dtype)
    expected[:, 5] = qkv.reshape(3, 128)[1:]
    for block in (3, last - 1, last):
        same_bits(runtime.to_host(cache.k[block, 0]), expected[0])
        same_bits(runtime.to_host(cache.v[block, 0]), expected[0 if block == last else 1])
    for untouched in (0, 1, 2, last - 2):
        assert not runtime.to_host(cache.k[untouched]).any()
