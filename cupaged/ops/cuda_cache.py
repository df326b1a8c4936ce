"""The paged cache as launches of kernels: its blocks, copies of them, and what is written to slots.

Checks operands, chooses grid and block as the kernels' headers state, and launches. It computes
nothing itself and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.config import DEVICE_BLOCK_SIZES
from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.cuda_step import CudaStep
from cupaged.ops.kernel_table import KernelTable
from cupaged.ops.launch_checks import LaunchChecks, OperandError
from cupaged.ops.launch_shapes import PACK_BYTES, row_threads, shared_row
from cupaged.runtime.protocol import Array, Runtime
from cupaged.runtime.staging import StagingBuffer

__all__ = ["CudaCache"]

_MAX_HEAD_DIM = 512


class CudaCache:
    """Operations on caches of one storage type, on a runtime.

    Every method raises `OperandError` for an operand that does not fit.
    """

    def __init__(self, runtime: Runtime, dtype: np.dtype[Any], kernels: KernelTable) -> None:
        self.runtime = runtime
        self.dtype = dtype
        self._kernels = kernels
        self._check = LaunchChecks(runtime)
        self._staging = StagingBuffer(runtime)  # for blocks that leave or come back

    def empty_kv_cache(self, spec: KVCacheSpec, num_blocks: int) -> KVCache:
        """The blocks of one layer."""
        for name, value, fits, allowed in (
            ("dtype", spec.dtype, spec.dtype == self.dtype.name, self.dtype.name),
            ("scale_dtype", spec.scale_dtype, spec.scale_dtype is None, "None"),
            (
                "block_size",
                spec.block_size,
                spec.block_size in DEVICE_BLOCK_SIZES,
                f"in {DEVICE_BLOCK_SIZES}",
            ),
            (
                "k_dim and v_dim",
                (spec.k_dim, spec.v_dim),
                spec.k_dim == spec.v_dim and _is_head_dim(spec.k_dim),
                f"equal, even, from 2 to {_MAX_HEAD_DIM}",
            ),
        ):
            if not fits:
                raise OperandError(f"empty_kv_cache: {name}", value, allowed)
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.k_dim)
        empty = self.runtime.empty
        return KVCache(spec, empty(shape, self.dtype), empty(shape, self.dtype))

    def copy_blocks(self, caches: Sequence[KVCache], step: CudaStep) -> None:
        """Whole blocks, one launch a layer."""
        op, copies = "copy_blocks", step.batch.copies
        n = self._check.length(op, "copies", copies, ndim=2)
        num_blocks = min((len(cache.k) for cache in caches), default=0)
        self._check.host_indices(op, "copies", copies, (n, 2), num_blocks)
        sources, destinations = copies[:, 0], copies[:, 1]
        if len(np.unique(destinations)) != n or np.isin(destinations, sources).any():
            allowed = "without a destination twice or also as a source"
            raise OperandError(f"{op}: copies", copies.tolist(), allowed)
        for cache in caches:
            self._check_cache(op, cache)
        if not n:
            return
        kernel = self._kernels.get("kv_cache.cu", op)
        for cache in caches:
            k_elements, v_elements = cache.k[0].size, cache.v[0].size
            threads, blocks = shared_row(max(k_elements, v_elements), self.dtype.itemsize)
            args = (cache.k, cache.v, step.copies, np.int64(k_elements), np.int64(v_elements))
            self.runtime.launch(kernel, (n, blocks, 2), (threads,), args)

    def gather_blocks(
        self,
        staging: Array,
        cache: Array,
        blocks: NDArray[np.int32],
        on_device: Array | None = None,
    ) -> None:
        """staging[i] = cache[blocks[i]], e.g. on the way to the host.

        staging: [n, Hkv, block_size, D]; cache: K or V of one layer, [num_blocks, Hkv, block_size,
        D]; blocks: int32 [n] on the host. on_device: the same there, if they were brought up.
        """
        self._move_blocks("gather_blocks", staging, cache, blocks, on_device)

    def scatter_blocks(
        self,
        cache: Array,
        staging: Array,
        blocks: NDArray[np.int32],
        on_device: Array | None = None,
    ) -> None:
        """cache[blocks[i]] = staging[i]; no block twice. Otherwise as `gather_blocks`."""
        op = "scatter_blocks"
        n = self._check.length(op, "blocks", blocks)
        self._check.host_int32(op, "blocks", blocks, (n,))
        if len(np.unique(blocks)) != n:
            raise OperandError(f"{op}: blocks", blocks.tolist(), "without a block twice")
        self._move_blocks(op, staging, cache, blocks, on_device)

    def write_blocks(self, cache: KVCache, blocks: NDArray[np.int32], bits: int) -> None:
        """Fill blocks, through memory that is taken for it."""
        for pages in (cache.k, cache.v):
            shape = (len(blocks), *pages.shape[1:])
            filling = np.full(shape, bits, f"u{self.dtype.itemsize}").view(self.dtype)
            self.scatter_blocks(pages, self.runtime.from_host(filling), blocks)

    def read_blocks(
        self, cache: KVCache, blocks: NDArray[np.int32]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of blocks on the host, through memory that is taken for it."""
        k, v = (self._read(pages, blocks) for pages in (cache.k, cache.v))
        return k, v

    def _read(self, pages: Array, blocks: NDArray[np.int32]) -> NDArray[Any]:
        staging = self.runtime.empty((len(blocks), *pages.shape[1:]), self.dtype)
        self.gather_blocks(staging, pages, blocks)
        return self.runtime.to_host(staging)

    def _move_blocks(
        self,
        op: str,
        staging: Array,
        cache: Array,
        blocks: NDArray[np.int32],
        on_device: Array | None,
    ) -> None:
        n = self._check.length(op, "blocks", blocks)
        self._check.on_device(op, "cache", cache)
        self._check.array(op, "cache", cache, cache.shape, self.dtype)
        self._check.array(op, "staging", staging, (n, *cache.shape[1:]), self.dtype)
        self._check.host_indices(op, "blocks", blocks, (n,), len(cache))
        self._check.apart(op, {"staging": staging}, {"cache": cache})
        elements = cache[0].size if len(cache) else 0
        if elements * self.dtype.itemsize % PACK_BYTES:
            raise OperandError(f"{op}: block elements", elements, "whole packs of 16 bytes")
        if not n:
            return
        if on_device is None:
            (on_device,) = self._staging.upload([blocks])
        threads, shares = shared_row(elements, self.dtype.itemsize)
        written, read = (staging, cache) if op == "gather_blocks" else (cache, staging)
        args = (written, read, on_device, np.int64(elements))
        self.runtime.launch(self._kernels.get("kv_cache.cu", op), (n, shares), (threads,), args)

    def rope_and_cache(self, step: CudaStep, qkv: Array, table: Array, cache: KVCache) -> None:
        """One block a token."""
        op, spec = "rope_and_cache", cache.spec
        n, width = self._check.matrix(op, "qkv", qkv, self.dtype)
        head_dim, kv_heads = spec.k_dim, spec.num_kv_heads
        q_heads = width // head_dim - 2 * kv_heads
        if width % head_dim or q_heads < 1:
            allowed = f"(Hq + 2 * {kv_heads}) * {head_dim}, Hq 1 or more"
            raise OperandError(f"{op}: columns of qkv", width, allowed)
        rotary_dim, max_positions = self._check_table(table, head_dim)
        num_blocks = self._check_cache(op, cache)
        group = step.groups[spec.group]
        self._check.array(op, "positions", step.positions, (n,), np.dtype(np.int32))
        self._check.array(op, "slot_mapping", group.slot_mapping, (n,), np.dtype(np.int64))
        written = {"qkv": qkv, "k cache": cache.k, "v cache": cache.v}
        self._check.apart(op, written, {"table": table})
        if step.max_position >= max_positions:
            raise OperandError(f"{op}: positions", step.max_position, f"below {max_positions}")
        if group.max_slot >= num_blocks * spec.block_size:
            allowed = f"below {num_blocks * spec.block_size}"
            raise OperandError(f"{op}: slot_mapping", group.max_slot, allowed)
        if not n:
            return
        args = (
            qkv, cache.k, cache.v, table, step.positions, group.slot_mapping,
            np.int32(q_heads), np.int32(kv_heads), np.int32(max_positions),
        )  # fmt: skip
        defines = {"HEAD_DIM": head_dim, "BLOCK_SIZE": spec.block_size}
        if rotary_dim != head_dim:
            defines["ROTARY_DIM"] = rotary_dim
        kernel = self._kernels.get("rope.cu", op, defines)
        threads = row_threads((q_heads + kv_heads) * rotary_dim // 2, self.dtype.itemsize)
        self.runtime.launch(kernel, (n,), (threads,), args)

    def _check_cache(self, op: str, cache: KVCache) -> int:
        """Both halves as the spec says; the number of blocks."""
        spec = cache.spec
        shape = (len(cache.k), spec.num_kv_heads, spec.block_size, spec.k_dim)
        self._check.array(op, "k cache", cache.k, shape, self.dtype)
        self._check.array(op, "v cache", cache.v, (*shape[:3], spec.v_dim), self.dtype)
        return shape[0]

    def _check_table(self, table: Array, head_dim: int) -> tuple[int, int]:
        """Rotary dimensions and positions of a table of `rotary_table`."""
        op = "rope_and_cache"
        self._check.on_device(op, "table", table)
        shape = table.shape
        if len(shape) != 3 or shape[0] != 2 or not 1 <= shape[2] <= head_dim // 2:
            allowed = f"float32 [2, max_positions, {head_dim // 2} or less]"
            raise OperandError(f"{op}: table", f"{table.dtype} {list(shape)}", allowed)
        self._check.array(op, "table", table, shape, np.dtype(np.float32))
        self._check.int32(op, "max_positions", shape[1])
        return 2 * shape[2], shape[1]


def _is_head_dim(value: int) -> bool:
    return value % 2 == 0 and 2 <= value <= _MAX_HEAD_DIM
