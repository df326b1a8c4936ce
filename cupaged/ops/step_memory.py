"""What the largest step takes of a device, besides weights, cache and the runner's own buffers.

Pure functions of limits: the plan of an engine's memory asks them before anything is taken, and the
operations reserve by the same figures. It knows no device and takes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cupaged.ops import KVCacheSpec, StepLimits
from cupaged.ops.attention_plan import (
    HEAD_DIMS,
    max_work_items,
    partial_row_bytes,
    workspace_bytes,
)
from cupaged.ops.gemm_plan import packing_bytes
from cupaged.ops.gemm_plan import workspace_bytes as product_bytes
from cupaged.runtime.staging import staged_bytes

__all__ = ["StepMemory"]

_BLOCKS_PER_MULTIPROCESSOR = 2  # of attention, at most
_MIN_ROWS_PER_TILE = 16
_MAX_WORKSPACE_BYTES = 32 << 20  # with less, the work of large steps is divided less evenly
_MAX_EDIT_BYTES = 16 << 20
_LISTED_EDITS = 1 << 16  # bytes for biases, bans and allowed tokens, which requests list
_PAIR_BYTES = 12  # of a changed logit: row, token id, value
_COLUMN_BYTES = (4, 4, 4, 4, 4, 8, 4, 4, 4)  # of a draw, as `sampling.cu` takes it
_REPORT_BYTES = 12  # of a token told: id, log probability, rank
_SWAP_AREA_BYTES = 4 << 20  # for blocks of one layer's K or V, on their way to the host or back
_MAX_PINNED_BYTES = 64 << 20  # for reports on prompts; with more of them it grows


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The buffers of `CudaOps`, in bytes, for steps within limits on a device."""

    limits: StepLimits
    multiprocessors: int

    @property
    def upload_bytes(self) -> int:
        """Of what goes up with a step. Edits beyond `edit_bytes` go up by themselves."""
        limits = self.limits
        tokens, seqs = limits.max_tokens, limits.max_seqs
        sizes = [4 * tokens, 4 * tokens, 4 * (seqs + 1), 4 * seqs]
        for _ in {spec.group for spec in limits.kv_specs}:
            sizes += 4 * seqs * limits.max_blocks_per_seq, 8 * tokens
        sizes += 8 * seqs, 4 * seqs  # copies of blocks, rows of hidden states
        sizes += [size * seqs for size in _COLUMN_BYTES]
        sizes += 4 * seqs, 4 * seqs, 4 * tokens, 4 * tokens  # what is told of draws and prompts
        sizes += [0] * 8 + [self.edit_bytes]  # nine arrays
        for spec in limits.kv_specs:
            sizes += self._attention_lists(spec)
        return staged_bytes(sizes)

    @property
    def edit_bytes(self) -> int:
        """Of changes to logits: two penalties of every token that a sequence may have."""
        limits = self.limits
        tokens = min(limits.vocab_size, limits.max_context)
        pairs = 2 * limits.max_logits * tokens
        return min(_MAX_EDIT_BYTES, pairs * _PAIR_BYTES + _LISTED_EDITS)

    @property
    def saved_bytes(self) -> int:
        """Of the logits of allowed tokens, while the others of their rows are forbidden."""
        return self.edit_bytes // 2  # a pair is 8 bytes, its logit 4

    @property
    def result_bytes(self) -> int:
        """Of tokens and of what is told about as many."""
        told = 1 + min(self.limits.max_logprobs, self.limits.vocab_size)
        return 4 * self.limits.max_seqs + self.limits.max_seqs * told * _REPORT_BYTES + 64

    @property
    def num_downloads(self) -> int:
        """Pinned buffers of `result_bytes`: of each step in flight one, and one a part of a
        prompt."""
        wanted = self.limits.max_steps_in_flight * (1 + self.limits.prompt_parts)
        return max(
            self.limits.max_steps_in_flight, min(wanted, _MAX_PINNED_BYTES // self.result_bytes)
        )

    @property
    def attention_bytes(self) -> int:
        """Of partial results of attention."""
        limits = self.limits
        wanted = [
            workspace_bytes(limits.num_q_heads, spec.k_dim, limits.max_context, self._blocks)
            for spec in limits.kv_specs
            if spec.k_dim in HEAD_DIMS
        ]
        return min(_MAX_WORKSPACE_BYTES, max(wanted, default=0))

    @property
    def swap_area_bytes(self) -> int:
        """Of blocks between the device and the host; 0 if the host has none."""
        return _SWAP_AREA_BYTES if self.limits.num_host_blocks else 0

    @property
    def swap_id_bytes(self) -> int:
        """Of the ids of as many blocks as the host has, or as sequences may load at once: several
        may load the same ones."""
        limits = self.limits
        if not limits.num_host_blocks:
            return 0
        most_loaded = limits.max_seqs * limits.max_blocks_per_seq
        return staged_bytes([4 * max(limits.num_host_blocks, most_loaded)])

    def total_bytes(self, products: Iterable[tuple[int, int]], dtype: str) -> int:
        """All of it, or what packing weights takes before, if that is more.

        Args:
            products: (out_features, in_features) of every linear weight.
            dtype: of weights and activations.
        """
        products = list(products)
        after = self.upload_bytes + self.saved_bytes + self.result_bytes + self.attention_bytes
        after += self.swap_area_bytes + self.swap_id_bytes
        after += 4 * self.limits.max_logits + product_bytes(self.limits.max_tokens, products, dtype)
        return max(after, packing_bytes(products))

    @property
    def _blocks(self) -> int:
        return self.multiprocessors * _BLOCKS_PER_MULTIPROCESSOR

    def _attention_lists(self, spec: KVCacheSpec) -> list[int]:
        """The arrays of a `WorkPlan`."""
        limits = self.limits
        group = -(-limits.num_q_heads // spec.num_kv_heads)
        items = max_work_items(
            limits.max_tokens,
            limits.max_seqs,
            group,
            _MIN_ROWS_PER_TILE,
            spec.num_kv_heads,
            self._blocks,
        )
        merged = min(
            limits.max_tokens * limits.num_q_heads,
            self.attention_bytes // partial_row_bytes(spec.k_dim) // 2,
        )
        return [4 * (self._blocks + 1), 32 * items, 4, 16 * merged]
