"""Blocks of all layers on their way to the host's pool and back, on a runtime.

A layer's blocks are gathered into one staging area on the device, which is copied to the pinned
blocks of the host in runs of neighbours; and the other way round. All of it is in the order of the
runtime's stream, as the kernels of the step are: nothing here waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.cuda_cache import CudaCache
from cupaged.ops.launch_checks import LaunchChecks, OperandError
from cupaged.runtime.protocol import Array, Runtime
from cupaged.runtime.staging import StagingBuffer

__all__ = ["CudaSwap"]


class CudaSwap:
    """Copies between caches of one storage type and blocks of the host.

    Every method raises `OperandError` for an operand that does not fit.
    """

    def __init__(self, runtime: Runtime, dtype: np.dtype[Any], cache: CudaCache) -> None:
        """Takes no memory: `reserve` does."""
        self.runtime = runtime
        self.dtype = dtype
        self._cache = cache
        self._check = LaunchChecks(runtime)
        self._ids = StagingBuffer(runtime)
        self._area: Array = None

    def reserve(self, area_bytes: int, id_bytes: int) -> None:
        """Take the staging area, and room for the ids of the most blocks of a step.

        Raises:
            DeviceMemoryError: it does not fit.
        """
        if area_bytes:
            self._area = self.runtime.empty((area_bytes,), np.uint8)
            self._ids.reserve(id_bytes)

    def empty_host_cache(self, spec: KVCacheSpec, num_blocks: int) -> KVCache:
        """Blocks of one layer in pinned memory."""
        shape = (num_blocks, spec.num_kv_heads, spec.block_size)
        pinned = self.runtime.empty_pinned
        k, v = (pinned((*shape, width), self.dtype) for width in (spec.k_dim, spec.v_dim))
        return KVCache(spec, k, v)

    def swap_out(
        self, caches: Sequence[KVCache], host: Sequence[KVCache], pairs: NDArray[np.int32]
    ) -> None:
        """Device to host. pairs: int32 [n, 2], (device block, host block)."""
        for array, kept, part, ids, runs in self._parts("swap_out", caches, host, pairs):
            staged = self._staged(array, len(part))
            self._cache.gather_blocks(staged, array, part, ids)
            for first, stop, at in runs:
                self.runtime.copy_to_host_async(kept[at : at + stop - first], staged[first:stop])

    def swap_in(
        self, caches: Sequence[KVCache], host: Sequence[KVCache], pairs: NDArray[np.int32]
    ) -> None:
        """Host to device. pairs: int32 [n, 2], (host block, device block)."""
        for array, kept, part, ids, runs in self._parts("swap_in", caches, host, pairs[:, ::-1]):
            staged = self._staged(array, len(part))
            for first, stop, at in runs:
                self.runtime.copy_to_device_async(staged[first:stop], kept[at : at + stop - first])
            self._cache.scatter_blocks(array, staged, part, ids)

    def _parts(
        self,
        op: str,
        caches: Sequence[KVCache],
        host: Sequence[KVCache],
        pairs: NDArray[np.int32],  # [n, 2], (device block, host block)
    ) -> Iterator[tuple[Array, NDArray[Any], NDArray[np.int32], Array, list[tuple[int, int, int]]]]:
        """K and V of each layer in parts that the staging area holds: the array on the device, the
        one on the host, the device blocks of the part on the host and on the device, and its runs
        (first, stop, first host block)."""
        n = self._check.length(op, "pairs", pairs, ndim=2)
        num_host = min((len(cache.k) for cache in host), default=0)
        self._check.host_indices(op, "host blocks", pairs[:, 1], (n,), num_host)
        what, written = ("host", pairs[:, 1]) if op == "swap_out" else ("device", pairs[:, 0])
        if len(np.unique(written)) != n:
            raise OperandError(f"{op}: {what} blocks", written.tolist(), "without a block twice")
        if not n:
            return
        pairs = pairs[np.argsort(pairs[:, 1])]  # neighbours on the host go in one copy
        blocks = np.ascontiguousarray(pairs[:, 0])
        (ids,) = self._ids.upload([blocks])
        arrays = [
            pair
            for cache, kept in zip(caches, host, strict=True)
            for pair in ((cache.k, kept.k), (cache.v, kept.v))
        ]
        for array, kept in arrays:
            most = self._area.nbytes // array[0].nbytes
            if not most:
                allowed = f"at most {self._area.nbytes}"
                raise OperandError(f"{op}: bytes of a block", array[0].nbytes, allowed)
            for first in range(0, n, most):
                part = slice(first, first + most)
                yield array, kept, blocks[part], ids[part], _runs(pairs[part, 1])

    def _staged(self, array: Array, num_blocks: int) -> Array:
        """The staging area as blocks of an array."""
        area = self._area[: num_blocks * array[0].nbytes]
        return area.view(self.dtype).reshape((num_blocks, *array.shape[1:]))


def _runs(blocks: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Ascending blocks as runs of neighbours: (first index, index behind the last, first block)."""
    edges = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    return [(a, b, int(blocks[a])) for a, b in pairwise(edges)]
