"""Arrays of the emulated device: host memory that behaves like memory of a GPU.

Owns `DeviceArray`, which refuses what an array on a GPU could not do (arithmetic, assignment,
fancy indexing: each would need a kernel). Every array lies alone between two large gaps without
access, so that no wild index reaches another array. Nothing here runs kernels.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.emulator.mapping import Mapping
from cupaged.errors import CupagedError
from cupaged.runtime.protocol import DeviceMemoryError, Shape

__all__ = ["DeviceArray", "DeviceArrayError", "host_view", "map_array"]

POISON = 0xFF  # bytes of memory that nobody wrote: NaN in every float format, -1 in integers


class DeviceArrayError(CupagedError, TypeError):
    """The host tried to compute with, or to assign to, an array that lies on the device."""


class DeviceArray(np.ndarray[Any, np.dtype[Any]]):
    """An array on the emulated device. Shapes, views and slices work; for values copy it first."""

    def __array_ufunc__(self, ufunc: np.ufunc, *_: Any, **__: Any) -> NoReturn:
        raise DeviceArrayError(f"{ufunc.__name__}{_NO_ARITHMETIC}")

    def __array_function__(self, func: Any, *_: Any, **__: Any) -> NoReturn:
        raise DeviceArrayError(f"{func.__name__}{_NO_ARITHMETIC}")

    def __setitem__(self, *_: Any) -> NoReturn:
        raise DeviceArrayError("an array on the device is written by a copy or by a kernel")

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k is ... or isinstance(k, int | np.integer | slice) for k in keys):
            raise DeviceArrayError("only slices and numbers index an array on the device")
        # A single element stays an array of no dimensions, as on a GPU.
        return super().__getitem__(key if ... in keys else (*keys, ...))

    def astype(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: a conversion is arithmetic."""
        raise DeviceArrayError(f"astype{_NO_ARITHMETIC}")

    def copy(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: `Runtime.copy_on_device` copies."""
        raise DeviceArrayError("an array on the device is copied by the runtime")

    def fill(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, as assignment is."""
        raise DeviceArrayError("an array on the device is written by a copy or by a kernel")

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype})"

    __str__ = __repr__


_NO_ARITHMETIC = " does not work on an array on the device: use a kernel, or copy it to the host"


def map_array(shape: Shape, dtype: DTypeLike, *, poison: bool) -> DeviceArray:
    """An array in a mapping of its own, unmapped when nobody refers to it any more.

    Args:
        poison: fill it with 0xFF bytes; otherwise it is zero.

    Raises:
        DeviceMemoryError: the system gives no more memory or address space.
    """
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        mapping = Mapping(num_bytes)
    except OSError as error:
        raise DeviceMemoryError(
            f"an array {list(shape)} of {dtype} does not fit in memory: {error.strerror}"
        ) from error
    memory = (ctypes.c_ubyte * num_bytes).from_address(mapping.address)
    weakref.finalize(memory, mapping.unmap).atexit = False
    if poison:
        ctypes.memset(mapping.address, POISON, num_bytes)
    return DeviceArray(shape, dtype, buffer=memoryview(memory))


def host_view(array: DeviceArray) -> NDArray[Any]:
    """The same memory as a plain array, for copies and launches."""
    return array.view(np.ndarray)
