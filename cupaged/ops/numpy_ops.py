"""The operations on NumPy arrays: the `cpu` device.

Matrix products go to the BLAS NumPy was built with; everything is float32. No operation loops over
tokens, heads or sequences in Python. Scratch memory is kept from step to step and only grows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch
from cupaged.engine.sampling_batch import SamplingBatch
from cupaged.ops import KVCache, KVCacheSpec, StepLimits
from cupaged.ops.host_pages import empty_pages
from cupaged.ops.numpy_attention import Scratch, attend
from cupaged.ops.numpy_sampling import logprobs, sample
from cupaged.ops.numpy_step import NumpyDownload, NumpyStep

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NumpyWeight:
    """matrix: float32 [out_features, in_features]; bias: float32 [out_features] or None."""

    matrix: FloatArray
    bias: FloatArray | None


class NumpyOps:
    """`Ops` on NumPy. See there for what each operation means."""

    dtype = np.dtype(np.float32)
    kept_types: Collection[str] = ()

    def __init__(self) -> None:
        self._scratch = Scratch()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An uninitialised array."""
        return np.empty(shape, dtype)

    def empty_kv_cache(self, spec: KVCacheSpec, num_blocks: int) -> KVCache:
        """The blocks of one layer; the system gives their memory when they are first written.

        Raises:
            DeviceMemoryError: it has not so much.
        """
        shape = (num_blocks, spec.num_kv_heads, spec.block_size)
        return KVCache(spec, empty_pages((*shape, spec.k_dim)), empty_pages((*shape, spec.v_dim)))

    def empty_host_cache(self, spec: KVCacheSpec, num_blocks: int) -> KVCache:
        """Blocks like all others: there is one memory."""
        return self.empty_kv_cache(spec, num_blocks)

    def asarray(self, host: NDArray[Any]) -> NDArray[Any]:
        """The array itself."""
        return host

    def pack_weight(self, weight: FloatArray, bias: FloatArray | None = None) -> NumpyWeight:
        """Keep the arrays as they are: BLAS reads the transpose at the same speed."""
        return NumpyWeight(weight, bias)

    def weight_bytes(
        self, out_features: int, in_features: int, has_bias: bool, stored: str | None = None
    ) -> int:
        """Of float32."""
        return 4 * out_features * (in_features + has_bias)

    def rotary_table(
        self, inverse_frequencies: NDArray[np.float64], max_positions: int, scale: float = 1.0
    ) -> FloatArray:
        """float32 [2, max_positions, D / 2]: cosines, then sines, computed in float64."""
        angles = np.outer(np.arange(max_positions, dtype=np.float64), inverse_frequencies)
        table = np.empty((2, *angles.shape), np.float32)
        np.multiply(np.cos(angles), scale, out=table[0], casting="same_kind")
        np.multiply(np.sin(angles, out=angles), scale, out=table[1], casting="same_kind")
        return table

    def buffer_bytes(self, limits: StepLimits, products: Sequence[tuple[int, int]]) -> int:
        """Scratch memory grows with the steps; it is small and not counted."""
        return 0

    def reserve(self, limits: StepLimits) -> None:
        """Nothing."""

    def warm_up_counts(self, max_tokens: int) -> tuple[int, ...]:
        """There are no kernels to load."""
        return ()

    def begin_step(self, batch: Batch) -> NumpyStep:
        """Nothing to upload."""
        return NumpyStep(batch)

    def copy_blocks(self, caches: Sequence[KVCache], step: NumpyStep) -> None:
        """Whole blocks, layer by layer."""
        _copy_blocks(caches, caches, step.batch.copies)

    def swap_out(self, caches: Sequence[KVCache], host: Sequence[KVCache], step: NumpyStep) -> None:
        """Whole blocks, layer by layer."""
        _copy_blocks(caches, host, step.batch.swap_out)

    def swap_in(self, caches: Sequence[KVCache], host: Sequence[KVCache], step: NumpyStep) -> None:
        """Whole blocks, layer by layer."""
        _copy_blocks(host, caches, step.batch.swap_in)

    def write_blocks(self, cache: KVCache, blocks: NDArray[np.int32], bits: int) -> None:
        """Through a view of the same memory as integers."""
        for pages in (cache.k, cache.v):
            pages.view(np.uint32)[blocks] = bits

    def read_blocks(
        self, cache: KVCache, blocks: NDArray[np.int32]
    ) -> tuple[FloatArray, FloatArray]:
        """Copies."""
        return cache.k[blocks], cache.v[blocks]

    def embedding(self, out: FloatArray, token_ids: NDArray[np.int32], table: NumpyWeight) -> None:
        """Rows of the table."""
        np.take(table.matrix, token_ids, axis=0, out=out, mode="clip")

    def linear(self, out: FloatArray, x: FloatArray, weight: NumpyWeight) -> None:
        """One BLAS product."""
        np.matmul(x, weight.matrix.T, out=out)
        if weight.bias is not None:
            np.add(out, weight.bias, out=out)

    def rms_norm(self, out: FloatArray, x: FloatArray, weight: FloatArray, eps: float) -> None:
        """Row sums of squares in one pass, without a temporary of x's size."""
        mean = np.einsum("th,th->t", x, x) / np.float32(x.shape[1])
        np.multiply(x, (1.0 / np.sqrt(mean + np.float32(eps)))[:, None], out=out)
        np.multiply(out, weight, out=out)

    def add_rms_norm(
        self, out: FloatArray, residual: FloatArray, x: FloatArray, weight: FloatArray, eps: float
    ) -> None:
        """The sum stays in `residual`."""
        np.add(residual, x, out=residual)
        self.rms_norm(out, residual, weight, eps)

    def silu_mul(self, out: FloatArray, gate_up: FloatArray) -> None:
        """gate / (1 + exp(-gate)) * up; exp may overflow to inf, which gives the right 0."""
        size = out.shape[1]
        gate, up = gate_up[:, :size], gate_up[:, size:]
        with np.errstate(over="ignore"):
            np.exp(np.negative(gate, out=out), out=out)
        np.add(out, 1.0, out=out)
        np.divide(gate, out, out=out)
        np.multiply(out, up, out=out)

    def rope_and_cache(
        self, step: NumpyStep, qkv: FloatArray, table: FloatArray, cache: KVCache
    ) -> None:
        """Turn q and k where they lie, then scatter k and v."""
        spec, num_tokens = cache.spec, len(qkv)
        kv_size = spec.num_kv_heads * spec.k_dim
        num_turned = qkv.shape[1] - spec.num_kv_heads * spec.v_dim
        halves = qkv[:, :num_turned].reshape(num_tokens, -1, 2, spec.k_dim // 2)
        real, imaginary = halves[:, :, 0], halves[:, :, 1]
        cos, sin = step.rotation(table)
        carried = np.multiply(real, sin, out=self._scratch.take("rope_real", real.shape))
        lost = np.multiply(imaginary, sin, out=self._scratch.take("rope_imag", real.shape))
        np.multiply(real, cos, out=real)
        np.subtract(real, lost, out=real)
        np.multiply(imaginary, cos, out=imaginary)
        np.add(imaginary, carried, out=imaginary)
        plan = step.plan(spec)
        k = qkv[:, num_turned - kv_size : num_turned].reshape(num_tokens, -1, spec.k_dim)
        v = qkv[:, num_turned:].reshape(num_tokens, -1, spec.v_dim)
        cache.k[plan.write_blocks, :, plan.write_offsets] = k[plan.written]
        cache.v[plan.write_blocks, :, plan.write_offsets] = v[plan.written]

    def paged_attention(
        self, step: NumpyStep, out: FloatArray, qkv: FloatArray, cache: KVCache, scale: float
    ) -> None:
        """Tiles of queries against tiles of blocks; see `numpy_attention`."""
        attend(step.plan(cache.spec), out, qkv, cache, scale, self._scratch)

    def gather_rows(self, out: FloatArray, x: FloatArray, rows: NDArray[np.int32]) -> None:
        """Rows of x."""
        np.take(x, rows, axis=0, out=out, mode="clip")

    def all_reduce(self, x: FloatArray) -> None:
        """One device: nothing to add."""

    def sample(self, logits: FloatArray, sampling: SamplingBatch) -> NDArray[np.int32]:
        """See `numpy_sampling`."""
        return sample(logits, sampling)

    def logprobs(
        self,
        logits: FloatArray,
        token_ids: NDArray[np.int32],
        count: int,
        which: NDArray[np.integer[Any]] | None = None,
    ) -> tuple[NDArray[np.int32], FloatArray, NDArray[np.int32]]:
        """See `numpy_sampling`."""
        given = token_ids if which is None else token_ids[which]
        return logprobs(logits, np.clip(given, 0, logits.shape[1] - 1), count)

    def download(self, arrays: Sequence[NDArray[Any]]) -> NumpyDownload:
        """Nothing to copy."""
        return NumpyDownload(arrays)


def _copy_blocks(
    sources: Sequence[KVCache], destinations: Sequence[KVCache], pairs: NDArray[np.int32]
) -> None:
    """pairs: int32 [n, 2], (source block, destination block)."""
    source, destination = pairs.T
    for old, new in zip(sources, destinations, strict=True):
        new.k[destination] = old.k[source]
        new.v[destination] = old.v[source]
