"""Memory of the host for KV blocks of the `cpu` device, which it gives page by page."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from cupaged.runtime.protocol import DeviceMemoryError

__all__ = ["empty_pages"]


def empty_pages(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """An array whose memory comes in the smallest pages that there are.

    NumPy asks for huge pages. A new block would then take 2 MiB for keys and for values of every
    layer, which are zeroed while a step waits: far more memory, and far more time, than it needs.

    Raises:
        DeviceMemoryError: the system has not so much.
    """
    num_bytes = 4 * math.prod(shape)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise DeviceMemoryError(f"cpu: no memory for {num_bytes} bytes: {error}") from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a system without such pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32).reshape(shape)
