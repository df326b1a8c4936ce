"""Paged attention against the float64 reference, with NaN in every slot that holds no token."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.engine.batch import Batch, GroupTables
from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.numpy_ops import NumpyOps
from tests import reference
from tests.ops.cpu_kernels import CPU_KERNELS, cpu_ops
from tests.ops.sampling_oracle import rows

F32 = NDArray[np.float32]

# (tokens with KV before the step, new tokens): what a sequence brings to the batch.
DECODES = [(n, 1) for n in (0, 1, 30, 31, 32, 62, 63, 64, 65, 126, 127, 128, 299)]
CHUNKS = [(0, 3), (0, 37), (5, 32), (60, 5), (63, 2), (64, 33), (127, 65), (255, 45)]
MIXED = [(300, 1), (0, 7), (63, 1), (31, 33), (0, 1), (128, 1), (64, 64)]


@dataclass(frozen=True)
class Case:
    """A step after its KV was written: query, key and value of the new tokens are in `qkv`."""

    spec: KVCacheSpec
    batch: Batch
    cache: KVCache
    qkv: F32  # [T, (Hq + 2 Hkv) D]
    keys: list[F32]  # of each sequence: [context, Hkv, D]
    values: list[F32]

    @property
    def num_heads(self) -> int:
        return int(self.qkv.shape[1]) // self.spec.k_dim - 2 * self.spec.num_kv_heads

    def tokens_of(self, sequence: int) -> slice:
        start = self.batch.query_start
        return slice(int(start[sequence]), int(start[sequence + 1]))


def make_batch(
    sequences: Sequence[tuple[int, int]],
    block_table: NDArray[np.int32],
    block_size: int,
    copies: Any = (),
) -> Batch:
    """A batch of sequences (tokens before, new tokens) that lie in the blocks of the table."""
    before, num_new = np.array(sequences, np.int32).T
    owner = np.repeat(np.arange(len(sequences)), num_new)
    query_start = np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32)
    positions = np.concatenate([b + np.arange(n) for b, n in sequences]).astype(np.int32)
    blocks = block_table[owner, positions // block_size].astype(np.int64)
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        query_start=query_start,
        context_len=before + num_new,
        groups=(GroupTables(block_table, blocks * block_size + positions % block_size),),
        copies=np.array(copies, np.int32).reshape(-1, 2),
        logits_tokens=np.zeros(0, np.int32),
        sampling=rows(num=0),
        prompt_logprobs=None,
    )


def make_case(
    sequences: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    block_size: int = 16,
    fill: float = np.nan,
    seed: int = 0,
) -> Case:
    """Random sequences in randomly placed blocks; all other slots and blocks hold `fill`."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    lengths = [before + new for before, new in sequences]
    num_blocks = [-(-length // block_size) for length in lengths]
    pool = sum(num_blocks) + 5
    free = rng.permutation(pool).astype(np.int32)
    table = np.full((len(sequences), max(num_blocks)), -1, np.int32)
    spec = KVCacheSpec(0, num_kv_heads, head_dim, head_dim, "float32", block_size)
    shape = (pool, num_kv_heads, block_size, head_dim)
    cache = KVCache(spec, np.full(shape, fill, np.float32), np.full(shape, fill, np.float32))
    keys, values, rows = [], [], []
    for i, (before, new) in enumerate(sequences):
        table[i, : num_blocks[i]], free = free[: num_blocks[i]], free[num_blocks[i] :]
        k, v = rng.standard_normal((2, lengths[i], num_kv_heads, head_dim), np.float32)
        slots = np.arange(lengths[i])
        blocks = table[i, slots // block_size]
        cache.k[blocks, :, slots % block_size] = k
        cache.v[blocks, :, slots % block_size] = v
        q = rng.standard_normal((new, num_heads * head_dim), np.float32)
        rows.append(np.hstack([q, k[before:].reshape(new, -1), v[before:].reshape(new, -1)]))
        keys.append(k)
        values.append(v)
    return Case(
        spec, make_batch(sequences, table, block_size), cache, np.vstack(rows), keys, values
    )


@pytest.fixture(params=CPU_KERNELS, autouse=True)
def ops(request: pytest.FixtureRequest) -> Iterator[NumpyOps]:
    """What computes; `attend` finds it."""
    with cpu_ops(request.param) as made:
        _present.append(made)
        yield made
        _present.pop()


_present: list[NumpyOps] = []


def attend(case: Case, *, scale: float | None = None) -> F32:
    """What the op makes of the case: [T, Hq D]."""
    ops = _present[-1]
    out = np.full((len(case.qkv), case.num_heads * case.spec.v_dim), np.nan, np.float32)
    scale = case.spec.k_dim**-0.5 if scale is None else scale
    ops.paged_attention(ops.begin_step(case.batch), out, case.qkv.copy(), case.cache, scale)
    return out


def check(case: Case, out: F32, *, scale: float | None = None) -> None:
    """Every row within 1e-5 of the weighted sum of absolute values."""
    head_dim = case.spec.k_dim
    for i, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        tokens = case.tokens_of(i)
        q = case.qkv[tokens, : case.num_heads * head_dim].reshape(-1, case.num_heads, head_dim)
        start = len(keys) - len(q)
        expected = reference.attention(q, keys, values, q_start=start, scale=scale)
        bound = reference.attention(q, keys, np.abs(values), q_start=start, scale=scale)
        error = np.abs(out[tokens].reshape(expected.shape) - expected)
        assert (error <= 1e-5 * bound).all(), f"sequence {i}: {np.max(error / bound)}"


@pytest.mark.parametrize("sequences", [DECODES, CHUNKS, MIXED], ids=["decodes", "chunks", "mixed"])
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64, 128])
def test_every_block_size(sequences: list[tuple[int, int]], block_size: int) -> None:
    case = make_case(sequences, block_size=block_size, seed=block_size)
    check(case, attend(case))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (7, 7), (6, 2), (9, 3), (5, 1)])
def test_every_grouping_of_heads(heads: tuple[int, int]) -> None:
    case = make_case(MIXED, heads=heads, seed=heads[0])
    check(case, attend(case))


@pytest.mark.parametrize("head_dim", [16, 32, 40, 64, 72, 80, 96, 100, 112, 128, 160, 192, 256])
def test_every_head_dim(head_dim: int) -> None:
    case = make_case([(129, 1), (0, 1), (63, 2), (30, 37)], head_dim=head_dim, heads=(4, 2))
    check(case, attend(case))


@pytest.mark.parametrize("length", [1, 3, 7, 31, 32, 33, 37, 63, 64, 65, 127, 128, 129, 300])
def test_whole_prompts(length: int) -> None:
    case = make_case([(0, length)], heads=(3, 1), head_dim=32)
    check(case, attend(case))


def test_long_context() -> None:
    case = make_case([(2047, 1), (1990, 3)], block_size=32)
    check(case, attend(case))


@pytest.mark.parametrize("scale", [0.0, 0.3, 8.0])
def test_scale(scale: float) -> None:
    """With 8, scores reach hundreds: the softmax must subtract the maximum first."""
    case = make_case(MIXED)
    out = attend(case, scale=scale)
    if scale < 8:
        check(case, out, scale=scale)
        return
    assert np.isfinite(out).all()
    q = case.qkv[0, :96].reshape(1, 6, 16)
    expected = reference.attention(q, case.keys[0], case.values[0], q_start=300, scale=scale)
    np.testing.assert_allclose(out[0].reshape(1, 6, 16), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("context", [1, 15, 16, 17])
@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 3e38], ids=str)
def test_unused_slots_may_hold_anything(context: int, fill: float) -> None:
    """What a freed block was left with, or memory that was never written, reaches no output."""
    for sequences in ([(context - 1, 1)], [(0, context)], [(context, 1), (0, 40), (70, 2)]):
        case = make_case(sequences, fill=fill)
        check(case, attend(case))


@pytest.mark.parametrize("scratch_bytes", [1, 60_000, 300_000, 2_000_000])
def test_work_in_several_groups(scratch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items that do not fit into the scratch memory together are merged group by group."""
    monkeypatch.setattr("cupaged.ops.numpy_attention.SCRATCH_BYTES", scratch_bytes)
    for sequences in (DECODES, CHUNKS, MIXED):
        case = make_case(sequences, heads=(4, 2), head_dim=80)
        check(case, attend(case))


def test_scratch_is_reused_by_smaller_and_larger_steps() -> None:
    for sequences in ([(0, 3)], MIXED, [(5, 1)], CHUNKS, [(299, 1), (1, 1)], MIXED):
        case = make_case(sequences)
        check(case, attend(case))


def alone(case: Case, sequence: int) -> Case:
    """Only this sequence of the batch; its blocks stay where they are."""
    tokens, table = case.tokens_of(sequence), case.batch.groups[0].block_table
    context, new = int(case.batch.context_len[sequence]), tokens.stop - tokens.start
    batch = make_batch([(context - new, new)], table[sequence : sequence + 1], case.spec.block_size)
    keys, values = [case.keys[sequence]], [case.values[sequence]]
    return replace(case, batch=batch, qkv=case.qkv[tokens], keys=keys, values=values)


@pytest.mark.parametrize("sequences", [DECODES, CHUNKS, MIXED], ids=["decodes", "chunks", "mixed"])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
def test_alone_and_in_a_batch_are_equal_bit_by_bit(
    sequences: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    """The batched products are one product an item, so the company changes nothing."""
    case = make_case(sequences, heads=heads, head_dim=64)
    together = attend(case)
    for i in range(len(sequences)):
        np.testing.assert_array_equal(attend(alone(case, i)), together[case.tokens_of(i)])


def test_placement_of_blocks_changes_no_bit() -> None:
    case = make_case(MIXED, block_size=8)
    table = case.batch.groups[0].block_table
    pool = len(case.cache.k)
    moved = np.random.default_rng(1).permutation(pool).astype(np.int32)
    new_table = np.where(table < 0, table, moved[table]).astype(np.int32)
    cache = KVCache(case.spec, np.empty_like(case.cache.k), np.empty_like(case.cache.v))
    cache.k[moved], cache.v[moved] = case.cache.k, case.cache.v
    other = replace(case, batch=make_batch(MIXED, new_table, 8), cache=cache)
    np.testing.assert_array_equal(attend(other), attend(case))


def test_wider_block_table_changes_nothing() -> None:
    case = make_case(MIXED)
    spare = np.full((len(MIXED), 40), -1, np.int32)
    table = np.hstack([case.batch.groups[0].block_table, spare])
    wider = replace(case, batch=make_batch(MIXED, table, 16))
    np.testing.assert_array_equal(attend(wider), attend(case))


def test_nan_of_one_sequence_stays_there() -> None:
    case = make_case(MIXED)
    clean = attend(case)
    table = case.batch.groups[0].block_table
    case.cache.k[table[1, 0], :, 2] = np.nan
    case.cache.v[table[5, 3], :, 0] = np.nan
    spoilt = attend(case)
    for i in range(len(MIXED)):
        tokens = case.tokens_of(i)
        if i in (1, 5):
            assert np.isnan(spoilt[tokens]).any()
        else:
            np.testing.assert_array_equal(spoilt[tokens], clean[tokens])
    np.testing.assert_array_equal(spoilt[1:3], clean[1:3])  # before the key that is NaN


def test_tokens_of_padding_belong_to_no_sequence() -> None:
    """Rows past the last sequence's tokens, with slot -1, disturb nobody."""
    case = make_case(MIXED)
    expected, (tables,) = attend(case), case.batch.groups
    slots = np.concatenate([tables.slot_mapping, [-1, -1, -1]])
    batch = replace(
        case.batch,
        token_ids=np.zeros(len(slots), np.int32),
        positions=np.concatenate([case.batch.positions, [0, 0, 0]]).astype(np.int32),
        groups=(GroupTables(tables.block_table, slots),),
    )
    qkv = np.vstack([case.qkv, np.full((3, case.qkv.shape[1]), np.nan, np.float32)])
    out = attend(replace(case, batch=batch, qkv=qkv))
    np.testing.assert_array_equal(out[:-3], expected)


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is reserved, not taken")
def test_offsets_beyond_32_bits() -> None:
    """The last block of a pool whose offsets, in elements, pass 2^31."""
    spec = KVCacheSpec(0, 2, 64, 64, "float32", 16)
    num_blocks = 2**31 // (2 * 16 * 64) + 3
    size, shape = num_blocks * 2 * 16 * 64 * 4, (num_blocks, 2, 16, 64)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    k, v = (
        np.frombuffer(mmap.mmap(-1, size, flags=flags), np.float32).reshape(shape) for _ in "kv"
    )
    small = make_case([(16, 3), (2, 1)], heads=(4, 2), head_dim=64)
    table = small.batch.groups[0].block_table
    far = np.where(table < 0, table, num_blocks - 1 - table).astype(np.int32)
    for i in range(len(small.cache.k)):
        k[num_blocks - 1 - i], v[num_blocks - 1 - i] = small.cache.k[i], small.cache.v[i]
    batch: Any = make_batch([(16, 3), (2, 1)], far, 16)
    out = attend(replace(small, spec=spec, batch=batch, cache=KVCache(spec, k, v)))
    np.testing.assert_array_equal(out, attend(small))
