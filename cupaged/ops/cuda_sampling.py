"""Sampling as launches of the kernels in `cuda/`: edits, draws, log probabilities.

The counterpart of `numpy_sampling` on a runtime. Everything that a step's draws need goes up in one
copy, everything is launched on the runtime's stream, and nothing waits: tokens and log
probabilities stay on the device until somebody downloads them. It draws nothing itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.engine.sampling_batch import LogitsEdits, SamplingBatch
from cupaged.ops.launch_checks import LaunchChecks, OperandError
from cupaged.runtime.protocol import Array, Kernel, Runtime, Shape
from cupaged.runtime.staging import StagingBuffer

__all__ = ["CudaSampling", "DeviceLogprobs", "likely_distance", "row_block"]

_STAGING_BYTES = 1 << 16  # grows where a step needs more
_OUTPUT_BYTES = 1 << 12  # likewise
_MAX_ROW_THREADS = 384  # of a block that works on a row of logits: two fit by their registers
_EDIT_THREADS = 256
_NO_WEIGHT_LOST = 2.0**-54  # the largest d whose exp(-d) still rounds to 1
_LOGITS = np.dtype(np.float32)
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """What `Ops.logprobs` gives, on the device: one array, so that one copy brings it down.

    packed: int32 [3, n, 1 + count]: ids, the bits of the float32 log probabilities, ranks. Good
    until the next call but one.
    """

    packed: Array

    @staticmethod
    def unpack(
        packed: NDArray[np.int32],
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
        """Ids, log probabilities and ranks of a copy on the host, each [n, 1 + count]."""
        ids, values, ranks = packed
        return ids, values.view(np.float32), ranks


class CudaSampling:
    """`Ops.sample` and `Ops.logprobs` on a runtime. Logits are float32, whatever a model stores.

    Every method raises `OperandError` for an operand that does not fit.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._check = LaunchChecks(runtime)
        self._staging = StagingBuffer(runtime, _STAGING_BYTES)
        self._tokens = _Outputs(runtime)
        self._reports = _Outputs(runtime)
        self._saved = _Outputs(runtime)
        self._kernels: dict[str, Kernel] = {}

    def sample(self, logits: Array, sampling: SamplingBatch, *, force: bool = False) -> Array:
        """See `Ops.sample`; the tokens stay on the device.

        Args:
            logits: float32 [num_logits, vocab_size], edited in place.
            force: take the batch's forced tokens for the drawn ones, where those are not -1.

        Returns:
            int32 [num_samples] on the device, good until the next call but one.
        """
        op = "sample"
        num_logits, vocab_size = self._check.matrix(op, "logits", logits, _LOGITS)
        n = len(sampling.logits_row)
        self._check.host_indices(op, "logits_row", sampling.logits_row, (n,), num_logits)
        columns = _columns(sampling, force)
        for name, (column, dtype) in columns.items():
            _check_host(f"{op}: {name}", column, (n,), dtype)
        edits = [] if sampling.edits is None else self._edit_arrays(sampling.edits, logits.shape)
        on_device = self._staging.upload([*(column for column, _ in columns.values()), *edits])
        if sampling.edits is not None:
            self._edit(logits, sampling.edits, on_device[len(columns) :])
        tokens = self._tokens.take((n,), _INT32)
        if n:
            args = (tokens, logits, *on_device[: len(columns)], np.int32(vocab_size))
            self._launch("sampling.cu", op, (n,), row_block(vocab_size), args)
        return tokens

    def device_logprobs(
        self,
        logits: Array,
        token_ids: Array | NDArray[np.int32],
        count: int,
        which: NDArray[np.int32] | None = None,
    ) -> DeviceLogprobs:
        """See `Ops.logprobs`; what it tells stays on the device.

        Args:
            logits: float32 [n, vocab_size].
            token_ids: int32 on the device or on the host, e.g. what `sample` gave; ids outside the
                vocabulary are clipped to it.
            which: int32 [n] on the host: row i is given token_ids[which[i]]. None: token_ids[i].
            count: likeliest tokens to tell; what exceeds the vocabulary is left out.
        """
        op = "logprobs"
        n, vocab_size = self._check.matrix(op, "logits", logits, _LOGITS)
        if which is None:
            which = np.arange(n, dtype=np.int32)
        num_ids = len(token_ids)
        self._check.host_indices(op, "which", which, (n,), num_ids)
        if not self._runtime.is_device_array(token_ids):
            self._check.host_int32(op, "token_ids", token_ids, (num_ids,))
            which, token_ids = self._staging.upload([which, token_ids])
        else:
            (which,) = self._staging.upload([which])
        self._check.array(op, "token_ids", token_ids, (num_ids,), _INT32)
        count = min(int(self._check.int32(op, "count", count)), vocab_size)
        packed = self._reports.take((3, n, 1 + count), _INT32)
        if n:
            ids, values, ranks = packed[0], packed[1].view(_LOGITS), packed[2]
            numbers = (np.int32(count), np.int32(vocab_size))
            args = (ids, values, ranks, logits, token_ids, which, *numbers)
            self._launch("logits_logprobs.cu", op, (n,), row_block(vocab_size), args)
        return DeviceLogprobs(packed)

    def logprobs(
        self, logits: Array, token_ids: Array | NDArray[np.int32], count: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
        """See `Ops.logprobs`. Waits for the device."""
        told = self.device_logprobs(logits, token_ids, count)
        return told.unpack(self._runtime.to_host(told.packed))

    # ---- edits -----------------------------------------------------------------------------------

    def _edit_arrays(self, edits: LogitsEdits, shape: Shape) -> list[NDArray[Any]]:
        """The arrays of the edits in their order, checked."""
        for field in fields(edits):
            array = getattr(edits, field.name)
            name = f"sample: edits.{field.name}"
            if field.name.endswith("values"):
                pairs = getattr(edits, field.name.removesuffix("_values"))
                _check_host(name, array, (len(pairs),), _LOGITS)
            elif field.name == "allowed_rows":
                self._check.host_indices("sample", name, array, (len(array),), shape[0])
            else:
                _check_host(name, array, (len(array), 2), _INT32)
                for axis in range(2):
                    column = array[:, axis]
                    self._check.host_indices("sample", name, column, column.shape, shape[axis])
        return [getattr(edits, field.name) for field in fields(edits)]

    def _edit(self, logits: Array, edits: LogitsEdits, on_device: list[Array]) -> None:
        """Launch what there is to edit, in the order that `LogitsEdits` states."""
        a = dict(zip((field.name for field in fields(edits)), on_device, strict=True))
        self._edit_pairs("add_bias", (logits, a["bias"], a["bias_values"]))
        self._edit_pairs("penalize", (logits, a["repetition"], a["repetition_values"]))
        self._edit_pairs("subtract", (logits, a["subtracted"], a["subtracted_values"]))
        forbidden, vocab_size = len(edits.allowed_rows), logits.shape[1]
        if forbidden:
            saved = self._saved.take((len(edits.allowed),), _LOGITS)
            self._edit_pairs("save_allowed", (saved, logits, a["allowed"]))
            grid = (forbidden, -(-vocab_size // (16 * _EDIT_THREADS)))
            args = (logits, a["allowed_rows"], np.int32(vocab_size))
            self._launch("logits_edits.cu", "forbid_rows", grid, _EDIT_THREADS, args)
            self._edit_pairs("restore_allowed", (logits, a["allowed"], saved))
        self._edit_pairs("ban", (logits, a["banned"]))

    def _edit_pairs(self, name: str, arrays: tuple[Array, ...]) -> None:
        """A thread a pair; nothing for none."""
        (pairs,) = (array for array in arrays if array.dtype == _INT32)
        (logits,) = (array for array in arrays if array.ndim == 2 and array.dtype == _LOGITS)
        if len(pairs):
            args = (*arrays, np.int32(len(pairs)), np.int32(logits.shape[1]))
            grid = (-(-len(pairs) // _EDIT_THREADS),)
            self._launch("logits_edits.cu", name, grid, _EDIT_THREADS, args)

    def _launch(
        self, file: str, name: str, grid: tuple[int, ...], threads: int, args: tuple[Any, ...]
    ) -> None:
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernels[name] = self._runtime.load_kernel(file, name, {})
        self._runtime.launch(kernel, grid, (threads,), args)


def row_block(vocab_size: int) -> int:
    """Threads of a block that works on a row: 4 logits a thread, as far as a block goes."""
    return min(_MAX_ROW_THREADS, 32 * -(-vocab_size // 128))


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


def _columns(sampling: SamplingBatch, force: bool) -> dict[str, tuple[NDArray[Any], np.dtype[Any]]]:
    """The arrays of the draws as the kernel takes them, and their types."""
    none = np.full(len(sampling.logits_row), -1, np.int32)
    return {
        "logits_row": (sampling.logits_row, _INT32),
        "temperature": (sampling.temperature, _LOGITS),
        "top_p": (sampling.top_p, _LOGITS),
        "min_p": (likely_distance(sampling.min_p), _LOGITS),
        "top_k": (sampling.top_k, _INT32),
        "seed": (sampling.seed, np.dtype(np.uint64)),
        "sample_index": (sampling.sample_index, _INT32),
        "output_position": (sampling.output_position, _INT32),
        "forced": (sampling.forced if force else none, _INT32),
    }


def _check_host(name: str, array: NDArray[Any], shape: Shape, dtype: np.dtype[Any]) -> None:
    if array.shape != shape or array.dtype != dtype:
        got = f"{array.dtype} {list(array.shape)}"
        raise OperandError(name, got, f"{dtype} {list(shape)}")


class _Outputs:
    """Two arrays on the device, used in turns; they only grow."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._arrays = [runtime.empty((_OUTPUT_BYTES,), np.uint8) for _ in range(2)]

    def take(self, shape: Shape, dtype: DTypeLike) -> Array:
        """The array that was used longer ago."""
        array = self._arrays.pop(0)
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if array.nbytes < num_bytes:
            array = self._runtime.empty((max(num_bytes, 2 * array.nbytes),), np.uint8)
        self._arrays.append(array)
        return array[:num_bytes].view(np.dtype(dtype)).reshape(shape)
