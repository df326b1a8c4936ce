"""Memory of its own for each array: far from every other, or shared with a child process.

A wild index must not reach another array, where it would look like a right access; so an array gets
a mapping with large gaps without access on both sides. The gaps cost address space, no memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref

ALIGNMENT_BYTES = 256  # as cudaMalloc gives it
GAP_BYTES = 4 << 30

_PROT_NONE = 0  # the mmap module does not name it, and the other only of late
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """`num_bytes` of zeros at `address`, unmapped when the object goes.

    The address is a multiple of 256, and the bytes end less than 256 bytes before the gap.

    Args:
        shared: written by child processes too.

    Raises:
        OSError: the system gives no more memory or address space.
    """

    def __init__(self, num_bytes: int, *, shared: bool = False) -> None:
        padded = max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        usable = -(-padded // mmap.PAGESIZE) * mmap.PAGESIZE
        total = usable + 2 * GAP_BYTES
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        flags |= mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _MAP_NORESERVE)
        begin: int | None = _libc.mmap(None, total, _PROT_NONE, flags, -1, 0)
        if begin is None or begin == _MAP_FAILED:
            raise _error(num_bytes)
        self._finalizer = weakref.finalize(self, _libc.munmap, begin, total)
        self._finalizer.atexit = False
        start = begin + GAP_BYTES
        if _libc.mprotect(start, usable, mmap.PROT_READ | mmap.PROT_WRITE):
            raise _error(num_bytes)
        self.address = start + usable - padded
        self.num_bytes = num_bytes

    def unmap(self) -> None:
        """Give the memory back now."""
        self._finalizer()


def _error(num_bytes: int) -> OSError:
    code = ctypes.get_errno() or errno.ENOMEM
    return OSError(
        code,
        f"the system does not map {num_bytes} bytes ({os.strerror(code)}); each array also takes "
        f"{2 * GAP_BYTES >> 30} GiB of address space without memory, see `ulimit -v`",
    )


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_libc = _load_libc()
