"""Shapes of attention: which there are kernels for, and the work lists of a step for one of them.

Owns the checks that need the batch on the host. It launches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cupaged.config import DEVICE_BLOCK_SIZES
from cupaged.engine.batch import Batch
from cupaged.errors import NotSupportedError
from cupaged.ops.attention_plan import HEAD_DIMS, AttentionVariant, plan_work
from cupaged.ops.launch_checks import OperandError
from cupaged.runtime.protocol import Runtime
from cupaged.runtime.staging import StagingBuffer

__all__ = ["AttentionPlanner", "AttentionShape", "check_attention_shape"]

_OP = "paged_attention"
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What layers must have in common to share a plan.

    window: positions that a token sees, with its own; 0 is all of them.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int = 0


def check_attention_shape(shape: AttentionShape) -> None:
    """Whether there is a kernel for such layers: to be asked before weights are read.

    Raises:
        NotSupportedError: there is none; it names what there is.
    """
    if shape.head_dim not in HEAD_DIMS:
        raise NotSupportedError(
            f"attention with head_dim {shape.head_dim} is not supported; "
            f"supported: {', '.join(map(str, HEAD_DIMS))}"
        )
    if shape.block_size not in DEVICE_BLOCK_SIZES:
        raise NotSupportedError(
            f"attention with block_size {shape.block_size} is not supported; "
            f"supported: {', '.join(map(str, DEVICE_BLOCK_SIZES))}"
        )
    if shape.num_kv_heads < 1 or shape.num_q_heads < 1 or shape.num_q_heads % shape.num_kv_heads:
        raise NotSupportedError(
            f"attention with {shape.num_q_heads} query heads and {shape.num_kv_heads} key/value "
            "heads is not supported; query heads must be a multiple of key/value heads"
        )
    if shape.window < 0:
        raise NotSupportedError(
            f"attention with a window of {shape.window} is not supported; supported: 0, which is "
            "none, or more"
        )


class AttentionPlanner:
    """Plans for one shape and KV group, each made once a step."""

    def __init__(
        self, runtime: Runtime, shape: AttentionShape, variant: AttentionVariant, rows: int
    ) -> None:
        self.variant = variant
        self.num_blocks = runtime.properties.multiprocessors * variant.blocks
        self.staging = StagingBuffer(runtime)  # for a step that did not know the shape
        self._shape = shape
        self._max_partial_rows = rows
        self._checked: Batch | None = None

    def plan(self, batch: Batch) -> list[NDArray[np.int32]]:
        """The arrays of the step's `WorkPlan`, with the number of merged rows before these."""
        shape = self._shape
        plan = plan_work(
            batch.query_start,
            batch.context_len,
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rows_per_tile=self.variant.rows_per_tile,
            num_blocks=self.num_blocks,
            max_partial_rows=self._max_partial_rows,
            window=shape.window,
        )
        count = np.array([len(plan.merge_rows)], np.int32)
        return [plan.block_work, plan.work, count, plan.merge_rows]

    def check(self, batch: Batch, group: int, num_cache_blocks: int) -> None:
        """Once a step.

        Raises:
            OperandError: a sequence is longer than its row of the block table, or a block number
                that would be read lies outside of the cache.
        """
        if self._checked is not batch:
            _check_blocks(batch, batch.groups[group].block_table, self._shape, num_cache_blocks)
            self._checked = batch


def _check_blocks(
    batch: Batch, table: NDArray[np.int32], shape: AttentionShape, num_cache_blocks: int
) -> None:
    """Every position that a new token sees has a block of the cache."""
    longest = int(batch.context_len.max(initial=0))
    if longest > table.shape[1] * shape.block_size:
        allowed = f"at most {table.shape[1] * shape.block_size}, as the block table is wide"
        raise OperandError(f"{_OP}: context_len", longest, allowed)
    if longest > _MAX_INT32 - 256:
        raise OperandError(f"{_OP}: context_len", longest, f"at most {_MAX_INT32 - 256}")
    num_new = np.diff(batch.query_start)
    begin = np.zeros(len(num_new), np.int64)
    if shape.window:
        begin = np.maximum(begin, batch.context_len.astype(np.int64) - num_new - shape.window + 1)
    table = table[:, : -(-longest // shape.block_size)]
    column = np.arange(table.shape[1])
    read = column >= (begin // shape.block_size)[:, None]
    read &= column < -(-batch.context_len // shape.block_size)[:, None]
    read &= (num_new > 0)[:, None]
    blocks = table[read]
    if blocks.size and not (blocks.min() >= 0 and blocks.max() < num_cache_blocks):
        raise OperandError(
            f"{_OP}: blocks in block_table",
            f"{blocks.min()} to {blocks.max()}",
            f"from 0 to {num_cache_blocks - 1}",
        )
