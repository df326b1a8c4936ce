"""The storage types of the engine by name, as NumPy dtypes and as the kernels' define DTYPE.

bfloat16 comes from `ml_dtypes`, which is imported only where it is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from cupaged.errors import ConfigError

__all__ = ["kernel_dtype", "storage_dtype"]

_KERNEL_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def storage_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of "float32", "float16" or "bfloat16".

    Raises:
        ConfigError: another name.
    """
    if name not in _KERNEL_NAMES:
        raise ConfigError("dtype", name, f"one of {', '.join(_KERNEL_NAMES)}")
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)


def kernel_dtype(dtype: DTypeLike) -> str:
    """What kernels call it: "f32", "f16" or "bf16".

    Raises:
        ConfigError: no kernel stores numbers of this type.
    """
    name = np.dtype(dtype).name
    if name not in _KERNEL_NAMES:
        raise ConfigError("dtype", name, f"one of {', '.join(_KERNEL_NAMES)}")
    return _KERNEL_NAMES[name]
