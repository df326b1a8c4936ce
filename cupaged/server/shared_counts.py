"""Numbers that each front end counts, and that any of them can tell for all: a small file each.

The files lie in one folder and outlive their processes, so that a successor of the same name goes
on where its predecessor ended. Whoever reads while another one counts sees each number as it was or
as it is, and maybe only one of two that belong together.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

__all__ = ["SharedCounts"]

_NUMBER = struct.Struct("@Q")
_LIMIT = 2**64


class SharedCounts:
    """The counts of this process.

    Args:
        file: where they are kept; its folder holds those of all processes and nothing else. None
            for a process that is alone.
        size: how many there are, the same everywhere.

    Raises:
        OSError: the file cannot be made, as where the disk is full.
    """

    def __init__(self, file: Path | None, size: int) -> None:
        self._folder = None if file is None else file.parent
        self._num_bytes = size * _NUMBER.size
        if file is None:
            self._memory: mmap.mmap = mmap.mmap(-1, self._num_bytes)
            return
        number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A write to a mapped page that has no block on a full disk would be a SIGBUS.
            os.posix_fallocate(number, 0, self._num_bytes)
            self._memory = mmap.mmap(number, self._num_bytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from None
        finally:
            os.close(number)

    def add(self, index: int, value: int) -> None:
        """Count."""
        place = index * _NUMBER.size
        (before,) = _NUMBER.unpack_from(self._memory, place)
        _NUMBER.pack_into(self._memory, place, (before + value) % _LIMIT)

    def put(self, index: int, value: int) -> None:
        """Replace a number."""
        _NUMBER.pack_into(self._memory, index * _NUMBER.size, value)

    def everywhere(self) -> list[tuple[int, ...]]:
        """The numbers of each process that has ever counted, this one included."""
        if self._folder is None:
            return [_numbers(self._memory[:])]
        found = (path.read_bytes() for path in sorted(self._folder.iterdir()))
        # A file that is being made is too short yet.
        return [_numbers(data) for data in found if len(data) == self._num_bytes]


def _numbers(data: bytes) -> tuple[int, ...]:
    return tuple(number for (number,) in _NUMBER.iter_unpack(data))
