"""Kernel arguments: the checks before a launch, and the memory they travel in.

Refuses what a GPU would misread in silence: a scalar of another width, an array of another element
type, a view that is not contiguous. Integers of one width may differ in sign; pointers to `void`,
to bytes and to 16-byte packs take any element type. Pointers to a struct take a structured array
of the same element size, or an array of numbers, which the kernel reads as packs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.emulator.errors import LaunchError
from cupaged.emulator.findings import ArrayArgument
from cupaged.emulator.launch_abi import ArgumentRange, ParameterInfo, Scalar

_INTEGERS = (Scalar.SIGNED, Scalar.UNSIGNED)
_PACK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a kernel takes at one place."""

    name: str
    is_pointer: bool
    is_const: bool
    scalar: Scalar
    bytes: int
    alignment: int
    element_bytes: int
    scalar_bytes: int

    @staticmethod
    def of(name: str, info: ParameterInfo) -> Parameter:
        """From the compiled module."""
        return Parameter(
            name, info.is_pointer, info.is_const, Scalar(info.scalar), info.bytes,
            info.alignment, info.element_bytes, info.scalar_bytes,
        )  # fmt: skip

    @property
    def type_name(self) -> str:
        """The name of the scalar, for messages."""
        return _name(self.scalar, self.scalar_bytes)


def _name(scalar: Scalar, size: int) -> str:
    if scalar is Scalar.SIGNED:
        return f"int{8 * size}"
    if scalar is Scalar.UNSIGNED:
        return f"uint{8 * size}"
    return "bytes" if scalar is Scalar.OPAQUE else scalar.name.lower()


@functools.cache
def _scalar_of(dtype: np.dtype[Any]) -> Scalar:
    if dtype.name == "bfloat16":
        return Scalar.BFLOAT16
    if dtype.kind == "f" and dtype.itemsize in (2, 4, 8):
        return {2: Scalar.FLOAT16, 4: Scalar.FLOAT32, 8: Scalar.FLOAT64}[dtype.itemsize]
    return {"b": Scalar.BOOL, "i": Scalar.SIGNED, "u": Scalar.UNSIGNED}.get(
        dtype.kind, Scalar.OPAQUE
    )


class PackedArguments:
    """The arguments of one launch in memory, and the ranges of its arrays.

    Args:
        replace: gives the address to pass for an array; the address of its data if None.

    Raises:
        LaunchError: an argument does not fit its parameter.
    """

    def __init__(
        self,
        kernel: str,
        parameters: Sequence[Parameter],
        arguments: Sequence[Any],
        addresses: dict[int, int] | None = None,
    ) -> None:
        if not isinstance(arguments, (tuple, list)):
            raise LaunchError(f"{kernel}: args must be a tuple, got {type(arguments).__name__}")
        if len(arguments) != len(parameters):
            names = ", ".join(p.name for p in parameters)
            raise LaunchError(
                f"{kernel} takes {len(parameters)} arguments ({names}), got {len(arguments)}"
            )
        self.arrays: dict[int, ArrayArgument] = {}
        self.ranges = (ArgumentRange * max(len(parameters), 1))()
        self.num_ranges = 0
        self.pointers = (ctypes.c_void_p * max(len(parameters), 1))()
        self._kept: list[Any] = []
        for index, (parameter, value) in enumerate(zip(parameters, arguments, strict=True)):
            if parameter.is_pointer:
                moved = None if addresses is None else addresses.get(index)
                content = self._pointer(kernel, index, parameter, value, moved)
            else:
                content = _scalar_bytes(kernel, parameter, value)
            storage = ctypes.create_string_buffer(len(content) + parameter.alignment)
            start = -ctypes.addressof(storage) % parameter.alignment
            ctypes.memmove(ctypes.addressof(storage) + start, content, len(content))
            self._kept.append(storage)
            self.pointers[index] = ctypes.addressof(storage) + start

    def _pointer(
        self, kernel: str, index: int, parameter: Parameter, value: Any, moved: int | None
    ) -> bytes:
        if not isinstance(value, np.ndarray):
            if isinstance(value, np.generic) and value.dtype.kind in "iu" and value.itemsize == 8:
                if int(value) == 0:
                    return bytes(8)
                raise LaunchError(
                    f"{kernel}: '{parameter.name}' is a pointer; an address other than 0 cannot be "
                    "checked, pass the array"
                )
            raise LaunchError(
                f"{kernel}: '{parameter.name}' is a pointer to {parameter.type_name} and needs an "
                f"array, got {type(value).__name__}"
            )
        check_array(kernel, parameter, value)
        address = value.ctypes.data if moved is None else moved
        read_only = parameter.is_const or not value.flags.writeable
        self.ranges[self.num_ranges] = ArgumentRange(
            address, address + value.nbytes, index, int(read_only)
        )
        self.num_ranges += 1
        self.arrays[index] = ArrayArgument(parameter.name, value.dtype, value.shape)
        return address.to_bytes(8, "little")


def check_array(kernel: str, parameter: Parameter, array: NDArray[Any]) -> None:
    """Whether the array may be passed.

    Raises:
        LaunchError: its element type is another, or it is not contiguous.
    """
    where = f"{kernel}: '{parameter.name}'"
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise LaunchError(
            f"{where} must be contiguous, got a view with strides {array.strides} of "
            f"{array.dtype} {array.shape}; pass the whole array and the stride"
        )
    if not array.dtype.isnative:
        raise LaunchError(f"{where} must have native byte order, got {array.dtype}")
    if array.dtype.hasobject or not array.itemsize:
        raise LaunchError(f"{where} must be an array of numbers, got {array.dtype}")
    if parameter.scalar is Scalar.OPAQUE and parameter.element_bytes > 1:
        if array.dtype.kind == "V" and array.itemsize != parameter.element_bytes:
            raise LaunchError(
                f"{where} points to elements of {parameter.element_bytes} bytes, got an array of "
                f"{array.dtype}, whose elements have {array.itemsize}"
            )
        return
    any_type = parameter.element_bytes == 1 and parameter.scalar is not Scalar.BOOL
    if not any_type and not _is_pack(parameter) and not _holds(parameter, array.dtype):
        raise LaunchError(f"{where} points to {parameter.type_name}, got an array of {array.dtype}")


def _is_pack(parameter: Parameter) -> bool:
    """Whether it points to vectors by which a kernel moves any data."""
    return parameter.element_bytes == _PACK_BYTES and parameter.scalar_bytes < _PACK_BYTES


def _holds(parameter: Parameter, dtype: np.dtype[Any]) -> bool:
    """Whether an array is made of the scalars, or of the vectors, that the parameter points to."""
    if dtype.names is not None or dtype.kind == "c":
        parts = [dtype[name].base for name in dtype.names or ()] or [np.empty(0, dtype).real.dtype]
        return dtype.itemsize == parameter.element_bytes and all(
            part.names is None and _holds(parameter, part) for part in parts
        )
    got, wanted = _scalar_of(dtype), parameter.scalar
    same = got is wanted or (got in _INTEGERS and wanted in _INTEGERS)
    same = same or {got, wanted} == {Scalar.BOOL, Scalar.UNSIGNED}
    return same and dtype.itemsize == parameter.scalar_bytes


def _scalar_bytes(kernel: str, parameter: Parameter, value: Any) -> bytes:
    where = f"{kernel}: '{parameter.name}'"
    if isinstance(value, np.ndarray) and value.ndim:
        raise LaunchError(f"{where} is passed by value, got an array of shape {value.shape}")
    if isinstance(value, (bool, int, float)) and not isinstance(value, np.generic):
        # As CuPy passes them: 1, 8 and 8 bytes.
        kind = {bool: Scalar.BOOL, int: Scalar.SIGNED, float: Scalar.FLOAT64}[type(value)]
        same = kind is parameter.scalar or (kind is Scalar.SIGNED and parameter.scalar in _INTEGERS)
        width = {Scalar.BOOL: 1}.get(kind, 8)
        if not same or width != parameter.bytes:
            raise LaunchError(
                f"{where} is {parameter.type_name}, and a Python {type(value).__name__} would be "
                f"passed in {width} byte{'s' * (width > 1)}: pass np.{_numpy_name(parameter)}(...)"
            )
        if kind is Scalar.SIGNED:
            try:
                return int(value).to_bytes(8, "little", signed=value < 0)
            except OverflowError:
                raise LaunchError(f"{where} must fit into 8 bytes, got {value}") from None
        return np.asarray(value).tobytes()
    if not isinstance(value, (np.generic, np.ndarray)):
        raise LaunchError(
            f"{where} is {parameter.type_name}, got {type(value).__name__}: pass a NumPy scalar"
        )
    got = _scalar_of(value.dtype)
    same = got is parameter.scalar or (got in _INTEGERS and parameter.scalar in _INTEGERS)
    is_struct = parameter.scalar is Scalar.OPAQUE or parameter.scalar_bytes != parameter.bytes
    if value.itemsize != parameter.bytes or not (same or (is_struct and got is Scalar.OPAQUE)):
        raise LaunchError(
            f"{where} is {parameter.type_name} of {parameter.bytes} bytes, got {value.dtype} of "
            f"{value.itemsize} bytes"
        )
    return value.tobytes()


def _numpy_name(parameter: Parameter) -> str:
    return "bool_" if parameter.scalar is Scalar.BOOL else parameter.type_name
