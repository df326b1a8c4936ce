"""The operations as launches of the kernels in `cuda/`: the devices `cuda` and `emulated`.

Each method checks its operands, chooses grid and block as the kernel's header states, and launches
on the runtime's stream. It computes nothing itself and waits for nothing. What is small and known
on the host (a step's batch, row numbers, block numbers) goes up through a staging buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.config import DEVICE_BLOCK_SIZES
from cupaged.engine.batch import Batch
from cupaged.engine.sampling_batch import SamplingBatch
from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.cuda_attention import CudaAttention
from cupaged.ops.cuda_gemm import CudaGemm, CudaWeight
from cupaged.ops.cuda_sampling import CudaSampling
from cupaged.ops.cuda_step import CudaStep, upload_step
from cupaged.ops.launch_checks import LaunchChecks, OperandError
from cupaged.ops.launch_shapes import PACK_BYTES, norm_threads, row_threads, shared_row
from cupaged.runtime.dtypes import kernel_dtype, storage_dtype
from cupaged.runtime.protocol import Array, Defines, Kernel, Runtime, Shape
from cupaged.runtime.staging import StagingBuffer

__all__ = ["CudaOps"]

_BLOCKS_PER_MULTIPROCESSOR = 8  # enough to fill it; kernels loop over the rest
_STAGING_BYTES = 1 << 20  # grows where a step needs more
_MAX_HEAD_DIM = 512
_NO_DEFINES: dict[str, int] = {}


class CudaOps:
    """`Ops` on a runtime. See there for what each operation means.

    Activations, weights and caches are of one storage type. All arrays are contiguous and start at
    multiples of 16 bytes; what is written overlaps nothing else, but for what the operation says.
    Every method raises `OperandError` for an operand that does not fit.
    """

    def __init__(self, runtime: Runtime, dtype: str) -> None:
        """`dtype`: "float32", "float16" or "bfloat16".

        Raises:
            ConfigError: another dtype.
        """
        self.runtime = runtime
        self.dtype = storage_dtype(dtype)
        self._check = LaunchChecks(runtime)
        self._step_staging = StagingBuffer(runtime, _STAGING_BYTES)
        self._index_staging = StagingBuffer(runtime, _STAGING_BYTES >> 4)
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._max_blocks = runtime.properties.multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
        self._gemm = CudaGemm(runtime, dtype)
        self._attention = CudaAttention(runtime, dtype)
        self._sampling = CudaSampling(runtime)

    # ---- memory and weights ----------------------------------------------------------------------

    def check_compiler(self) -> None:
        """Load the first kernel that a model needs, so that what is missing shows at once.

        Raises:
            CupagedError: kernels cannot be compiled, and why.
        """
        self._gemm.packing_kernel()

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        """An uninitialised array."""
        return self.runtime.empty(shape, dtype)

    def empty_kv_cache(self, spec: KVCacheSpec, num_blocks: int) -> KVCache:
        """The blocks of one layer."""
        for name, value, fits, allowed in (
            ("dtype", spec.dtype, spec.dtype == self.dtype.name, self.dtype.name),
            ("scale_dtype", spec.scale_dtype, spec.scale_dtype is None, "None"),
            (
                "block_size",
                spec.block_size,
                spec.block_size in DEVICE_BLOCK_SIZES,
                f"in {DEVICE_BLOCK_SIZES}",
            ),
            (
                "k_dim and v_dim",
                (spec.k_dim, spec.v_dim),
                spec.k_dim == spec.v_dim and _is_head_dim(spec.k_dim),
                f"equal, even, from 2 to {_MAX_HEAD_DIM}",
            ),
        ):
            if not fits:
                raise OperandError(f"empty_kv_cache: {name}", value, allowed)
        shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.k_dim)
        empty = self.runtime.empty
        return KVCache(spec, empty(shape, self.dtype), empty(shape, self.dtype))

    def asarray(self, host: NDArray[Any]) -> Array:
        """A host array on the device; numbers with a fraction become the storage type."""
        is_integer = host.dtype.kind in "iub"
        return self.runtime.from_host(host if is_integer else host.astype(self.dtype, copy=False))

    def pack_weight(
        self, weight: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> CudaWeight:
        """On the device, in the storage type and the layout that the products read."""
        return self._gemm.pack_weight(weight, bias)

    def rotary_table(
        self, inverse_frequencies: NDArray[np.float64], max_positions: int, scale: float = 1.0
    ) -> Array:
        """float32 [2, max_positions, rotary_dim / 2]: cosines, then sines, computed in float64."""
        angles = np.outer(np.arange(max_positions, dtype=np.float64), inverse_frequencies)
        table = scale * np.stack([np.cos(angles), np.sin(angles)])
        return self.runtime.from_host(table.astype(np.float32))

    # ---- once a step -----------------------------------------------------------------------------

    def begin_step(self, batch: Batch) -> CudaStep:
        """One copy brings everything that kernels read of the batch."""
        return upload_step(batch, self._step_staging)

    def copy_blocks(self, caches: Sequence[KVCache], copies: NDArray[np.int32]) -> None:
        """Whole blocks, one launch a layer. copies: int32 [n, 2] on the host."""
        op = "copy_blocks"
        n = self._check.length(op, "copies", copies, ndim=2)
        num_blocks = min((len(cache.k) for cache in caches), default=0)
        self._check.host_indices(op, "copies", copies, (n, 2), num_blocks)
        sources, destinations = copies[:, 0], copies[:, 1]
        if len(np.unique(destinations)) != n or np.isin(destinations, sources).any():
            allowed = "without a destination twice or also as a source"
            raise OperandError(f"{op}: copies", copies.tolist(), allowed)
        for cache in caches:
            self._check_cache(op, cache)
        if not n:
            return
        (on_device,) = self._index_staging.upload([copies])
        kernel = self._kernel("kv_cache.cu", op)
        for cache in caches:
            k_elements, v_elements = cache.k[0].size, cache.v[0].size
            threads, blocks = shared_row(max(k_elements, v_elements), self.dtype.itemsize)
            args = (cache.k, cache.v, on_device, np.int64(k_elements), np.int64(v_elements))
            self.runtime.launch(kernel, (n, blocks, 2), (threads,), args)

    def gather_blocks(self, staging: Array, cache: Array, blocks: NDArray[np.int32]) -> None:
        """staging[i] = cache[blocks[i]], e.g. on the way to the host.

        staging: [n, Hkv, block_size, D]; cache: K or V of one layer, [num_blocks, Hkv, block_size,
        D]; blocks: int32 [n] on the host.
        """
        self._move_blocks("gather_blocks", staging, cache, blocks)

    def scatter_blocks(self, cache: Array, staging: Array, blocks: NDArray[np.int32]) -> None:
        """cache[blocks[i]] = staging[i]; no block twice. Otherwise as `gather_blocks`."""
        op = "scatter_blocks"
        n = self._check.length(op, "blocks", blocks)
        self._check.host_int32(op, "blocks", blocks, (n,))
        if len(np.unique(blocks)) != n:
            raise OperandError(f"{op}: blocks", blocks.tolist(), "without a block twice")
        self._move_blocks(op, staging, cache, blocks)

    def _move_blocks(
        self, op: str, staging: Array, cache: Array, blocks: NDArray[np.int32]
    ) -> None:
        n = self._check.length(op, "blocks", blocks)
        self._check.on_device(op, "cache", cache)
        self._check.array(op, "cache", cache, cache.shape, self.dtype)
        self._check.array(op, "staging", staging, (n, *cache.shape[1:]), self.dtype)
        self._check.host_indices(op, "blocks", blocks, (n,), len(cache))
        self._check.apart(op, {"staging": staging}, {"cache": cache})
        elements = cache[0].size if len(cache) else 0
        if elements * self.dtype.itemsize % PACK_BYTES:
            raise OperandError(f"{op}: block elements", elements, "whole packs of 16 bytes")
        if not n:
            return
        (on_device,) = self._index_staging.upload([blocks])
        threads, shares = shared_row(elements, self.dtype.itemsize)
        written, read = (staging, cache) if op == "gather_blocks" else (cache, staging)
        args = (written, read, on_device, np.int64(elements))
        self.runtime.launch(self._kernel("kv_cache.cu", op), (n, shares), (threads,), args)

    # ---- rows ------------------------------------------------------------------------------------

    def embedding(self, out: Array, token_ids: Array, table: CudaWeight) -> None:
        """Rows of a packed weight; ids outside it are clipped."""
        self._gemm.embedding(out, token_ids, table)

    def linear(self, out: Array, x: Array, weight: CudaWeight) -> None:
        """See `CudaGemm`."""
        self._gemm.linear(out, x, weight)

    def gather_rows(self, out: Array, x: Array, rows: Array | NDArray[np.int32]) -> None:
        """Rows of x, of any of the storage types; numbers outside are clipped.

        rows: int32 [n], on the host or on the device.
        """
        op = "gather_rows"
        self._check.on_device(op, "x", x)
        dtype = x.dtype
        num_rows, size = self._check.matrix(op, "x", x, dtype)
        n = self._check.length(op, "rows", rows)
        self._check.array(op, "out", out, (n, size), dtype)
        if not num_rows and n:
            raise OperandError(f"{op}: rows of x", num_rows, "1 or more")
        if not self.runtime.is_device_array(rows):
            self._check.host_int32(op, "rows", rows, (n,))
            (rows,) = self._index_staging.upload([rows])
        self._check.array(op, "rows", rows, (n,), np.dtype(np.int32))
        self._check.apart(op, {"out": out}, {"x": x, "rows": rows})
        if n:
            args = (out, x, rows, np.int32(num_rows), np.int32(size))
            kernel = self._kernel("gather_rows.cu", op, dtype=dtype)
            self.runtime.launch(kernel, (n,), (row_threads(size, dtype.itemsize),), args)

    # ---- norms and activations -------------------------------------------------------------------

    def rms_norm(self, out: Array, x: Array, weight: Array, eps: float) -> None:
        """One block a row."""
        op = "rms_norm"
        n, hidden = self._check.matrix(op, "x", x, self.dtype)
        self._check.array(op, "out", out, (n, hidden), self.dtype)
        self._check.array(op, "weight", weight, (hidden,), self.dtype)
        self._check.apart(op, {"out": out}, {"x": x, "weight": weight})
        args = (out, x, weight, np.int32(hidden), self._check.eps(op, eps))
        if n:
            self.runtime.launch(self._kernel("norm.cu", op), (n,), (norm_threads(hidden),), args)

    def add_rms_norm(
        self, out: Array, residual: Array, x: Array, weight: Array, eps: float
    ) -> None:
        """One block a row; what is normalised is the sum as `residual` holds it, rounded."""
        op = "add_rms_norm"
        n, hidden = self._check.matrix(op, "x", x, self.dtype)
        self._check.array(op, "out", out, (n, hidden), self.dtype)
        self._check.array(op, "residual", residual, (n, hidden), self.dtype)
        self._check.array(op, "weight", weight, (hidden,), self.dtype)
        self._check.apart(op, {"out": out, "residual": residual}, {"x": x, "weight": weight})
        args = (out, residual, x, weight, np.int32(hidden), self._check.eps(op, eps))
        if n:
            self.runtime.launch(self._kernel("norm.cu", op), (n,), (norm_threads(hidden),), args)

    def layer_norm(
        self, out: Array, x: Array, weight: Array, bias: Array | None, eps: float
    ) -> None:
        """out = (x - mean) / sqrt(variance + eps) * weight (+ bias) over the last axis.

        out, x: [T, hidden]; weight, bias: [hidden].
        """
        op = "layer_norm"
        n, hidden = self._check.matrix(op, "x", x, self.dtype)
        self._check.array(op, "out", out, (n, hidden), self.dtype)
        vectors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        for name, vector in vectors.items():
            self._check.array(op, name, vector, (hidden,), self.dtype)
        self._check.apart(op, {"out": out}, {"x": x, **vectors})
        args = (out, x, *vectors.values(), np.int32(hidden), self._check.eps(op, eps))
        defines = {"BIAS": 0} if bias is None else {}
        if n:
            kernel = self._kernel("norm.cu", op, defines)
            self.runtime.launch(kernel, (n,), (norm_threads(hidden),), args)

    def silu_mul(self, out: Array, gate_up: Array) -> None:
        """out = silu(gate) * up; gate_up is only read."""
        self._gated("silu_mul", out, gate_up)

    def gelu_mul(self, out: Array, gate_up: Array) -> None:
        """out = gelu(gate) * up, gelu in its tanh form. Shapes as in `silu_mul`."""
        self._gated("gelu_mul", out, gate_up)

    def gelu(self, out: Array, x: Array, *, exact: bool = False) -> None:
        """out = gelu(x), by the error function if `exact`, else by tanh. out may be x itself."""
        self._elementwise("gelu", out, x, {"GELU_ERF": 1} if exact else {})

    def relu(self, out: Array, x: Array) -> None:
        """out = max(x, 0). out may be x itself."""
        self._elementwise("relu", out, x, {})

    def _gated(self, op: str, out: Array, gate_up: Array) -> None:
        rows, size = self._check.matrix(op, "out", out, self.dtype)
        self._check.array(op, "gate_up", gate_up, (rows, 2 * size), self.dtype)
        self._check.apart(op, {"out": out}, {"gate_up": gate_up})
        if rows:
            threads, shares = shared_row(size, self.dtype.itemsize)
            grid = (rows, shares)
            kernel = self._kernel("activation.cu", op)
            self.runtime.launch(kernel, grid, (threads,), (out, gate_up, np.int32(size)))

    def _elementwise(self, op: str, out: Array, x: Array, defines: dict[str, int]) -> None:
        self._check.on_device(op, "x", x)
        self._check.array(op, "x", x, x.shape, self.dtype)
        self._check.array(op, "out", out, x.shape, self.dtype)
        if self.runtime.address(out) != self.runtime.address(x):
            self._check.apart(op, {"out": out}, {"x": x})
        if x.size:
            threads, shares = shared_row(x.size, self.dtype.itemsize)
            grid = (min(shares, self._max_blocks),)
            kernel = self._kernel("activation.cu", op, defines)
            self.runtime.launch(kernel, grid, (threads,), (out, x, np.int64(x.size)))

    # ---- attention -------------------------------------------------------------------------------

    def rope_and_cache(self, step: CudaStep, qkv: Array, table: Array, cache: KVCache) -> None:
        """One block a token."""
        op, spec = "rope_and_cache", cache.spec
        n, width = self._check.matrix(op, "qkv", qkv, self.dtype)
        head_dim, kv_heads = spec.k_dim, spec.num_kv_heads
        q_heads = width // head_dim - 2 * kv_heads
        if width % head_dim or q_heads < 1:
            allowed = f"(Hq + 2 * {kv_heads}) * {head_dim}, Hq 1 or more"
            raise OperandError(f"{op}: columns of qkv", width, allowed)
        rotary_dim, max_positions = self._check_table(table, head_dim)
        num_blocks = self._check_cache(op, cache)
        group = step.groups[spec.group]
        self._check.array(op, "positions", step.positions, (n,), np.dtype(np.int32))
        self._check.array(op, "slot_mapping", group.slot_mapping, (n,), np.dtype(np.int64))
        written = {"qkv": qkv, "k cache": cache.k, "v cache": cache.v}
        self._check.apart(op, written, {"table": table})
        if step.max_position >= max_positions:
            raise OperandError(f"{op}: positions", step.max_position, f"below {max_positions}")
        if group.max_slot >= num_blocks * spec.block_size:
            allowed = f"below {num_blocks * spec.block_size}"
            raise OperandError(f"{op}: slot_mapping", group.max_slot, allowed)
        if not n:
            return
        args = (
            qkv, cache.k, cache.v, table, step.positions, group.slot_mapping,
            np.int32(q_heads), np.int32(kv_heads), np.int32(max_positions),
        )  # fmt: skip
        defines = {"HEAD_DIM": head_dim, "BLOCK_SIZE": spec.block_size}
        if rotary_dim != head_dim:
            defines["ROTARY_DIM"] = rotary_dim
        kernel = self._kernel("rope.cu", op, defines)
        threads = row_threads((q_heads + kv_heads) * rotary_dim // 2, self.dtype.itemsize)
        self.runtime.launch(kernel, (n,), (threads,), args)

    def paged_attention(
        self, step: CudaStep, out: Array, qkv: Array, cache: KVCache, scale: float
    ) -> None:
        """See `CudaAttention`."""
        self._attention.paged_attention(step, out, qkv, cache, scale)

    def all_reduce(self, x: Array) -> None:
        """One device: nothing to add."""

    # ---- logits ----------------------------------------------------------------------------------

    def sample(self, logits: Array, sampling: SamplingBatch) -> NDArray[np.int32]:
        """See `CudaSampling`. Waits for the step, and brings the tokens down."""
        return self.runtime.to_host(self._sampling.sample(logits, sampling))

    def logprobs(
        self, logits: Array, token_ids: NDArray[np.int32], count: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
        """See `CudaSampling`. Waits."""
        return self._sampling.logprobs(logits, token_ids, count)

    # ---- launches --------------------------------------------------------------------------------

    def _kernel(
        self, file: str, name: str, defines: Defines = _NO_DEFINES, dtype: DTypeLike | None = None
    ) -> Kernel:
        """Loaded once; of the ops' own storage type unless another is given."""
        key = (name, dtype, *defines.items())
        kernel = self._kernels.get(key)
        if kernel is None:
            define = kernel_dtype(self.dtype if dtype is None else dtype)
            kernel = self.runtime.load_kernel(file, name, {"DTYPE": define, **defines})
            self._kernels[key] = kernel
        return kernel

    def _check_cache(self, op: str, cache: KVCache) -> int:
        """Both halves as the spec says; the number of blocks."""
        spec = cache.spec
        shape = (len(cache.k), spec.num_kv_heads, spec.block_size, spec.k_dim)
        self._check.array(op, "k cache", cache.k, shape, self.dtype)
        self._check.array(op, "v cache", cache.v, (*shape[:3], spec.v_dim), self.dtype)
        return shape[0]

    def _check_table(self, table: Array, head_dim: int) -> tuple[int, int]:
        """Rotary dimensions and positions of a table of `rotary_table`."""
        op = "rope_and_cache"
        self._check.on_device(op, "table", table)
        shape = table.shape
        if len(shape) != 3 or shape[0] != 2 or not 1 <= shape[2] <= head_dim // 2:
            allowed = f"float32 [2, max_positions, {head_dim // 2} or less]"
            raise OperandError(f"{op}: table", f"{table.dtype} {list(shape)}", allowed)
        self._check.array(op, "table", table, shape, np.dtype(np.float32))
        self._check.int32(op, "max_positions", shape[1])
        return 2 * shape[2], shape[1]


def _is_head_dim(value: int) -> bool:
    return value % 2 == 0 and 2 <= value <= _MAX_HEAD_DIM
