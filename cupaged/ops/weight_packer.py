"""Weights on their way to the device: through pinned memory, in parts, into the packed layout.

Owns two pinned buffers and one on the device, which live until `release`. While a part is copied
and packed, the host converts the next one into the other pinned buffer. Copies and launches are in
order on the runtime's stream, so that one buffer on the device is enough.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.ops.gemm_plan import ceil_div, packing_rows, padded_columns, padded_rows
from cupaged.ops.launch_shapes import PACK_BYTES
from cupaged.runtime.dtypes import kernel_dtype
from cupaged.runtime.protocol import Array, Event, Kernel, Runtime

__all__ = ["WeightPacker"]

_THREADS = 256


class WeightPacker:
    """Packs weights of one storage type on one runtime."""

    def __init__(self, runtime: Runtime, dtype: np.dtype[Any]) -> None:
        """Takes no memory: the first weight does."""
        self._runtime = runtime
        self._dtype = dtype
        self._pinned: list[tuple[NDArray[np.uint8], Event]] = []
        self._device: Array = None

    def kernel(self, source: DTypeLike) -> Kernel:
        """What lays out numbers of that type.

        Raises:
            CupagedError: the runtime cannot compile it, and why.
        """
        defines: dict[str, str | int] = {"DTYPE": kernel_dtype(self._dtype)}
        if np.dtype(source) != np.float32:
            defines["SOURCE_DTYPE"] = kernel_dtype(source)
        return self._runtime.load_kernel("gemm_pack.cu", "pack_weight", defines)

    def pack(self, weight: NDArray[Any]) -> Array:
        """A weight [out_features, in_features], float32 or of the storage type, in its layout.

        Storage type [padded_rows(out_features), padded_columns(in_features)]. The host array may be
        changed at once; the device may still be at work.
        """
        out_features, in_features = weight.shape
        rows, columns = padded_rows(out_features), padded_columns(in_features)
        packed = self._runtime.empty((rows, columns), self._dtype)
        part_rows = min(rows, packing_rows(in_features, weight.dtype.itemsize))
        kernel = self.kernel(weight.dtype)
        for start in range(0, rows, part_rows):
            part, to = weight[start : start + part_rows], packed[start : start + part_rows]
            self._make_room(part_rows * in_features * weight.dtype.itemsize)
            source = self._device[: part.nbytes].view(weight.dtype)
            self._send(source, part)
            sizes = (to.shape[0], columns, part.shape[0], in_features)
            blocks = ceil_div(to.nbytes, PACK_BYTES * _THREADS)
            args = (to, source, *(np.int32(size) for size in sizes))
            self._runtime.launch(kernel, (blocks,), (_THREADS,), args)
        return packed

    def upload(self, host: NDArray[Any]) -> Array:
        """A plain copy on the device, e.g. of the weight of a norm. It does not wait, either."""
        array = self._runtime.empty(host.shape, host.dtype)
        if host.nbytes:
            self._make_room(host.nbytes)
            self._send(array.reshape(-1), host)
        return array

    def release(self) -> None:
        """Give the buffers back, once the device has done with them."""
        for _, copied in self._pinned:
            copied.synchronize()
        self._pinned.clear()
        self._device = None

    def _send(self, target: Array, host: NDArray[Any]) -> None:
        """Copy through the pinned buffer that was used longer ago. target: flat."""
        self._pinned.reverse()
        pinned, copied = self._pinned[0]
        copied.synchronize()
        place = pinned[: host.nbytes].view(host.dtype)
        place.reshape(host.shape)[...] = host
        self._runtime.copy_to_device_async(target, place)
        copied.record(self._runtime.stream)

    def _make_room(self, num_bytes: int) -> None:
        if self._device is not None and self._device.nbytes >= num_bytes:
            return
        self.release()
        self._device = self._runtime.empty((num_bytes,), np.uint8)
        self._pinned = [
            (self._runtime.empty_pinned((num_bytes,), np.uint8), self._runtime.new_event())
            for _ in range(2)
        ]
