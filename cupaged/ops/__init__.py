"""The operations that models are written against: one signature and one meaning for every device.

Each operation writes into `out`, which its caller owns and which never overlaps an input unless the
docstring says so. Arrays belong to the device: NumPy arrays on `cpu`. T is the number of tokens in
the step, H heads, D head_dim. Weights are opaque: only the ops know their layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch
from cupaged.ops.start import (
    BLOCK_ELEMENTS,
    BYTES_PER_ELEMENT,
    STORED_DTYPES,
    Array,
    KVCache,
    KVCacheSpec,
    StartOps,
    StepLimits,
    Weight,
)

__all__ = [
    "BLOCK_ELEMENTS",
    "BYTES_PER_ELEMENT",
    "STORED_DTYPES",
    "Array",
    "Download",
    "KVCache",
    "KVCacheSpec",
    "Ops",
    "StepContext",
    "StepLimits",
    "Weight",
]


class StepContext(Protocol):
    """What `begin_step` made of a batch. Models read `num_tokens` and `token_ids`, and pass it on.

    Arrays lie on the device, may be sliced, and are good for all that is submitted before the next
    `begin_step`.
    """

    @property
    def batch(self) -> Batch:
        """The step on the host."""

    @property
    def num_tokens(self) -> int:
        """New tokens in the step, T."""

    @property
    def token_ids(self) -> Array:
        """int32 [T]."""

    @property
    def logits_tokens(self) -> Array:
        """int32 [num_logits], the flat tokens whose logits are needed."""

    @property
    def sampling(self) -> Any:
        """The draws, as `sample` takes them."""

    @property
    def told_samples(self) -> Array:
        """int32 [num_told], the samples that ask for logprobs."""

    @property
    def told_rows(self) -> Array:
        """int32 [num_told], the row of logits of each of them."""

    @property
    def prompt_tokens(self) -> Array:
        """int32 [n], the flat tokens whose logits tell about prompts; [0] if nobody asked."""

    @property
    def prompt_targets(self) -> Array:
        """int32 [n], the prompt token that follows each."""


class Download(Protocol):
    """Arrays on their way to the host."""

    def wait(self) -> list[NDArray[Any]]:
        """The arrays, once they have come. To be called once.

        Raises:
            DeviceError: the work before failed.
        """


class Ops(StartOps, Protocol):
    """Every operation of a decoder step; `cupaged.ops.start` has those before the first step."""

    # Once a step.

    def begin_step(self, batch: Batch) -> Any:
        """Bring up all that the step's operations need to know, in one copy: a StepContext."""

    def copy_blocks(self, caches: Sequence[KVCache], step: Any) -> None:
        """Make the batch's copies of whole blocks in every layer.

        No destination is also a source.
        """

    def swap_out(self, caches: Sequence[KVCache], host: Sequence[KVCache], step: Any) -> None:
        """Copy whole blocks of every layer to the host's: the batch's `swap_out`.

        It is done before anything that is submitted later. No host block is written twice.
        """

    def swap_in(self, caches: Sequence[KVCache], host: Sequence[KVCache], step: Any) -> None:
        """Copy whole blocks of every layer back from the host's: the batch's `swap_in`.

        No block of the device is written twice; several may get the same content.
        """

    def write_blocks(self, cache: KVCache, blocks: NDArray[np.int32], bits: int) -> None:
        """Fill K and V of some blocks of a layer with elements of those bits. blocks: [n]."""

    def read_blocks(
        self, cache: KVCache, blocks: NDArray[np.int32]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of some blocks of a layer on the host, each [n, Hkv, block_size, D]; waits."""

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

    def sample(self, logits: Array, sampling: Any) -> Array:
        """Draw a token id a sample; -1 where the logits are not numbers.

        logits: float32 [num_logits, vocab_size]; the batch's edits are made in place.
        sampling: the step's.
        Greedy rows take the highest logit, the lowest id among equals. The others drop what min_p
        calls unlikely, keep the top_k likeliest tokens (all if 0), of these the likeliest whose
        mass reaches top_p, and draw from what is left at the row's temperature. Equal seeds, sample
        indices and output positions give equal draws in any batch. A forced token stands in for
        what was drawn, but not for -1.

        Returns:
            int32 [num_samples] on the device, a result of the step.
        """

    def logprobs(
        self, logits: Array, token_ids: Array, count: int, which: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Log probabilities of one given token a row, and of the `count` likeliest.

        logits: float32 [n, vocab_size]; token_ids, which: int32 on the device. Row i is given
        token_ids[which[i]], or token_ids[i] without `which`, clipped to the vocabulary.
        count: at most the vocabulary counts.

        Returns:
            ids int32, logprobs float32 and ranks int32, each [n, 1 + count], results of the step:
            the given token first, then the likeliest, equal ones by token id. The rank of the given
            token is the number of tokens at least as likely. The logprobs of a row whose logits are
            not numbers are NaN.
        """

    def download(self, arrays: Sequence[Array]) -> Download:
        """Start copying arrays to the host, and do not wait.

        Results of the step that were made since the last download come in one copy; what is
        submitted later may overwrite them.
        """
