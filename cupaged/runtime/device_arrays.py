"""Arrays of the emulated device: host memory that behaves like memory of a GPU.

Owns `DeviceArray`, which refuses what an array on a GPU could not do (arithmetic, assignment,
fancy indexing: each would need a kernel) and reading its values, which would need a copy. Every
array lies alone between two large gaps without access, so that no wild index reaches another array.
Nothing here runs kernels.
"""

from __future__ import annotations

import ctypes
import math
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.emulator.mapping import Mapping
from cupaged.errors import BadValueError, CupagedError
from cupaged.runtime.protocol import DeviceError, DeviceMemoryError, Shape

__all__ = [
    "ArrayValueError",
    "DeviceArray",
    "DeviceArrayError",
    "MemoryBudget",
    "host_view",
    "map_array",
]

POISON = 0xFF  # bytes of memory that nobody wrote: NaN in every float format, -1 in integers


class DeviceArrayError(CupagedError, TypeError):
    """The host tried to compute with, to read or to assign to an array on the device."""


class ArrayValueError(BadValueError, DeviceError):
    """The shape or the dtype asked for is none that an array on the device can have."""


class DeviceArray(np.ndarray[Any, np.dtype[Any]]):
    """An array on the emulated device. Shapes, views and slices work; for values copy it first."""

    def __array_ufunc__(self, ufunc: np.ufunc, *_: Any, **__: Any) -> NoReturn:
        raise DeviceArrayError(f"{ufunc.__name__}{_NO_ARITHMETIC}")

    def __array_function__(self, func: Any, *_: Any, **__: Any) -> NoReturn:
        raise DeviceArrayError(f"{func.__name__}{_NO_ARITHMETIC}")

    def __setitem__(self, *_: Any) -> NoReturn:
        raise DeviceArrayError(_NO_WRITE)

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k is ... or isinstance(k, int | np.integer | slice) for k in keys):
            raise DeviceArrayError("only slices and numbers index an array on the device")
        # A single element stays an array of no dimensions, as on a GPU.
        return super().__getitem__(key if ... in keys else (*keys, ...))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def copy(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: `Runtime.copy_on_device` copies."""
        raise DeviceArrayError("an array on the device is copied by the runtime")

    @property
    def flat(self) -> NoReturn:
        """Refused: it reads and writes single elements."""
        raise DeviceArrayError(f"flat{_NO_ARITHMETIC}")

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype})"

    __str__ = __repr__


_NO_WRITE = "an array on the device is written by a copy or by a kernel"
_NO_ARITHMETIC = " does not work on an array on the device: use a kernel, or copy it to the host"
_READ_OR_COMPUTE = (
    "__array__", "__bool__", "__complex__", "__contains__", "__copy__", "__deepcopy__",
    "__dlpack__", "__float__", "__index__", "__int__", "__reduce__", "__reduce_ex__", "argmax",
    "argmin", "argpartition", "argsort", "astype", "byteswap", "choose", "compress", "conj",
    "conjugate", "diagonal", "dot", "dump", "dumps", "flatten", "item", "nonzero", "repeat",
    "round", "searchsorted", "take", "to_device", "tobytes", "tofile", "tolist", "trace",
)  # fmt: skip
_WRITE = ("fill", "partition", "put", "resize", "setfield", "sort")


def _refusal(reason: str) -> Callable[..., NoReturn]:
    def refuse(self: DeviceArray, *_: Any, **__: Any) -> NoReturn:
        raise DeviceArrayError(reason)

    return refuse


# The methods of NumPy that ask neither __array_ufunc__ nor __array_function__.
for _name in _READ_OR_COMPUTE:
    setattr(DeviceArray, _name, _refusal(f"{_name.strip('_')}{_NO_ARITHMETIC}"))
for _name in _WRITE:
    setattr(DeviceArray, _name, _refusal(f"{_name}: {_NO_WRITE}"))


class MemoryBudget:
    """How much memory all arrays of a device may take together."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What can still be taken; never negative."""
        return max(0, self.total_bytes - self.used_bytes)

    def give_back(self, num_bytes: int) -> None:
        """An array is gone."""
        self.used_bytes -= num_bytes


def map_array(
    shape: Shape, dtype: DTypeLike, *, poison: bool, budget: MemoryBudget | None = None
) -> DeviceArray:
    """An array in a mapping of its own, unmapped when nobody refers to it any more.

    Args:
        poison: fill it with 0xFF bytes; otherwise it is zero.
        budget: what it is taken from; None for all that the system gives.

    Raises:
        DeviceMemoryError: the budget, or the system, gives no more memory.
        ArrayValueError: the shape is no tuple of whole numbers, 0 or more; the dtype is no dtype,
            or one of Python objects.
    """
    shape, dtype = _checked_shape(shape), _checked_dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if budget is not None and num_bytes > budget.free_bytes:
        raise DeviceMemoryError(
            f"{num_bytes} bytes for an array {list(shape)} of {dtype} do not fit: "
            f"{budget.free_bytes} of {budget.total_bytes} bytes are free"
        )
    try:
        mapping = Mapping(num_bytes)
    except OSError as error:
        raise DeviceMemoryError(
            f"an array {list(shape)} of {dtype} does not fit in memory: {error.strerror}"
        ) from error
    memory = (ctypes.c_ubyte * num_bytes).from_address(mapping.address)
    weakref.finalize(memory, mapping.unmap).atexit = False
    if budget is not None:
        budget.used_bytes += num_bytes
        weakref.finalize(memory, budget.give_back, num_bytes).atexit = False
    if poison:
        ctypes.memset(mapping.address, POISON, num_bytes)
    return DeviceArray(shape, dtype, buffer=memoryview(memory))


def _checked_shape(shape: Shape) -> Shape:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if isinstance(shape, str | bytes) or min(sizes, default=0) < 0:
        raise ArrayValueError("shape", shape, "a tuple of whole numbers, 0 or more")
    return sizes


def _checked_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        checked = np.dtype(dtype)
    except TypeError:
        raise ArrayValueError("dtype", dtype, "a dtype of NumPy") from None
    if checked.hasobject:
        raise ArrayValueError("dtype", checked.name, "of numbers, not of Python objects")
    return checked


def host_view(array: DeviceArray) -> NDArray[Any]:
    """The same memory as a plain array, for copies and launches."""
    return array.view(np.ndarray)
