"""How many threads and blocks a launch takes: pure functions of sizes.

A thread moves packs of 16 bytes. The kernels loop, so that any of these shapes is right; only the
block of a norm belongs to its contract, because the order of its sums depends on it.
"""

from __future__ import annotations

__all__ = ["MAX_THREADS", "PACK_BYTES", "norm_threads", "row_threads", "shared_row"]

PACK_BYTES = 16
MAX_THREADS = 256  # of a block of every kernel but the norms
_MAX_NORM_THREADS = 1024
_NORM_ELEMENTS_PER_WARP = 256


def row_threads(elements: int, itemsize: int) -> int:
    """Threads of a block that moves a row: whole warps, a thread a piece as far as a block goes.

    Rows whose size is no multiple of a pack are moved by element.
    """
    return min(MAX_THREADS, _whole_warps(_pieces(elements, itemsize)))


def shared_row(elements: int, itemsize: int) -> tuple[int, int]:
    """Threads of a block, and blocks that share a row so that each thread has one piece."""
    threads = row_threads(elements, itemsize)
    return threads, max(1, -(-_pieces(elements, itemsize) // threads))


def norm_threads(hidden: int) -> int:
    """Threads of a norm's block: a warp for every 256 elements, 32 warps at most."""
    return min(_MAX_NORM_THREADS, 32 * -(-hidden // _NORM_ELEMENTS_PER_WARP))


def _pieces(elements: int, itemsize: int) -> int:
    if elements * itemsize % PACK_BYTES:
        return elements
    return elements * itemsize // PACK_BYTES


def _whole_warps(threads: int) -> int:
    return max(32, -(-threads // 32) * 32)
