"""One upload for many arrays, one download for many results: `StagingBuffer`, `ResultBuffer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupaged.runtime import results as results_module
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.protocol import DeviceMemoryError
from cupaged.runtime.results import ResultBuffer
from cupaged.runtime.staging import StagingBuffer, staged_bytes


class CountedRuntime(HostRuntime):
    """Counts copies and arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads = 0
        self.downloads = 0
        self.arrays = 0
        self.pinned = 0

    def copy_to_device_async(self, target: Any, pinned: Any, stream: Any = None) -> None:
        self.uploads += 1
        super().copy_to_device_async(target, pinned, stream)

    def copy_to_host_async(self, target: Any, array: Any, stream: Any = None) -> None:
        self.downloads += 1
        super().copy_to_host_async(target, array, stream)

    def empty(self, shape: Any, dtype: Any) -> Any:
        self.arrays += 1
        return super().empty(shape, dtype)

    def empty_pinned(self, shape: Any, dtype: Any) -> Any:
        self.pinned += 1
        return super().empty_pinned(shape, dtype)


class LateRuntime(HostRuntime):
    """Copies to the device are made when a test says so: what the host does meanwhile shows."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Callable[[], None]] = []

    def copy_to_device_async(self, target: Any, pinned: Any, stream: Any = None) -> None:
        self.late.append(lambda: self.copy_to_device(target, pinned))


# ---- uploads -------------------------------------------------------------------------------------


def test_one_copy_for_many_arrays() -> None:
    runtime = CountedRuntime()
    staging = StagingBuffer(runtime, 4096)
    arrays: list[Any] = [
        np.arange(3, dtype=np.int32),
        np.arange(10, dtype=np.int64).reshape(2, 5),
        np.zeros((0, 4), np.int32),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        np.array([7], np.int8),
    ]
    on_device = staging.upload(arrays)
    assert runtime.uploads == 1
    for array, copy in zip(arrays, on_device, strict=True):
        assert runtime.address(copy) % 16 == 0
        np.testing.assert_array_equal(runtime.to_host(copy), array)
        assert copy.dtype == array.dtype


@pytest.mark.parametrize("num_pinned", [2, 3, 5])
def test_as_many_uploads_as_asked_stand_in_line(num_pinned: int) -> None:
    """All of them come to one address, one after another, however far ahead the host is."""
    runtime = LateRuntime()
    staging = StagingBuffer(runtime)
    staging.reserve(80, num_pinned)
    for _ in range(3):
        places = set()
        for number in range(num_pinned):
            (copy,) = staging.upload([np.full(16, number, np.int32)])
            places.add(runtime.address(copy))
        for number, make in enumerate(runtime.late):
            make()
            np.testing.assert_array_equal(runtime.to_host(copy), np.full(16, number))
        runtime.late.clear()
        assert len(places) == 1


def test_a_larger_step_makes_the_buffer_grow_once() -> None:
    runtime = CountedRuntime()
    staging = StagingBuffer(runtime)
    assert runtime.arrays == 0
    staging.upload([np.zeros(1, np.int32)])
    assert runtime.arrays == 1
    for _ in range(4):
        large = np.arange(100, dtype=np.int64)
        (copy,) = staging.upload([large])
        np.testing.assert_array_equal(runtime.to_host(copy), large)
    assert runtime.arrays == 2
    assert [a.size for a in staging.upload([np.zeros(0, np.int32)])] == [0]
    assert staging.upload([]) == []


def test_what_fits_into_the_reserved_memory() -> None:
    staging = StagingBuffer(HostRuntime())
    arrays: list[Any] = [np.zeros(5, np.int32), np.zeros(3, np.int8)]
    assert staged_bytes([array.nbytes for array in arrays]) == 80  # 32 and 16, a gap for each
    assert staging.holds(arrays)  # nothing is reserved: it grows
    staging.reserve(80)
    assert staging.holds(arrays) and not staging.holds([*arrays, arrays[1]])


def test_an_upload_that_found_no_memory_leaves_the_next_ones_right() -> None:
    runtime = HostRuntime(memory_bytes=1000)
    staging = StagingBuffer(runtime, 400)
    with pytest.raises(DeviceMemoryError, match=r"2016 bytes .* do not fit"):
        staging.upload([np.zeros(2000, np.uint8)])
    for number in range(3):
        (copy,) = staging.upload([np.full(100, number, np.uint8)])
        np.testing.assert_array_equal(runtime.to_host(copy), np.full(100, number))


# ---- downloads -----------------------------------------------------------------------------------


def filled(runtime: HostRuntime, results: ResultBuffer, values: Any) -> Any:
    """The next result, with these values."""
    array = results.take(values.shape, values.dtype)
    runtime.copy_to_device(array, values)
    return array


def test_one_copy_for_many_results() -> None:
    runtime = CountedRuntime()
    results = ResultBuffer(runtime)
    results.reserve(256, 2)
    given: list[Any] = [
        np.arange(3, dtype=np.int32), np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 4), np.int32), np.arange(5, dtype=np.int32),
    ]  # fmt: skip
    arrays = [filled(runtime, results, values) for values in given]
    before = runtime.arrays
    download = results.download([arrays[3], *arrays[:3]])
    assert runtime.downloads == 1 and runtime.arrays == before
    for got, values in zip(download.wait(), [given[3], *given[:3]], strict=True):
        np.testing.assert_array_equal(got, values)
        assert got.dtype == values.dtype


def test_results_that_lie_elsewhere_come_too() -> None:
    runtime = CountedRuntime()
    results = ResultBuffer(runtime)
    inside = filled(runtime, results, np.arange(4, dtype=np.int32))
    outside = runtime.from_host(np.arange(3, dtype=np.float32))
    got = results.download([outside, inside]).wait()
    np.testing.assert_array_equal(got[0], [0, 1, 2])
    np.testing.assert_array_equal(got[1], [0, 1, 2, 3])
    assert runtime.downloads == 2


def test_downloads_under_way_do_not_share_memory() -> None:
    """However many there are; what was read, or dropped, is used again."""
    runtime = CountedRuntime()
    results = ResultBuffer(runtime)
    results.reserve(64, 2)
    assert runtime.pinned == 2
    for _ in range(3):
        downloads = [
            results.download([filled(runtime, results, np.full(4, number))]) for number in range(2)
        ]
        for number, download in enumerate(downloads):
            np.testing.assert_array_equal(download.wait()[0], np.full(4, number))
    results.download([filled(runtime, results, np.full(4, 7))])  # nobody reads it
    assert runtime.pinned == 2
    held = [results.download([filled(runtime, results, np.full(4, n))]) for n in range(5)]
    assert runtime.pinned == 5
    assert [int(d.wait()[0][0]) for d in held] == [0, 1, 2, 3, 4]


def test_more_results_than_were_reserved() -> None:
    runtime = CountedRuntime()
    results = ResultBuffer(runtime)
    results.reserve(32, 1)
    arrays = [filled(runtime, results, np.full(6, n, np.int64)) for n in range(3)]
    got = results.download(arrays).wait()
    assert [array.tolist() for array in got] == [[n] * 6 for n in range(3)]


def test_a_result_that_found_no_memory_leaves_the_next_ones_right() -> None:
    runtime = HostRuntime(memory_bytes=10_000)
    results = ResultBuffer(runtime)
    results.reserve(5000, 1)
    with pytest.raises(DeviceMemoryError, match=r"20000 bytes .* do not fit"):
        results.take((20_000,), np.uint8)
    results.restart()
    (got,) = results.download([filled(runtime, results, np.arange(7, dtype=np.int32))]).wait()
    np.testing.assert_array_equal(got, np.arange(7))


def test_looking_for_a_free_buffer_is_not_looking_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with 200 downloads asks about 200 buffers, not about 200 of them each time."""
    asked: list[bool] = []

    class CountedPinned(results_module._Pinned):
        @property
        def is_free(self) -> bool:
            asked.append(super().is_free)
            return asked[-1]

    monkeypatch.setattr(results_module, "_Pinned", CountedPinned)
    results = ResultBuffer(HostRuntime())
    results.reserve(64, 200)
    for _ in range(3):
        downloads = [results.download([results.take((4,), np.int32)]) for _ in range(200)]
        assert asked == [True] * 200
        asked.clear()
        for download in downloads:
            download.wait()
