"""Packed weights and y = x W^T (+ b) on a runtime: workspace, checks, launches.

The order of summation belongs to the weight: its columns are cut into chunks by `chunk_columns`, a
function of its shape alone. Which kernel runs depends on the number of tokens and on the device,
and changes no bit of a result. Owns the workspace in which blocks leave the sums of their chunks.
It computes nothing itself and waits for nothing but the upload of weights; see `cuda/gemm.cuh` for
the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.ops.gemm_plan import (
    MAX_FEW_TOKENS,
    GemmLaunch,
    choose_launch,
    chunk_columns,
    padded_columns,
    padded_rows,
    token_counts,
    workspace_sizes,
)
from cupaged.ops.launch_checks import LaunchChecks, OperandError
from cupaged.ops.launch_shapes import row_threads
from cupaged.ops.weight_packer import WeightPacker
from cupaged.runtime.dtypes import kernel_dtype, storage_dtype
from cupaged.runtime.protocol import Array, Kernel, Runtime

__all__ = ["CudaGemm", "CudaWeight"]

_MAX_COLUMNS = 1 << 22
_MAX_FEATURES = 1 << 30


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
        self._packer = WeightPacker(runtime, self.dtype)
        self._kernels: dict[tuple[str, str, bool, bool], Kernel] = {}
        self._embedding_kernel: Kernel = None
        self._shapes: set[tuple[int, int]] = set()  # of all weights packed so far
        self._partial: Array = None
        self._tickets: Array = None

    def pack_weight(
        self, weight: NDArray[Any], bias: NDArray[np.float32] | None = None
    ) -> CudaWeight:
        """A copy on the device, rounded to the storage type; a float32 bias stays as it is.

        weight: [out_features, in_features], on the host, float32 or of the storage type already;
        bias: [out_features]. Besides the copy it takes memory for some rows only, until `reserve`.
        """
        op = "pack_weight"
        if weight.ndim != 2 or weight.dtype not in (np.float32, self.dtype) or not weight.size:
            found = f"{weight.dtype} {list(weight.shape)}"
            allowed = " or ".join(dict.fromkeys(["float32", self.dtype.name]))
            raise OperandError(f"{op}: weight", found, f"{allowed} of two dimensions, not empty")
        out_features, in_features = weight.shape
        if out_features > _MAX_FEATURES or in_features > _MAX_COLUMNS:
            allowed = f"at most {_MAX_FEATURES} x {_MAX_COLUMNS}"
            raise OperandError(f"{op}: weight", list(weight.shape), allowed)
        if bias is not None and (bias.shape != (out_features,) or bias.dtype != np.float32):
            found = f"{bias.dtype} {list(bias.shape)}"
            raise OperandError(f"{op}: bias", found, f"float32 [{out_features}]")
        packed = CudaWeight(
            self._packer.pack(weight),
            None if bias is None else self.runtime.from_host(bias),
            out_features,
            in_features,
            chunk_columns(out_features, in_features),
        )
        self._shapes.add(packed.shape)
        return packed

    def upload(self, host: NDArray[Any]) -> Array:
        """A plain copy on the device, by the way that weights go."""
        return self._packer.upload(host)

    def packing_kernel(self) -> Kernel:
        """What lays weights out: the first kernel that a model needs.

        Raises:
            CupagedError: the runtime cannot compile it, and why.
        """
        return self._packer.kernel(np.float32)

    def reserve(self, max_tokens: int = MAX_FEW_TOKENS) -> int:
        """Allocate the workspace for all weights packed so far; its bytes.

        Call it when the last weight is packed: from then on `linear` allocates nothing for up to
        max_tokens tokens (any number, by default), and what packing needed is given back. Without
        it, the first product that needs the workspace allocates it.
        """
        self._packer.release()
        floats, tickets = workspace_sizes(max_tokens, self._shapes, self.dtype.name)
        if self._partial is None or self._partial.size < floats:
            self._partial = self.runtime.empty((floats,), np.float32)
        if self._tickets is None or self._tickets.size < tickets:
            self._tickets = self.runtime.zeros((tickets,), np.int32)
        return int(self._partial.nbytes + self._tickets.nbytes)

    def warm_up_counts(self, max_tokens: int) -> list[int]:
        """See `Ops.warm_up_counts`, for the weights packed so far."""
        multiprocessors = self.runtime.properties.multiprocessors
        return token_counts(max_tokens, self._shapes, self.dtype.name, multiprocessors)

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
            self._make_room(launch)
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

    def _make_room(self, launch: GemmLaunch) -> None:
        """As `reserve`, unless there is enough."""
        is_there = self._partial is not None
        if (
            not is_there
            or self._partial.size < launch.partial_floats
            or (self._tickets.size < launch.tickets)
        ):
            self.reserve()

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
        if self._embedding_kernel is None:
            defines = {"DTYPE": kernel_dtype(self.dtype)}
            file, name = "embedding_packed.cu", "embedding_packed"
            self._embedding_kernel = self.runtime.load_kernel(file, name, defines)
        sizes = (np.int32(vocab_size), np.int32(hidden), np.int32(stride))
        threads = row_threads(hidden, self.dtype.itemsize)
        args = (out, token_ids, table.matrix, *sizes)
        self.runtime.launch(self._embedding_kernel, (num_tokens,), (threads,), args)

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
