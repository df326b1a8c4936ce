"""What the Python of a check block works with: arrays as a GPU would hold them, and `expect`.

Arrays are aligned to 256 bytes, as cudaMalloc does, and hold NaN or -1 where nobody wrote. Random
values follow from the seed and the number of the block. Nothing here knows a file or runs a kernel.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from cupaged.emulator.errors import EmulatorError
from cupaged.emulator.mapping import ALIGNMENT_BYTES

__all__ = ["TOLERANCES", "CheckValues", "ExpectationError", "block_dtype", "compare"]

_POISON = 0xFF  # of every byte: NaN in every format of floats, -1 in integers

# Of a value of size 1 or less; larger values may be off by as much more.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


class ExpectationError(EmulatorError):
    """An array does not hold what a check block expects."""


class CheckValues:
    """The names of one run of one block, and how much it compared.

    Args:
        seed: of the random values.
        number: the block's, so that two blocks draw different values.
        dtype: "f32", "f16" or "bf16": of floating-point arrays that name no other.
        with_bf16: offer the name bf16.

    Raises:
        EmulatorError: bfloat16 is asked for and `ml_dtypes` is not installed.
    """

    def __init__(self, seed: int, number: int, dtype: str = "f32", with_bf16: bool = False) -> None:
        self._random = np.random.default_rng([seed, number])
        self.types: dict[str, Any] = {"f32": np.float32, "f16": np.float16}
        if with_bf16 or dtype == "bf16":
            self.types["bf16"] = _bfloat16()
        self._dtype: np.dtype[Any] = np.dtype(self.types.get(dtype, np.float32))
        self.num_comparisons = 0

    def names(self) -> dict[str, Any]:
        """Everything a block may use, by its name there, apart from the kernels."""
        return {
            "np": np, **self.types,
            "normal": self.normal, "uniform": self.uniform, "integers": self.integers,
            "empty": self.empty, "zeros": self.zeros, "array": self.array, "expect": self.expect,
        }  # fmt: skip

    def normal(self, *shape: int, dtype: DTypeLike | None = None) -> NDArray[Any]:
        """Standard normal values."""
        return self._on_device(self._random.standard_normal(shape), self._chosen(dtype))

    def uniform(
        self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: DTypeLike | None = None
    ) -> NDArray[Any]:
        """Values in [low, high), evenly spread."""
        return self._on_device(self._random.uniform(low, high, shape), self._chosen(dtype))

    def integers(
        self, low: int, high: int, *shape: int, dtype: DTypeLike = np.int32
    ) -> NDArray[Any]:
        """Whole numbers in [low, high)."""
        return self._on_device(self._random.integers(low, high, shape), self._chosen(dtype))

    def empty(self, *shape: int, dtype: DTypeLike | None = None) -> NDArray[Any]:
        """An array that nobody has written: NaN, or -1 in integers."""
        return _memory(shape, self._chosen(dtype), poison=True)

    def zeros(self, *shape: int, dtype: DTypeLike | None = None) -> NDArray[Any]:
        """Zeros."""
        return _memory(shape, self._chosen(dtype), poison=False)

    def array(self, values: ArrayLike, dtype: DTypeLike | None = None) -> NDArray[Any]:
        """These values; Python's numbers as the block's type of floats, as int32 or as bool."""
        given = np.asarray(values)
        if dtype is None and not isinstance(values, (np.ndarray, np.generic)):
            dtype = {"f": self._dtype, "i": np.dtype(np.int32)}.get(given.dtype.kind)
        return self._on_device(given, given.dtype if dtype is None else self._chosen(dtype))

    def expect(self, actual: ArrayLike, desired: ArrayLike, tolerance: float | None = None) -> None:
        """Compare what a kernel wrote with what it should be.

        Args:
            actual: the kernel's array; its dtype decides the tolerance.
            desired: the right values, of the same shape or one that broadcasts to it.
            tolerance: how far a value may be off, times its size where that is above 1. None: by
                `TOLERANCES`; integers must be equal.

        Raises:
            ExpectationError: they differ; tells the first element that does.
        """
        self.num_comparisons += 1
        problem = compare(np.asarray(actual), np.asarray(desired), tolerance)
        if problem is not None:
            raise ExpectationError(problem)

    def _chosen(self, dtype: DTypeLike | None) -> np.dtype[Any]:
        if dtype is None:
            return self._dtype
        found: np.dtype[Any] = np.dtype(self.types.get(str(dtype), dtype))
        return found

    def _on_device(self, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        array = _memory(np.shape(values), dtype, poison=False)
        array[...] = values
        return array


def compare(
    actual: NDArray[Any], desired: NDArray[Any], tolerance: float | None = None
) -> str | None:
    """None if `actual` is near enough, else a predicate about its first element that is not."""
    try:
        desired = np.broadcast_to(desired, actual.shape)
    except ValueError:
        return f" has shape {_shape(actual)}, expected {_shape(desired)}"
    if tolerance is None:
        tolerance = TOLERANCES.get(actual.dtype.name, 0.0)
    if tolerance == 0.0 and actual.dtype.kind in "biu" and desired.dtype.kind in "biu":
        differs = actual != desired  # in 64 bits a float would round
        error = allowed = np.zeros(actual.shape)
    else:
        got, right = actual.astype(np.float64), desired.astype(np.float64)
        with np.errstate(invalid="ignore"):
            allowed = tolerance * np.maximum(1.0, np.abs(right))
            error = np.abs(got - right)
            same = (got == right) | (np.isnan(got) & np.isnan(right))
            differs = ~(same | (np.isfinite(right) & (error <= allowed)))
    if not differs.any():
        return None
    where = tuple(int(i) for i in np.argwhere(differs)[0])
    index = f"[{', '.join(map(str, where))}]" if where else ""
    text = f"{index} is {_value(actual[where])}, expected {_value(desired[where])}"
    if np.isfinite(error[where]) and allowed[where]:
        ratio = error[where] / allowed[where]
        text += f": the error is {ratio:.3g} times the allowed {allowed[where]:.3g}"
    elif actual[where] != actual[where]:
        text += ": was it never written?"
    count = int(np.count_nonzero(differs))
    return text if actual.size == 1 else f"{text}; {count:,} of {actual.size:,} elements differ"


def block_dtype(defines: Mapping[str, object]) -> str:
    """The type of floats that the define DTYPE names, "f32" where it names none."""
    given = str(defines.get("DTYPE", "f32"))
    return given if re.fullmatch("f32|f16|bf16", given) else "f32"


def _memory(shape: tuple[int, ...], dtype: np.dtype[Any], *, poison: bool) -> NDArray[Any]:
    sizes = tuple(map(operator.index, shape))  # NumPy's integers, too
    num_bytes = math.prod(sizes) * dtype.itemsize
    raw = np.full(num_bytes + ALIGNMENT_BYTES, _POISON if poison else 0, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + num_bytes].view(dtype).reshape(sizes)


def _value(value: Any) -> str:
    return f"{float(value):.9g}" if value.dtype.kind not in "biu" else str(value)


def _shape(array: NDArray[Any]) -> str:
    return "x".join(map(str, array.shape)) or "of a single value"


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise EmulatorError(
            "bf16 needs the package ml_dtypes: install it with `pip install ml_dtypes`"
        ) from None
    return ml_dtypes.bfloat16
