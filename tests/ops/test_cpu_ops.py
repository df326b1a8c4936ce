"""The operations of the `cpu` device, one by one and in all forms, against the float64 reference.

Outputs are NaN before every call, so that a value which is not written shows. Attention and
sampling have files of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.engine.batch import GroupTables
from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.runtime.protocol import DeviceMemoryError
from tests import reference
from tests.ops.cpu_kernels import CPU_KERNELS, cpu_ops
from tests.ops.test_attention import make_batch

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

TOKENS = [0, 1, 3, 7, 37, 64]
TOLERANCE = 1e-5


@pytest.fixture(params=CPU_KERNELS)
def ops(request: pytest.FixtureRequest) -> Iterator[NumpyOps]:
    with cpu_ops(request.param) as made:
        yield made


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def poisoned(*shape: int) -> F32:
    return np.full(shape, np.nan, np.float32)


def check(out: F32, expected: F64, bound: F64) -> None:
    """|out - expected| <= 1e-5 * bound, where `bound` sums the absolute values of the terms."""
    assert out.shape == expected.shape
    assert (np.abs(out - expected) <= TOLERANCE * bound + 1e-37).all()


# ---- memory and weights --------------------------------------------------------------------------


def test_arrays_have_the_shapes_asked_for(ops: NumpyOps) -> None:
    assert ops.empty((3, 5), np.float32).shape == (3, 5)
    assert ops.empty((2,), np.int32).dtype == np.int32
    spec = KVCacheSpec(0, 3, 64, 64, "float32", 8)
    cache = ops.empty_kv_cache(spec, 7)
    assert cache.k.shape == cache.v.shape == (7, 3, 8, 64)
    assert cache.k.nbytes + cache.v.nbytes == 7 * spec.bytes_per_block
    vector = normal(0, 5)
    np.testing.assert_array_equal(ops.asarray(vector), vector)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_blocks_take_memory_when_they_are_first_written(ops: NumpyOps) -> None:
    spec, layers = KVCacheSpec(0, 3, 64, 64, "float32", 16), 16
    caches = [ops.empty_kv_cache(spec, 20_000) for _ in range(layers)]  # 236 MB of keys each
    before = resident_bytes()
    for cache in caches:
        cache.k[10_000] = cache.v[10_000] = 1.0
    pages = -(-spec.bytes_per_block // 4096) + 2
    assert resident_bytes() - before < layers * pages * 4096 + 2**20


def test_blocks_that_the_memory_does_not_hold(ops: NumpyOps) -> None:
    for num_blocks in (2**40, 2**60):
        with pytest.raises(DeviceMemoryError, match=rf"no memory for {num_blocks * 8 * 64 * 4} by"):
            ops.empty_kv_cache(KVCacheSpec(0, 1, 64, 64, "float32", 8), num_blocks)


@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 96, 128])
def test_rotary_table(head_dim: int, ops: NumpyOps) -> None:
    half = head_dim // 2
    frequencies = 10000.0 ** -(np.arange(half) / half)
    table = ops.rotary_table(frequencies, 5000)
    for position in (0, 1, 17, 4999):
        ones = reference.rope(np.ones((1, 1, head_dim)), [position], 10000.0)[0, 0]
        cos, sin = table[0, position], table[1, position]
        np.testing.assert_allclose(cos - sin, ones[:half], rtol=0, atol=2e-7)
        np.testing.assert_allclose(cos + sin, ones[half:], rtol=0, atol=2e-7)


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_embedding_and_gather_rows(num_tokens: int, ops: NumpyOps) -> None:
    table = normal(1, 37, 65)
    ids = np.random.default_rng(2).integers(0, 37, num_tokens).astype(np.int32)
    ids[:2] = [36, 0][: len(ids[:2])]
    out = poisoned(num_tokens, 65)
    ops.embedding(out, ids, ops.pack_weight(table))
    np.testing.assert_array_equal(out, reference.embedding(ids, table))
    out = poisoned(num_tokens, 65)
    ops.gather_rows(out, table, ids)
    np.testing.assert_array_equal(out, table[ids])


def test_a_packed_weight_is_embedding_and_head_at_once(ops: NumpyOps) -> None:
    table = normal(1, 37, 16)
    packed = ops.pack_weight(table)
    hidden, logits = poisoned(3, 16), poisoned(3, 37)
    ops.embedding(hidden, np.array([5, 0, 36], np.int32), packed)
    ops.linear(logits, hidden, packed)
    check(logits, reference.linear(hidden, table), np.abs(hidden) @ np.abs(table).T)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (3, 7), (37, 65), (300, 193)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(
    num_tokens: int, out_features: int, in_features: int, with_bias: bool, ops: NumpyOps
) -> None:
    x, weight = normal(3, num_tokens, in_features), normal(4, out_features, in_features)
    bias = normal(5, out_features) if with_bias else None
    out = poisoned(num_tokens, out_features)
    ops.linear(out, x, ops.pack_weight(weight, bias))
    bound = reference.linear(np.abs(x), np.abs(weight), None if bias is None else np.abs(bias))
    check(out, reference.linear(x, weight, bias), bound)


# ---- norms and activation ------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("size", [1, 3, 64, 193])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rms_norm(num_tokens: int, size: int, scale: float, ops: NumpyOps) -> None:
    x, weight = normal(6, num_tokens, size) * np.float32(scale), normal(7, size)
    x[1:2] = 0.0
    out, before = poisoned(num_tokens, size), x.copy()
    ops.rms_norm(out, x, weight, 1e-6)
    expected = reference.rms_norm(x, weight, 1e-6)
    check(out, expected, np.abs(expected))
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_add_rms_norm(num_tokens: int, ops: NumpyOps) -> None:
    residual, x, weight = normal(8, num_tokens, 65), normal(9, num_tokens, 65), normal(10, 65)
    total = residual.astype(np.float64) + x
    out = poisoned(num_tokens, 65)
    ops.add_rms_norm(out, residual, x, weight, 1e-5)
    np.testing.assert_array_equal(residual, total.astype(np.float32))
    expected = reference.rms_norm(residual, weight, 1e-5)
    check(out, expected, np.abs(expected))


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("size", [1, 7, 80])
def test_silu_mul(num_tokens: int, size: int, ops: NumpyOps) -> None:
    gate, up = 4 * normal(11, num_tokens, size), normal(12, num_tokens, size)
    out = poisoned(num_tokens, size)
    ops.silu_mul(out, np.hstack([gate, up]))
    expected = reference.silu_mul(gate, up)
    check(out, expected, np.abs(expected))


def test_silu_mul_of_extremes(ops: NumpyOps) -> None:
    """exp(-gate) passes what float32 holds; the product is then 0, never NaN."""
    gate = np.array([[0.0, -0.0, 1e-30, 30.0, 88.0, 1e4, 3e38, -30.0, -87.0, -89.0, -1e4, -3e38]])
    x = np.hstack([gate, np.ones_like(gate)]).astype(np.float32)
    out = poisoned(*gate.shape)
    ops.silu_mul(out, x)
    expected = reference.silu_mul(x[:, : gate.size], np.ones_like(gate))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-36)


def test_all_reduce_on_one_device(ops: NumpyOps) -> None:
    x = normal(13, 3, 5)
    before = x.copy()
    ops.all_reduce(x)
    np.testing.assert_array_equal(x, before)


# ---- KV cache ------------------------------------------------------------------------------------

MIXED = [(300, 1), (0, 7), (63, 1), (0, 1), (15, 37)]


def table_for(sequences: Sequence[tuple[int, int]], block_size: int) -> NDArray[np.int32]:
    """Blocks in random places of a pool that has 4 more."""
    lengths = [before + new for before, new in sequences]
    counts = [-(-length // block_size) for length in lengths]
    free = iter(np.random.default_rng(block_size).permutation(sum(counts) + 4))
    table = np.full((len(lengths), max(counts)), -1, np.int32)
    for row, n in enumerate(counts):
        table[row, :n] = [next(free) for _ in range(n)]
    return table


@pytest.mark.parametrize("head_dim", [2, 16, 32, 64, 80, 96, 128])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("block_size", [4, 16, 128])
def test_rope_and_cache(
    head_dim: int, heads: tuple[int, int], block_size: int, ops: NumpyOps
) -> None:
    num_heads, num_kv_heads = heads
    table = table_for(MIXED, block_size)
    batch = make_batch(MIXED, table, block_size)
    slots = batch.groups[0].slot_mapping.copy()
    slots[[2, 5, -1]] = -1  # padding
    batch = replace(batch, groups=(GroupTables(table, slots),))
    qkv = normal(14, batch.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    heads_before = qkv.reshape(batch.num_tokens, -1, head_dim).copy()
    spec = KVCacheSpec(0, num_kv_heads, head_dim, head_dim, "float32", block_size)
    shape = (int(table.max()) + 5, num_kv_heads, block_size, head_dim)
    cache = KVCache(spec, poisoned(*shape), poisoned(*shape))
    frequencies = 500000.0 ** -(np.arange(head_dim // 2) / (head_dim // 2))
    ops.rope_and_cache(ops.begin_step(batch), qkv, ops.rotary_table(frequencies, 400), cache)

    heads_after = qkv.reshape(heads_before.shape)
    num_turned = num_heads + num_kv_heads
    turned = heads_before[:, :num_turned]
    expected = reference.rope(turned, batch.positions, 500000.0)
    pair = np.abs(turned[..., : head_dim // 2]) + np.abs(turned[..., head_dim // 2 :])
    check(heads_after[:, :num_turned], expected, np.concatenate([pair, pair], -1, dtype=np.float64))
    np.testing.assert_array_equal(heads_after[:, num_turned:], heads_before[:, num_turned:])

    k, v = poisoned(*shape), poisoned(*shape)
    for token in np.flatnonzero(slots >= 0):
        block, offset = divmod(int(slots[token]), block_size)
        k[block, :, offset] = heads_after[token, num_heads:num_turned]
        v[block, :, offset] = heads_before[token, num_turned:]
    np.testing.assert_array_equal(cache.k, k)
    np.testing.assert_array_equal(cache.v, v)


def test_a_step_of_padding_writes_nothing(ops: NumpyOps) -> None:
    batch = make_batch([(0, 3)], np.zeros((1, 1), np.int32), 16)
    slots = np.full(3, -1, np.int64)
    batch = replace(batch, groups=(GroupTables(batch.groups[0].block_table, slots),))
    spec = KVCacheSpec(0, 1, 4, 4, "float32", 16)
    cache = KVCache(spec, poisoned(2, 1, 16, 4), poisoned(2, 1, 16, 4))
    table = ops.rotary_table(np.ones(2), 8)
    ops.rope_and_cache(ops.begin_step(batch), normal(15, 3, 12), table, cache)
    assert np.isnan(cache.k).all() and np.isnan(cache.v).all()


@pytest.mark.parametrize("copies", [[], [(3, 0)], [(5, 1), (5, 2), (6, 7)]])
def test_copy_blocks(copies: list[tuple[int, int]], ops: NumpyOps) -> None:
    """In every layer, whatever its number of heads; NaN in unused slots comes along."""
    caches, expected = [], []
    for layer, num_kv_heads in enumerate((1, 3)):
        spec = KVCacheSpec(0, num_kv_heads, 4, 4, "float32", 8)
        k, v = normal(layer, 2, 9, num_kv_heads, 8, 4)
        k[5, :, 6:] = v[5, :, 6:] = np.nan
        caches.append(KVCache(spec, k, v))
        expected.append((k.copy(), v.copy()))
    step = ops.begin_step(make_batch([(0, 1)], np.zeros((1, 1), np.int32), 8, copies))
    ops.copy_blocks(caches, step)
    for cache, (k, v) in zip(caches, expected, strict=True):
        for source, destination in copies:
            k[destination], v[destination] = k[source], v[source]
        np.testing.assert_array_equal(cache.k, k)
        np.testing.assert_array_equal(cache.v, v)
