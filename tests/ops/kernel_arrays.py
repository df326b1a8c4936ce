"""Arrays for the tests of kernels: on the device, between guards, and compared bit by bit.

Everything lies in a buffer of NaN bytes (0xFF) that is larger than the array, so that a value which
is not written, one that is written beyond the end, and one read from there all show.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.runtime.protocol import Array, Runtime

DTYPES = ["float32", "float16", "bfloat16"]
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
SMALLEST = {"float32": 1e-37, "float16": 2.0**-24, "bfloat16": 1e-37}  # what may round to zero
GUARD_BYTES = 256


class Guarded:
    """An array on the device with guards before and behind it."""

    def __init__(self, runtime: Runtime, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self._runtime = runtime
        self._dtype = np.dtype(dtype)
        self._num_bytes = math.prod(shape) * self._dtype.itemsize
        poison = np.full(self._num_bytes + 2 * GUARD_BYTES, 0xFF, np.uint8)
        self._buffer = runtime.from_host(poison)
        inside = self._buffer[GUARD_BYTES : GUARD_BYTES + self._num_bytes]
        self.array: Array = inside.view(self._dtype).reshape(shape)

    @classmethod
    def of(cls, runtime: Runtime, host: NDArray[Any]) -> Guarded:
        """With the values of a host array."""
        guarded = cls(runtime, host.shape, host.dtype)
        runtime.copy_to_device(guarded.array, np.ascontiguousarray(host).reshape(host.shape))
        return guarded

    def read(self) -> NDArray[Any]:
        """The array on the host; the guards must be as they were."""
        buffer = self._runtime.to_host(self._buffer)
        assert (buffer[:GUARD_BYTES] == 0xFF).all(), "written before the array"
        assert (buffer[GUARD_BYTES + self._num_bytes :] == 0xFF).all(), "written behind the array"
        inside = buffer[GUARD_BYTES : GUARD_BYTES + self._num_bytes]
        return inside.view(self._dtype).reshape(self.array.shape)


def normal(seed: int, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> NDArray[Any]:
    """Normal numbers of a storage type."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(NUMPY[dtype])


def same_bits(got: NDArray[Any], expected: NDArray[Any]) -> None:
    """Equal in every bit, NaN included."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(unsigned), np.ascontiguousarray(expected).view(unsigned)
    )


def close(got: NDArray[Any], expected: NDArray[np.float64], bound: Any, dtype: str) -> None:
    """|got - expected| <= tolerance * bound, `bound` the sum of the terms' absolute values."""
    assert (got.shape, got.dtype) == (expected.shape, np.dtype(NUMPY[dtype]))
    error = np.abs(got.astype(np.float64) - expected)
    allowed = TOLERANCE[dtype] * np.asarray(bound) + SMALLEST[dtype]
    worst = np.nan_to_num(error / allowed, nan=np.inf, posinf=np.inf).max(initial=0.0)
    assert worst <= 1, f"the error is {worst:.2f} times what is allowed"
