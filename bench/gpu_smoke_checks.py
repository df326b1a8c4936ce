"""What the sections of `gpu_smoke` share: the device, what a check says, and arrays to work on.

A section is a function from a `Device` to checks. A check passed or failed, or it is a measurement
and did neither. Nothing here knows what is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.protocol import Array, Runtime

__all__ = ["BF16", "Check", "Checks", "Device", "filled", "same"]

BF16 = np.dtype(ml_dtypes.bfloat16)
_FILLING = 1 << 22  # random numbers that are drawn; the rest repeats them


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table.

    passed: None for a measurement. values: numbers for the JSON.
    """

    name: str
    said: str
    passed: bool | None
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Device:
    """Where the sections run.

    runtime: under test. emulator: what it is compared with. dry_run: the runtime is an emulator
    too, and sizes are small. name: for `LLM`.
    """

    runtime: Runtime
    emulator: HostRuntime
    dry_run: bool

    @property
    def name(self) -> str:
        """As `LLM` calls it."""
        return "emulated" if self.dry_run else "cuda"


Checks = Iterator[Check]


def same(name: str, got: NDArray[Any], expected: NDArray[Any]) -> Check:
    """Equal in every bit, and something: memory that nobody wrote is zeros or NaN."""
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    got, expected = got.view(unsigned), expected.view(unsigned)
    differ = int((got != expected).sum())
    values = {"elements": got.size, "differ": differ}
    if not differ and got.min() == got.max():
        return Check(name, "nothing was computed", False, values)
    said = "equal" if not differ else f"{differ} of {got.size} elements differ"
    return Check(name, said, not differ, values)


def filled(runtime: Runtime, shape: tuple[int, ...], dtype: DTypeLike, scale: float = 1.0) -> Array:
    """An array of normal numbers that were drawn once and repeated."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape))
    drawn = np.random.default_rng(1).standard_normal(min(size, _FILLING), np.float32) * scale
    array = runtime.empty((size,), dtype)
    done = drawn.size
    runtime.copy_to_device(array[:done], drawn.astype(dtype))
    while done < size:
        count = min(done, size - done)
        runtime.copy_on_device(array[done : done + count], array[:count])
        done += count
    runtime.synchronize()
    return array.reshape(shape)
