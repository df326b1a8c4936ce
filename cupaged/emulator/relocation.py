"""Runs a launch on copies of its arrays, each in memory of its own.

Arrays that overlap are copied as one range, so that a kernel working in place still does. An array
keeps its alignment, up to 256 bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.emulator.arguments import Parameter
from cupaged.emulator.errors import EmulatorError
from cupaged.emulator.mapping import ALIGNMENT_BYTES, Mapping


class Relocation:
    """The copies of one launch.

    addresses: where the kernel finds the array of a parameter, by its index.

    Args:
        shared: the kernel runs in a child process.

    Raises:
        EmulatorError: there is no memory for the copies.
    """

    def __init__(
        self, parameters: Sequence[Parameter], arguments: Sequence[Any], *, shared: bool
    ) -> None:
        self.addresses: dict[int, int] = {}
        self._moved: list[tuple[int, int, int, bool]] = []  # original, copy, bytes, written
        self._mappings: list[Mapping] = []
        if not isinstance(arguments, (tuple, list)):
            return  # to be refused
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
            copy = self._copy(begin, end - begin, written, shared)
            for index, address in members:
                self.addresses[index] = copy + address - begin

    def _copy(self, begin: int, num_bytes: int, written: bool, shared: bool) -> int:
        offset = begin % ALIGNMENT_BYTES
        try:
            mapping = Mapping(offset + num_bytes, shared=shared)
        except OSError as error:
            raise EmulatorError(str(error.strerror)) from error
        self._mappings.append(mapping)
        address = mapping.address + offset
        ctypes.memmove(address, begin, num_bytes)
        self._moved.append((begin, address, num_bytes, written))
        return address

    def give_back(self) -> None:
        """Bring home what the kernel wrote, and free the copies."""
        for original, copy, num_bytes, written in self._moved:
            if written:
                ctypes.memmove(original, copy, num_bytes)
        for mapping in self._mappings:
            mapping.unmap()
