"""One upload for many small arrays: what a step needs to know goes to the device in one copy.

Owns two buffers on the device and two pinned ones on the host, used in turns, so that the host may
lay out a step while the copy before it is under way. They only grow. The caller gets views, which
stay valid until the next upload but one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.runtime.protocol import Array, Event, Runtime

__all__ = ["StagingBuffer"]

_ALIGNMENT_BYTES = 16  # of each array in the buffer: the widest load there is
_GAP_BYTES = 16  # between arrays, so that the emulator sees an access beyond the end of one


class _Half:
    """A pinned buffer, its device buffer, and the event behind the copy between them."""

    def __init__(self, runtime: Runtime, num_bytes: int) -> None:
        self.pinned = runtime.empty_pinned((num_bytes,), np.uint8)
        self.device: Array = runtime.empty((num_bytes,), np.uint8)
        self.copied: Event = runtime.new_event()


class StagingBuffer:
    """Uploads of at most `capacity_bytes`, or more at the price of an allocation."""

    def __init__(self, runtime: Runtime, capacity_bytes: int) -> None:
        self._runtime = runtime
        self._halves = [_Half(runtime, capacity_bytes) for _ in range(2)]

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Array]:
        """Copies of host arrays on the device, each at a multiple of 16 bytes.

        The copy is in order on the runtime's stream. The host arrays may be changed at once.
        """
        offsets, end = [], -_GAP_BYTES
        for array in arrays:
            offsets.append(end + _GAP_BYTES)
            end = offsets[-1] + -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        half = self._take(end)
        for array, offset in zip(arrays, offsets, strict=True):
            place = half.pinned[offset : offset + array.nbytes]
            place.view(array.dtype).reshape(array.shape)[...] = array
        if end > 0:
            self._runtime.copy_to_device_async(half.device[:end], half.pinned[:end])
            half.copied.record(self._runtime.stream)
        return [
            half.device[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def _take(self, num_bytes: int) -> _Half:
        """The half that was used longer ago, once its last copy has been made."""
        half = self._halves.pop(0)
        half.copied.synchronize()
        if half.pinned.nbytes < num_bytes:
            half = _Half(self._runtime, max(num_bytes, 2 * half.pinned.nbytes))
        self._halves.append(half)
        return half
