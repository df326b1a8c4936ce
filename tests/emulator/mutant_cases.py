"""Reference cases for the kernels of `cuda/`, sharp enough to tell mutants from the original.

Each function launches the kernels of one file on an emulated module and raises AssertionError where
a result differs from NumPy's in float64. Outputs begin as NaN, sizes cross every edge of the
kernels: one element, a tail, several packs a thread, several warps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupaged.emulator.module import EmulatedModule

Array = NDArray[Any]
F16, F32, I32, I64 = np.float16, np.float32, np.int32, np.int64


def _random(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def _empty(*shape: int) -> Array:
    return np.full(shape, np.nan, F32)


def _near(actual: Array, expected: Array, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def _same(actual: Array, expected: Array) -> None:
    np.testing.assert_array_equal(actual, expected)


def check_rows(module: EmulatedModule) -> None:
    """gather_rows: out[i] = x[clip(rows[i])]."""
    rows = np.array([0, 6, -1, 3, 7, 5, 99], I32)
    for size in (1, 7, 8, 300):
        x, out = _random(7, size), _empty(7, size)
        module.get_function("gather_rows")((7,), (32,), [out, x, rows, I32(7), I32(size)])
        _same(out, x[np.clip(rows, 0, 6)])


def check_norms(module: EmulatedModule) -> None:
    """rms_norm, add_rms_norm, layer_norm, with an eps that is felt."""
    eps = F32(0.05)
    for hidden in (1, 7, 8, 300, 516, 517):
        block = (32 * -(-hidden // 256),)
        x, weight, bias = _random(3, hidden), _random(hidden, seed=2), _random(hidden, seed=3)
        x += F32(0.5)

        def rms(values: Array, weight: Array = weight) -> Array:
            mean = (values**2).mean(1, keepdims=True)
            return np.asarray(values / np.sqrt(mean + float(eps)) * weight)

        out = _empty(3, hidden)
        module.get_function("rms_norm")((3,), block, [out, x, weight, I32(hidden), eps])
        _near(out, rms(x.astype(float)))

        out, residual = _empty(3, hidden), _random(3, hidden, seed=4)
        total = residual + x
        args = [out, residual, x, weight, I32(hidden), eps]
        module.get_function("add_rms_norm")((3,), block, args)
        _same(residual, total)
        _near(out, rms(total.astype(float)))

        out = _empty(3, hidden)
        centred = x - x.astype(float).mean(1, keepdims=True)
        module.get_function("layer_norm")((3,), block, [out, x, weight, bias, I32(hidden), eps])
        _near(out, rms(centred) + bias)


def _silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def _gelu_erf(x: Array) -> Array:
    return np.asarray(x / 2 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x])))


def check_activations(module: EmulatedModule) -> None:
    """silu_mul, gelu_mul, gelu in its tanh form, relu."""
    gated = {"silu_mul": _silu, "gelu_mul": _gelu_tanh}
    for n in (1, 7, 8, 300):
        gate_up = 3 * _random(2, 2 * n)
        gate, up = gate_up[:, :n].astype(float), gate_up[:, n:]
        for name, function in gated.items():
            out = _empty(2, n)
            module.get_function(name)((2, 2), (32,), [out, gate_up, I32(n)])
            _near(out, function(gate) * up)
    check_gelu(module, _gelu_tanh)
    for count in (1, 7, 8, 301):
        x = 3 * _random(count)
        x[count // 2] = np.nan
        out = _empty(count)
        module.get_function("relu")((2,), (32,), [out, x, I64(count)])
        _same(out, np.where(x < 0, F32(0), x))


def check_gelu(module: EmulatedModule, form: Callable[[Array], Array] = _gelu_erf) -> None:
    """gelu in place, also with a tail that takes a single thread several steps."""
    for count, grid, block in ((1, 2, 32), (7, 1, 1), (8, 2, 32), (301, 2, 32)):
        x = 3 * _random(count)
        out = x.copy()
        module.get_function("gelu")((grid,), (block,), [out, out, I64(count)])
        _near(out, form(x.astype(float)))


HEAD_DIM, ROTARY, BLOCK_SIZE = 48, 32, 8


def check_rope(module: EmulatedModule, rotary: int = ROTARY) -> None:
    """rope_and_cache in float16: a part of the head does not turn, one token is skipped."""
    num_q, num_kv, max_positions, num_blocks = 3, 2, 50, 4
    half = rotary // 2
    positions = np.array([0, 49, 7, 12, 3], I32)
    slots = np.array([5, 31, -1, 16, 0], I64)
    table = _random(2, max_positions, half)
    qkv = _random(5, num_q + 2 * num_kv, HEAD_DIM).astype(F16)
    caches = [
        _random(num_blocks, num_kv, BLOCK_SIZE, HEAD_DIM, seed=seed).astype(F16) for seed in (5, 6)
    ]
    expected = qkv.astype(float)
    expected_caches = [cache.astype(float) for cache in caches]
    for t, position in enumerate(positions):
        cos, sin = table[:, position].astype(float)
        turned = expected[t, : num_q + num_kv]
        low, high = turned[:, :half].copy(), turned[:, half:rotary].copy()
        turned[:, :half] = low * cos - high * sin
        turned[:, half:rotary] = high * cos + low * sin
        if slots[t] >= 0:
            block, offset = divmod(int(slots[t]), BLOCK_SIZE)
            expected_caches[0][block, :, offset] = expected[t, num_q : num_q + num_kv]
            expected_caches[1][block, :, offset] = expected[t, num_q + num_kv :]
    counts = [I32(num_q), I32(num_kv), I32(max_positions)]
    for threads in (4, 32):
        ours, ours_caches = qkv.copy(), [cache.copy() for cache in caches]
        module.get_function("rope_and_cache")(
            (5,), (threads,), [ours, *ours_caches, table, positions, slots, *counts]
        )
        for array, wanted in zip([ours, *ours_caches], [expected, *expected_caches], strict=True):
            _near(array.astype(float), wanted, 2e-3)


def check_blocks(module: EmulatedModule) -> None:
    """copy_blocks, gather_blocks, scatter_blocks, with more packs than threads."""
    for k_size, v_size in ((8, 264), (304, 16)):
        k, v = _random(6, k_size), _random(6, v_size, seed=2)
        pairs = np.array([[1, 4], [5, 0], [3, 2]], I32)
        expected_k, expected_v = k.copy(), v.copy()
        expected_k[pairs[:, 1]], expected_v[pairs[:, 1]] = k[pairs[:, 0]], v[pairs[:, 0]]
        module.get_function("copy_blocks")(
            (3, 2, 2), (16,), [k, v, pairs, I64(k_size), I64(v_size)]
        )
        _same(k, expected_k)
        _same(v, expected_v)
        blocks, staging = np.array([4, 0, 5], I32), _empty(3, k_size)
        module.get_function("gather_blocks")((3, 2), (16,), [staging, k, blocks, I64(k_size)])
        _same(staging, k[blocks])
        staging, expected_k = _random(3, k_size, seed=3), k.copy()
        expected_k[blocks] = staging
        module.get_function("scatter_blocks")((3, 2), (16,), [k, staging, blocks, I64(k_size)])
        _same(k, expected_k)


def check_reductions(module: EmulatedModule) -> None:
    """block_sum and block_max of one to 32 warps, the maximum in each of them in turn."""
    for threads in (32, 64, 96, 1024):
        x = np.random.default_rng(threads).integers(-99, -1, threads).astype(F32)
        for place in range(threads // 64, threads, 32):
            values, out = x.copy(), _empty(threads, 2)
            values[place] = -1  # sums of small integers are exact
            module.get_function("reductions")((1,), (threads,), [out, values])
            _same(out, np.broadcast_to([values.sum(), -1], (threads, 2)).astype(F32))


MANY_STEPS = 100_000_000  # about a second


@dataclass(frozen=True, slots=True)
class Variant:
    """A program to compile, its defines, and the cases it must pass.

    smaller: by file, a constant and the smaller one that the cases are made for.
    max_steps: after which a block of threads counts as endless.
    global_races: look for races between blocks, too.
    opt_level: of the compiler. With 1, writing outside of a thread's own arrays shows.
    """

    program: str
    check: Callable[[EmulatedModule], None]
    defines: dict[str, Any] = field(default_factory=lambda: {"DTYPE": "f32"})
    smaller: dict[str, tuple[str, str]] = field(default_factory=dict)
    max_steps: int = 2_000_000
    global_races: bool = False
    opt_level: int = 0


ROPE = {"DTYPE": "f16", "HEAD_DIM": HEAD_DIM, "ROTARY_DIM": ROTARY, "BLOCK_SIZE": BLOCK_SIZE}
ROWS = Variant("gather_rows.cu", check_rows)
NORM = Variant("norm.cu", check_norms)

# What is mutated, and the variants that see it.
SUBJECTS: dict[str, list[Variant]] = {
    "gather_rows.cu": [ROWS],
    "rows.cuh": [ROWS],
    "norm.cu": [NORM],
    "common.cuh": [NORM],
    "activation.cu": [
        Variant("activation.cu", check_activations),
        Variant("activation.cu", check_gelu, {"DTYPE": "f32", "GELU_ERF": 1}),
    ],
    "rope.cu": [
        Variant("rope.cu", check_rope, ROPE),
        Variant("rope.cu", lambda module: check_rope(module, 24), {**ROPE, "ROTARY_DIM": 24}),
    ],
    "kv_cache.cu": [Variant("kv_cache.cu", check_blocks)],
    "reduce.cuh": [Variant("reductions.cu", check_reductions, {})],
}
