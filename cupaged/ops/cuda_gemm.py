"""Packed weights and y = x W^T (+ b) on a runtime: layout, choice of kernel, workspace, launches.

The order of summation belongs to the weight: its columns are cut into chunks by `chunk_columns`, a
function of its shape alone. Which kernel runs depends on the number of tokens and on the device,
and changes no bit of a result. Owns the workspace in which blocks leave the sums of their chunks.
It computes nothing itself and waits for nothing; see `cuda/gemm.cuh` for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.ops.launch_checks import LaunchChecks, OperandError
from cupaged.ops.launch_shapes import PACK_BYTES, row_threads
from cupaged.runtime.dtypes import kernel_dtype, storage_dtype
from cupaged.runtime.protocol import Array, Kernel, Runtime

__all__ = [
    "CudaGemm",
    "CudaWeight",
    "GemmLaunch",
    "choose_launch",
    "chunk_columns",
    "padded_columns",
    "padded_rows",
    "workspace_bytes",
]

_GRANULE = 64  # columns; in packed_weight.cuh
_BLOCK_ROWS = 16  # in packed_weight.cuh
_MIN_CHUNK = 256
_MAX_CHUNKS = 64
_FEATURES = 64  # of a tile of the kernels for few tokens
# Blocks that such a launch should have where the weight is large enough: about four on each
# multiprocessor of a large GPU. A constant, because the order of summation follows from it.
_BLOCKS = 512
_MAX_FEW_TOKENS = 64  # from here on reading the weight once more costs more than computing
_MAX_COLUMNS = 1 << 22
_MAX_FEATURES = 1 << 30
_PACKING_BYTES = 16 << 20  # of float32 numbers that are packed at a time
_PACKING_THREADS = 256


@dataclass(frozen=True, slots=True)
class CudaWeight:
    """A weight on the device.

    matrix: storage type [padded_rows(out_features), padded_columns(in_features)], in the layout of
        `cuda/packed_weight.cuh`.
    bias: float32 [out_features], or None. chunk: columns of a chunk of the sum.
    """

    matrix: Array
    bias: Array | None
    out_features: int
    in_features: int
    chunk: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features), as `workspace_bytes` takes it."""
        return self.out_features, self.in_features


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    """Which kernel computes a product, and how it is launched.

    partial_floats, tickets: sizes of the workspace that it uses; both 0 if it uses none.
    has_workspace: whether the kernel has parameters for it.
    """

    file: str
    kernel: str
    grid: tuple[int, ...]
    threads: int
    shared_memory_bytes: int = 0
    has_workspace: bool = False
    partial_floats: int = 0
    tickets: int = 0


@dataclass(frozen=True, slots=True)
class _TileKernel:
    """A kernel of gemm_tiles.cu. speed: per output, relative, when the device is full of tiles."""

    name: str
    features: int
    tokens: int
    threads: int
    shared_memory_bytes: int
    speed: float


_TILE_KERNELS = (
    _TileKernel("gemm_tiles_64", 64, 64, 128, 49152, 0.6),
    _TileKernel("gemm_tiles_128", 128, 128, 256, 98304, 0.85),
)
_ONE_CHUNK_KERNEL = _TileKernel("gemm_tiles_256", 256, 128, 256, 98304, 1.0)


def padded_rows(out_features: int) -> int:
    """Rows of a packed weight: a multiple of 16."""
    return _ceil(out_features, _BLOCK_ROWS) * _BLOCK_ROWS


def padded_columns(in_features: int) -> int:
    """Columns of a packed weight: a multiple of 64."""
    return _ceil(in_features, _GRANULE) * _GRANULE


def chunk_columns(out_features: int, in_features: int) -> int:
    """Columns of a chunk of the sum: a multiple of 64.

    As few chunks as give `_BLOCKS` blocks to the kernels for few tokens; none below 256 columns.
    The same for all storage types.
    """
    granules = padded_columns(in_features) // _GRANULE
    wanted = max(1, _BLOCKS // _ceil(out_features, _FEATURES))
    chunk = _ceil(granules, min(wanted, _MAX_CHUNKS)) * _GRANULE
    return max(_MIN_CHUNK, chunk)


@lru_cache(maxsize=1024)
def choose_launch(
    num_tokens: int, out_features: int, in_features: int, dtype: str, multiprocessors: int
) -> GemmLaunch:
    """How a product is computed. num_tokens: at least 1; dtype: "float32" and so on."""
    chunks = _ceil(padded_columns(in_features), chunk_columns(out_features, in_features))
    if num_tokens <= _MAX_FEW_TOKENS:
        return _few_tokens(num_tokens, out_features, chunks, dtype)
    if dtype == "float32":
        tiles = _ceil(out_features, 64) * _ceil(num_tokens, 64)
        return GemmLaunch("gemm_f32.cu", "gemm_f32_tiles", (tiles,), 128)
    fits_one_chunk_kernel = chunks == 1 and in_features % 8 == 0
    kernels = (*_TILE_KERNELS, _ONE_CHUNK_KERNEL) if fits_one_chunk_kernel else _TILE_KERNELS

    def tiles_of(kernel: _TileKernel) -> int:
        return _ceil(out_features, kernel.features) * _ceil(num_tokens, kernel.tokens)

    def time(kernel: _TileKernel) -> float:
        rounds = _ceil(tiles_of(kernel), multiprocessors)
        return rounds * kernel.features * kernel.tokens / kernel.speed

    best = min(kernels, key=time)
    grid = (tiles_of(best),)
    return GemmLaunch("gemm_tiles.cu", best.name, grid, best.threads, best.shared_memory_bytes)


def workspace_bytes(max_tokens: int, shapes: Iterable[tuple[int, int]], dtype: str) -> int:
    """Bytes of the workspace for products of up to max_tokens tokens, one after another.

    Args:
        max_tokens: of a step; at least 1.
        shapes: (out_features, in_features) of each weight.
        dtype: storage type of the weights, "float32" and so on.
    """
    floats, tickets = _workspace(max_tokens, shapes, dtype)
    return 4 * (floats + tickets)


def _few_tokens(num_tokens: int, out_features: int, chunks: int, dtype: str) -> GemmLaunch:
    if dtype == "float32":
        file, kernel, tokens = "gemm_f32.cu", "gemm_f32_rows", 16
    else:
        tokens = 8 if num_tokens <= 8 else 16 if num_tokens <= 16 else 32
        file, kernel = "gemm_rows.cu", f"gemm_rows_{tokens}"
    tiles = _ceil(out_features, _FEATURES) * _ceil(num_tokens, tokens)
    several = chunks > 1
    return GemmLaunch(
        file,
        kernel,
        (tiles, chunks),
        threads=128,
        has_workspace=True,
        partial_floats=several * chunks * tiles * _FEATURES * tokens,
        tickets=several * tiles,
    )


def _workspace(max_tokens: int, shapes: Iterable[tuple[int, int]], dtype: str) -> tuple[int, int]:
    """Floats and tickets: the largest that any number of tokens takes; more tokens never less."""
    floats, tickets = 1, 1  # a kernel's parameters are never null
    for out_features, in_features in shapes:
        tokens = min(max_tokens, _MAX_FEW_TOKENS)
        launch = choose_launch(tokens, out_features, in_features, dtype, multiprocessors=1)
        floats, tickets = max(floats, launch.partial_floats), max(tickets, launch.tickets)
    return floats, tickets


class CudaGemm:
    """Weights of one storage type and products with them, on one runtime.

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
        self._kernels: dict[tuple[str, str, bool, bool], Kernel] = {}
        self._needed = (1, 1)  # floats and tickets for all weights packed so far
        self._partial: Array = None
        self._tickets: Array = None

    def pack_weight(
        self, weight: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> CudaWeight:
        """A copy on the device, rounded to the storage type; a float32 bias stays as it is.

        weight: [out_features, in_features], on the host; bias: [out_features]. Besides the copy it
        takes memory for some rows only.
        """
        op = "pack_weight"
        if weight.ndim != 2 or weight.dtype != np.float32 or not weight.size:
            found = f"{weight.dtype} {list(weight.shape)}"
            raise OperandError(f"{op}: weight", found, "float32 of two dimensions, not empty")
        out_features, in_features = weight.shape
        if out_features > _MAX_FEATURES or in_features > _MAX_COLUMNS:
            allowed = f"at most {_MAX_FEATURES} x {_MAX_COLUMNS}"
            raise OperandError(f"{op}: weight", list(weight.shape), allowed)
        if bias is not None and (bias.shape != (out_features,) or bias.dtype != np.float32):
            found = f"{bias.dtype} {list(bias.shape)}"
            raise OperandError(f"{op}: bias", found, f"float32 [{out_features}]")
        packed = CudaWeight(
            self._packed(weight),
            None if bias is None else self.runtime.from_host(bias),
            out_features,
            in_features,
            chunk_columns(out_features, in_features),
        )
        floats, tickets = _workspace(_MAX_FEW_TOKENS, [packed.shape], self.dtype.name)
        self._needed = max(self._needed[0], floats), max(self._needed[1], tickets)
        return packed

    def _packed(self, weight: NDArray[np.float32]) -> Array:
        """Part by part: up as float32, then rounded and laid out by a kernel."""
        out_features, in_features = weight.shape
        rows, columns = padded_rows(out_features), padded_columns(in_features)
        packed = self.runtime.empty((rows, columns), self.dtype)
        part_rows = _BLOCK_ROWS * max(1, _PACKING_BYTES // (4 * in_features * _BLOCK_ROWS))
        part_rows = min(part_rows, rows)
        staging = self.runtime.empty((part_rows * in_features,), np.float32)
        kernel = self.packing_kernel()
        for start in range(0, rows, part_rows):
            part = np.ascontiguousarray(weight[start : start + part_rows])
            to = packed[start : start + part_rows]
            self.runtime.copy_to_device(staging[: part.size], part.reshape(-1))
            sizes = (to.shape[0], columns, part.shape[0], in_features)
            blocks = _ceil(to.nbytes, PACK_BYTES * _PACKING_THREADS)
            args = (to, staging[: part.size], *(np.int32(size) for size in sizes))
            self.runtime.launch(kernel, (blocks,), (_PACKING_THREADS,), args)
        self.runtime.stream.synchronize()  # before the staging memory goes
        return packed

    def packing_kernel(self) -> Kernel:
        """What lays weights out: the first kernel that a model needs.

        Raises:
            CupagedError: the runtime cannot compile it, and why.
        """
        define = {"DTYPE": kernel_dtype(self.dtype)}
        return self.runtime.load_kernel("gemm_pack.cu", "pack_weight", define)

    def reserve(self) -> int:
        """Allocate the workspace for all weights packed so far; its bytes.

        Call it when the last weight is packed: from then on `linear` allocates nothing. Without it,
        the first product that needs the workspace allocates it.
        """
        floats, tickets = self._needed
        if self._partial is None or self._partial.size < floats:
            self._partial = self.runtime.empty((floats,), np.float32)
        if self._tickets is None or self._tickets.size < tickets:
            self._tickets = self.runtime.zeros((tickets,), np.int32)
        return int(self._partial.nbytes + self._tickets.nbytes)

    def linear(self, out: Array, x: Array, weight: CudaWeight) -> None:
        """out = x W^T (+ bias), added up in float32 and rounded once.

        out: [T, out_features], of the storage type or float32; x: [T, in_features]. A row's bits do
        not depend on T or on where it stands.
        """
        op, (features, columns) = "linear", weight.shape
        num_tokens, _ = self._check.matrix(op, "x", x, self.dtype)
        self._check.array(op, "x", x, (num_tokens, columns), self.dtype)
        self._check.on_device(op, "out", out)
        out_dtype = np.dtype(np.float32) if out.dtype == np.float32 else self.dtype
        self._check.array(op, "out", out, (num_tokens, features), out_dtype)
        padded = padded_columns(columns)
        packed_shape = (padded_rows(features), padded)
        self._check.array(op, "weight", weight.matrix, packed_shape, self.dtype)
        read = {"x": x, "weight": weight.matrix}
        if weight.bias is not None:
            self._check.array(op, "bias", weight.bias, (features,), np.dtype(np.float32))
            read["bias"] = weight.bias
        self._check.apart(op, {"out": out}, read)
        if not num_tokens:
            return
        multiprocessors = self.runtime.properties.multiprocessors
        launch = choose_launch(num_tokens, features, columns, self.dtype.name, multiprocessors)
        args = [out]
        if launch.has_workspace:
            self.reserve()
            args += [self._partial, self._tickets]
        args += read.values()
        sizes = (num_tokens, features, columns, padded, weight.chunk)
        args += [np.int32(size) for size in sizes]
        kernel = self._kernel(launch, out_dtype, weight.bias is not None)
        self.runtime.launch(
            kernel,
            launch.grid,
            (launch.threads,),
            args,
            shared_memory_bytes=launch.shared_memory_bytes,
        )

    def embedding(self, out: Array, token_ids: Array, table: CudaWeight) -> None:
        """out[t] = table[token_ids[t]], ids clipped to the vocabulary.

        out: [T, in_features] of the storage type; token_ids: int32 [T] on the device.
        """
        op, (vocab_size, hidden) = "embedding", table.shape
        num_tokens, _ = self._check.matrix(op, "out", out, self.dtype)
        self._check.array(op, "out", out, (num_tokens, hidden), self.dtype)
        self._check.array(op, "token_ids", token_ids, (num_tokens,), np.dtype(np.int32))
        stride = padded_columns(hidden)
        self._check.array(op, "table", table.matrix, (padded_rows(vocab_size), stride), self.dtype)
        self._check.apart(op, {"out": out}, {"token_ids": token_ids, "table": table.matrix})
        if not num_tokens:
            return
        defines = {"DTYPE": kernel_dtype(self.dtype)}
        kernel = self.runtime.load_kernel("embedding_packed.cu", "embedding_packed", defines)
        sizes = (np.int32(vocab_size), np.int32(hidden), np.int32(stride))
        threads = row_threads(hidden, self.dtype.itemsize)
        args = (out, token_ids, table.matrix, *sizes)
        self.runtime.launch(kernel, (num_tokens,), (threads,), args)

    def _kernel(self, launch: GemmLaunch, out_dtype: np.dtype[Any], has_bias: bool) -> Kernel:
        key = (launch.file, launch.kernel, out_dtype == self.dtype, has_bias)
        if key not in self._kernels:
            defines: dict[str, str | int] = {"DTYPE": kernel_dtype(self.dtype)}
            if out_dtype != self.dtype:
                defines["OUT_DTYPE"] = kernel_dtype(out_dtype)
            if has_bias:
                defines["BIAS"] = 1
            self._kernels[key] = self.runtime.load_kernel(launch.file, launch.kernel, defines)
        return self._kernels[key]


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit)
