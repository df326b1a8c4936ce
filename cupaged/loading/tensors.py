"""What a weight file looks like to the rest of cupaged: named tensors that decode to float32.

Owns the description of a stored tensor, the protocol every weight format implements, and the two
steps all formats share: mapping a file, and checking the array that a tensor is decoded into.
It knows no format, and no reader ever allocates the array it fills.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cupaged.errors import CheckpointError, ModelNotFoundError
from cupaged.ops.start import BLOCK_ELEMENTS, STORED_DTYPES

__all__ = [
    "TensorInfo",
    "TensorReader",
    "check_destination",
    "forget",
    "is_stored_as",
    "map_file",
    "shown",
]

_LFS_POINTER = b"version https://git-lfs"
_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as a file stores it.

    `shape` is in NumPy order: a linear layer's weight is `(out_features, in_features)`. `dtype` is
    the format's own name of the stored numbers ("F32", "BF16", "Q4_1", ...), `nbytes` their size in
    the file, and `path` the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    path: Path


class TensorReader(Protocol):
    """An open checkpoint. Reading changes nothing in it, so threads may share one."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint, by name."""

    def read_into(self, name: str, out: NDArray[Any]) -> None:
        """Decode tensor `name` into `out`, without a second copy of its size.

        `out` is float32, or of the type that the tensor `is_stored_as`, and then takes its bits as
        they are. It is C-contiguous and of exactly the tensor's shape, where an item of a quantised
        type stands for its 32 numbers; it may be a slice of a larger array. Raises
        `CheckpointError` for an unknown name or another shape, and `NotSupportedError` for numbers
        that cannot be decoded to float32.
        """

    def close(self) -> None:
        """Release the files; the reader cannot be used afterwards. Closing twice is fine."""


def shown(name: str) -> str:
    """`name` quoted for an error message, cut where a damaged file made it very long."""
    return repr(name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}...")


def map_file(path: Path) -> mmap.mmap:
    """Map `path` read-only. Nothing is read until it is used.

    Raises `ModelNotFoundError` where there is no such file, and `CheckpointError` where it cannot
    be opened, is empty, or is the pointer that Git LFS leaves in place of a large file.
    """
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path}: the file is empty (0 bytes)")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if mapped[: len(_LFS_POINTER)] == _LFS_POINTER:
        mapped.close()
        raise CheckpointError(
            f"{path}: a Git LFS pointer, not the weights themselves; fetch them with `git lfs pull`"
        )
    return mapped


def forget(mapped: mmap.mmap, start: int, nbytes: int) -> None:
    """Let go of pages that were read, so that the file does not count as memory of the process.

    They stay in the cache of the system, and come back from there when they are used again.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            mapped.madvise(mmap.MADV_DONTNEED, first, length)


def is_stored_as(info: TensorInfo, dtype: np.dtype[Any]) -> bool:
    """Whether the file has the numbers in this type, one of `STORED_DTYPES`."""
    return STORED_DTYPES.get(info.dtype) == dtype


def check_destination(info: TensorInfo, out: NDArray[Any]) -> None:
    """Raise `CheckpointError` unless `out` has the shape of the tensor that `info` describes."""
    shape = out.shape
    if out.dtype.names is not None:
        shape = (*shape[:-1], shape[-1] * BLOCK_ELEMENTS)
    if shape != info.shape:
        raise CheckpointError(
            f"{info.path}: tensor {shown(info.name)} has shape {info.shape}, "
            f"must be {shape} to fit the model"
        )
    assert out.dtype == np.float32 or is_stored_as(info, out.dtype)
    assert out.flags.c_contiguous and out.flags.writeable
