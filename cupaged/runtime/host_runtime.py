"""The emulated device: `Runtime` with host memory and the emulator in the place of a GPU.

Runs the same `.cu` files with the same launches as `CuPyRuntime`, under the emulator's checks in
mode "checked". Streams are in order and immediate: every call has done its work when it returns,
and a failing kernel raises in `launch`. What a GPU could not do, it refuses as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.emulator.module import MAX_SHARED_BYTES, EmulatedModule
from cupaged.resources import read_resources
from cupaged.runtime.device_arrays import DeviceArray, MemoryBudget, host_view, map_array
from cupaged.runtime.errors import KernelNotFoundError
from cupaged.runtime.kernels import kernel_file, kernel_folder
from cupaged.runtime.protocol import (
    Array,
    Defines,
    DeviceError,
    DeviceProperties,
    Kernel,
    MemoryInfo,
    Shape,
    check_copy,
)

__all__ = ["HostEvent", "HostRuntime", "HostStream"]

# The emulator claims to be sm_90. It runs one block after another, so few multiprocessors will do.
_PROPERTIES = DeviceProperties("emulated", "sm_90", 4, MAX_SHARED_BYTES)


class HostStream:
    """Everything submitted is done already."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self, event: HostEvent) -> None:
        """The event has passed already."""


class HostEvent:
    """A moment of the host's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: float | None = None

    def record(self, stream: HostStream) -> None:
        """Take the time."""
        self.seconds = self._clock()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def passed(self) -> bool:
        """Always."""
        return True


class HostRuntime:
    """`Runtime` on the emulator. See there for what each method means.

    Memory that nobody wrote holds NaN bytes (0xFF) in mode "checked", and zeros in mode "plain".
    """

    def __init__(
        self,
        *,
        mode: Literal["checked", "plain"] = "checked",
        seed: int | None = None,
        isolated: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        memory_bytes: int | None = None,
    ) -> None:
        """A device of its own, with no kernel loaded.

        Args:
            mode: "checked" stops at the first fault of a kernel; "plain" is faster and does not
                notice: a wild kernel ends the process.
            seed: of a random order of threads and blocks; None is the order of their numbers.
            isolated: in mode "plain", run each launch in a child process, which a wild kernel
                cannot leave. All its arrays are copied there and back.
            clock: seconds, for events.
            memory_bytes: what arrays may take together; None for what the system gives.
        """
        self._budget = None if memory_bytes is None else MemoryBudget(memory_bytes)
        self._mode = mode
        self._seed = seed
        self._isolated = isolated
        self._clock = clock
        self._stream = HostStream()
        self._modules: dict[tuple[str, frozenset[tuple[str, str | int]]], EmulatedModule] = {}

    @property
    def properties(self) -> DeviceProperties:
        """A small GPU of compute capability 9.0."""
        return _PROPERTIES

    @property
    def stream(self) -> HostStream:
        """All streams are alike."""
        return self._stream

    def memory_info(self) -> MemoryInfo:
        """What is left of the memory it was given, or of the memory of this process."""
        if self._budget is not None:
            return MemoryInfo(self._budget.total_bytes, self._budget.free_bytes)
        resources = read_resources()
        return MemoryInfo(resources.memory_bytes, resources.available_bytes)

    def empty(self, shape: Shape, dtype: DTypeLike) -> DeviceArray:
        """Poisoned in mode "checked"."""
        return map_array(shape, dtype, poison=self._mode == "checked", budget=self._budget)

    def zeros(self, shape: Shape, dtype: DTypeLike) -> DeviceArray:
        """Fresh pages are zero."""
        return map_array(shape, dtype, poison=False, budget=self._budget)

    def from_host(self, host: NDArray[Any]) -> DeviceArray:
        """A copy; the host array may have any strides."""
        array = map_array(host.shape, host.dtype, poison=False, budget=self._budget)
        host_view(array)[...] = host
        return array

    def to_host(self, array: Array) -> NDArray[Any]:
        """A copy."""
        host = np.empty(array.shape, array.dtype)
        self.copy_to_host(host, array)
        return host

    def empty_pinned(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """Any host array will do."""
        return np.empty(shape, dtype)

    def is_device_array(self, array: object) -> bool:
        """Whether it came from an emulated device."""
        return isinstance(array, DeviceArray)

    def address(self, array: Array) -> int:
        """The address in this process."""
        address: int = array.__array_interface__["data"][0]
        return address

    def copy_to_device(self, target: Array, host: NDArray[Any]) -> None:
        """Copy."""
        self._copy(host_view(self._own(target)), self._not_own(host))

    def copy_to_host(self, target: NDArray[Any], array: Array) -> None:
        """Copy."""
        self._copy(self._not_own(target), host_view(self._own(array)))

    def copy_to_device_async(self, target: Array, pinned: NDArray[Any], stream: Any = None) -> None:
        """Copy."""
        self.copy_to_device(target, pinned)

    def copy_to_host_async(self, target: NDArray[Any], array: Array, stream: Any = None) -> None:
        """Copy."""
        self.copy_to_host(target, array)

    def copy_on_device(self, target: Array, source: Array, stream: Any = None) -> None:
        """Copy.

        Raises:
            DeviceError: the two overlap.
        """
        to, start = host_view(self._own(target)), host_view(self._own(source))
        check_copy(to, start)
        if abs(self.address(to) - self.address(start)) < to.nbytes:
            raise DeviceError(
                f"the target and the source of a copy overlap: {to.nbytes} bytes each, "
                f"{abs(self.address(to) - self.address(start))} bytes apart"
            )
        to[...] = start

    def new_stream(self) -> HostStream:
        """All streams are alike."""
        return HostStream()

    def new_event(self, *, timing: bool = False) -> HostEvent:
        """An event with or without a time costs the same."""
        return HostEvent(self._clock)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds of the host's clock."""
        if start.seconds is None or end.seconds is None:
            raise DeviceError("the time between events that were not recorded is not known")
        return float(end.seconds - start.seconds) * 1e3

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def load_kernel(self, file: str, name: str, defines: Defines) -> Kernel:
        """Compile with the host's compiler, or find what was compiled before.

        Raises:
            KernelNotFoundError: there is no such file, or the name leaves the kernel folder.
        """
        if isinstance(file, str) and os.path.basename(file) != file:
            raise KernelNotFoundError(f"a kernel file is named without a folder, got {file!r}")
        key = (file, frozenset(defines.items()))
        if key not in self._modules:
            self._modules[key] = EmulatedModule(
                kernel_file(file),
                dict(defines),
                include_dirs=[kernel_folder()],
                mode=self._mode,
                seed=self._seed,
                isolated=self._isolated,
                separated=False,  # the arrays lie apart already
            )
        return self._modules[key].get_function(name)

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Array | np.generic],
        *,
        shared_memory_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        """Run the kernel to its end.

        Raises:
            EmulatorError: the arguments do not fit the kernel, or a check failed while it ran.
            DeviceError: an argument lies on the host.
        """
        given = [a if isinstance(a, np.generic) else host_view(self._own(a)) for a in args]
        if shared_memory_bytes > kernel.max_dynamic_shared_size_bytes:
            kernel.max_dynamic_shared_size_bytes = shared_memory_bytes
        kernel(tuple(grid), tuple(block), tuple(given), shared_mem=shared_memory_bytes)

    def _own(self, array: Array) -> DeviceArray:
        if not isinstance(array, DeviceArray):
            raise DeviceError(f"an array on the device is needed, got {type(array).__name__}")
        return array

    def _not_own(self, array: NDArray[Any]) -> NDArray[Any]:
        if isinstance(array, DeviceArray):
            raise DeviceError("an array on the host is needed, got one on the device")
        return array

    def _copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        check_copy(target, source)
        target[...] = source
