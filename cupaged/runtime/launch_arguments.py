"""The arguments of a launch as the driver wants them: an array of pointers to their values.

Owns one block of host memory with a fixed slot an argument, whose pointers are made once; a launch
only writes the values. The driver copies them before its launch call returns, so the block serves
every launch of a thread. What types a kernel wants is not known here: the emulator checks that.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupaged.runtime.protocol import DeviceError

__all__ = ["MAX_ARGUMENTS", "ArgumentBlock"]

MAX_ARGUMENTS = 64
_SLOT_BYTES = 16
_POINTER_FORMAT = "Q"
_FORMATS = {  # by kind and size of the NumPy scalar
    "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "b1": "?",
}  # fmt: skip


class ArgumentBlock:
    """Space for the arguments of one launch at a time; for one thread."""

    def __init__(self, array_type: type[Any], address: Callable[[Any], int]) -> None:
        """`array_type` is the type of the device's arrays; `address` gives where one starts."""
        self._array_type = array_type
        self._address = address
        self._values = ctypes.create_string_buffer(MAX_ARGUMENTS * _SLOT_BYTES)
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * MAX_ARGUMENTS)(
            *(first + i * _SLOT_BYTES for i in range(MAX_ARGUMENTS))
        )
        self._packers: dict[tuple[type, ...], struct.Struct] = {}

    def pack(self, args: Sequence[Any]) -> int:
        """Write the values; the address of the pointers to them, valid until the next call.

        Raises:
            DeviceError: an argument is neither an array of the device nor a NumPy number.
        """
        types = tuple(map(type, args))
        packer = self._packers.get(types)
        if packer is None:
            packer = self._packers[types] = self._make_packer(types)
        array_type, address = self._array_type, self._address
        values = [address(a) if isinstance(a, array_type) else a for a in args]
        packer.pack_into(self._values, 0, *values)
        return ctypes.addressof(self._pointers)

    def _make_packer(self, types: tuple[type, ...]) -> struct.Struct:
        if len(types) > MAX_ARGUMENTS:
            raise DeviceError(f"a launch takes at most {MAX_ARGUMENTS} arguments, got {len(types)}")
        slots = []
        for index, given in enumerate(types):
            if issubclass(given, self._array_type):
                code = _POINTER_FORMAT
            elif issubclass(given, np.generic) and given is not np.void:
                dtype = np.dtype(given)
                code = _FORMATS.get(f"{dtype.kind}{dtype.itemsize}", "")
            else:
                code = ""
            if not code:
                raise DeviceError(
                    f"argument {index} of a launch must be an array of the device or a NumPy "
                    f"number such as np.int32(3), got {given.__name__}"
                )
            slots.append(f"{code}{_SLOT_BYTES - struct.calcsize('=' + code)}x")
        return struct.Struct("=" + "".join(slots))
