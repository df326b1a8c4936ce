"""`CuPyRuntime` on a CuPy that is made of host memory: what it calls, packs and refuses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.runtime import cupy_runtime
from cupaged.runtime.cupy_runtime import CuPyRuntime
from cupaged.runtime.protocol import (
    DeviceError,
    DeviceMemoryError,
    DeviceProperties,
    DeviceUnavailableError,
    MemoryInfo,
)
from cupaged.runtime.staging import StagingBuffer
from tests.unit.fake_cupy import FakeGpu, make

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setitem(sys.modules, "cupy", make(gpu))

    def compile_kernel(file: str, defines: Any, arch: str) -> SimpleNamespace:
        gpu.log("compile", file, dict(defines), arch)
        return SimpleNamespace(path=Path(f"/cubins/{file}.{arch}.{sorted(defines.items())}"))

    monkeypatch.setattr(cupy_runtime, "compile_kernel", compile_kernel)
    return gpu


@pytest.fixture
def runtime(gpu: FakeGpu) -> CuPyRuntime:
    runtime = CuPyRuntime()
    gpu.calls.clear()
    return runtime


# ---- opening -------------------------------------------------------------------------------------


def test_properties(gpu: FakeGpu) -> None:
    runtime = CuPyRuntime()
    assert runtime.properties == DeviceProperties("NVIDIA A100", "sm_80", 108, 166912)
    assert ("setDevice", 0) in gpu.calls


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceUnavailableError, match=r"pip install 'cupaged\[cuda12\]'"):
        CuPyRuntime()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"driver_version": 0}, "no NVIDIA driver"),
        ({"driver_version": 11080}, r"serves CUDA 11\.8, .* update the driver to 525\.60\.13"),
        ({"count": -1}, "no GPU can be used: cudaErrorNoDevice"),
        ({"count": 0}, "GPU 0 is not there: 0 visible"),
        ({"name": b"Tesla V100", "capability": (7, 0)}, r"Tesla V100 .* 7\.0; .* needs 8\.0"),
    ],
)
def test_machines_that_cannot_be_used(changes: Any, message: str, gpu: FakeGpu) -> None:
    for name, value in changes.items():
        setattr(gpu, name, value)
    with pytest.raises(DeviceUnavailableError, match=message):
        CuPyRuntime()
    assert not gpu.calls, "nothing was started on it"


def test_a_device_that_is_not_there(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(DeviceUnavailableError, match=r"GPU 1 .* 1 visible .*_DEVICES='3'"):
        CuPyRuntime(device=1)


def test_cupy_is_imported_with_a_cache_folder_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy makes its folder below the home directory, which a container's user may not have."""
    (tmp_path / "cupy.py").write_text("import os\nraise ImportError(os.environ['CUPY_CACHE_DIR'])")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(DeviceUnavailableError, match=str(tmp_path / "cache" / "cupy")):
        CuPyRuntime()
    assert "CUPY_CACHE_DIR" not in os.environ
    monkeypatch.setenv("CUPY_CACHE_DIR", "/elsewhere")
    with pytest.raises(DeviceUnavailableError, match="/elsewhere"):
        CuPyRuntime()


def test_importing_the_runtime_does_not_import_cupy() -> None:
    code = (
        "import sys, cupaged, cupaged.runtime.cupy_runtime, cupaged.runtime.host_runtime\n"
        "import cupaged.ops.cuda_ops\n"
        "assert not {m for m in sys.modules if m.startswith('cupy')}, sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# ---- memory --------------------------------------------------------------------------------------


def test_arrays_come_from_the_pool_in_the_order_of_the_stream(
    gpu: FakeGpu, runtime: CuPyRuntime
) -> None:
    array = runtime.empty((3, 5), np.float16)
    assert (array.shape, array.dtype) == ((3, 5), np.dtype(np.float16))
    assert runtime.is_device_array(array)
    assert not runtime.is_device_array(np.zeros(3))
    zeros = runtime.zeros((4,), np.int64)
    np.testing.assert_array_equal(runtime.to_host(zeros), [0, 0, 0, 0])
    stream = runtime.stream.pointer
    assert gpu.calls == [
        ("malloc", 30, stream),
        ("malloc", 32, stream),
        ("fill", 32, stream),
        ("copy", 32, 2, stream),
        ("synchronize", stream),
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, ml_dtypes.bfloat16])
def test_there_and_back(dtype: Any, runtime: CuPyRuntime) -> None:
    values = np.arange(12).reshape(3, 4).astype(dtype)
    for host in (values, values.T, values[::2, 1:], values[:0], values[0, 0]):
        back = runtime.to_host(runtime.from_host(host))
        assert back.dtype == host.dtype
        np.testing.assert_array_equal(back, host)


def test_pinned_memory_is_what_was_asked_for_and_goes_with_its_last_view(
    gpu: FakeGpu, runtime: CuPyRuntime
) -> None:
    row = runtime.empty_pinned((1001, 3), np.int16)[7]
    assert gpu.pinned_bytes == 6006
    row[...] = [1, 2, 3]
    del row
    assert gpu.pinned_bytes == 0
    assert runtime.empty_pinned((0, 3), np.float64).shape == (0, 3)
    gpu.memory_is_full = True
    with pytest.raises(DeviceMemoryError, match=r"^24 bytes of pinned memory .* out of memory"):
        runtime.empty_pinned((3,), np.int64)


def test_asynchronous_copies_do_not_wait(gpu: FakeGpu, runtime: CuPyRuntime) -> None:
    pinned = runtime.empty_pinned((2, 3), np.int32)
    pinned[...] = [[1, 2, 3], [4, 5, 6]]
    source, target = runtime.empty((2, 3), np.int32), runtime.empty((2, 3), np.int32)
    stream = runtime.new_stream()
    gpu.calls.clear()
    runtime.copy_to_device_async(source, pinned, stream)
    runtime.copy_on_device(target, source)
    pinned[...] = 0
    runtime.copy_to_host_async(pinned, target)
    own = runtime.stream.pointer
    expected = [("copy", 24, 1, stream.pointer), ("copy", 24, 3, own), ("copy", 24, 2, own)]
    assert gpu.calls == expected
    np.testing.assert_array_equal(pinned, [[1, 2, 3], [4, 5, 6]])
    assert stream.pointer != own


def test_copies_that_do_not_fit(runtime: CuPyRuntime) -> None:
    array = runtime.empty((2, 3), np.int32)
    with pytest.raises(DeviceError, match=r"int64 \[2, 3\] for int32 \[2, 3\]"):
        runtime.copy_to_device(array, np.zeros((2, 3), np.int64))
    with pytest.raises(DeviceError, match=r"int32 \[3, 2\]"):
        runtime.copy_to_device(array, np.zeros((3, 2), np.int32))
    with pytest.raises(DeviceError, match="source of a copy must be contiguous"):
        runtime.copy_to_device(array, np.zeros((3, 2), np.int32).T)


def test_memory_that_is_full(gpu: FakeGpu, runtime: CuPyRuntime) -> None:
    gpu.memory_is_full = True
    message = r"^4000 bytes for an array \[10, 100\] of float32 do not fit on .*, where 3100 bytes"
    with pytest.raises(DeviceMemoryError, match=message):
        runtime.empty((10, 100), np.float32)


def test_memory_info_frees_first(gpu: FakeGpu, runtime: CuPyRuntime) -> None:
    assert runtime.memory_info() == MemoryInfo(total_bytes=10000, free_bytes=3100)
    assert gpu.calls == [("free_all_blocks",)]
    gpu.pool_counts = (500, 100, 700)
    assert runtime.memory_info().free_bytes == 200


def test_one_upload_a_step(gpu: FakeGpu, runtime: CuPyRuntime) -> None:
    staging = StagingBuffer(runtime, 1024)
    gpu.calls.clear()
    first, second = staging.upload([np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int64)])
    np.testing.assert_array_equal(runtime.to_host(first), [0, 1, 2])
    np.testing.assert_array_equal(runtime.to_host(second), [0, 1, 2, 3])
    assert runtime.address(second) == runtime.address(first) + 32
    stream = runtime.stream.pointer
    assert gpu.calls[:2] == [("copy", 64, 1, stream), ("record", stream)]  # and no wait


# ---- order ---------------------------------------------------------------------------------------


def test_events_and_streams(gpu: FakeGpu, runtime: CuPyRuntime) -> None:
    start, end = runtime.new_event(timing=True), runtime.new_event(timing=True)
    other = runtime.new_stream()
    start.record(runtime.stream)
    other.wait(start)
    end.record(other)
    end.synchronize()
    assert end.passed()
    assert runtime.elapsed_ms(start, end) == 2.5
    runtime.synchronize()
    assert gpu.calls == [
        ("record", runtime.stream.pointer),
        ("wait_event", other.pointer),
        ("record", other.pointer),
        ("event synchronize",),
        ("deviceSynchronize",),
    ]


def test_a_failure_on_the_gpu_shows_where_somebody_waits(
    gpu: FakeGpu, runtime: CuPyRuntime
) -> None:
    gpu.sync_error = "cudaErrorIllegalAddress"
    with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
        runtime.stream.synchronize()
    with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
        runtime.from_host(np.zeros(3))


# ---- kernels -------------------------------------------------------------------------------------


def test_a_module_is_loaded_once(gpu: FakeGpu, runtime: CuPyRuntime) -> None:
    defines = {"DTYPE": "f16"}
    kernel = runtime.load_kernel("norm.cu", "rms_norm", defines)
    assert runtime.load_kernel("norm.cu", "rms_norm", dict(defines)) is kernel
    runtime.load_kernel("norm.cu", "layer_norm", defines)
    cubin = "/cubins/norm.cu.sm_80.[('DTYPE', 'f16')]"
    assert gpu.calls == [
        ("compile", "norm.cu", defines, "sm_80"),
        ("load", cubin),
        ("function", "rms_norm"),
        ("compile", "norm.cu", defines, "sm_80"),
        ("function", "layer_norm"),
    ]
    runtime.load_kernel("norm.cu", "rms_norm", {"DTYPE": "bf16"})
    assert ("load", "/cubins/norm.cu.sm_80.[('DTYPE', 'bf16')]") in gpu.calls


def test_a_launch(gpu: FakeGpu, runtime: CuPyRuntime) -> None:
    kernel = runtime.load_kernel("norm.cu", "rms_norm", {})
    out, x = runtime.empty((4, 8), np.float16), runtime.empty((4, 8), np.float16)
    gpu.argument_formats = [
        ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_int64
    ]  # fmt: skip
    gpu.calls.clear()
    args = [out, x[2:], np.int32(-7), np.float32(0.5), np.int64(-(1 << 40))]
    runtime.launch(kernel, (4,), (32, 2), args)
    stream = runtime.new_stream()
    runtime.launch(kernel, (4, 5, 6), (32,), args, shared_memory_bytes=1024, stream=stream)
    values = [out.data.ptr, x.data.ptr + 32, -7, 0.5, -(1 << 40)]
    handle, own = kernel.handle, runtime.stream.pointer
    assert gpu.launched == [
        ((handle, 4, 1, 1, 32, 2, 1, 0, own), values),
        ((handle, 4, 5, 6, 32, 1, 1, 1024, stream.pointer), values),
    ]
    assert not gpu.calls, "a launch waits for nothing and allocates nothing"


def test_shared_memory_beyond_48_kib_is_asked_for_once(gpu: FakeGpu, runtime: CuPyRuntime) -> None:
    gpu.static_shared = 1024
    kernel = runtime.load_kernel("norm.cu", "rms_norm", {})
    gpu.calls.clear()
    for num_bytes in (47 << 10, 48 << 10, 100 << 10, 60 << 10):
        runtime.launch(kernel, (1,), (32,), (), shared_memory_bytes=num_bytes)
    assert gpu.calls == [("allow", 48 << 10), ("allow", 100 << 10)]
    with pytest.raises(DeviceError, match=r"165889 bytes .* NVIDIA A100 has at most 165888"):
        runtime.launch(kernel, (1,), (32,), (), shared_memory_bytes=166912 - 1024 + 1)


def test_a_refused_launch_names_the_kernel(gpu: FakeGpu, runtime: CuPyRuntime) -> None:
    kernel = runtime.load_kernel("norm.cu", "rms_norm", {})
    gpu.launch_error = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(DeviceError, match=r"rms_norm with grid \(70,\), block \(2048,\) .*_VALUE"):
        runtime.launch(kernel, (70,), (2048,), ())
