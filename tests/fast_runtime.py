"""The emulated device without its checks, for tests of whole models: same kernels, same bits.

What the checks find is tested with small cases; here it is the numbers that count. Memory that
nobody wrote holds NaN, as in mode "checked".
"""

from __future__ import annotations

import functools
from dataclasses import replace

from numpy.typing import DTypeLike

from cupaged.emulator.module import EmulatedModule
from cupaged.ops.cuda_ops import CudaOps
from cupaged.runtime.device_arrays import DeviceArray, map_array
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.kernels import kernel_file
from cupaged.runtime.protocol import Defines, DeviceProperties, Kernel, Shape


class FastRuntime(HostRuntime):
    """`HostRuntime` in mode "plain", its kernels compiled for speed.

    Args:
        seed: of a random order of blocks and threads; None is the order of their numbers.
        changes: to the properties of the device.
    """

    def __init__(self, *, seed: int | None = None, **changes: int) -> None:
        super().__init__(mode="plain", seed=seed)
        self._order = seed
        self._changed = replace(super().properties, **changes)  # type: ignore[arg-type]
        self._fast: dict[tuple[str, frozenset[tuple[str, str | int]]], EmulatedModule] = {}

    @property
    def properties(self) -> DeviceProperties:
        """Those of the base class, changed."""
        return self._changed

    def empty(self, shape: Shape, dtype: DTypeLike) -> DeviceArray:
        """Poisoned."""
        return map_array(shape, dtype, poison=True)

    def load_kernel(self, file: str, name: str, defines: Defines) -> Kernel:
        """As the base class, with -O2."""
        key = (file, frozenset(defines.items()))
        if key not in self._fast:
            self._fast[key] = EmulatedModule(
                kernel_file(file), dict(defines), mode="plain", opt_level=2, isolated=False,
                seed=self._order,
            )  # fmt: skip
        return self._fast[key].get_function(name)


@functools.cache
def fast_ops(dtype: str) -> CudaOps:
    """The ops of one fast device, which all tests share."""
    return CudaOps(FastRuntime(), dtype)
