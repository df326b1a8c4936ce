"""What every runtime provides: arrays, copies, streams, events, kernels and their launches.

`CuPyRuntime` does it on a GPU, `HostRuntime` with the emulator. `cupaged.ops` is written against
this protocol alone. A runtime is for one device. It never knows an operation, and it never computes
on arrays itself: all arithmetic is in kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.errors import CupagedError

__all__ = [
    "Array",
    "Defines",
    "DeviceError",
    "DeviceMemoryError",
    "DeviceProperties",
    "DeviceUnavailableError",
    "Event",
    "Kernel",
    "MemoryInfo",
    "Runtime",
    "Shape",
    "Stream",
    "check_copy",
]

Array: TypeAlias = Any  # an array of the device: only shapes, views and slices work on the host
Defines: TypeAlias = Mapping[str, str | int]
Kernel: TypeAlias = Any  # what `load_kernel` gives and `launch` takes
Shape: TypeAlias = tuple[int, ...]


class DeviceError(CupagedError):
    """The device refused a launch or a copy, or failed while it computed."""


class DeviceUnavailableError(DeviceError):
    """There is no device that can be used: no driver, no GPU, too old a GPU, no CuPy."""


class DeviceMemoryError(DeviceError):
    """The memory of the device does not hold what was asked for."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What kernels are built and launched for.

    name: as the maker calls it. arch: "sm_80" and so on; what kernels are compiled for.
    max_shared_memory_bytes: most shared memory of a block, static and dynamic.
    """

    name: str
    arch: str
    multiprocessors: int
    max_shared_memory_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """total_bytes of the device; free_bytes can still be allocated. Neither is negative."""

    total_bytes: int
    free_bytes: int


class Stream(Protocol):
    """Work in order. Work on different streams has no order but what events give it."""

    def synchronize(self) -> None:
        """Return when all work submitted so far is done.

        Raises:
            DeviceError: some of it failed.
        """

    def wait(self, event: Any) -> None:
        """Later work on this stream starts after the event."""


class Event(Protocol):
    """A point in the work of a stream. One that was never recorded counts as passed."""

    def record(self, stream: Any) -> None:
        """Put the point behind all work submitted to the stream so far."""

    def synchronize(self) -> None:
        """Return when the point has been passed.

        Raises:
            DeviceError: the work before it failed.
        """

    def passed(self) -> bool:
        """Whether the point has been passed, without waiting."""


class Runtime(Protocol):
    """One device. Where a method takes a stream, None is the runtime's own."""

    @property
    def properties(self) -> DeviceProperties:
        """The device."""

    @property
    def stream(self) -> Stream:
        """The runtime's own stream."""

    def memory_info(self) -> MemoryInfo:
        """Total and free memory now."""

    # Arrays: C order, start at a multiple of 256 bytes, live as long as somebody refers to them.

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        """An uninitialised array.

        Raises:
            DeviceMemoryError: it does not fit.
        """

    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        """An array of zero bytes.

        Raises:
            DeviceMemoryError: it does not fit.
        """

    def from_host(self, host: NDArray[Any]) -> Array:
        """A copy of a host array; blocks.

        Raises:
            DeviceMemoryError: it does not fit.
        """

    def to_host(self, array: Array) -> NDArray[Any]:
        """A copy on the host, after the work on the runtime's stream; blocks."""

    def empty_pinned(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """A host array that asynchronous copies may read and write while the host goes on."""

    def is_device_array(self, array: object) -> bool:
        """Whether the array lies on a device (and not on the host)."""

    def address(self, array: Array) -> int:
        """Address on the device of the first element."""

    # Copies between contiguous arrays of equal shape and dtype.

    def copy_to_device(self, target: Array, host: NDArray[Any]) -> None:
        """Copy and wait."""

    def copy_to_host(self, target: NDArray[Any], array: Array) -> None:
        """Copy, after the work on the runtime's stream, and wait."""

    def copy_to_device_async(
        self, target: Array, pinned: NDArray[Any], stream: Stream | None = None
    ) -> None:
        """Copy in stream order. The host must leave `pinned` alone until then."""

    def copy_to_host_async(
        self, target: NDArray[Any], array: Array, stream: Stream | None = None
    ) -> None:
        """Copy in stream order into the pinned `target`, which is not to be read until then."""

    def copy_on_device(self, target: Array, source: Array, stream: Stream | None = None) -> None:
        """Copy in stream order; the two do not overlap."""

    # Order and time.

    def new_stream(self) -> Stream:
        """A stream of its own."""

    def new_event(self, *, timing: bool = False) -> Event:
        """An event; `timing` makes it fit for `elapsed_ms`."""

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Milliseconds between two passed events that were made with `timing`."""

    def synchronize(self) -> None:
        """Return when all work on all streams is done.

        Raises:
            DeviceError: some of it failed.
        """

    # Kernels.

    def load_kernel(self, file: str, name: str, defines: Defines) -> Kernel:
        """The kernel `name` of `cuda/<file>`, compiled with the defines; kept once loaded."""

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Array | np.generic],
        *,
        shared_memory_bytes: int = 0,
        stream: Stream | None = None,
    ) -> None:
        """Start a kernel and do not wait for it.

        Args:
            grid, block: one to three positive numbers each.
            args: arrays of the device and NumPy scalars, exactly the types of the parameters.
            shared_memory_bytes: dynamic shared memory of a block.

        Raises:
            DeviceError: the launch was refused. What fails later shows when somebody waits.
        """


def check_copy(target: Array, source: Array) -> None:
    """What every copy of a runtime asks of its two arrays.

    Raises:
        DeviceError: shapes or dtypes differ, or one of the two is not contiguous.
    """
    if target.shape != source.shape or target.dtype != source.dtype:
        raise DeviceError(
            f"a copy needs equal shapes and dtypes, got {source.dtype} {list(source.shape)} "
            f"for {target.dtype} {list(target.shape)}"
        )
    for what, array in (("target", target), ("source", source)):
        if not array.flags.c_contiguous:
            raise DeviceError(
                f"the {what} of a copy must be contiguous, got strides {array.strides}"
            )
