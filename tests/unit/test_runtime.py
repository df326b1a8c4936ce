"""The parts of the runtimes that need no GPU: the emulated device, staging, arguments, limits."""

from __future__ import annotations

import ctypes
import gc
import pickle
import re
from copy import copy as shallow_copy
from copy import deepcopy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.emulator.mapping import GAP_BYTES
from cupaged.errors import ConfigError
from cupaged.ops.cuda_ops import CudaOps
from cupaged.ops.launch_checks import OperandError
from cupaged.runtime.device_arrays import DeviceArrayError
from cupaged.runtime.device_limits import check_driver, free_bytes, kernel_arch
from cupaged.runtime.dtypes import kernel_dtype, storage_dtype
from cupaged.runtime.errors import KernelNotFoundError
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.launch_arguments import MAX_ARGUMENTS, ArgumentBlock
from cupaged.runtime.protocol import DeviceError, DeviceMemoryError, DeviceUnavailableError


@pytest.fixture
def runtime() -> HostRuntime:
    return HostRuntime()


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((100, 30, 50, 10), 40),
        ((100, 30, 50, 0), 30),
        ((100, 0, 100, 0), 0),
        ((100, 90, 20, 0), 80),  # others freed memory between the two questions
        ((100, 30, 120, 0), 0),
        ((100, 40, 50, 10, 70), 20),  # what the pool keeps counts towards its limit
        ((100, 40, 50, 10, 40), 0),
        ((100, 40, 50, 10, 1000), 50),
    ],
)
def test_free_bytes(numbers: tuple[int, ...], expected: int) -> None:
    assert free_bytes(*numbers) == expected


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_86"), ((8, 9), "sm_89"),
        ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((12, 1), "sm_120"),
    ],
)  # fmt: skip
def test_kernel_arch(capability: tuple[int, int], expected: str) -> None:
    assert kernel_arch("a GPU", *capability) == expected


@pytest.mark.parametrize("capability", [(5, 2), (7, 5)])
def test_old_gpus_are_refused_by_name(capability: tuple[int, int]) -> None:
    with pytest.raises(DeviceUnavailableError, match=r"Tesla T4 .* needs 8\.0"):
        kernel_arch("Tesla T4", *capability)


@pytest.mark.parametrize("capability", [(11, 0), (13, 0)])
def test_unknown_generations_are_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(DeviceUnavailableError, match="sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"):
        kernel_arch("NVIDIA Next", *capability)


def test_drivers() -> None:
    check_driver(12020, 12090)  # an older minor version serves
    check_driver(13000, 12090)
    with pytest.raises(DeviceUnavailableError, match=r"CUDA 12\.8, .* needs CUDA 13: .*580\.65"):
        check_driver(12080, 13000)
    with pytest.raises(DeviceUnavailableError, match="no NVIDIA driver"):
        check_driver(0, 12090)


def test_dtypes() -> None:
    assert storage_dtype("float16") == np.dtype(np.float16)
    assert storage_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    names = [kernel_dtype(storage_dtype(n)) for n in ("float32", "float16", "bfloat16")]
    assert names == ["f32", "f16", "bf16"]
    for use in (storage_dtype, kernel_dtype):
        with pytest.raises(ConfigError, match="float32, float16, bfloat16, got 'float64'"):
            use("float64")


# ---- arguments -----------------------------------------------------------------------------------


class Tensor:
    """Stands for an array of a GPU."""

    def __init__(self, address: int) -> None:
        self.address = address


def pack(*args: Any) -> list[int]:
    """Addresses of the packed values."""
    block = ArgumentBlock(Tensor, lambda array: int(array.address))
    pointers = (ctypes.c_void_p * MAX_ARGUMENTS).from_address(block.pack(args))
    pack.block = block  # type: ignore[attr-defined]  # keeps the values alive
    return [pointer or 0 for pointer in pointers]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.int8(-3), ctypes.c_int8), (np.uint8(200), ctypes.c_uint8),
        (np.int16(-3), ctypes.c_int16), (np.uint16(65535), ctypes.c_uint16),
        (np.int32(-(1 << 31)), ctypes.c_int32), (np.uint32(1 << 31), ctypes.c_uint32),
        (np.int64(-(1 << 63)), ctypes.c_int64), (np.uint64(1 << 63), ctypes.c_uint64),
        (np.longlong(-5), ctypes.c_int64), (np.float32(1 / 3), ctypes.c_float),
        (np.float64(1 / 3), ctypes.c_double), (np.bool_(True), ctypes.c_bool),
    ],
)  # fmt: skip
def test_numbers_are_packed_as_the_driver_reads_them(value: Any, kind: Any) -> None:
    address = pack(Tensor(1), value, Tensor(2))[1]
    assert address % ctypes.sizeof(kind) == 0
    assert kind.from_address(address).value == value.item()


def test_half_precision_numbers_are_packed() -> None:
    address = pack(np.float16(-1.5))[0]
    assert ctypes.c_uint16.from_address(address).value == 0xBE00


def test_each_launch_has_its_own_types() -> None:
    block = ArgumentBlock(Tensor, lambda array: int(array.address))
    cases: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
        ((Tensor(1 << 47), np.int32(5)), (ctypes.c_uint64, ctypes.c_int32)),
        ((np.int64(-1), Tensor(7)), (ctypes.c_int64, ctypes.c_uint64)),
        ((Tensor(3), np.float32(0.25)), (ctypes.c_uint64, ctypes.c_float)),
    ]
    for args, kinds in cases:
        pointers = (ctypes.c_void_p * 2).from_address(block.pack(args))
        read = [kind.from_address(p).value for kind, p in zip(kinds, pointers, strict=True)]
        assert read == [a.address if isinstance(a, Tensor) else a.item() for a in args]


@pytest.mark.parametrize("value", [3, 0.5, None, "x", np.zeros(3), np.complex64(1)])
def test_what_is_no_argument(value: Any) -> None:
    name = type(value).__name__
    with pytest.raises(DeviceError, match=rf"argument 1 .* got {name}"):
        pack(Tensor(0), value)


def test_too_many_arguments() -> None:
    assert len(pack(*[np.int32(0)] * MAX_ARGUMENTS)) == 64
    with pytest.raises(DeviceError, match="at most 64 arguments, got 65"):
        pack(*[np.int32(0)] * 65)


# ---- the emulated device: memory -----------------------------------------------------------------


def mapped(address: int) -> bool:
    """Whether the address can be read and written."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line)
        assert match
        if int(match[1], 16) <= address < int(match[2], 16):
            return match[3].startswith("rw")
    return False


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (64, 64), (1024,), (4097,), (0, 4)])
def test_arrays_lie_alone(shape: tuple[int, ...], runtime: HostRuntime) -> None:
    array = runtime.empty(shape, np.float32)
    assert (array.shape, array.dtype) == (shape, np.dtype(np.float32))
    start = runtime.address(array)
    assert start % 256 == 0
    end = start + max(256, -(-array.nbytes // 256) * 256)
    assert mapped(start)
    assert mapped(end - 1)
    assert not mapped(end), "less than 256 bytes behind an array the gap begins"
    assert not mapped(end + GAP_BYTES - 4096)
    assert not mapped(start - GAP_BYTES)
    assert not mapped(start - 4096)


def test_memory_lives_as_long_as_a_view(runtime: HostRuntime) -> None:
    array = runtime.from_host(np.arange(6, dtype=np.int32))
    view, address = array[2:4], runtime.address(array)
    del array
    gc.collect()
    np.testing.assert_array_equal(runtime.to_host(view), [2, 3])
    assert mapped(address)
    del view
    gc.collect()
    assert not mapped(address)


def test_more_than_there_is_room_for(runtime: HostRuntime) -> None:
    with pytest.raises(DeviceMemoryError, match=r"array \[4, .*\] of float16 does not fit"):
        runtime.empty((4, 1 << 50), np.float16)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_fresh_memory_is_poisoned(dtype: Any, runtime: HostRuntime) -> None:
    assert np.isnan(runtime.to_host(runtime.empty((5, 7), dtype)).astype(np.float32)).all()
    np.testing.assert_array_equal(runtime.to_host(runtime.empty((3,), np.int64)), [-1, -1, -1])
    assert not runtime.to_host(runtime.zeros((5, 7), dtype)).any()
    assert not runtime.to_host(HostRuntime(mode="plain").empty((3,), np.int64)).any()


@pytest.mark.parametrize("dtype", [np.float32, np.int64, ml_dtypes.bfloat16])
def test_there_and_back(dtype: Any, runtime: HostRuntime) -> None:
    values = np.arange(12).reshape(3, 4).astype(dtype)
    for host in (values, values.T, values[::2, 1:], values[:0], values[0, 0]):
        back = runtime.to_host(runtime.from_host(host))
        assert back.dtype == host.dtype
        np.testing.assert_array_equal(back, host)


def test_copies(runtime: HostRuntime) -> None:
    array = runtime.zeros((4, 2), np.int32)
    runtime.copy_to_device(array[1:3], np.array([[1, 2], [3, 4]], np.int32))
    runtime.copy_on_device(array[3:], array[1:2])
    np.testing.assert_array_equal(runtime.to_host(array), [[0, 0], [1, 2], [3, 4], [1, 2]])
    with pytest.raises(DeviceError, match="source of a copy must be contiguous"):
        runtime.to_host(array[:, 1])
    with pytest.raises(DeviceError, match=r"int64 \[2, 2\] for int32 \[4, 2\]"):
        runtime.copy_to_device(array, np.zeros((2, 2), np.int64))
    with pytest.raises(DeviceError, match="on the host is needed"):
        runtime.copy_to_device(array, array)
    with pytest.raises(DeviceError, match="on the device is needed, got ndarray"):
        runtime.copy_to_host(np.zeros(3), np.zeros(3))


@pytest.mark.parametrize(
    "compute",
    [
        lambda a: a + a, lambda a: a == 1, lambda a: a.sum(), lambda a: np.concatenate([a, a]),
        lambda a: a.astype(np.float64), lambda a: a[[0, 1]], lambda a: a[a], lambda a: a.copy(),
        lambda a: a.fill(0), lambda a: a.__setitem__(0, 1), lambda a: a.__iadd__(1),
        lambda a: a.put([0], [9]), lambda a: a[::-1].sort(), lambda a: a[::-1].partition(1),
        lambda a: a.setfield(9, np.int16), lambda a: a.byteswap(inplace=True),
        lambda a: a.flat.__setitem__(0, 9), lambda a: a.argsort(), lambda a: a.dot(a),
        lambda a: a.round(), lambda a: a.conj(), lambda a: a.take([0]), lambda a: a.repeat(2),
        lambda a: a.compress([True]), lambda a: a.searchsorted(1), lambda a: a.nonzero(),
        lambda a: a.flatten(), shallow_copy, deepcopy,
    ],
)  # fmt: skip
def test_no_arithmetic_on_the_device(compute: Any, runtime: HostRuntime) -> None:
    array = runtime.from_host(np.array([0, 1, 2], np.int32))
    with pytest.raises(DeviceArrayError):
        compute(array)
    np.testing.assert_array_equal(runtime.to_host(array), [0, 1, 2])


@pytest.mark.parametrize(
    "read",
    [
        lambda a: a.tolist(), lambda a: a.item(0), lambda a: a[0].item(), lambda a: float(a[0]),
        lambda a: int(a[0]), lambda a: complex(a[0]), lambda a: bool(a[0]), lambda a: 1 in a,
        lambda a: [10, 11, 12][a[0]], lambda a: a.tobytes(), lambda a: list(a.flat),
        lambda a: a.tofile("/dev/null"), lambda a: a.argmax(), pickle.dumps,
    ],
)  # fmt: skip
def test_values_are_read_on_the_host(read: Any, runtime: HostRuntime) -> None:
    with pytest.raises(DeviceArrayError, match="copy it to the host"):
        read(runtime.from_host(np.array([0, 1, 2], np.int32)))


def test_elements_of_an_array_stay_on_the_device(runtime: HostRuntime) -> None:
    parts = list(runtime.from_host(np.array([7, 8], np.int32)))
    assert all(map(runtime.is_device_array, parts))
    assert [runtime.to_host(part).item() for part in parts] == [7, 8]


def test_copies_do_not_overlap(runtime: HostRuntime) -> None:
    array = runtime.from_host(np.arange(6, dtype=np.int32))
    with pytest.raises(DeviceError, match="overlap: 12 bytes each, 8 bytes apart"):
        runtime.copy_on_device(array[2:5], array[:3])
    with pytest.raises(DeviceError, match="overlap: 24 bytes each, 0 bytes apart"):
        runtime.copy_on_device(array, array)
    runtime.copy_on_device(array[3:], array[:3])
    runtime.copy_on_device(array[:0], array[:0])
    np.testing.assert_array_equal(runtime.to_host(array), [0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (1.0,), (2.5, 1), 4, "12", None, ("3",)])
def test_what_is_no_shape(shape: Any, runtime: HostRuntime) -> None:
    for make in (runtime.empty, runtime.zeros):
        with pytest.raises(DeviceError, match=r"shape must be a tuple of whole numbers") as found:
            make(shape, np.float32)
        assert repr(shape) in str(found.value)


@pytest.mark.parametrize("dtype", [object, "nonsense", [("x", np.float32), ("y", object)]])
def test_what_is_no_dtype(dtype: Any, runtime: HostRuntime) -> None:
    with pytest.raises(DeviceError, match="dtype must be"):
        runtime.empty((2,), dtype)
    assert runtime.empty((np.int64(2),), "float16").shape == (2,)  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["../README.md", "sub/norm.cu", "/etc/passwd", "./norm.cu"])
def test_kernels_come_from_their_folder(file: str, runtime: HostRuntime) -> None:
    with pytest.raises(KernelNotFoundError, match="named without a folder, got '"):
        runtime.load_kernel(file, "rms_norm", {})


# ---- operations on the emulated device: operands that are refused before any kernel --------------


def test_rows_and_blocks_that_are_no_arrays(runtime: HostRuntime) -> None:
    ops = CudaOps(runtime, "float32")
    x = runtime.zeros((2, 4), np.float32)
    for rows in (None, 3, [0, 1], np.int32(1), np.zeros((), np.int32), np.zeros((1, 1), np.int32)):
        with pytest.raises(OperandError, match="gather_rows: rows must be an array of one"):
            ops.gather_rows(x, x, rows)
    for blocks in (None, 1, np.zeros((), np.int32)):
        with pytest.raises(OperandError, match="scatter_blocks: blocks must be an array of one"):
            ops.scatter_blocks(x, x, blocks)  # type: ignore[arg-type]
        with pytest.raises(OperandError, match="gather_blocks: blocks must be an array of one"):
            ops.gather_blocks(x, x, blocks)  # type: ignore[arg-type]
    with pytest.raises(OperandError, match="scatter_blocks: blocks must be an array on the host"):
        ops.scatter_blocks(x, x, runtime.zeros((2,), np.int32))


@pytest.mark.parametrize(
    "eps",
    ["x", None, -1e-5, np.nan, np.inf, 1e39, pytest.param(10**400, id="huge"), 1j, [1e-5]],
)
def test_what_is_no_eps(eps: Any, runtime: HostRuntime) -> None:
    ops = CudaOps(runtime, "float32")
    x, out, weight = (runtime.zeros(shape, np.float32) for shape in ((0, 4), (0, 4), (4,)))
    with pytest.raises(OperandError, match="rms_norm: eps must be a number, 0 or more, got"):
        ops.rms_norm(out, x, weight, eps)
    with pytest.raises(OperandError, match="layer_norm: eps must be a number, 0 or more, got"):
        ops.layer_norm(out, x, weight, None, eps)
    ops.rms_norm(out, x, weight, 0)
    ops.rms_norm(out, x, weight, np.float32(1e-5))  # type: ignore[arg-type]


def test_views_stay_on_the_device(runtime: HostRuntime) -> None:
    array = runtime.from_host(np.arange(24, dtype=np.int32))
    for view in (array[3], array[4:], array.reshape(2, 12)[1], array.view(np.int64), array[None]):
        assert runtime.is_device_array(view)
    assert not runtime.is_device_array(np.arange(3))
    np.testing.assert_array_equal(runtime.to_host(array.reshape(2, 3, 4)[1, 2]), [20, 21, 22, 23])


def test_events_give_the_time_of_the_clock() -> None:
    times = iter([2.0, 2.5])
    runtime = HostRuntime(clock=lambda: next(times))
    start, end = runtime.new_event(timing=True), runtime.new_event(timing=True)
    with pytest.raises(DeviceError, match="not recorded"):
        runtime.elapsed_ms(start, end)
    start.record(runtime.stream)
    runtime.new_stream().wait(start)
    end.record(runtime.stream)
    assert end.passed()
    assert runtime.elapsed_ms(start, end) == 500.0


def test_memory_info_is_of_this_machine(runtime: HostRuntime) -> None:
    info = runtime.memory_info()
    assert 0 < info.free_bytes <= info.total_bytes
