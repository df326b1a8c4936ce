"""Sampling as launches of the kernels in `cuda/`: edits, draws, log probabilities.

The counterpart of `numpy_sampling` on a runtime. Everything is launched on the runtime's stream and
nothing waits: tokens and log probabilities are results that stay on the device until somebody
downloads them. It draws nothing itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.engine.sampling_batch import LogitsEdits
from cupaged.ops.cuda_draws import CudaDraws
from cupaged.ops.launch_checks import LaunchChecks
from cupaged.runtime.protocol import Array, Kernel, Runtime, Shape
from cupaged.runtime.results import ResultBuffer

__all__ = ["CudaSampling", "row_block"]

_MAX_ROW_THREADS = 384  # of a block that works on a row of logits: two fit by their registers
_EDIT_THREADS = 256
_FIRST_ROWS = 64  # of the numbers 0, 1, 2 ...; they grow where more are needed
_FIRST_SAVED = 1 << 10
_LOGITS = np.dtype(np.float32)
_INT32 = np.dtype(np.int32)
_INDEX_BYTES = 4  # kernels read indices one by one


class CudaSampling:
    """`Ops.sample` and `Ops.logprobs` on a runtime. Logits are float32, whatever a model stores.

    Every method raises `OperandError` for an operand that does not fit.
    """

    def __init__(self, runtime: Runtime, results: ResultBuffer) -> None:
        """`results`: where tokens and reports go."""
        self._runtime = runtime
        self._results = results
        self._check = LaunchChecks(runtime)
        self._numbers: Array = None  # int32, 0, 1, 2 ...
        self._saved: Array = None
        self._kernels: dict[str, Kernel] = {}

    def reserve(self, max_rows: int, saved_bytes: int) -> None:
        """Take the memory for reports on so many rows, and for logits of allowed tokens.

        Raises:
            DeviceMemoryError: it does not fit.
        """
        if self._numbers is None or len(self._numbers) < max_rows:
            self._numbers = self._runtime.from_host(np.arange(max_rows, dtype=_INT32))
        if self._saved is None or self._saved.nbytes < saved_bytes:
            self._saved = None
            self._saved = self._runtime.empty((-(-saved_bytes // 4),), _LOGITS)

    def sample(self, logits: Array, draws: CudaDraws) -> Array:
        """See `Ops.sample`."""
        op, batch = "sample", draws.batch
        num_logits, vocab_size = self._check.matrix(op, "logits", logits, _LOGITS)
        n = len(batch.logits_row)
        self._check.host_indices(op, "logits_row", batch.logits_row, (n,), num_logits)
        if batch.edits is not None:
            self._check_edits(batch.edits, logits.shape)
            self._edit(logits, batch.edits, draws.edits)
        tokens = self._results.take((n,), _INT32)
        if n:
            args = (tokens, logits, *draws.columns, np.int32(vocab_size))
            self._launch("sampling.cu", op, (n,), row_block(vocab_size), args)
        return tokens

    def logprobs(
        self, logits: Array, token_ids: Array, count: int, which: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """See `Ops.logprobs`."""
        op = "logprobs"
        n, vocab_size = self._check.matrix(op, "logits", logits, _LOGITS)
        num_ids = self._check.length(op, "token_ids", token_ids)
        self._check.array(op, "token_ids", token_ids, (num_ids,), _INT32, _INDEX_BYTES)
        if which is None:
            self._check.array(op, "token_ids", token_ids, (n,), _INT32, _INDEX_BYTES)
            if self._numbers is None or len(self._numbers) < n:
                self.reserve(max(2 * n, _FIRST_ROWS), 0)
            which = self._numbers[:n]
        self._check.array(op, "which", which, (n,), _INT32, _INDEX_BYTES)
        count = min(int(self._check.int32(op, "count", count)), vocab_size)
        packed = self._results.take((3, n, 1 + count), _INT32)
        ids, values, ranks = packed[0], packed[1].view(_LOGITS), packed[2]
        if n:
            numbers = (np.int32(count), np.int32(vocab_size))
            args = (ids, values, ranks, logits, token_ids, which, *numbers)
            self._launch("logits_logprobs.cu", op, (n,), row_block(vocab_size), args)
        return ids, values, ranks

    # ---- edits -----------------------------------------------------------------------------------

    def _check_edits(self, edits: LogitsEdits, shape: Shape) -> None:
        """Every pair and row lies inside the logits."""
        for name in ("bias", "repetition", "subtracted", "allowed", "banned"):
            pairs = getattr(edits, name)
            for axis in range(2):
                column = pairs[:, axis]
                what = f"edits.{name}"
                self._check.host_indices("sample", what, column, column.shape, shape[axis])
        rows = edits.allowed_rows
        self._check.host_indices("sample", "edits.allowed_rows", rows, rows.shape, shape[0])

    def _edit(self, logits: Array, edits: LogitsEdits, a: dict[str, Array]) -> None:
        """Launch what there is to edit, in the order that `LogitsEdits` states."""
        self._edit_pairs("add_bias", (logits, a["bias"], a["bias_values"]))
        self._edit_pairs("penalize", (logits, a["repetition"], a["repetition_values"]))
        self._edit_pairs("subtract", (logits, a["subtracted"], a["subtracted_values"]))
        forbidden, vocab_size = len(edits.allowed_rows), logits.shape[1]
        if forbidden:
            count = len(edits.allowed)
            if self._saved is None or len(self._saved) < count:
                self.reserve(0, 4 * max(2 * count, _FIRST_SAVED))
            saved = self._saved[:count]
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
