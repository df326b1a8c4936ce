"""The GPU: `Runtime` on CuPy.

Uses of CuPy only its thin layers: memory pool, streams, events, copies, the loading of cubins, and
the driver's launch call. Never an elementwise operation or a conversion, which would compile a
kernel at run time, and never the default stream. CuPy is imported when a runtime is made, not
before: importing cupaged does not touch CUDA. A runtime belongs to the thread that made it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.runtime.cache_folder import cache_folder
from cupaged.runtime.device_limits import check_driver, free_bytes, kernel_arch
from cupaged.runtime.kernels import compile_kernel
from cupaged.runtime.launch_arguments import ArgumentBlock
from cupaged.runtime.protocol import (
    Array,
    Defines,
    DeviceError,
    DeviceMemoryError,
    DeviceProperties,
    DeviceUnavailableError,
    Kernel,
    MemoryInfo,
    Shape,
    check_copy,
)

__all__ = ["CuPyRuntime"]

_SHARED_BYTES_WITHOUT_ASKING = 48 << 10
_MAX_SHARED_MEMORY = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyKind


class CuPyStream:
    """A CUDA stream that does not wait for the default stream."""

    def __init__(self, cupy: Any) -> None:
        self._errors = _errors(cupy)
        self.raw = cupy.cuda.Stream(non_blocking=True)
        self.pointer: int = self.raw.ptr

    def synchronize(self) -> None:
        """Wait; errors of kernels show here."""
        with _reported("the work on a stream", self._errors):
            self.raw.synchronize()

    def wait(self, event: CuPyEvent) -> None:
        """Later work starts after the event."""
        self.raw.wait_event(event.raw)


class CuPyEvent:
    """A CUDA event."""

    def __init__(self, cupy: Any, timing: bool) -> None:
        self._errors = _errors(cupy)
        self.raw = cupy.cuda.Event(disable_timing=not timing)

    def record(self, stream: CuPyStream) -> None:
        """Put it behind what the stream has so far."""
        self.raw.record(stream.raw)

    def synchronize(self) -> None:
        """Wait; errors of kernels show here."""
        with _reported("the work before an event", self._errors):
            self.raw.synchronize()

    def passed(self) -> bool:
        """Ask without waiting."""
        return bool(self.raw.done)


@dataclass(slots=True)
class CuPyKernel:
    """A loaded kernel.

    raw: CuPy's kernel, which keeps the module alive. handle: the driver's function.
    static_bytes: its own shared memory. allowed_bytes: dynamic shared memory that a launch may ask.
    """

    name: str
    raw: Any
    handle: int
    static_bytes: int
    allowed_bytes: int


class CuPyRuntime:
    """`Runtime` on one GPU. See there for what each method means."""

    def __init__(self, device: int = 0) -> None:
        """Open the GPU with that index among the visible ones.

        Raises:
            DeviceUnavailableError: no CuPy, no driver or an old one, no such GPU, or an old one.
        """
        cupy = _import_cupy()
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._launch_kernel = cupy.cuda.driver.launchKernel
        self._errors = _errors(cupy)
        self.device = device
        self._properties = self._open()
        self._pool = cupy.cuda.MemoryPool()
        self._stream = CuPyStream(cupy)
        self._arguments = ArgumentBlock(cupy.ndarray, self.address)
        self._modules: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str, frozenset[tuple[str, str | int]]], CuPyKernel] = {}

    def _open(self) -> DeviceProperties:
        check_driver(self._runtime.driverGetVersion(), self._runtime.runtimeGetVersion())
        try:
            count = self._runtime.getDeviceCount()
        except self._errors as error:
            raise DeviceUnavailableError(f"no GPU can be used: {error}") from error
        if not 0 <= self.device < count:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
            raise DeviceUnavailableError(f"GPU {self.device} is not there: {count} visible{shown}")
        found = self._runtime.getDeviceProperties(self.device)
        name = found["name"].decode()
        arch = kernel_arch(name, found["major"], found["minor"])
        self._runtime.setDevice(self.device)
        shared = self._runtime.deviceGetAttribute(_MAX_SHARED_MEMORY, self.device)
        return DeviceProperties(name, arch, found["multiProcessorCount"], shared)

    @property
    def properties(self) -> DeviceProperties:
        """The GPU."""
        return self._properties

    @property
    def stream(self) -> CuPyStream:
        """The runtime's own stream."""
        return self._stream

    def memory_info(self) -> MemoryInfo:
        """Of the GPU; what the pool keeps without using counts as free."""
        self._pool.free_all_blocks()
        driver_free, total = self._runtime.memGetInfo()
        pool = self._pool
        free = free_bytes(
            total, driver_free, pool.used_bytes(), pool.free_bytes(), pool.get_limit()
        )
        return MemoryInfo(total, free)

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        """From the runtime's own pool, in the order of its stream."""
        dtype = np.dtype(dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        try:
            with self._stream.raw:
                memory = self._pool.malloc(num_bytes)
        except (self._cupy.cuda.memory.OutOfMemoryError, *self._errors) as error:
            free = self.memory_info().free_bytes
            raise DeviceMemoryError(
                f"{num_bytes} bytes for an array {list(shape)} of {dtype} do not fit on "
                f"{self._properties.name}, where {free} bytes are free: {error}"
            ) from error
        return self._cupy.ndarray(shape, dtype, memptr=memory)

    def zeros(self, shape: Shape, dtype: DTypeLike) -> Array:
        """Set by the driver, in the order of the stream."""
        array = self.empty(shape, dtype)
        if array.nbytes:
            self._runtime.memsetAsync(array.data.ptr, 0, array.nbytes, self._stream.pointer)
        return array

    def from_host(self, host: NDArray[Any]) -> Array:
        """A copy; the host array may have any strides."""
        array = self.empty(host.shape, host.dtype)
        self.copy_to_device(array, np.ascontiguousarray(host).reshape(host.shape))
        return array

    def to_host(self, array: Array) -> NDArray[Any]:
        """A copy."""
        host = np.empty(array.shape, array.dtype)
        self.copy_to_host(host, array)
        return host

    def empty_pinned(self, shape: Shape, dtype: DTypeLike) -> NDArray[Any]:
        """Page-locked memory, and not of CuPy's pool for it, which takes powers of two and gives
        nothing back."""
        dtype = np.dtype(dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        cuda = self._cupy.cuda
        try:
            memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(max(1, num_bytes)), 0)
        except self._errors as error:
            raise DeviceMemoryError(
                f"{num_bytes} bytes of pinned memory on the host are not to be had: {error}"
            ) from error
        return np.frombuffer(memory, np.uint8, num_bytes).view(dtype).reshape(shape)

    def is_device_array(self, array: object) -> bool:
        """Whether it is CuPy's."""
        return isinstance(array, self._cupy.ndarray)

    def address(self, array: Array) -> int:
        """The address on the GPU."""
        address: int = array.data.ptr
        return address

    def copy_to_device(self, target: Array, host: NDArray[Any]) -> None:
        """From any host memory."""
        self.copy_to_device_async(target, host)
        self._stream.synchronize()

    def copy_to_host(self, target: NDArray[Any], array: Array) -> None:
        """To any host memory."""
        self.copy_to_host_async(target, array)
        self._stream.synchronize()

    def copy_to_device_async(self, target: Array, pinned: NDArray[Any], stream: Any = None) -> None:
        """Memory that is not pinned is read before this returns."""
        check_copy(target, pinned)
        self._copy(target.data.ptr, pinned.ctypes.data, target.nbytes, _TO_DEVICE, stream)

    def copy_to_host_async(self, target: NDArray[Any], array: Array, stream: Any = None) -> None:
        """Memory that is not pinned is written before this returns."""
        check_copy(target, array)
        self._copy(target.ctypes.data, array.data.ptr, array.nbytes, _TO_HOST, stream)

    def copy_on_device(self, target: Array, source: Array, stream: Any = None) -> None:
        """By the copy engine."""
        check_copy(target, source)
        self._copy(target.data.ptr, source.data.ptr, source.nbytes, _ON_DEVICE, stream)

    def new_stream(self) -> CuPyStream:
        """A stream that does not wait for the default stream."""
        return CuPyStream(self._cupy)

    def new_event(self, *, timing: bool = False) -> CuPyEvent:
        """Without timing an event is cheaper."""
        return CuPyEvent(self._cupy, timing)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds by the GPU's clock."""
        with _reported("the time between two events", self._errors):
            return float(self._cupy.cuda.get_elapsed_time(start.raw, end.raw))

    def synchronize(self) -> None:
        """Wait for the whole GPU."""
        with _reported("the work on the GPU", self._errors):
            self._runtime.deviceSynchronize()

    def load_kernel(self, file: str, name: str, defines: Defines) -> CuPyKernel:
        """From the cubin for this GPU, which is compiled unless it was before."""
        key = (file, name, frozenset(defines.items()))
        if key not in self._kernels:
            cubin = str(compile_kernel(file, defines, self._properties.arch).path)
            if cubin not in self._modules:
                self._modules[cubin] = self._cupy.RawModule(path=cubin)
            with _reported(f"loading {name} of {file}", self._errors):
                raw = self._modules[cubin].get_function(name)
                static = raw.shared_size_bytes
                self._kernels[key] = CuPyKernel(
                    name, raw, raw.kernel.ptr, static, _SHARED_BYTES_WITHOUT_ASKING - static
                )
        return self._kernels[key]

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
        """Through the driver's call: CuPy's own would make an object an argument each time."""
        if shared_memory_bytes > kernel.allowed_bytes:
            self._allow(kernel, shared_memory_bytes)
        try:
            self._launch_kernel(
                kernel.handle,
                *(*grid, 1, 1)[:3],
                *(*block, 1, 1)[:3],
                shared_memory_bytes,
                (stream or self._stream).pointer,
                self._arguments.pack(args),
                0,
            )
        except self._errors as error:
            raise DeviceError(
                f"the launch of {kernel.name} with grid {tuple(grid)}, block {tuple(block)} and "
                f"{shared_memory_bytes} bytes of shared memory failed: {error}"
            ) from error

    def _allow(self, kernel: Kernel, num_bytes: int) -> None:
        """Let a kernel have more dynamic shared memory than the 48 KiB that need no asking."""
        most = self._properties.max_shared_memory_bytes - kernel.static_bytes
        if num_bytes > most:
            raise DeviceError(
                f"{kernel.name} wants {num_bytes} bytes of dynamic shared memory; a block on "
                f"{self._properties.name} has at most {most}"
            )
        with _reported(f"shared memory for {kernel.name}", self._errors):
            kernel.raw.max_dynamic_shared_size_bytes = num_bytes
        kernel.allowed_bytes = num_bytes

    def _copy(
        self, target: int, source: int, num_bytes: int, kind: int, stream: CuPyStream | None
    ) -> None:
        if not num_bytes:
            return
        pointer = (stream or self._stream).pointer
        with _reported("a copy", self._errors):
            self._runtime.memcpyAsync(target, source, num_bytes, kind, pointer)


def _import_cupy() -> Any:
    """CuPy makes a cache folder when it is imported, where its user may have no home."""
    unset = "CUPY_CACHE_DIR" not in os.environ
    if unset:
        os.environ["CUPY_CACHE_DIR"] = str(cache_folder("cupy"))
    try:
        import cupy
    except ImportError as error:
        raise DeviceUnavailableError(
            f"CuPy cannot be imported ({error}); `pip install 'cupaged[cuda12]'` (or "
            f"[cuda13]) brings it"
        ) from error
    finally:
        if unset:
            del os.environ["CUPY_CACHE_DIR"]
    return cupy


def _errors(cupy: Any) -> tuple[type[Exception], ...]:
    return cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError


@contextmanager
def _reported(what: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise DeviceError(f"{what} failed: {error}") from error
