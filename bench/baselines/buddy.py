"""A buddy allocator (Knowlton, CACM 1965): contiguous chunks of 2^k blocks."""

from __future__ import annotations


class BuddyAllocator:
    """Gives chunks of blocks out of [0, num_blocks); at most `max_chunk`, a power of two.

    The pool is carved from its start into the largest chunks that fit. A chunk is split in halves
    until it is as small as it may be; two free halves become one chunk again.
    """

    def __init__(self, num_blocks: int, max_chunk: int) -> None:
        self.max_chunk = max_chunk
        self._free: dict[int, list[int]] = {1 << k: [] for k in range(max_chunk.bit_length())}
        start, size = 0, max_chunk
        while start < num_blocks:
            if start + size <= num_blocks:
                self._free[size].append(start)
                start += size
            else:
                size //= 2

    def free_chunks(self, size: int) -> list[int]:
        """Where the free chunks of exactly that size begin."""
        return sorted(self._free[size])

    def allocate(self, num_blocks: int) -> tuple[int, int] | None:
        """(start, size) of a chunk of the next power of two; None if there is none.

        The smallest free chunk that suffices is taken, of equal ones the one freed last.
        """
        size = 1 << (num_blocks - 1).bit_length()
        found = next((s for s in self._free if s >= size and self._free[s]), None)
        if found is None:
            return None
        start = self._free[found].pop()
        while found > size:  # keep the low half
            found //= 2
            self._free[found].append(start + found)
        return start, size

    def free(self, start: int, size: int) -> None:
        """Take a chunk back, and unite it with its other half as long as that is free."""
        while size < self.max_chunk and (start ^ size) in self._free[size]:
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free[size].append(start)
