"""Paged attention as launches of `cuda/paged_attention.cu`.

Checks operands, plans a step once for all layers of one shape, keeps the workspace of partial
results, and launches. It computes nothing itself and waits for nothing. The bits of a token's
output depend on its own sequence alone: not on the plan, the variant, or the workspace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.config import DEVICE_BLOCK_SIZES
from cupaged.engine.batch import Batch
from cupaged.errors import NotSupportedError
from cupaged.ops import KVCache
from cupaged.ops.attention_plan import (
    HEAD_DIMS,
    AttentionVariant,
    choose_variant,
    partial_row_bytes,
    plan_work,
)
from cupaged.ops.cuda_step import CudaStep
from cupaged.ops.launch_checks import LaunchChecks, OperandError
from cupaged.runtime.dtypes import kernel_dtype, storage_dtype
from cupaged.runtime.protocol import Array, Kernel, Runtime
from cupaged.runtime.staging import StagingBuffer

__all__ = ["AttentionShape", "CudaAttention", "check_attention_shape"]

_FILE = "paged_attention.cu"
_OP = "paged_attention"
_THREADS = 128
_MERGE_BLOCKS_PER_MULTIPROCESSOR = 8
_WORKSPACE_BYTES = 32 << 20
_STAGING_BYTES = 1 << 16
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


@dataclass(frozen=True, slots=True)
class _Work:
    """A plan on the device. merge_rows is None when there is nothing to merge."""

    block_work: Array
    work: Array
    num_merge_rows: Array
    merge_rows: Array | None


class _Planner:
    """Plans for one shape and KV group, each made once a step."""

    def __init__(
        self, runtime: Runtime, shape: AttentionShape, variant: AttentionVariant, rows: int
    ) -> None:
        self.variant = variant
        self.num_blocks = runtime.properties.multiprocessors * variant.blocks
        self._shape = shape
        self._max_partial_rows = rows
        self._staging = StagingBuffer(runtime, _STAGING_BYTES)
        self._batch: Batch | None = None
        self._work: _Work | None = None

    def plan(self, batch: Batch, group: int, num_cache_blocks: int) -> _Work:
        """The step's work list; the same until another batch comes.

        Raises:
            OperandError: a sequence is longer than its row of the block table, or a block number
                that would be read lies outside of the cache.
        """
        if self._work is not None and self._batch is batch:
            return self._work
        shape = self._shape
        _check_blocks(batch, batch.groups[group].block_table, shape, num_cache_blocks)
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
        arrays = [plan.block_work, plan.work, count, plan.merge_rows]
        block_work, work, num_merge_rows, merge_rows = self._staging.upload(arrays)
        self._batch = batch
        self._work = _Work(
            block_work, work, num_merge_rows, merge_rows if len(plan.merge_rows) else None
        )
        return self._work


class CudaAttention:
    """Attention of all layers of one storage type on a runtime."""

    def __init__(
        self,
        runtime: Runtime,
        dtype: str,
        *,
        workspace_bytes: int = _WORKSPACE_BYTES,
        max_shared_bytes: int | None = None,
    ) -> None:
        """`dtype`: "float32", "float16" or "bfloat16".

        Args:
            workspace_bytes: for partial results, allocated here; `attention_plan.workspace_bytes`
                tells what is enough. With less, work is divided less evenly.
            max_shared_bytes: of a block, if other than what the device has.

        Raises:
            ConfigError: another dtype.
            DeviceMemoryError: the workspace does not fit.
        """
        self.runtime = runtime
        self.dtype = storage_dtype(dtype)
        self._check = LaunchChecks(runtime)
        self._workspace = runtime.empty((workspace_bytes // 4,), np.float32)
        self._max_shared_bytes = max_shared_bytes or runtime.properties.max_shared_memory_bytes
        self._planners: dict[tuple[AttentionShape, int], _Planner] = {}
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def paged_attention(
        self,
        step: CudaStep,
        out: Array,
        qkv: Array,
        cache: KVCache,
        scale: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Array | None = None,
    ) -> None:
        """Causal attention of the step's tokens, through the block table of the cache's group.

        Args:
            out: [T, Hq D]. Tokens of no sequence keep what is there.
            qkv: [T, (Hq + 2 Hkv) D]; queries are read, keys and values come from the cache.
            scale: multiplies q . k.
            window: positions that a token sees, with its own; 0 is all.
            softcap: scores become softcap * tanh(score / softcap); 0 is none.
            sinks: [Hq], a score a query head that takes weight and has no value; or None.

        Raises:
            NotSupportedError: there is no kernel for the shape.
            OperandError: an operand does not fit.
        """
        check, spec = self._check, cache.spec
        n, shape = self._shape(out, cache, window)
        heads = shape.num_q_heads + 2 * shape.num_kv_heads
        check.array(_OP, "qkv", qkv, (n, heads * shape.head_dim), self.dtype)
        read = {"qkv": qkv, "k cache": cache.k, "v cache": cache.v}
        if sinks is not None:
            check.array(_OP, "sinks", sinks, (shape.num_q_heads,), self.dtype)
            read["sinks"] = sinks
        check.apart(_OP, {"out": out}, read)
        if not math.isfinite(scale):
            raise OperandError(f"{_OP}: scale", scale, "a number")
        if not (math.isfinite(softcap) and softcap >= 0):
            raise OperandError(f"{_OP}: softcap", softcap, "a number, 0 or more")
        table, num_seqs = self._check_step(step, spec.group, n)
        if not n or not num_seqs:
            return
        planner = self._planner(shape, spec.group)
        work = planner.plan(step.batch, spec.group, len(cache.k))
        self._launch(planner, work, step, out, qkv, cache, table, scale, softcap, sinks, shape)

    def _launch(
        self,
        planner: _Planner,
        work: _Work,
        step: CudaStep,
        out: Array,
        qkv: Array,
        cache: KVCache,
        table: Array,
        scale: float,
        softcap: float,
        sinks: Array | None,
        shape: AttentionShape,
    ) -> None:
        flags = {"WINDOW": bool(shape.window), "SOFTCAP": bool(softcap), "SINKS": sinks is not None}
        attend, merge = (
            self._kernel(name, shape, planner.variant, flags)
            for name in (_OP, "merge_attention_splits")
        )
        num_rows = self._workspace.size // (shape.head_dim + 2)
        values = self._workspace[: num_rows * shape.head_dim]
        sums = self._workspace[num_rows * shape.head_dim : num_rows * (shape.head_dim + 2)]
        extra = [] if sinks is None else [sinks]
        args = [
            out, values, sums, qkv, cache.k, cache.v, table, step.query_start, step.context_len,
            work.block_work, work.work, *extra,
            np.int32(shape.num_q_heads), np.int32(shape.num_kv_heads), np.int32(table.shape[1]),
        ]  # fmt: skip
        args += [np.int32(shape.window)] if shape.window else []
        args += [np.float32(softcap)] if softcap else []
        self.runtime.launch(
            attend,
            (planner.num_blocks,),
            (_THREADS,),
            [*args, np.float32(scale)],
            shared_memory_bytes=planner.variant.shared_bytes,
        )
        if work.merge_rows is None:
            return
        args = [out, values, sums, work.num_merge_rows, work.merge_rows, *extra]
        blocks = self.runtime.properties.multiprocessors * _MERGE_BLOCKS_PER_MULTIPROCESSOR
        blocks = min(blocks, -(-len(work.merge_rows) * 32 // _THREADS))
        self.runtime.launch(merge, (blocks,), (_THREADS,), [*args, np.int32(shape.num_q_heads)])

    def _shape(self, out: Array, cache: KVCache, window: int) -> tuple[int, AttentionShape]:
        """Tokens, and the shape of the layer."""
        spec = cache.spec
        n, width = self._check.matrix(_OP, "out", out, self.dtype)
        if spec.k_dim != spec.v_dim or width % spec.k_dim:
            allowed = f"a multiple of k_dim {spec.k_dim} = v_dim {spec.v_dim}"
            raise OperandError(f"{_OP}: columns of out", width, allowed)
        shape = AttentionShape(
            width // spec.k_dim, spec.num_kv_heads, spec.k_dim, spec.block_size, window
        )
        check_attention_shape(shape)
        pages = (len(cache.k), spec.num_kv_heads, spec.block_size, spec.k_dim)
        self._check.array(_OP, "k cache", cache.k, pages, self.dtype)
        self._check.array(_OP, "v cache", cache.v, pages, self.dtype)
        self._check.int32(_OP, "rows of heads", n * shape.num_q_heads)
        self._check.int32(_OP, "window", window)
        return n, shape

    def _check_step(self, step: CudaStep, group: int, num_tokens: int) -> tuple[Array, int]:
        """The block table, and the number of sequences."""
        int32, num_seqs = np.dtype(np.int32), step.batch.num_seqs
        table = step.groups[group].block_table
        self._check.array(_OP, "query_start", step.query_start, (num_seqs + 1,), int32)
        self._check.array(_OP, "context_len", step.context_len, (num_seqs,), int32)
        self._check.array(_OP, "block_table", table, (num_seqs, table.shape[-1]), int32)
        last = int(step.batch.query_start[-1])
        if last > num_tokens:
            raise OperandError(f"{_OP}: rows of out", num_tokens, f"{last} or more")
        return table, num_seqs

    def _planner(self, shape: AttentionShape, group: int) -> _Planner:
        planner = self._planners.get((shape, group))
        if planner is None:
            variant = choose_variant(shape.head_dim, self.dtype.itemsize, self._max_shared_bytes)
            rows = self._workspace.nbytes // partial_row_bytes(shape.head_dim)
            planner = _Planner(self.runtime, shape, variant, rows)
            self._planners[shape, group] = planner
        return planner

    def _kernel(
        self, name: str, shape: AttentionShape, variant: AttentionVariant, flags: dict[str, bool]
    ) -> Kernel:
        key = (name, shape.head_dim, shape.block_size, variant, *flags.values())
        kernel = self._kernels.get(key)
        if kernel is None:
            defines: dict[str, str | int] = {
                "DTYPE": kernel_dtype(self.dtype),
                "HEAD_DIM": shape.head_dim,
                "BLOCK_SIZE": shape.block_size,
                "ROW_TILES": variant.row_tiles,
                "SLOTS": variant.slots,
                **{flag: 1 for flag, is_set in flags.items() if is_set},
            }
            kernel = self._kernels[key] = self.runtime.load_kernel(_FILE, name, defines)
        return kernel


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
