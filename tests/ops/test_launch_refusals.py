"""Operands that do not fit are refused by name, before a kernel is compiled or launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.errors import ConfigError
from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.cuda_ops import CudaOps
from cupaged.ops.launch_checks import LaunchChecks, OperandError
from tests.ops.test_attention import make_batch
from tests.ops.writing_runtime import WritingRuntime

F16, I32 = np.float16, np.int32


def int32s(values: list[Any]) -> NDArray[np.int32]:
    return np.array(values, I32)


class Given:
    """Operands that fit each other, for the tests to spoil."""

    def __init__(self, ops: CudaOps) -> None:
        self.ops = ops
        e = ops.empty
        self.x, self.out, self.sums = e((5, 16), F16), e((5, 16), F16), e((5, 16), F16)
        self.weight, self.wide = e((16,), F16), e((5, 32), F16)
        self.table = ops.pack_weight(np.zeros((9, 16), np.float32))
        self.ids = e((5,), I32)
        self.cache = ops.empty_kv_cache(KVCacheSpec(0, 1, 8, 8, "float16", 8), 4)
        self.step = ops.begin_step(make_batch([(0, 5)], np.array([[3, 1]], I32), 8))
        self.qkv, self.rotary = e((5, 24), F16), e((2, 9, 4), np.float32)
        self.away = e((2, 1, 8, 8), F16)

    def copy(self, copies: NDArray[Any]) -> None:
        step = self.ops.begin_step(replace(self.step.batch, copies=copies))
        self.ops.copy_blocks([self.cache], step)

    def rope(self, **changes: Any) -> None:
        given = {"step": self.step, "qkv": self.qkv, "table": self.rotary, "cache": self.cache}
        self.ops.rope_and_cache(**(given | changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.ops.rms_norm(g.out, np.zeros((5, 16), F16), g.weight, 1e-5),
         r"rms_norm: x must be an array on the device, got float16 \[5, 16\] on the host"),
        (lambda g: g.ops.rms_norm(g.out, g.x.view(np.int16), g.weight, 1e-5),
         r"rms_norm: x must be float16 \[5, 16\], got int16 \[5, 16\]"),
        (lambda g: g.ops.rms_norm(g.out[:4], g.x, g.weight, 1e-5),
         r"rms_norm: out must be float16 \[5, 16\], got float16 \[4, 16\]"),
        (lambda g: g.ops.rms_norm(g.out, g.x, g.weight[:8], 1e-5),
         r"weight must be float16 \[16\], got float16 \[8\]"),
        (lambda g: g.ops.rms_norm(g.out, g.wide[:, :16], g.weight, 1e-5),
         r"x must be contiguous, got strides \(64, 2\)"),
        (lambda g: g.ops.rms_norm(g.out, g.wide.reshape(160)[4:84].reshape(5, 16), g.weight, 0.0),
         "x must be at a multiple of 16 bytes, got an address that is 8 past one"),
        (lambda g: g.ops.rms_norm(g.out, g.x[0], g.weight, 1e-5), "x must be of two dimensions"),
        (lambda g: g.ops.rms_norm(g.out, g.x[:, :0], g.weight, 1e-5), "not empty"),
        (lambda g: g.ops.rms_norm(g.out, "x", g.weight, 1e-5), "got str"),
        (lambda g: g.ops.rms_norm(g.x, g.x, g.weight, 1e-5),
         "out must be apart from x, got memory"),
        (lambda g: g.ops.rms_norm(g.x, g.out, g.x[4], 1e-5), "out must be apart from weight"),
        (lambda g: g.ops.rms_norm(g.out, g.x, g.weight, -1.0), "eps must be a number, 0 or more"),
        (lambda g: g.ops.rms_norm(g.out, g.x, g.weight, float("nan")), "eps must be a number"),
        (lambda g: g.ops.add_rms_norm(g.out, g.x, g.x, g.weight, 1e-5),
         "residual must be apart from x"),
        (lambda g: g.ops.add_rms_norm(g.sums, g.sums, g.x, g.weight, 1e-5),
         "out must be apart from residual"),
        (lambda g: g.ops.add_rms_norm(g.out, g.wide, g.x, g.weight, 1e-5),
         "residual must be float16"),
        (lambda g: g.ops.layer_norm(g.out, g.x, g.weight, g.weight[:8], 1e-5),
         "bias must be float16"),
        (lambda g: g.ops.layer_norm(g.x, g.x, g.weight, None, 1e-5),
         "layer_norm: out must be apart"),
        (lambda g: g.ops.silu_mul(g.out, g.x), r"gate_up must be float16 \[5, 32\]"),
        (lambda g: g.ops.silu_mul(g.wide.reshape(10, 16)[:5], g.wide),
         "out must be apart from gate_up"),
        (lambda g: g.ops.gelu_mul(g.out.view(np.int16), g.wide), "gelu_mul: out must be float16"),
        (lambda g: g.ops.gelu(g.out, [1.0]), "gelu: x must be an array on the device, got list"),
        (lambda g: g.ops.gather_rows(g.out, g.x, [0] * 5),
         "rows must be an array of one dimension, got list"),
        (lambda g: g.ops.embedding(g.out, int32s([0] * 5), g.table),
         r"token_ids must be an array on the device, got int32 \[5\] on the host"),
        (lambda g: g.ops.embedding(g.out, g.ids.reshape(5, 1), g.table),
         r"token_ids must be int32 \[5\], got int32 \[5, 1\]"),
        (lambda g: g.rope(table=np.zeros((2, 9, 4), np.float32)), "table must be an array on"),
        (lambda g: g.ops.gelu(g.out[:4], g.x), r"out must be float16 \[5, 16\]"),
        (lambda g: g.ops.relu(g.x[1:], g.x[:4]), "relu: out must be apart from x"),
        (lambda g: g.ops.embedding(g.out, g.ids.view(np.uint32), g.table),
         r"token_ids must be int32 \[5\], got uint32 \[5\]"),
        (lambda g: g.ops.embedding(g.wide, g.ids, g.table), r"out must be float16 \[5, 16\]"),
        (lambda g: g.ops.gather_rows(g.out, g.x, g.ids.view(np.uint32)),
         r"rows must be int32 \[5\], got uint32 \[5\]"),
        (lambda g: g.ops.gather_rows(g.out, g.x, int32s([0] * 5)),
         r"rows must be an array on the device, got int32 \[5\] on the host"),
        (lambda g: g.ops.gather_rows(g.out, g.x, g.ids[:2]), r"out must be float16 \[2, 16\]"),
        (lambda g: g.ops.gather_rows(g.out, g.x.view(np.int16), g.ids),
         r"out must be int16 \[5, 16\]"),
        (lambda g: g.ops.gather_rows(g.out.view(np.int16), g.x.view(np.int16), g.ids),
         "float16, bfloat16, got 'int16'"),
        (lambda g: g.ops.gather_rows(g.out, g.x[:0], g.ids), "rows of x must be 1 or more"),
        (lambda g: g.rope(qkv=g.x), r"columns of qkv must be \(Hq \+ 2 \* 1\) \* 8, .* got 16"),
        (lambda g: g.rope(qkv=g.qkv[:4]), r"positions must be int32 \[4\], got int32 \[5\]"),
        (lambda g: g.rope(table=g.rotary[:, :4].reshape(1, 8, 4)), r"table must be float32 \[2,"),
        (lambda g: g.rope(table=g.ops.empty((2, 9, 5), np.float32)), "4 or less"),
        (lambda g: g.rope(table=g.ops.empty((2, 4, 4), np.float32)),
         "positions must be below 4, got 4"),
        (lambda g: g.rope(cache=KVCache(g.cache.spec, g.cache.k[:3], g.cache.v[:3])),
         "slot_mapping must be below 24, got 28"),
        (lambda g: g.rope(cache=KVCache(g.cache.spec, g.cache.k, g.cache.v[:3])),
         r"v cache must be float16 \[4, 1, 8, 8\]"),
        (lambda g: g.rope(cache=KVCache(g.cache.spec, g.cache.k, g.cache.k)),
         "k cache must be apart from v cache"),
        (lambda g: g.copy(int32s([[0, 4]])), "copies must be from 0 to 3, got 0 to 4"),
        (lambda g: g.copy(int32s([[-1, 1]])), "copies must be from 0 to 3, got -1"),
        (lambda g: g.copy(int32s([[0, 1], [1, 2]])), "also as a source, got"),
        (lambda g: g.copy(int32s([[0, 1], [2, 1]])), "without a destination twice"),
        (lambda g: g.copy(np.zeros((1, 2), np.int64)), r"int32 \[1, 2\]"),
        (lambda g: g.copy(int32s([0, 1])), "copies must be an array of 2 dimensions"),
        (lambda g: g.ops.gather_blocks(g.away, g.cache.k, int32s([0])),
         r"staging must be .* \[1, 1, 8, 8\]"),
        (lambda g: g.ops.gather_blocks(g.away, g.cache.k, int32s([0, 4])),
         "blocks must be from 0 to 3"),
        (lambda g: g.ops.gather_blocks(g.away, g.cache.k, g.ids[:2]),
         "blocks must be an array on the host"),
        (lambda g: g.ops.scatter_blocks(g.cache.k, g.cache.k[:2], int32s([2, 3])),
         "apart from cache"),
        (lambda g: g.ops.scatter_blocks(g.cache.k, g.away, int32s([2, 2])),
         "without a block twice"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_launch(
    call: Callable[[Given], None], message: str
) -> None:
    runtime = WritingRuntime()
    given = Given(CudaOps(runtime, "float16"))
    runtime.launches.clear()  # of the packing of a weight
    runtime.loaded.clear()
    with pytest.raises((OperandError, ConfigError), match=message):
        call(given)
    assert not runtime.launches
    assert not runtime.loaded


def test_numbers_that_fit_no_int_are_refused() -> None:
    checks = LaunchChecks(WritingRuntime())
    assert checks.int32("op", "n", 2**31 - 1) == 2**31 - 1
    for value in (2**31, -1):
        with pytest.raises(OperandError, match="op: n must be from 0 to 2147483647"):
            checks.int32("op", "n", value)
