"""What operations do before the first step: memory, weights, and the plan of both.

The first half of the `Ops` protocol, and the nouns that it shares with the other half.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np

__all__ = [
    "BLOCK_ELEMENTS",
    "BYTES_PER_ELEMENT",
    "STORED_DTYPES",
    "Array",
    "KVCache",
    "KVCacheSpec",
    "StartOps",
    "StepLimits",
    "Weight",
]

BYTES_PER_ELEMENT = {"float32": 4, "float16": 2, "bfloat16": 2}

BLOCK_ELEMENTS = 32  # numbers that share a scale in the quantised types below

# Types of a checkpoint that may go to a device as they are, by their names there. An item of a
# quantised one is a block of a row, as ggml defines it.
STORED_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "Q8_0": np.dtype([("d", "<f2"), ("q", "i1", BLOCK_ELEMENTS)]),
    "Q4_0": np.dtype([("d", "<f2"), ("q", "u1", BLOCK_ELEMENTS // 2)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", BLOCK_ELEMENTS // 2)]),
}

Array: TypeAlias = Any  # an array of the device
Weight: TypeAlias = Any  # a packed weight; made by `pack_weight`, read by `linear` and `embedding`


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step.

    max_logits: rows of logits at a time. max_blocks_per_seq: columns of a block table.
    max_logprobs: likeliest tokens told beside a given one.
    max_steps_in_flight: steps submitted before the first of them is collected.
    kv_specs: the different kinds of layers.
    num_host_blocks: blocks of the host that sequences are swapped to.
    """

    max_tokens: int
    max_seqs: int
    max_logits: int
    max_context: int
    max_blocks_per_seq: int
    vocab_size: int
    max_logprobs: int
    max_steps_in_flight: int
    num_q_heads: int
    kv_specs: tuple[KVCacheSpec, ...]
    num_host_blocks: int = 0

    @property
    def prompt_parts(self) -> int:
        """Parts in which the logits of a step of prompt tokens are computed, to tell about them."""
        return -(-self.max_tokens // self.max_logits)


class StartOps(Protocol):
    """Operations of an engine that starts."""

    @property
    def dtype(self) -> Any:
        """NumPy's type of activations, weights and KV caches; logits are float32."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised array on the device."""

    def empty_kv_cache(self, spec: KVCacheSpec, num_blocks: int) -> KVCache:
        """The blocks of one layer."""

    def empty_host_cache(self, spec: KVCacheSpec, num_blocks: int) -> KVCache:
        """Blocks of one layer in the memory of the host, for `swap_out`: NumPy arrays."""

    def asarray(self, host: Array) -> Array:
        """A host array on the device, e.g. the weight of a norm."""

    @property
    def kept_types(self) -> Collection[str]:
        """Types of a checkpoint, names of `STORED_DTYPES`, that `pack_weight` takes as they are."""

    def pack_weight(self, weight: Array, bias: Array | None = None) -> Weight:
        """Take over a host array [out_features, in_features] and a float32 bias [out_features].

        weight: float32, or of one of the kept types; blocks of 32 are [out_features,
            in_features / 32].
        """

    def weight_bytes(
        self, out_features: int, in_features: int, has_bias: bool, stored: str | None = None
    ) -> int:
        """Memory that `pack_weight` takes for good.

        stored: the kept type that it is given; None for float32.
        """

    def rotary_table(
        self, inverse_frequencies: Array, max_positions: int, scale: float = 1.0
    ) -> Array:
        """scale * cosines and sines of position * frequency, for `rope_and_cache`.

        inverse_frequencies: float64 [D / 2] on the host, radians a position.
        """

    def buffer_bytes(self, limits: StepLimits, products: Sequence[tuple[int, int]]) -> int:
        """Memory that `reserve` takes, and packing before it.

        products: (out_features, in_features) of every weight that `linear` reads.
        """

    def reserve(self, limits: StepLimits) -> None:
        """Take the memory of the largest step, after the last weight: later none is taken.

        Raises:
            DeviceMemoryError: it does not fit.
        """

    def warm_up_counts(self, max_tokens: int) -> Sequence[int]:
        """Numbers of tokens such that steps of these load every kernel that a step can need."""
