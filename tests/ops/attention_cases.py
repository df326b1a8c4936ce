"""Sequences with a paged cache on a device, and their attention, for the tests of attention.

Everything that is not to be read is NaN or points nowhere: slots behind a sequence's last position
and blocks of nobody, keys and values within qkv, the padding of the block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch, GroupTables
from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.cuda_attention import CudaAttention
from cupaged.ops.cuda_step import upload_step
from cupaged.runtime.staging import StagingBuffer
from tests.ops.kernel_arrays import NUMPY, Guarded, close, normal
from tests.ops.reference_attention import attention
from tests.ops.sampling_oracle import rows


class Sequences:
    """Whole sequences: q [length, Hq, D], k and v [length, Hkv, D] of each, all in one cache."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: tuple[int, int],
        head_dim: int,
        dtype: str,
        *,
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        self.lengths, self.heads, self.head_dim, self.dtype = lengths, heads, head_dim, dtype
        self.block_size = block_size
        num_q, num_kv = heads
        self.q, self.k, self.v = (
            [normal(seed + 31 * i + j, (n, h, head_dim), dtype) for i, n in enumerate(lengths)]
            for j, h in enumerate((num_q, num_kv, num_kv))
        )
        self.scale = head_dim**-0.5
        self.sinks: NDArray[Any] | None = None
        num_blocks = [-(-n // block_size) for n in lengths]
        order = np.random.default_rng(seed).permutation(sum(num_blocks) + 2)  # two are nobody's
        ends = np.cumsum(num_blocks)
        self.blocks = [order[end - n : end] for n, end in zip(num_blocks, ends, strict=True)]
        self.num_cache_blocks = len(order)

    @property
    def spec(self) -> KVCacheSpec:
        """Of the cache."""
        num_kv, dim = self.heads[1], self.head_dim
        return KVCacheSpec(0, num_kv, dim, dim, self.dtype, self.block_size)

    def caches(self, known: Sequence[int]) -> list[NDArray[Any]]:
        """Keys and values of the first `known` positions of each sequence; all else is NaN."""
        shape = (self.num_cache_blocks, self.heads[1], self.block_size, self.head_dim)
        caches = [np.full(shape, np.nan, NUMPY[self.dtype]) for _ in range(2)]
        for cache, sources in zip(caches, (self.k, self.v), strict=True):
            for source, blocks, count in zip(sources, self.blocks, known, strict=True):
                for p in range(count):
                    cache[blocks[p // self.block_size], :, p % self.block_size] = source[p]
        return caches

    def attend(
        self,
        ops: CudaAttention,
        parts: Sequence[tuple[int, int, int]],
        *,
        window: int = 0,
        softcap: float = 0.0,
        cache: KVCache | None = None,
    ) -> list[NDArray[Any]]:
        """One step: tokens [start, stop) of sequence i for each (i, start, stop): [n, Hq, D] each.

        Unless a cache is given, it holds each sequence up to the largest `stop`.
        """
        num_q, num_kv = self.heads
        if cache is None:
            known = [max((e for i, _, e in parts if i == s), default=0) for s in range(len(self.q))]
            k, v = (Guarded.of(ops.runtime, c) for c in self.caches(known))
            cache = KVCache(self.spec, k.array, v.array)
        new = [self.q[i][start:stop] for i, start, stop in parts]
        num_tokens = sum(map(len, new))
        numpy_dtype = NUMPY[self.dtype]
        qkv = np.full((num_tokens, num_q + 2 * num_kv, self.head_dim), np.nan, numpy_dtype)
        qkv[:, :num_q] = np.concatenate(new)
        batch = self.batch(parts)
        out = Guarded(ops.runtime, (num_tokens, num_q * self.head_dim), numpy_dtype)
        sinks = None if self.sinks is None else Guarded.of(ops.runtime, self.sinks).array
        step = upload_step(batch, StagingBuffer(ops.runtime, 1 << 12))
        on_device = Guarded.of(ops.runtime, qkv.reshape(num_tokens, -1))
        ops.paged_attention(
            step, out.array, on_device.array, cache, self.scale,
            window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        results = out.read().reshape(num_tokens, num_q, self.head_dim)
        return np.split(results, batch.query_start[1:-1])

    def check(
        self,
        ops: CudaAttention,
        parts: Sequence[tuple[int, int, int]],
        *,
        window: int = 0,
        softcap: float = 0.0,
        most: int = 40,
    ) -> None:
        """The step's results are close to the reference: the last `most` tokens of each part."""
        results = self.attend(ops, parts, window=window, softcap=softcap)
        for (i, start, stop), got in zip(parts, results, strict=True):
            first = max(start, stop - most)
            expected, bound = attention(
                self.q[i][first:stop], self.k[i][:stop], self.v[i][:stop],
                self.scale, window, softcap, self.sinks,
            )  # fmt: skip
            close(got[first - start :], expected, bound, self.dtype)

    def batch(self, parts: Sequence[tuple[int, int, int]]) -> Batch:
        """What attention reads of such a step."""
        query_start = np.cumsum([0, *(stop - start for _, start, stop in parts)], dtype=np.int32)
        width = max(len(self.blocks[i]) for i, _, _ in parts) + 1
        table = np.full((len(parts), width), -1, np.int32)
        for row, (i, _, stop) in zip(table, parts, strict=True):
            used = -(-stop // self.block_size)
            row[:used] = self.blocks[i][:used]
        nothing = np.zeros(int(query_start[-1]), np.int32)
        return Batch(
            token_ids=nothing,
            positions=nothing,
            query_start=query_start,
            context_len=np.array([stop for _, _, stop in parts], np.int32),
            groups=(GroupTables(table, nothing.astype(np.int64)),),
            copies=np.zeros((0, 2), np.int32),
            logits_tokens=nothing[:0],
            sampling=rows(num=0),
            prompt_logprobs=None,
        )
