"""A runtime that writes launches down and runs nothing: no kernel is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupaged.runtime.host_runtime import HostRuntime


class WritingRuntime(HostRuntime):
    """Writes kernels, launches, uploads and allocations down and runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[str, str, dict[str, Any]]] = []
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = []
        self.uploads = 0
        self.allocations = 0

    def load_kernel(self, file: str, name: str, defines: Any) -> str:
        self.loaded.append((file, name, dict(defines)))
        return name

    def launch(
        self, kernel: str, grid: Sequence[int], block: Sequence[int], args: Any, **_: Any
    ) -> None:
        self.launches.append((kernel, tuple(grid), tuple(block), tuple(args)))

    def copy_to_device_async(self, target: Any, pinned: Any, stream: Any = None) -> None:
        self.uploads += 1
        super().copy_to_device_async(target, pinned, stream)

    def empty(self, shape: Any, dtype: Any) -> Any:
        self.allocations += 1
        return super().empty(shape, dtype)
