"""The emulated device, as late as a device can be: nothing happens until somebody waits for it.

What the host overwrites too early, or reads too early, shows as a wrong result.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from tests.fast_runtime import FastRuntime


class DeferredStream:
    """The one stream of a runtime."""

    def __init__(self, runtime: DeferredRuntime) -> None:
        self._runtime = runtime

    def synchronize(self) -> None:
        self._runtime.run_until(self._runtime.submitted)

    def wait(self, event: DeferredEvent) -> None:
        """There is one stream."""


class DeferredEvent:
    """A point in the stream; never recorded, it has passed."""

    def __init__(self, runtime: DeferredRuntime) -> None:
        self._runtime = runtime
        self._place = 0

    def record(self, stream: Any) -> None:
        self._place = self._runtime.submitted

    def synchronize(self) -> None:
        self._runtime.run_until(self._place)

    def passed(self) -> bool:
        return self._place <= self._runtime.done


class DeferredRuntime(FastRuntime):
    """Launches and asynchronous copies stand in line. Counts what is asked of it.

    asked: by name of the method; "wait" for every wait that has to wait.
    """

    def __init__(self, **changes: int) -> None:
        super().__init__(**changes)
        self.asked: Counter[str] = Counter()
        self.submitted = 0
        self.done = 0
        self._line: deque[Callable[[], None]] = deque()
        self._forbidden: frozenset[str] = frozenset()

    @contextmanager
    def forbidding(self, *names: str) -> Iterator[None]:
        """Asking for one of these is a failure: methods, or "wait"."""
        before, self._forbidden = self._forbidden, frozenset(names)
        try:
            yield
        finally:
            self._forbidden = before

    def run_until(self, place: int) -> None:
        """Do what was submitted up to there."""
        if place > self.done:
            self._count("wait")
        while self.done < place:
            self._line.popleft()()
            self.done += 1

    def _count(self, name: str) -> None:
        if name in self._forbidden:
            raise AssertionError(f"{name} at a forbidden time")
        self.asked[name] += 1

    def _submit(self, work: Callable[[], None]) -> None:
        self._line.append(work)
        self.submitted += 1

    @property
    def stream(self) -> Any:
        return DeferredStream(self)

    def new_event(self, *, timing: bool = False) -> Any:
        return DeferredEvent(self)

    def synchronize(self) -> None:
        self.run_until(self.submitted)

    def empty(self, shape: Any, dtype: Any) -> Any:
        self._count("empty")
        return super().empty(shape, dtype)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        self._count("empty")
        return super().zeros(shape, dtype)

    def empty_pinned(self, shape: Any, dtype: Any) -> Any:
        self._count("empty_pinned")
        return super().empty_pinned(shape, dtype)

    def load_kernel(self, file: str, name: str, defines: Any) -> Any:
        self._count("load_kernel")
        return super().load_kernel(file, name, defines)

    def from_host(self, host: NDArray[Any]) -> Any:
        self._count("empty")
        self.synchronize()
        return super().from_host(host)

    def copy_to_device(self, target: Any, host: NDArray[Any]) -> None:
        self._count("blocking copy")
        self.synchronize()
        super().copy_to_device(target, host)

    def copy_to_host(self, target: NDArray[Any], array: Any) -> None:
        self._count("blocking copy")
        self.synchronize()
        super().copy_to_host(target, array)

    def copy_to_device_async(self, target: Any, pinned: NDArray[Any], stream: Any = None) -> None:
        self._count("upload")
        self._submit(lambda: FastRuntime.copy_to_device(self, target, pinned))

    def copy_to_host_async(self, target: NDArray[Any], array: Any, stream: Any = None) -> None:
        self._count("download")
        self._submit(lambda: FastRuntime.copy_to_host(self, target, array))

    def launch(
        self, kernel: Any, grid: Sequence[int], block: Sequence[int], args: Any, **options: Any
    ) -> None:
        self._count("launch")
        given = tuple(args)
        self._submit(
            lambda: super(DeferredRuntime, self).launch(kernel, grid, block, given, **options)
        )
