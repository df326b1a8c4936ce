"""The operations as launches of the kernels in `cuda/`: the devices `cuda` and `emulated`.

Each method checks its operands, chooses grid and block as the kernel's header states, and launches
on the runtime's stream. It computes nothing itself and waits for nothing. What the operations of a
step need to know goes up with `begin_step`, in one copy; what they give comes down with `download`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupaged.engine.batch import Batch
from cupaged.ops import STORED_DTYPES, KVCache, KVCacheSpec, StepLimits
from cupaged.ops.cuda_attention import CudaAttention
from cupaged.ops.cuda_cache import CudaCache
from cupaged.ops.cuda_draws import CudaDraws
from cupaged.ops.cuda_gemm import CudaGemm, CudaWeight
from cupaged.ops.cuda_sampling import CudaSampling
from cupaged.ops.cuda_step import CudaStep, upload_step
from cupaged.ops.cuda_swap import CudaSwap
from cupaged.ops.gemm_plan import packed_bytes
from cupaged.ops.kernel_table import KernelTable
from cupaged.ops.launch_checks import LaunchChecks, OperandError
from cupaged.ops.launch_shapes import norm_threads, row_threads, shared_row
from cupaged.ops.step_memory import StepMemory
from cupaged.runtime.dtypes import storage_dtype
from cupaged.runtime.protocol import Array, Runtime, Shape
from cupaged.runtime.results import Download, ResultBuffer
from cupaged.runtime.staging import StagingBuffer

__all__ = ["CudaOps"]

_BLOCKS_PER_MULTIPROCESSOR = 8  # enough to fill it; kernels loop over the rest
_INDEX_BYTES = 4  # kernels read row numbers one by one, so that parts of a list will do


class CudaOps:
    """`Ops` on a runtime. See there for what each operation means.

    Activations, weights and caches are of one storage type. All arrays are contiguous and start at
    multiples of 16 bytes; what is written overlaps nothing else, but for what the operation says.
    Every method raises `OperandError` for an operand that does not fit.
    """

    def __init__(self, runtime: Runtime, dtype: str) -> None:
        """Takes no memory: `reserve` does. `dtype`: "float32", "float16" or "bfloat16".

        Raises:
            ConfigError: another dtype.
        """
        self.runtime = runtime
        self.dtype = storage_dtype(dtype)
        self._check = LaunchChecks(runtime)
        self._kernels = KernelTable(runtime, self.dtype)
        self._staging = StagingBuffer(runtime)
        self._many_edits = StagingBuffer(runtime)  # what does not fit the step's own
        self._results = ResultBuffer(runtime)
        self._max_blocks = runtime.properties.multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
        self._gemm = CudaGemm(runtime, dtype)
        self._cache = CudaCache(runtime, self.dtype, self._kernels)
        self._swap = CudaSwap(runtime, self.dtype, self._cache)
        self._attention = CudaAttention(runtime, dtype)
        self._sampling = CudaSampling(runtime, self._results)

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
        return self._cache.empty_kv_cache(spec, num_blocks)

    def empty_host_cache(self, spec: KVCacheSpec, num_blocks: int) -> KVCache:
        """The host's blocks of one layer, in pinned memory."""
        return self._swap.empty_host_cache(spec, num_blocks)

    def asarray(self, host: NDArray[Any]) -> Array:
        """A host array on the device; numbers with a fraction become the storage type."""
        is_integer = host.dtype.kind in "iub"
        return self._gemm.upload(host if is_integer else host.astype(self.dtype, copy=False))

    @property
    def kept_types(self) -> tuple[str, ...]:
        """Its own type."""
        return tuple(name for name, dtype in STORED_DTYPES.items() if dtype == self.dtype)

    def pack_weight(
        self, weight: NDArray[Any], bias: NDArray[np.float32] | None = None
    ) -> CudaWeight:
        """On the device, in the storage type and the layout that the products read."""
        return self._gemm.pack_weight(weight, bias)

    def weight_bytes(
        self, out_features: int, in_features: int, has_bias: bool, stored: str | None = None
    ) -> int:
        """With the padding of the layout."""
        return packed_bytes(out_features, in_features, has_bias, self.dtype.itemsize)

    def rotary_table(
        self, inverse_frequencies: NDArray[np.float64], max_positions: int, scale: float = 1.0
    ) -> Array:
        """float32 [2, max_positions, rotary_dim / 2]: cosines, then sines, computed in float64."""
        angles = np.outer(np.arange(max_positions, dtype=np.float64), inverse_frequencies)
        table = scale * np.stack([np.cos(angles), np.sin(angles)])
        return self.runtime.from_host(table.astype(np.float32))

    def buffer_bytes(self, limits: StepLimits, products: Sequence[tuple[int, int]]) -> int:
        """See `StepMemory`."""
        return self._memory(limits).total_bytes(products, self.dtype.name)

    def reserve(self, limits: StepLimits) -> None:
        """Buffers of the step, the workspaces of products and attention, pinned memory."""
        memory = self._memory(limits)
        self._gemm.reserve(limits.max_tokens)
        self._attention.reserve(memory.attention_bytes, limits.num_q_heads, limits.kv_specs)
        self._staging.reserve(memory.upload_bytes, limits.max_steps_in_flight)
        self._results.reserve(memory.result_bytes, memory.num_downloads)
        self._sampling.reserve(limits.max_logits, memory.saved_bytes)
        self._swap.reserve(memory.swap_area_bytes, memory.swap_id_bytes)

    def warm_up_counts(self, max_tokens: int) -> list[int]:
        """Only products have other kernels for other numbers of tokens."""
        return self._gemm.warm_up_counts(max_tokens)

    def _memory(self, limits: StepLimits) -> StepMemory:
        return StepMemory(limits, self.runtime.properties.multiprocessors)

    # ---- once a step -----------------------------------------------------------------------------

    def begin_step(self, batch: Batch) -> CudaStep:
        """One copy brings everything that the step's kernels read of the batch."""
        self._results.restart()
        work = self._attention.plan(batch)
        return upload_step(batch, self._staging, work, self._many_edits)

    def copy_blocks(self, caches: Sequence[KVCache], step: CudaStep) -> None:
        """Whole blocks, one launch a layer."""
        self._cache.copy_blocks(caches, step)

    def write_blocks(self, cache: KVCache, blocks: NDArray[np.int32], bits: int) -> None:
        """See `CudaCache`."""
        self._cache.write_blocks(cache, blocks, bits)

    def read_blocks(
        self, cache: KVCache, blocks: NDArray[np.int32]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """See `CudaCache`."""
        return self._cache.read_blocks(cache, blocks)

    def gather_blocks(self, staging: Array, cache: Array, blocks: NDArray[np.int32]) -> None:
        """See `CudaCache`."""
        self._cache.gather_blocks(staging, cache, blocks)

    def scatter_blocks(self, cache: Array, staging: Array, blocks: NDArray[np.int32]) -> None:
        """See `CudaCache`."""
        self._cache.scatter_blocks(cache, staging, blocks)

    def swap_out(self, caches: Sequence[KVCache], host: Sequence[KVCache], step: CudaStep) -> None:
        """See `CudaSwap`."""
        self._swap.swap_out(caches, host, step.batch.swap_out)

    def swap_in(self, caches: Sequence[KVCache], host: Sequence[KVCache], step: CudaStep) -> None:
        """See `CudaSwap`."""
        self._swap.swap_in(caches, host, step.batch.swap_in)

    # ---- rows ------------------------------------------------------------------------------------

    def embedding(self, out: Array, token_ids: Array, table: CudaWeight) -> None:
        """Rows of a packed weight; ids outside it are clipped."""
        self._gemm.embedding(out, token_ids, table)

    def linear(self, out: Array, x: Array, weight: CudaWeight) -> None:
        """See `CudaGemm`."""
        self._gemm.linear(out, x, weight)

    def gather_rows(self, out: Array, x: Array, rows: Array) -> None:
        """Rows of x, of any of the storage types; numbers outside are clipped."""
        op = "gather_rows"
        self._check.on_device(op, "x", x)
        dtype = x.dtype
        num_rows, size = self._check.matrix(op, "x", x, dtype)
        n = self._check.length(op, "rows", rows)
        self._check.array(op, "out", out, (n, size), dtype)
        if not num_rows and n:
            raise OperandError(f"{op}: rows of x", num_rows, "1 or more")
        self._check.array(op, "rows", rows, (n,), np.dtype(np.int32), _INDEX_BYTES)
        self._check.apart(op, {"out": out}, {"x": x, "rows": rows})
        if n:
            args = (out, x, rows, np.int32(num_rows), np.int32(size))
            kernel = self._kernels.get("gather_rows.cu", op, dtype=dtype)
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
            self.runtime.launch(
                self._kernels.get("norm.cu", op), (n,), (norm_threads(hidden),), args
            )

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
            self.runtime.launch(
                self._kernels.get("norm.cu", op), (n,), (norm_threads(hidden),), args
            )

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
            kernel = self._kernels.get("norm.cu", op, defines)
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
            kernel = self._kernels.get("activation.cu", op)
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
            kernel = self._kernels.get("activation.cu", op, defines)
            self.runtime.launch(kernel, grid, (threads,), (out, x, np.int64(x.size)))

    # ---- attention -------------------------------------------------------------------------------

    def rope_and_cache(self, step: CudaStep, qkv: Array, table: Array, cache: KVCache) -> None:
        """One block a token."""
        self._cache.rope_and_cache(step, qkv, table, cache)

    def paged_attention(
        self, step: CudaStep, out: Array, qkv: Array, cache: KVCache, scale: float
    ) -> None:
        """See `CudaAttention`."""
        self._attention.paged_attention(step, out, qkv, cache, scale)

    def all_reduce(self, x: Array) -> None:
        """One device: nothing to add."""

    # ---- results ---------------------------------------------------------------------------------

    def sample(self, logits: Array, sampling: CudaDraws) -> Array:
        """See `CudaSampling`."""
        return self._sampling.sample(logits, sampling)

    def logprobs(
        self, logits: Array, token_ids: Array, count: int, which: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """See `CudaSampling`."""
        return self._sampling.logprobs(logits, token_ids, count, which)

    def download(self, arrays: Sequence[Array]) -> Download:
        """See `ResultBuffer`."""
        return self._results.download(arrays)
