"""Kernels by name, storage type and defines: each is asked of the runtime once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from cupaged.runtime.dtypes import kernel_dtype
from cupaged.runtime.protocol import Defines, Kernel, Runtime

__all__ = ["KernelTable"]

_NO_DEFINES: dict[str, int] = {}


class KernelTable:
    """The kernels of one storage type on one runtime."""

    def __init__(self, runtime: Runtime, dtype: np.dtype[Any]) -> None:
        self._runtime = runtime
        self._dtype = dtype
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def get(
        self, file: str, name: str, defines: Defines = _NO_DEFINES, dtype: DTypeLike | None = None
    ) -> Kernel:
        """Loaded once; of the table's storage type unless another is given.

        Raises:
            ConfigError: no kernel stores numbers of the type given.
        """
        key = (name, dtype, *defines.items())
        kernel = self._kernels.get(key)
        if kernel is None:
            define = kernel_dtype(self._dtype if dtype is None else dtype)
            kernel = self._runtime.load_kernel(file, name, {"DTYPE": define, **defines})
            self._kernels[key] = kernel
        return kernel
