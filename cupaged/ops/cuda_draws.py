"""The draws of a step as `cuda/sampling.cu` and `cuda/logits_edits.cu` take them.

Checks a `SamplingBatch`, lists the arrays that go up with the step, and names what came of them on
the device. It uploads and launches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.sampling_batch import LogitsEdits, SamplingBatch
from cupaged.ops.launch_checks import OperandError
from cupaged.runtime.protocol import Array, Shape

__all__ = ["CudaDraws", "column_arrays", "edit_arrays", "likely_distance"]

_NO_WEIGHT_LOST = 2.0**-54  # the largest d whose exp(-d) still rounds to 1
_FLOAT32 = np.dtype(np.float32)
_INT32 = np.dtype(np.int32)
_EDITS = tuple(field.name for field in fields(LogitsEdits))


@dataclass(frozen=True, slots=True)
class CudaDraws:
    """The draws of a step.

    batch: the same on the host. columns: what `column_arrays` lists, on the device.
    edits: the fields of `LogitsEdits` on the device, empty if there are none.
    """

    batch: SamplingBatch
    columns: tuple[Array, ...]
    edits: dict[str, Array]

    @classmethod
    def of(
        cls, batch: SamplingBatch, columns: Sequence[Array], edits: Sequence[Array]
    ) -> CudaDraws:
        """From the arrays of `column_arrays` and `edit_arrays`, on the device."""
        names = _EDITS if edits else ()
        return cls(batch, tuple(columns), dict(zip(names, edits, strict=True)))


def column_arrays(sampling: SamplingBatch) -> list[NDArray[Any]]:
    """The arrays of the draws in the order of the kernel's parameters.

    Raises:
        OperandError: one has another shape or dtype than `SamplingBatch` says.
    """
    shape = sampling.logits_row.shape
    columns: dict[str, tuple[NDArray[Any], np.dtype[Any]]] = {
        "logits_row": (sampling.logits_row, _INT32),
        "temperature": (sampling.temperature, _FLOAT32),
        "top_p": (sampling.top_p, _FLOAT32),
        "min_p": (likely_distance(sampling.min_p), _FLOAT32),
        "top_k": (sampling.top_k, _INT32),
        "seed": (sampling.seed, np.dtype(np.uint64)),
        "sample_index": (sampling.sample_index, _INT32),
        "output_position": (sampling.output_position, _INT32),
        "forced": (sampling.forced, _INT32),
    }
    for name, (column, dtype) in columns.items():
        _check(f"sample: {name}", column, shape, dtype)
    return [column for column, _ in columns.values()]


def edit_arrays(edits: LogitsEdits | None) -> list[NDArray[Any]]:
    """The arrays of the edits in their order; none for None.

    Raises:
        OperandError: one has another shape or dtype than `LogitsEdits` says.
    """
    if edits is None:
        return []
    arrays = [getattr(edits, name) for name in _EDITS]
    for name, array in zip(_EDITS, arrays, strict=True):
        if name.endswith("values"):
            pairs = getattr(edits, name.removesuffix("_values"))
            _check(f"sample: edits.{name}", array, (len(pairs),), _FLOAT32)
        else:
            shape = (len(array),) if name == "allowed_rows" else (len(array), 2)
            _check(f"sample: edits.{name}", array, shape, _INT32)
    return arrays


def likely_distance(min_p: NDArray[np.float32]) -> NDArray[np.float32]:
    """How far below the highest a scaled logit may lie for its token to count as likely.

    The largest float32 d with exp(-d) >= min_p, exp in float64 as NumPy computes it; inf for 0.
    """
    with np.errstate(divide="ignore"):
        middle = -np.log(min_p.astype(np.float64))
    nearest = middle.clip(_NO_WEIGHT_LOST).astype(np.float32)
    distance = np.nextafter(nearest, np.float32(0))
    for candidate in (nearest, np.nextafter(nearest, np.float32(np.inf))):
        fits = np.exp(-candidate.astype(np.float64)) >= min_p
        distance = np.where(fits, candidate, distance)
    return distance.astype(np.float32)


def _check(name: str, array: NDArray[Any], shape: Shape, dtype: np.dtype[Any]) -> None:
    if array.shape != shape or array.dtype != dtype:
        got = f"{array.dtype} {list(array.shape)}"
        raise OperandError(name, got, f"{dtype} {list(shape)}")
