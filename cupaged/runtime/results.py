"""One download for what a step gives back: results lie side by side on the device.

Owns a buffer on the device, whose address stays, that operations write their results to, and pinned
buffers on the host that they come down to. Nothing here waits but `Download.wait`. Results may be
overwritten by what is submitted after their download: the stream keeps the order.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.runtime.protocol import Array, Event, Runtime, Shape

__all__ = ["Download", "ResultBuffer"]

_ALIGNMENT_BYTES = 16
_FIRST_BYTES = 1 << 12  # of a buffer that was not reserved; it grows where more is needed


class _Pinned:
    """A pinned buffer. It is free when its last copy was made and nobody is to read it."""

    def __init__(self, runtime: Runtime, num_bytes: int) -> None:
        self.memory = runtime.empty_pinned((num_bytes,), np.uint8)
        self.copied: Event = runtime.new_event()
        self._reader: weakref.ref[Download] | None = None

    @property
    def is_free(self) -> bool:
        unread = self._reader is not None and self._reader() is not None
        return not unread and self.copied.passed()

    def lend(self, reader: Download) -> None:
        self._reader = weakref.ref(reader)

    def give_back(self) -> None:
        self._reader = None


class Download:
    """Arrays on their way to the host."""

    def __init__(self, pinned: _Pinned, views: Sequence[NDArray[Any]]) -> None:
        self._pinned = pinned
        self._views = views

    def wait(self) -> list[NDArray[Any]]:
        """The arrays, once they have come. To be called once.

        Raises:
            DeviceError: the work before the copy failed.
        """
        self._pinned.copied.synchronize()
        arrays = [view.copy() for view in self._views]
        self._pinned.give_back()
        return arrays


class ResultBuffer:
    """Results of a step, taken one after another, and their downloads."""

    def __init__(self, runtime: Runtime) -> None:
        """Takes no memory: `reserve` does, or the first result."""
        self._runtime = runtime
        self._device: Array = None
        self._address = 0
        self._capacity_bytes = 0
        self._end = 0
        self._pinned: deque[_Pinned] = deque()

    def reserve(self, num_bytes: int, num_downloads: int) -> None:
        """Take memory for results of that size, and for downloads not yet read.

        Raises:
            DeviceMemoryError: it does not fit.
        """
        if num_bytes > self._capacity_bytes:
            self._grow(num_bytes)
        fitting = [p for p in self._pinned if p.memory.nbytes >= num_bytes or not p.is_free]
        missing = num_downloads - len(fitting)
        added = [_Pinned(self._runtime, num_bytes) for _ in range(missing)]
        self._pinned = deque(fitting + added)

    def restart(self) -> None:
        """The next result is the first of a step."""
        self._end = 0

    def take(self, shape: Shape, dtype: DTypeLike) -> Array:
        """An array behind the results that were taken since the last download."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self._end + num_bytes > self._capacity_bytes:
            self._grow(max(self._end + num_bytes, 2 * self._capacity_bytes, _FIRST_BYTES))
        start = self._end
        self._end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return self._device[start : start + num_bytes].view(np.dtype(dtype)).reshape(shape)

    def download(self, arrays: Sequence[Array]) -> Download:
        """Start copying arrays down: what lies in the buffer in one copy, others one by one."""
        self.restart()
        starts = [self._runtime.address(array) - self._address for array in arrays]
        inside = [0 <= start < self._capacity_bytes for start in starts]
        held = [(s, s + a.nbytes) for s, a, i in zip(starts, arrays, inside, strict=True) if i]
        first, end = min((s for s, _ in held), default=0), max((e for _, e in held), default=0)
        others = sum(_padded(a.nbytes) for a, i in zip(arrays, inside, strict=True) if not i)
        pinned = self._free(_padded(end - first) + others)
        views: list[NDArray[Any]] = []
        behind = _padded(end - first)
        for array, start, is_inside in zip(arrays, starts, inside, strict=True):
            at = start - first if is_inside else behind
            place = pinned.memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            views.append(place)
            if not is_inside:
                behind += _padded(array.nbytes)
                self._runtime.copy_to_host_async(place, array)
        if end > first:
            self._runtime.copy_to_host_async(pinned.memory[: end - first], self._device[first:end])
        pinned.copied.record(self._runtime.stream)
        download = Download(pinned, views)
        pinned.lend(download)
        return download

    def _grow(self, num_bytes: int) -> None:
        self._device = None  # first, so that both need not fit, unless a result is still held
        self._capacity_bytes = self._end = 0
        self._device = self._runtime.empty((num_bytes,), np.uint8)
        self._address = self._runtime.address(self._device)
        self._capacity_bytes = num_bytes

    def _free(self, num_bytes: int) -> _Pinned:
        for _ in range(len(self._pinned)):
            pinned = self._pinned[0]
            self._pinned.rotate(-1)  # the one that is lent is the last to be asked again
            if pinned.memory.nbytes >= num_bytes and pinned.is_free:
                return pinned
        self._pinned.append(_Pinned(self._runtime, max(num_bytes, self._capacity_bytes)))
        return self._pinned[-1]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
