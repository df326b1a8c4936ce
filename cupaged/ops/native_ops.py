"""The operations by kernels in C++: the `cpu` device where they could be compiled.

`cupaged.ops.native` has their source; a `kernel` here is a function of the module that it becomes.
Each weight is laid out once, in its format, in panels that the products read in order. A product's
result does not depend on the number of rows beside it, so that a sequence gets the same bits alone
and in any batch. What is no hot path, and sampling, is NumPy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.batch import Batch
from cupaged.errors import CheckpointError, ConfigError
from cupaged.ops import BLOCK_ELEMENTS, STORED_DTYPES, KVCache
from cupaged.ops import _native as native
from cupaged.ops.blas import threads_of_environment
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.ops.numpy_step import NumpyStep
from cupaged.runtime.protocol import DeviceUnavailableError

FloatArray = NDArray[np.float32]

_FLOAT32, _BFLOAT16, _INT8, _INT4 = range(4)  # formats of weights in memory
_FORMAT_OF = {"BF16": _BFLOAT16, "Q8_0": _INT8, "Q4_0": _INT4, "Q4_1": _INT4}
_STORED = {"F32": 0, "BF16": 1, "Q8_0": 2, "Q4_0": 3, "Q4_1": 4}  # as `pack` numbers them
_LARGEST_Q4_0_SCALE = 8188.0  # -8 times it is a float16
_LARGEST_Q8 = 127 * 65504.0  # 127 times the largest scale

# By the option's value: what is kept as it is stored, and the format of all that is not.
_CHOICES: dict[str, tuple[tuple[str, ...], int]] = {
    "auto": (tuple(_FORMAT_OF), _FLOAT32),
    "file": (tuple(_FORMAT_OF), _FLOAT32),
    "float32": ((), _FLOAT32),
    "bfloat16": (("BF16",), _BFLOAT16),
    "q8": (("Q8_0",), _INT8),
}

_LINE = 64  # bytes
_MOST_THREADS = 1024
_QUERY_ROWS = 48  # of an attention task: its tokens times the query heads of a KV head


def use_native_threads(asked: int | None, cores: int) -> tuple[int, str]:
    """Set the threads of the kernels, and give what is in force: threads, and instructions.

    They share small units of work, so that one that another program holds up holds up little.

    Args:
        asked: that many; None for OPENBLAS_NUM_THREADS, OMP_NUM_THREADS and their like, or `cores`.

    Raises:
        ConfigError: more were asked for than the kernels can use.
        DeviceUnavailableError: the system does not give so many.
    """
    if asked is not None and asked > _MOST_THREADS:
        raise ConfigError("threads", asked, f"at most {_MOST_THREADS}")
    threads = asked or min(threads_of_environment() or cores, _MOST_THREADS)
    try:
        native.set_threads(threads)
    except RuntimeError as error:
        raise DeviceUnavailableError(f"cpu: {error}; set `threads` to fewer") from None
    return native.num_threads(), native.instructions()


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """packed: uint8, panels in one of the formats. bias: float32 [out_features] or None."""

    packed: NDArray[np.uint8]
    format: int
    out_features: int
    in_features: int
    bias: FloatArray | None


class NativeStep(NumpyStep):
    """A batch, and how its attention is shared out."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self._tasks: dict[int, NDArray[np.int32]] = {}

    def tasks(self, tokens_at_once: int) -> NDArray[np.int32]:
        """int32 [n, 3]: sequence, first token and number of tokens of each task, the last part of
        a sequence first: it has the most keys."""
        if tokens_at_once not in self._tasks:
            start = self.batch.query_start.astype(np.int64)
            counts = -(-np.diff(start) // tokens_at_once)
            sequence = np.repeat(np.arange(len(counts)), counts)
            index = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
            first = start[sequence] + index * tokens_at_once
            number = np.minimum(start[sequence + 1] - first, tokens_at_once)
            tasks = np.stack([sequence, first, number], axis=1).astype(np.int32)
            self._tasks[tokens_at_once] = np.ascontiguousarray(tasks[::-1])
        return self._tasks[tokens_at_once]


class NativeOps(NumpyOps):
    """`Ops` by compiled kernels. See there for what each operation means.

    Args:
        weight_dtype: how weights lie in memory. "float32"; "bfloat16", rounded; "q8", 8 bits and a
            scale for each 32, rounded; "file", as the checkpoint has them (BF16, Q8_0, Q4_0 and
            Q4_1), with results that differ from those of float32 by roundings at most; "auto",
            likewise, and float32 for all other types.
    """

    def __init__(self, weight_dtype: str = "auto") -> None:
        super().__init__()
        self.kept_types, self._format = _CHOICES[weight_dtype]

    def pack_weight(  # type: ignore[override]  # what is packed only these operations read
        self, weight: NDArray[Any], bias: FloatArray | None = None
    ) -> NativeWeight:
        """Lay the rows out in panels.

        Raises:
            CheckpointError: scales of Q4_0 that are too large to be kept, numbers that are too
                large to be rounded to 8 bits, or none.
        """
        stored = next((n for n in self.kept_types if STORED_DTYPES[n] == weight.dtype), "F32")
        out_features, columns = weight.shape
        is_blocks = weight.dtype.names is not None
        in_features = columns * (BLOCK_ELEMENTS if is_blocks else 1)
        if stored == "Q4_0" and not (np.abs(weight["d"]) <= _LARGEST_Q4_0_SCALE).all():
            largest = float(np.abs(weight["d"]).max())
            raise CheckpointError(
                f"a scale of Q4_0 is {largest:g}, at most {_LARGEST_Q4_0_SCALE:g} can be kept; "
                "use cpu_weight_dtype='float32'"
            )
        form = self._format_of(None if stored == "F32" else stored, in_features)
        if form == _INT8 and stored == "F32":
            largest = float(max(weight.max(), -weight.min()))
            if not largest <= _LARGEST_Q8:
                raise CheckpointError(
                    f"its largest number is {largest:g}, at most {_LARGEST_Q8:g} can be rounded to "
                    "q8; use another cpu_weight_dtype"
                )
        packed = _aligned(native.packed_bytes(form, out_features, in_features))
        rows = np.ascontiguousarray(weight).reshape(-1).view(np.uint8)
        native.pack(packed, rows, _STORED[stored], form, out_features, in_features)
        return NativeWeight(packed, form, out_features, in_features, bias)

    def weight_bytes(
        self, out_features: int, in_features: int, has_bias: bool, stored: str | None = None
    ) -> int:
        """With the padding of the last panel."""
        form = self._format_of(stored, in_features)
        return native.packed_bytes(form, out_features, in_features) + 4 * out_features * has_bias

    def _format_of(self, stored: str | None, in_features: int) -> int:
        if stored is not None:
            return _FORMAT_OF[stored]
        if self._format == _INT8 and in_features % BLOCK_ELEMENTS:
            return _FLOAT32
        return self._format

    def begin_step(self, batch: Batch) -> NativeStep:
        """Nothing to upload."""
        return NativeStep(batch)

    def embedding(self, out: FloatArray, token_ids: NDArray[np.int32], table: Any) -> None:
        """Rows out of their panels."""
        ids = np.clip(token_ids, 0, table.out_features - 1)
        native.gather(out, ids, table.packed, table.format, table.out_features, table.in_features)

    def linear(self, out: FloatArray, x: FloatArray, weight: Any) -> None:
        """The kernel reads each weight once for all rows."""
        native.multiply(
            out, x, weight.bias, weight.packed, weight.format, weight.out_features,
            weight.in_features,
        )  # fmt: skip

    def rms_norm(self, out: FloatArray, x: FloatArray, weight: FloatArray, eps: float) -> None:
        """Row by row."""
        native.rms_norm(out, x, None, weight, eps)

    def add_rms_norm(
        self, out: FloatArray, residual: FloatArray, x: FloatArray, weight: FloatArray, eps: float
    ) -> None:
        """The sum stays in `residual`."""
        native.rms_norm(out, residual, x, weight, eps)

    def silu_mul(self, out: FloatArray, gate_up: FloatArray) -> None:
        """In one pass."""
        native.silu_mul(out, gate_up, out.shape[1])

    def rope_and_cache(
        self, step: NumpyStep, qkv: FloatArray, table: FloatArray, cache: KVCache
    ) -> None:
        """Each token's heads, then its keys and values into its slot."""
        slots = step.batch.groups[cache.spec.group].slot_mapping
        native.rotate_and_keep(qkv, step.batch.positions, table, slots, *_pages(qkv, cache))

    def paged_attention(
        self, step: NumpyStep, out: FloatArray, qkv: FloatArray, cache: KVCache, scale: float
    ) -> None:
        """Each key and value is read once from its block for all queries of a task."""
        assert isinstance(step, NativeStep)
        block_table = step.batch.groups[cache.spec.group].block_table
        pages = _pages(qkv, cache)
        tasks = step.tasks(max(1, _QUERY_ROWS * cache.spec.num_kv_heads // pages[-1]))
        native.attend(
            out, qkv, step.batch.positions, block_table, tasks, len(block_table), scale, *pages
        )  # fmt: skip


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Memory whose vectors lie in one line of the cache each."""
    memory = np.empty(num_bytes + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + num_bytes]


def _pages(
    qkv: FloatArray, cache: KVCache
) -> tuple[FloatArray, FloatArray, int, int, int, int, int]:
    """What both kernels of attention end with: pages, their shape, the number of query heads."""
    spec = cache.spec
    kv_width = spec.num_kv_heads * (spec.k_dim + spec.v_dim)
    query_heads = (qkv.shape[1] - kv_width) // spec.k_dim
    sizes = (spec.num_kv_heads, spec.block_size, spec.k_dim, spec.v_dim, query_heads)
    return cache.k, cache.v, *sizes
