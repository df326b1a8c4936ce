"""Paged attention as launches of `cuda/paged_attention.cu`.

Checks operands, plans a step once for all layers of one shape, keeps the workspace of partial
results, and launches. It computes nothing itself and waits for nothing. The bits of a token's
output depend on its own sequence alone: not on the plan, the variant, or the workspace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch
from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.attention_plan import AttentionVariant, choose_variant, partial_row_bytes
from cupaged.ops.attention_shapes import AttentionPlanner, AttentionShape, check_attention_shape
from cupaged.ops.cuda_step import CudaStep
from cupaged.ops.launch_checks import LaunchChecks, OperandError
from cupaged.runtime.dtypes import kernel_dtype, storage_dtype
from cupaged.runtime.protocol import Array, Kernel, Runtime

__all__ = ["CudaAttention"]

_FILE = "paged_attention.cu"
_OP = "paged_attention"
_THREADS = 128
_MERGE_BLOCKS_PER_MULTIPROCESSOR = 8
_WORKSPACE_BYTES = 32 << 20


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
        """`dtype`: "float32", "float16" or "bfloat16". Takes no memory: `reserve` or a step does.

        Args:
            workspace_bytes: for partial results, where `reserve` says nothing else.
                `attention_plan.workspace_bytes` tells what is enough. With less, work is divided
                less evenly.
            max_shared_bytes: of a block, if other than what the device has.

        Raises:
            ConfigError: another dtype.
        """
        self.runtime = runtime
        self.dtype = storage_dtype(dtype)
        self._check = LaunchChecks(runtime)
        self._workspace_bytes = workspace_bytes
        self._workspace: Array = None
        self._max_shared_bytes = max_shared_bytes or runtime.properties.max_shared_memory_bytes
        self._planners: dict[tuple[AttentionShape, int], AttentionPlanner] = {}
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def reserve(self, workspace_bytes: int, num_q_heads: int, specs: Sequence[KVCacheSpec]) -> None:
        """Take the workspace, and know the shapes of the layers from the first step on.

        Raises:
            DeviceMemoryError: it does not fit.
        """
        self._planners.clear()  # they count with the workspace, and others' shapes are not ours
        if self._workspace is None or self._workspace.nbytes < workspace_bytes:
            self._workspace = None
            self._workspace = self.runtime.empty((workspace_bytes // 4,), np.float32)
        for spec in specs:
            shape = AttentionShape(num_q_heads, spec.num_kv_heads, spec.k_dim, spec.block_size)
            check_attention_shape(shape)
            self._planner(shape, spec.group)

    def plan(self, batch: Batch) -> dict[tuple[AttentionShape, int], list[NDArray[np.int32]]]:
        """Work lists of the step for all shapes known, to go up with it: for `CudaStep`."""
        if not batch.num_seqs:
            return {}
        known = self._planners.items()
        return {key: planner.plan(batch) for key, planner in known if key[1] < len(batch.groups)}

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
        planner.check(step.batch, spec.group, len(cache.k))
        work = step.attention.get((shape, spec.group))
        if work is None:  # the first step with such a layer: the next ones bring it up at once
            work = planner.staging.upload(planner.plan(step.batch))
            step.attention[shape, spec.group] = work
        self._launch(planner, work, step, out, qkv, cache, table, scale, softcap, sinks, shape)

    def _launch(
        self,
        planner: AttentionPlanner,
        work: Sequence[Array],
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
        block_work, items, num_merge_rows, merge_rows = work
        args = [
            out, values, sums, qkv, cache.k, cache.v, table, step.query_start, step.context_len,
            block_work, items, *extra,
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
        if not len(merge_rows):
            return
        args = [out, values, sums, num_merge_rows, merge_rows, *extra]
        blocks = self.runtime.properties.multiprocessors * _MERGE_BLOCKS_PER_MULTIPROCESSOR
        blocks = min(blocks, -(-len(merge_rows) * 32 // _THREADS))
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

    def _planner(self, shape: AttentionShape, group: int) -> AttentionPlanner:
        planner = self._planners.get((shape, group))
        if planner is None:
            variant = choose_variant(shape.head_dim, self.dtype.itemsize, self._max_shared_bytes)
            if self._workspace is None:
                self.reserve(self._workspace_bytes, shape.num_q_heads, ())
            rows = self._workspace.nbytes // partial_row_bytes(shape.head_dim)
            planner = AttentionPlanner(self.runtime, shape, variant, rows)
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
