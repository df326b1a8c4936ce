"""What every operation asks of its arrays before a kernel is launched.

A kernel trusts its arguments; here they are checked on the host: where they lie, dtype, shape,
order, alignment, overlap, and numbers that must fit an int of the kernel. The checks look at no
element and start no work on the device.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.errors import BadValueError
from cupaged.runtime.protocol import Array, Runtime, Shape

__all__ = ["ALIGNMENT_BYTES", "LaunchChecks", "OperandError"]

ALIGNMENT_BYTES = 16  # the widest load of a kernel
_MAX_INT32 = 2**31 - 1
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class OperandError(BadValueError):
    """An operand of an operation does not fit. `name` is "operation: operand"."""

    def __str__(self) -> str:
        return f"{self.name} must be {self.allowed}, got {self.value}"


class LaunchChecks:
    """The checks, for arrays of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def on_device(self, op: str, name: str, array: Array) -> None:
        """The array lies on the device.

        Raises:
            OperandError: it does not, or it is no array.
        """
        if not self._runtime.is_device_array(array):
            raise OperandError(f"{op}: {name}", _described(array), "an array on the device")

    def array(
        self,
        op: str,
        name: str,
        array: Array,
        shape: Shape,
        dtype: np.dtype[Any],
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> None:
        """The array lies on the device, in C order, aligned, with that shape and dtype.

        Raises:
            OperandError: it does not.
        """
        self.on_device(op, name, array)
        if array.shape != shape or array.dtype != dtype:
            raise OperandError(f"{op}: {name}", _described(array), f"{dtype} {list(shape)}")
        if not array.flags.c_contiguous:
            raise OperandError(f"{op}: {name}", f"strides {array.strides}", "contiguous")
        address = self._runtime.address(array)
        if address % alignment_bytes and array.nbytes:
            raise OperandError(
                f"{op}: {name}",
                f"an address that is {address % alignment_bytes} past one",
                f"at a multiple of {alignment_bytes} bytes",
            )

    def matrix(self, op: str, name: str, array: Array, dtype: np.dtype[Any]) -> tuple[int, int]:
        """As `array`, for any shape of two dimensions; numbers of rows and of columns.

        Raises:
            OperandError: it is no such array, or has no columns, or too many of either.
        """
        self.on_device(op, name, array)
        if array.ndim != 2 or not array.shape[1]:
            raise OperandError(f"{op}: {name}", _described(array), "of two dimensions, not empty")
        self.array(op, name, array, array.shape, dtype)
        rows, columns = array.shape
        self.int32(op, f"rows of {name}", rows)
        self.int32(op, f"columns of {name}", columns)
        return rows, columns

    def length(self, op: str, name: str, array: Array | NDArray[Any], ndim: int = 1) -> int:
        """The first length of an array on the host or on the device.

        Raises:
            OperandError: it is no array, or of another number of dimensions.
        """
        is_array = self._runtime.is_device_array(array) or isinstance(array, np.ndarray)
        if not is_array or array.ndim != ndim:
            allowed = "an array of " + ("one dimension" if ndim == 1 else f"{ndim} dimensions")
            raise OperandError(f"{op}: {name}", _described(array), allowed)
        return len(array)

    def apart(self, op: str, written: dict[str, Array], read: dict[str, Array]) -> None:
        """No array that is written overlaps another. All are contiguous.

        Raises:
            OperandError: two of them overlap.
        """
        spans = []
        for name, array in (*written.items(), *read.items()):
            start = self._runtime.address(array)
            spans.append((name, start, start + array.nbytes))
        for i, (name, start, end) in enumerate(spans[: len(written)]):
            for other, other_start, other_end in spans[i + 1 :]:
                if max(start, other_start) < min(end, other_end):
                    raise OperandError(f"{op}: {name}", "memory of both", f"apart from {other}")

    def host_int32(self, op: str, name: str, array: NDArray[Any], shape: Shape) -> None:
        """A host array of int32 with that shape.

        Raises:
            OperandError: it is not.
        """
        if not isinstance(array, np.ndarray) or self._runtime.is_device_array(array):
            raise OperandError(f"{op}: {name}", _described(array), "an array on the host")
        if array.shape != shape or array.dtype != np.int32:
            raise OperandError(f"{op}: {name}", _described(array), f"int32 {list(shape)}")

    def host_indices(
        self, op: str, name: str, array: NDArray[Any], shape: Shape, count: int
    ) -> None:
        """As `host_int32`, and every number is in [0, count).

        Raises:
            OperandError: it is not.
        """
        self.host_int32(op, name, array, shape)
        if array.size and not (array.min() >= 0 and array.max() < count):
            raise OperandError(
                f"{op}: {name}", f"{array.min()} to {array.max()}", f"from 0 to {count - 1}"
            )

    def int32(self, op: str, name: str, value: int) -> np.int32:
        """The number as a kernel's int.

        Raises:
            OperandError: it is negative or too large.
        """
        if not 0 <= value <= _MAX_INT32:
            raise OperandError(f"{op}: {name}", value, f"from 0 to {_MAX_INT32}")
        return np.int32(value)

    def eps(self, op: str, value: float) -> np.float32:
        """The eps of a norm as a kernel's float.

        Raises:
            OperandError: it is negative, no number, or too large for a float.
        """
        if not (isinstance(value, Real) and 0 <= value <= _MAX_FLOAT32):
            raise OperandError(f"{op}: eps", value, "a number, 0 or more")
        return np.float32(value)


def _described(array: Any) -> str:
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        return type(array).__name__
    where = " on the host" if type(array) is np.ndarray else ""
    return f"{array.dtype} {list(array.shape)}{where}"
