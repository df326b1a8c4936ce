"""Copies of arrays in memory that a child process shares.

Arrays that overlap are copied as one range, so that a kernel working in place still does.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.emulator.arguments import Parameter


class SharedCopies:
    """Holds the copies of one launch.

    addresses: where the child finds the array of a parameter, by its index.
    """

    def __init__(self, parameters: Sequence[Parameter], arguments: Sequence[Any]) -> None:
        self.addresses: dict[int, int] = {}
        self._moved: list[tuple[int, int, int, bool]] = []  # original, copy, bytes, written
        self._maps: list[mmap.mmap] = []
        if not isinstance(arguments, (tuple, list)):
            return
        arrays: list[tuple[int, NDArray[Any], bool]] = [
            (index, value, not parameter.is_const and value.flags.writeable)
            for index, (parameter, value) in enumerate(zip(parameters, arguments, strict=False))
            if isinstance(value, np.ndarray) and parameter.is_pointer and value.nbytes
        ]
        arrays.sort(key=lambda entry: entry[1].ctypes.data)
        position = 0
        while position < len(arrays):
            begin = arrays[position][1].ctypes.data
            end, written = begin, False
            members: list[tuple[int, int]] = []
            while position < len(arrays) and (not members or arrays[position][1].ctypes.data < end):
                index, array, writes = arrays[position]
                end = max(end, array.ctypes.data + array.nbytes)
                written |= writes
                members.append((index, array.ctypes.data))
                position += 1
            copy = self._copy(begin, end - begin, written)
            for index, address in members:
                self.addresses[index] = copy + address - begin

    def _copy(self, begin: int, num_bytes: int, written: bool) -> int:
        shared = mmap.mmap(-1, num_bytes)
        self._maps.append(shared)
        address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        ctypes.memmove(address, begin, num_bytes)
        self._moved.append((begin, address, num_bytes, written))
        return address

    def give_back(self) -> None:
        """Bring home what the child wrote."""
        for original, copy, num_bytes, written in self._moved:
            if written:
                ctypes.memmove(original, copy, num_bytes)
