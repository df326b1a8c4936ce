"""A CuPy made of host memory, for tests of `CuPyRuntime` where there is no GPU.

It has what the runtime uses and no more, so that a use of anything else fails. Calls are written
down in `calls`; copies really copy, and launches read their arguments as the driver would.
"""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.runtime import cupy_runtime


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class CUDADriverError(RuntimeError):
    """As CuPy's."""


class OutOfMemoryError(MemoryError):
    """As CuPy's."""


class Memory:
    """What a pool gives: a pointer to zeroed bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = np.full(num_bytes + 256, 0x77, np.uint8)
        start: int = self.bytes.ctypes.data
        self.ptr = start + -start % 256


class NdArray:
    """Contiguous arrays with views along the first axis."""

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, memptr: Memory, _view: Any = None
    ) -> None:
        self.data = memptr
        if _view is None:
            dtype = np.dtype(dtype)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            first = memptr.ptr - memptr.bytes.ctypes.data
            _view = memptr.bytes[first : first + size].view(dtype).reshape(shape)
        self.host: NDArray[Any] = _view

    def __getattr__(self, name: str) -> Any:
        if name not in ("shape", "dtype", "nbytes", "size", "ndim", "strides", "flags"):
            raise AttributeError(f"the fake array has no {name}")
        return getattr(self.host, name)

    def _viewed(self, view: NDArray[Any]) -> NdArray:
        array = NdArray((), None, self.data, view)
        array.data = Memory(0)
        array.data.bytes = self.data.bytes
        array.data.ptr = view.ctypes.data
        return array

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, key: Any) -> NdArray:
        return self._viewed(self.host[key])

    def view(self, dtype: Any) -> NdArray:
        return self._viewed(self.host.view(dtype))

    def reshape(self, *shape: Any) -> NdArray:
        return self._viewed(self.host.reshape(*shape))


class FakeGpu:
    """State of the machine that the fake CuPy sees. Tests change it before they make a runtime."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.driver_version = 12040
        self.count = 1
        self.name = b"NVIDIA A100"
        self.capability = (8, 0)
        self.memory = (3000, 10000)  # free, total
        self.pool_counts = (500, 100, 0)  # used, free, limit
        self.memory_is_full = False
        self.pinned_bytes = 0  # in use
        self.launch_error: str | None = None
        self.sync_error: str | None = None
        self.static_shared = 0
        self.argument_formats: list[Any] = []  # ctypes, what the next launch reads
        self.launched: list[tuple[Any, ...]] = []

    def log(self, *call: Any) -> None:
        self.calls.append(call)


def make(gpu: FakeGpu) -> ModuleType:
    """The module, to be put in `sys.modules` as "cupy"."""
    cupy = ModuleType("cupy")
    for name, part in (("cuda", _cuda(gpu)), ("ndarray", NdArray), ("RawModule", _raw_module(gpu))):
        setattr(cupy, name, part)
    return cupy


def install(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Let `import cupy` give it, and kernels be "compiled" to nothing."""
    cupy = make(gpu)
    cupy.__spec__ = ModuleSpec("cupy", None)  # as of an installed module
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    compiled = SimpleNamespace(path=Path("/no.cubin"))
    monkeypatch.setattr(cupy_runtime, "compile_kernel", lambda *_: compiled)
    return gpu


def _raw_module(gpu: FakeGpu) -> type:
    class RawKernel:
        def __init__(self, path: str, name: str) -> None:
            self.name = name
            self.shared_size_bytes = gpu.static_shared
            self.kernel = ModuleType("function")
            self.kernel.ptr = 0xF00  # type: ignore[attr-defined]

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "max_dynamic_shared_size_bytes":
                gpu.log("allow", value)
            super().__setattr__(name, value)

    class RawModule:
        def __init__(self, *, path: str) -> None:
            gpu.log("load", path)
            self.path = path

        def get_function(self, name: str) -> RawKernel:
            gpu.log("function", name)
            return RawKernel(self.path, name)

    return RawModule


def _cuda(gpu: FakeGpu) -> ModuleType:
    current: list[int] = []

    class Stream:
        made = 0

        def __init__(self, *, non_blocking: bool) -> None:
            assert non_blocking
            Stream.made += 1
            self.ptr = 0x1000 + Stream.made

        def __enter__(self) -> None:
            current.append(self.ptr)

        def __exit__(self, *_: Any) -> None:
            current.pop()

        def synchronize(self) -> None:
            gpu.log("synchronize", self.ptr)
            if gpu.sync_error:
                raise CUDARuntimeError(gpu.sync_error)

        def wait_event(self, event: Any) -> None:
            gpu.log("wait_event", self.ptr)

    class Event:
        def __init__(self, *, disable_timing: bool) -> None:
            self.timing = not disable_timing
            self.done = True

        def record(self, stream: Stream) -> None:
            gpu.log("record", stream.ptr)

        def synchronize(self) -> None:
            gpu.log("event synchronize")

    class PinnedMemory(bytearray):
        def __init__(self, num_bytes: int) -> None:
            if gpu.memory_is_full:
                raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
            super().__init__(num_bytes)
            gpu.pinned_bytes += num_bytes

        def __del__(self) -> None:
            gpu.pinned_bytes -= len(self)

    class MemoryPool:
        def malloc(self, num_bytes: int) -> Memory:
            assert current, "the pool is asked on the runtime's stream"
            gpu.log("malloc", num_bytes, current[-1])
            if gpu.memory_is_full:
                raise OutOfMemoryError("out of memory")
            return Memory(num_bytes)

        def free_all_blocks(self) -> None:
            gpu.log("free_all_blocks")

        def used_bytes(self) -> int:
            return gpu.pool_counts[0]

        def free_bytes(self) -> int:
            return gpu.pool_counts[1]

        def get_limit(self) -> int:
            return gpu.pool_counts[2]

    def launch_kernel(*numbers: int) -> None:
        *shape, parameters, extra = numbers
        assert extra == 0
        if gpu.launch_error:
            raise CUDADriverError(gpu.launch_error)
        pointers = (ctypes.c_void_p * len(gpu.argument_formats)).from_address(parameters)
        values = [
            kind.from_address(pointer).value
            for kind, pointer in zip(gpu.argument_formats, pointers, strict=True)
        ]
        gpu.launched.append((tuple(shape), values))

    cuda = ModuleType("cupy.cuda")
    parts = {
        "Stream": Stream,
        "Event": Event,
        "MemoryPool": MemoryPool,
        "PinnedMemory": PinnedMemory,
        "PinnedMemoryPointer": lambda memory, offset: memoryview(memory)[offset:],
        "get_elapsed_time": lambda start, end: 2.5 if start.timing and end.timing else None,
        "runtime": _runtime(gpu),
        "driver": ModuleType("driver"),
        "memory": ModuleType("memory"),
    }
    for name, part in parts.items():
        setattr(cuda, name, part)
    cuda.driver.launchKernel = launch_kernel
    cuda.driver.CUDADriverError = CUDADriverError
    cuda.memory.OutOfMemoryError = OutOfMemoryError
    return cuda


def _runtime(gpu: FakeGpu) -> ModuleType:
    def device_count() -> int:
        if gpu.count < 0:
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return gpu.count

    def copy(target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        gpu.log("copy", num_bytes, kind, stream)
        ctypes.memmove(target, source, num_bytes)

    def fill(target: int, value: int, num_bytes: int, stream: int) -> None:
        gpu.log("fill", num_bytes, stream)
        ctypes.memset(target, value, num_bytes)

    def properties(device: int) -> dict[str, Any]:
        major, minor = gpu.capability
        return {"name": gpu.name, "major": major, "minor": minor, "multiProcessorCount": 108}

    runtime = ModuleType("cupy.cuda.runtime")
    parts = {
        "CUDARuntimeError": CUDARuntimeError,
        "driverGetVersion": lambda: gpu.driver_version,
        "runtimeGetVersion": lambda: 12090,
        "getDeviceCount": device_count,
        "getDeviceProperties": properties,
        "deviceGetAttribute": lambda attribute, device: {97: 166912}[attribute],
        "setDevice": lambda device: gpu.log("setDevice", device),
        "memGetInfo": lambda: gpu.memory,
        "memcpyAsync": copy,
        "memsetAsync": fill,
        "deviceSynchronize": lambda: gpu.log("deviceSynchronize"),
    }
    for name, part in parts.items():
        setattr(runtime, name, part)
    return runtime
