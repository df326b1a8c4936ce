"""The operations that models are written against: one signature and one meaning for every device.

Each operation writes into `out`, which its caller owns and which never overlaps an input unless the
docstring says so. Arrays belong to the device: NumPy arrays on `cpu`. T is the number of tokens in
the step, H heads, D head_dim. Weights are opaque: only the ops know their layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from cupaged.engine.batch import Batch
from cupaged.engine.sampling_batch import SamplingBatch

BYTES_PER_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2}

Array: TypeAlias = Any  # an array of the device
Weight: TypeAlias = Any  # a packed weight; made by `pack_weight`, read by `linear` and `embedding`


class StepContext(Protocol):
    """What `begin_step` made of a batch. Models read these and pass the rest on."""

    @property
    def num_tokens(self) -> int:
        """New tokens in the step, T."""

    @property
    def token_ids(self) -> Array:
        """int32 [T], on the device."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps per token.

    group: index of the KV group (of the block table) the layer reads through.
    k_dim, v_dim: elements of a key and of a value head.
    dtype: storage type of keys and values. scale_dtype: type of quantisation scales, None if none.
    """

    group: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    block_size: int
    scale_dtype: str | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the keys and values of one block of this layer."""
        size = BYTES_PER_ELEMENT[self.dtype]
        return self.block_size * self.num_kv_heads * (self.k_dim + self.v_dim) * size


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of one layer: each [num_blocks, num_kv_heads, block_size, head_dim]."""

    spec: KVCacheSpec
    k: Array
    v: Array


class Ops(Protocol):
    """Every operation of a decoder step."""

    @property
    def dtype(self) -> Any:
        """NumPy's type of activations, weights and KV caches; logits are float32."""

    # At start: memory and weights.

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised array on the device."""

    def empty_kv_cache(self, spec: KVCacheSpec, num_blocks: int) -> KVCache:
        """The blocks of one layer."""

    def asarray(self, host: Array) -> Array:
        """A host array on the device, e.g. the weight of a norm."""

    def pack_weight(self, weight: Array, bias: Array | None = None) -> Weight:
        """Take over a float32 host array [out_features, in_features] and a bias [out_features]."""

    def rotary_table(
        self, inverse_frequencies: Array, max_positions: int, scale: float = 1.0
    ) -> Array:
        """scale * cosines and sines of position * frequency, for `rope_and_cache`.

        inverse_frequencies: float64 [D / 2] on the host, radians a position.
        """

    # Once a step.

    def begin_step(self, batch: Batch) -> Any:
        """Bring the batch to the device and plan attention once for all layers: a StepContext."""

    def copy_blocks(self, caches: Sequence[KVCache], copies: Array) -> None:
        """Copy whole blocks in every layer. copies: int32 [n, 2], (source, destination).

        No destination is also a source.
        """

    # In every layer.

    def embedding(self, out: Array, token_ids: Array, table: Weight) -> None:
        """out[t] = table[token_ids[t]]. out: [T, hidden]; table: packed [vocab, hidden]."""

    def linear(self, out: Array, x: Array, weight: Weight) -> None:
        """out = x W^T (+ bias). out: [T, out_features]; x: [T, in_features]."""

    def rms_norm(self, out: Array, x: Array, weight: Array, eps: float) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight over the last axis. out, x: [T, hidden]."""

    def add_rms_norm(
        self, out: Array, residual: Array, x: Array, weight: Array, eps: float
    ) -> None:
        """residual += x, then out = rms_norm(residual). All [T, hidden]."""

    def silu_mul(self, out: Array, gate_up: Array) -> None:
        """out = silu(gate) * up. out: [T, n]; gate_up: [T, 2n], gate first. gate_up is scratch."""

    def rope_and_cache(self, step: Any, qkv: Array, table: Array, cache: KVCache) -> None:
        """Turn q and k in place by their positions, then write k and v into their slots.

        qkv: [T, (Hq + 2 Hkv) D], query heads first, then key heads, then value heads. The two
        halves of a head are the real and imaginary parts ("rotate half"). Slots of -1 are skipped.
        """

    def paged_attention(
        self, step: Any, out: Array, qkv: Array, cache: KVCache, scale: float
    ) -> None:
        """Causal attention of the step's tokens over all earlier ones, through the block table.

        out: [T, Hq D]; qkv: as `rope_and_cache` left it; scale multiplies q . k.
        """

    def gather_rows(self, out: Array, x: Array, rows: Array) -> None:
        """out[i] = x[rows[i]]. rows: int32 [n]."""

    def all_reduce(self, x: Array) -> None:
        """Sum x over devices, in place: nothing to do on one device."""

    def sample(self, logits: Array, sampling: SamplingBatch) -> Array:
        """Draw a token id a sample; -1 where the logits are not numbers.

        logits: float32 [num_logits, vocab_size]; the batch's edits are made in place.
        Greedy rows take the highest logit, the lowest id among equals. The others drop what min_p
        calls unlikely, keep the top_k likeliest tokens (all if 0), of these the likeliest whose
        mass reaches top_p, and draw from what is left at the row's temperature. Equal seeds, sample
        indices and output positions give equal draws in any batch.

        Returns:
            int32 [num_samples].
        """

    def logprobs(self, logits: Array, token_ids: Array, count: int) -> tuple[Array, Array, Array]:
        """Log probabilities of one given token a row, and of the `count` likeliest.

        logits: float32 [n, vocab_size]; token_ids: int32 [n]; count: at most the vocabulary counts.

        Returns:
            ids int32, logprobs float32 and ranks int32, each [n, 1 + count] on the host: the given
            token first, then the likeliest, equal ones by token id. The rank of the given token is
            the number of tokens at least as likely. The logprobs of a row whose logits are not
            numbers are NaN.
        """
