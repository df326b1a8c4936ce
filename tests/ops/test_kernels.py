"""Every kernel against the float64 reference, on every device there is.

The kernels run as `CudaOps` launches them, on arrays between guards, with NaN wherever nothing is
to be read. Sizes are odd, or lie at the edges of packs, warps and blocks. What only moves must be
equal bit by bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.ops.cuda_ops import CudaOps
from cupaged.runtime.protocol import Runtime
from tests import reference
from tests.ops.kernel_arrays import DTYPES, NUMPY, Guarded, close, normal, same_bits

TOKENS = [1, 3, 7, 37]
F64 = NDArray[np.float64]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def ops(runtime: Runtime, dtype: str) -> CudaOps:
    return CudaOps(runtime, dtype)


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("size", [1, 7, 8, 65, 2056])
def test_gather_rows(size: int, first: int, dtype: str, ops: CudaOps) -> None:
    """All of a list of rows, and a part of it."""
    x = normal(3, (5, size), dtype)
    rows = np.array([4, 0, 0, 3, -1, 5, 2], np.int32)
    out = Guarded(ops.runtime, (7 - first, size), x.dtype)
    given = Guarded.of(ops.runtime, rows).array[first:]
    ops.gather_rows(out.array, Guarded.of(ops.runtime, x).array, given)
    same_bits(out.read(), x[[4, 0, 0, 3, 0, 4, 2][first:]])


def test_rows_beyond_32_bits(runtime: Runtime) -> None:
    """The last row begins at element 2^31. On the host, untouched pages take no memory."""
    ops, row = CudaOps(runtime, "bfloat16"), normal(1, (1, 1 << 14), "bfloat16")
    table = runtime.zeros(((1 << 17) + 1, 1 << 14), row.dtype)
    runtime.copy_to_device(table[1 << 17 :], row)
    ids = runtime.from_host(np.array([1 << 17, 0], np.int32))
    out = Guarded(runtime, (2, 1 << 14), row.dtype)
    ops.gather_rows(out.array, table, ids)
    same_bits(out.read(), np.concatenate([row, np.zeros_like(row)]))


# ---- norms ---------------------------------------------------------------------------------------

# The edges: of a pack (8), of one warp (256) and two, of 32 warps (8192), where threads go round.
HIDDEN = [1, 7, 8, 64, 193, 256, 257, 520]
LARGE_HIDDEN = [8192, 8203, 8712]


def norm_inputs(
    num_tokens: int, hidden: int, dtype: str, scale: float = 1.0
) -> tuple[NDArray[Any], NDArray[Any]]:
    return normal(4, (num_tokens, hidden), dtype, scale), normal(5, (hidden,), dtype)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rms_norm(num_tokens: int, hidden: int, dtype: str, ops: CudaOps) -> None:
    check_rms_norm(*norm_inputs(num_tokens, hidden, dtype), 1e-5, dtype, ops)


@pytest.mark.parametrize("hidden", LARGE_HIDDEN)
def test_rms_norm_of_a_long_row(hidden: int, dtype: str, ops: CudaOps) -> None:
    check_rms_norm(*norm_inputs(2, hidden, dtype), 1e-6, dtype, ops)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_rms_norm_of_small_and_large_numbers(scale: float, dtype: str, ops: CudaOps) -> None:
    """The sum of squares of 16-bit numbers does not fit in 16 bits."""
    check_rms_norm(*norm_inputs(3, 193, dtype, scale), 1e-12, dtype, ops)


def check_rms_norm(
    x: NDArray[Any], weight: NDArray[Any], eps: float, dtype: str, ops: CudaOps
) -> None:
    out, x_on_device = Guarded(ops.runtime, x.shape, x.dtype), Guarded.of(ops.runtime, x)
    ops.rms_norm(out.array, x_on_device.array, Guarded.of(ops.runtime, weight).array, eps)
    expected = reference.rms_norm(x, weight, eps)
    close(out.read(), expected, np.abs(expected), dtype)
    same_bits(x_on_device.read(), x)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("hidden", [1, 8, 193, 520])
def test_add_rms_norm(num_tokens: int, hidden: int, dtype: str, ops: CudaOps) -> None:
    check_add_rms_norm(num_tokens, hidden, dtype, ops)


@pytest.mark.parametrize("hidden", LARGE_HIDDEN)
def test_add_rms_norm_of_a_long_row(hidden: int, dtype: str, ops: CudaOps) -> None:
    check_add_rms_norm(1, hidden, dtype, ops)


def check_add_rms_norm(num_tokens: int, hidden: int, dtype: str, ops: CudaOps) -> None:
    x, weight = norm_inputs(num_tokens, hidden, dtype)
    residual = normal(6, x.shape, dtype, 3.0)
    out, sums = Guarded(ops.runtime, x.shape, x.dtype), Guarded.of(ops.runtime, residual)
    x_on_device, w = Guarded.of(ops.runtime, x).array, Guarded.of(ops.runtime, weight).array
    ops.add_rms_norm(out.array, sums.array, x_on_device, w, 1e-5)
    rounded = (residual.astype(np.float32) + x.astype(np.float32)).astype(x.dtype)
    same_bits(sums.read(), rounded)
    expected = reference.rms_norm(rounded, weight, 1e-5)
    close(out.read(), expected, np.abs(expected), dtype)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("hidden", [1, 8, 193, 520])
def test_layer_norm(num_tokens: int, hidden: int, dtype: str, ops: CudaOps) -> None:
    check_layer_norm(num_tokens, hidden, True, dtype, ops)


@pytest.mark.parametrize("hidden", LARGE_HIDDEN)
def test_layer_norm_of_a_long_row(hidden: int, dtype: str, ops: CudaOps) -> None:
    check_layer_norm(1, hidden, True, dtype, ops)


@pytest.mark.parametrize("hidden", [1, 8, 193, 8203])
def test_layer_norm_without_bias(hidden: int, runtime: Runtime) -> None:
    check_layer_norm(3, hidden, False, "bfloat16", CudaOps(runtime, "bfloat16"))


def check_layer_norm(
    num_tokens: int, hidden: int, has_bias: bool, dtype: str, ops: CudaOps
) -> None:
    x, weight = norm_inputs(num_tokens, hidden, dtype)
    x = (x + x.dtype.type(2)).astype(x.dtype)  # a mean that is not near zero
    bias = normal(7, (hidden,), dtype) if has_bias else None
    out, given = Guarded(ops.runtime, x.shape, x.dtype), None
    if bias is not None:
        given = Guarded.of(ops.runtime, bias).array
    x_on_device, w = Guarded.of(ops.runtime, x).array, Guarded.of(ops.runtime, weight).array
    ops.layer_norm(out.array, x_on_device, w, given, 1e-5)
    expected = reference.layer_norm(x, weight, bias, 1e-5)
    values = x.astype(np.float64)
    spread = np.sqrt(values.var(axis=1, keepdims=True) + 1e-5)
    terms = (np.abs(values) + np.abs(values).mean(axis=1, keepdims=True)) / spread
    bound = terms * np.abs(weight.astype(np.float64))
    close(out.read(), expected, bound + (0 if bias is None else np.abs(bias)), dtype)


def test_a_row_has_the_same_bits_in_any_company(dtype: str, ops: CudaOps) -> None:
    """Alone, among others, and beside rows that are not numbers."""
    x, weight = norm_inputs(7, 520, dtype)
    x[2] = np.nan
    x[5] = np.inf
    w = Guarded.of(ops.runtime, weight).array
    together = Guarded(ops.runtime, x.shape, x.dtype)
    ops.rms_norm(together.array, Guarded.of(ops.runtime, x).array, w, 1e-5)
    rows = together.read()
    assert np.isnan(rows[2].astype(np.float32)).all()
    for i in (0, 1, 3, 4, 6):
        alone = Guarded(ops.runtime, (1, 520), x.dtype)
        ops.rms_norm(alone.array, Guarded.of(ops.runtime, x[i : i + 1]).array, w, 1e-5)
        same_bits(alone.read()[0], rows[i])
        assert np.isfinite(rows[i].astype(np.float32)).all()


# ---- activations ---------------------------------------------------------------------------------

# Sizes of rows, and rows of each. 4104 float32: five blocks share a row.
GATED_SHAPES = [(n, size) for n in TOKENS for size in (1, 7, 8, 65)] + [(3, 2056), (1, 4104)]


def extremes(dtype: str) -> NDArray[Any]:
    """Numbers at which exp overflows or gelu has tails, and both zeros."""
    values = [0.0, -0.0, 1e-5, -1e-5, 3.0, -3.0, 5.5, -5.5, 12.0, -12.0, 90.0, -90.0, 1e4, -1e4]
    return np.array(values).astype(NUMPY[dtype])


@pytest.mark.parametrize(("num_tokens", "size"), GATED_SHAPES)
@pytest.mark.parametrize("op", ["silu_mul", "gelu_mul"])
def test_gated(op: str, num_tokens: int, size: int, dtype: str, ops: CudaOps) -> None:
    check_gated(op, normal(8, (num_tokens, 2 * size), dtype, 2.0), dtype, ops)


@pytest.mark.parametrize("op", ["silu_mul", "gelu_mul"])
def test_gated_at_the_extremes(op: str, dtype: str, ops: CudaOps) -> None:
    gate = extremes(dtype)
    check_gated(op, np.concatenate([gate, np.full_like(gate, 0.5)])[None], dtype, ops)


def check_gated(op: str, gate_up: NDArray[Any], dtype: str, ops: CudaOps) -> None:
    size = gate_up.shape[1] // 2
    gate, up = gate_up[:, :size].astype(np.float64), gate_up[:, size:].astype(np.float64)
    out = Guarded(ops.runtime, gate.shape, gate_up.dtype)
    getattr(ops, op)(out.array, Guarded.of(ops.runtime, gate_up).array)
    silu = op == "silu_mul"
    expected = reference.silu_mul(gate, up) if silu else reference.gelu_tanh(gate) * up
    # The reference itself cancels in the tail of 1 + tanh: there it is exact to 1e-16 of gate.
    close(out.read(), expected, np.abs(expected) + 1e-10 * np.abs(gate * up), dtype)


COUNTS = [1, 3, 7, 8, 37, 1023, 40000]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("op", ["gelu", "relu"])
def test_elementwise(op: str, count: int, in_place: bool, dtype: str, ops: CudaOps) -> None:
    x = normal(9, (count,), dtype, 2.0)
    x[: len(extremes(dtype))] = extremes(dtype)[:count]
    check_elementwise(op, x, in_place, dtype, ops)


@pytest.mark.parametrize("count", [14, 37, 1023])
def test_gelu_by_the_error_function(count: int, runtime: Runtime) -> None:
    x = normal(9, (count,), "float32", 2.0)
    x[:14] = extremes("float32")
    check_elementwise("exact gelu", x, False, "float32", CudaOps(runtime, "float32"))


def check_elementwise(op: str, x: NDArray[Any], in_place: bool, dtype: str, ops: CudaOps) -> None:
    given = Guarded.of(ops.runtime, x)
    out = given if in_place else Guarded(ops.runtime, x.shape, x.dtype)
    if op == "relu":
        ops.relu(out.array, given.array)
        np.testing.assert_array_equal(out.read(), np.where(x > 0, x, x.dtype.type(0)))
        return
    ops.gelu(out.array, given.array, exact=op == "exact gelu")
    expected = reference.gelu(x) if op == "exact gelu" else reference.gelu_tanh(x)
    close(out.read(), expected, np.abs(expected) + 1e-10 * np.abs(x.astype(np.float64)), dtype)


def test_what_is_not_a_number_stays_so(dtype: str, ops: CudaOps) -> None:
    x = np.array([np.nan, 1.0, -np.inf, np.inf] * 9).astype(NUMPY[dtype])
    for op in (ops.gelu, ops.relu):
        out = Guarded(ops.runtime, x.shape, x.dtype)
        op(out.array, Guarded.of(ops.runtime, x).array)
        values = out.read().astype(np.float64).reshape(9, 4)
        assert np.isnan(values[:, 0]).all()
        assert (values[:, 1] > 0.8).all()
        assert (values[:, 3] == np.inf).all()
