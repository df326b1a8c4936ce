"""One upload for many small arrays: what a step needs to know goes to the device in one copy.

Owns one buffer on the device, whose address stays, and pinned ones on the host that are used in
turns, so that the host may lay out a step while the copy before it is under way. The copy is in
order on the runtime's stream, as all readers are: what they read is there until the next upload,
however far ahead the host is. A captured graph may keep the device addresses as long as the layout
of the step is the same and nothing makes the buffer grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.runtime.protocol import Array, Event, Runtime

__all__ = ["StagingBuffer", "staged_bytes"]

_ALIGNMENT_BYTES = 16  # of each array in the buffer: the widest load there is
_GAP_BYTES = 16  # between arrays, so that the emulator sees an access beyond the end of one
_NUM_PINNED = 2


def staged_bytes(sizes: Sequence[int]) -> int:
    """Bytes of the buffer for arrays of so many bytes each."""
    return sum(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES + _GAP_BYTES for size in sizes)


class StagingBuffer:
    """Uploads of at most `capacity_bytes`, or more at the price of an allocation."""

    def __init__(self, runtime: Runtime, capacity_bytes: int = 0) -> None:
        """Takes no memory for a capacity of 0: the first upload does."""
        self._runtime = runtime
        self._device: Array = None
        self._pinned: deque[tuple[NDArray[np.uint8], Event]] = deque()
        self.capacity_bytes = 0
        self._is_reserved = False
        if capacity_bytes:
            self.reserve(capacity_bytes)

    def reserve(self, capacity_bytes: int, num_pinned: int = _NUM_PINNED) -> None:
        """Take the memory for uploads of that size; what there is stays if it is enough.

        Args:
            num_pinned: uploads that the host may lay out before the first of them has been made.

        Raises:
            DeviceMemoryError: it does not fit.
        """
        self._is_reserved = True
        self._make_room(capacity_bytes, num_pinned)

    def holds(self, arrays: Sequence[NDArray[Any]]) -> bool:
        """Whether an upload of them stays within what was reserved; yes if nothing was."""
        needed = staged_bytes([array.nbytes for array in arrays])
        return not self._is_reserved or needed <= self.capacity_bytes

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Array]:
        """Copies of host arrays on the device, each at a multiple of 16 bytes.

        The copy is in order on the runtime's stream. The host arrays may be changed at once. What
        it gives is good for all work that is submitted before the next upload.
        """
        if not arrays:
            return []
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES + _GAP_BYTES
        if end > self.capacity_bytes:
            self._make_room(max(end, 2 * self.capacity_bytes), len(self._pinned))
        self._pinned.rotate(1)
        pinned, copied = self._pinned[0]
        if not copied.passed():
            copied.synchronize()
        for array, offset in zip(arrays, offsets, strict=True):
            place = pinned[offset : offset + array.nbytes]
            place.view(array.dtype).reshape(array.shape)[...] = array
        if any(array.nbytes for array in arrays):
            end -= _GAP_BYTES
            self._runtime.copy_to_device_async(self._device[:end], pinned[:end])
            copied.record(self._runtime.stream)
        return [
            self._device[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def _make_room(self, capacity_bytes: int, num_pinned: int) -> None:
        if capacity_bytes <= self.capacity_bytes and num_pinned <= len(self._pinned):
            return
        for _, copied in self._pinned:
            copied.synchronize()  # before its memory goes
        capacity = max(capacity_bytes, self.capacity_bytes)
        is_larger = capacity > self.capacity_bytes
        self._pinned.clear()
        self.capacity_bytes = 0  # until all of it is there: taking it may fail
        if is_larger:
            self._device = None  # first, so that both need not fit
            self._device = self._runtime.empty((capacity,), np.uint8)
        self._pinned.extend(
            (self._runtime.empty_pinned((capacity,), np.uint8), self._runtime.new_event())
            for _ in range(max(num_pinned, _NUM_PINNED))
        )
        self.capacity_bytes = capacity
