"""Shares of what the device was measured to do, at shapes of Llama-3-8B; part of `gpu_smoke`.

The limits are measured first: bytes a second of a copy, and the best rate of the project's own
products. Times are the device's, by events around launches that wait in line behind a copy, so that
the host's work does not count. Where the device is emulated they mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bench.gpu_smoke_checks import BF16, Check, Checks, Device, filled
from cupaged.engine.batch import Batch, GroupTables
from cupaged.ops import KVCache, KVCacheSpec
from cupaged.ops.cuda_attention import CudaAttention
from cupaged.ops.cuda_gemm import CudaGemm
from cupaged.ops.cuda_step import upload_step
from cupaged.runtime.staging import StagingBuffer
from tests.ops.sampling_oracle import rows

__all__ = ["speed"]

_MIB = 1 << 20
PRODUCTS = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
    "lm_head": (128256, 4096),
}  # fmt: skip
DRY_PRODUCTS = {"o": (64, 128)}
DECODE_TOKENS, PREFILL_TOKENS = (1, 16, 64), (512, 4096)
DECODE = ((64, 2048), (1, 32768))  # sequences, context
PREFILL = ((1, 2048), (1, 8192))  # sequences, prompt
HEADS, HEAD_DIM, BLOCK_SIZE = (32, 8), 128, 16


class Clock:
    """Times launches of the device."""

    def __init__(self, device: Device) -> None:
        self._runtime = device.runtime
        self._repeats = 1 if device.dry_run else 30
        free = device.runtime.memory_info().free_bytes
        size = 4096 if device.dry_run else min(1 << 30, free // 16)
        self._from = filled(device.runtime, (size // 2,), BF16)
        self._to = device.runtime.empty((size // 2,), BF16)
        self._copy_ms = 0.0
        self._copy_ms = self.milliseconds(lambda i: self._copy(), 5)
        self.gb_per_s = 2 * self._to.nbytes / self._copy_ms / 1e6

    def _copy(self) -> None:
        self._runtime.copy_on_device(self._to, self._from)

    def milliseconds(self, launch: Callable[[int], None], repeats: int | None = None) -> float:
        """Mean time of launch(i), i = 0, 1, ..., one after another."""
        repeats = repeats or self._repeats
        runtime, start, end = self._runtime, *(self._runtime.new_event(timing=True) for _ in "se")
        launch(0)  # loads what is to be loaded
        runtime.synchronize()
        began = time.perf_counter()
        for i in range(repeats):
            launch(i)
        host_ms = (time.perf_counter() - began) * 1e3
        runtime.synchronize()
        if self._copy_ms:  # what keeps the device busy while the launches are put in line
            for _ in range(min(200, int(1.5 * host_ms / self._copy_ms) + 1)):
                self._copy()
        start.record(runtime.stream)
        for i in range(repeats):
            launch(i)
        end.record(runtime.stream)
        end.synchronize()
        return runtime.elapsed_ms(start, end) / repeats


def speed(device: Device) -> Checks:
    """The limits, products, attention."""
    clock = Clock(device)
    gb_per_s = clock.gb_per_s
    yield Check("copy", f"{gb_per_s:.0f} GB/s read and written", None, {"gb_per_s": gb_per_s})
    few, many = _products(device, clock)
    best = max(rate for _, _, rate in many)
    yield Check("best product", f"{best:.1f} TFLOP/s", None, {"tflops": best})
    for name, ms, rate in few:
        yield _share(name, ms, rate, "GB/s", gb_per_s, "copy")
    for name, ms, rate in many:
        yield _share(name, ms, rate, "TFLOP/s", best, "best product")
    for num, length in ((2, 40),) if device.dry_run else DECODE:
        ms, num_bytes, _ = _attention(device, clock, num, length, 1)
        name = f"decode attention, {num} x {length}"
        yield _share(name, ms, num_bytes / ms / 1e6, "GB/s", gb_per_s, "copy")
    for num, length in ((1, 24),) if device.dry_run else PREFILL:
        ms, _, flops = _attention(device, clock, num, length, length)
        name = f"prefill attention, {num} x {length}"
        yield _share(name, ms, flops / ms / 1e9, "TFLOP/s", best, "best product")


def _share(name: str, ms: float, rate: float, unit: str, limit: float, of: str) -> Check:
    said = f"{ms * 1e3:.1f} us, {rate:.4g} {unit}, {rate / limit:.0%} of the {of}"
    return Check(name, said, None, {"us": ms * 1e3, "rate": rate, "share": rate / limit})


Rates = list[tuple[str, float, float]]  # name, ms, GB/s or TFLOP/s


def _products(device: Device, clock: Clock) -> tuple[Rates, Rates]:
    """Of few tokens, which read weights, and of many, which compute."""
    runtime, gemm = device.runtime, CudaGemm(device.runtime, "bfloat16")
    few: Rates = []
    many: Rates = []
    drawn = np.random.default_rng(2).standard_normal(1 << 20, np.float32) / 64
    for name, (features, columns) in (DRY_PRODUCTS if device.dry_run else PRODUCTS).items():
        weight = gemm.pack_weight(np.resize(drawn, (features, columns)))
        # More of them than caches hold.
        copies = [weight]
        while not device.dry_run and len(copies) * weight.matrix.nbytes < 256 * _MIB:
            matrix = runtime.empty(weight.matrix.shape, BF16)
            runtime.copy_on_device(matrix, weight.matrix)
            copies.append(replace(weight, matrix=matrix))
        counts = (1, 65) if device.dry_run else (*DECODE_TOKENS, *PREFILL_TOKENS)
        for tokens in counts:
            if name == "lm_head" and tokens > 64:
                continue  # logits of last tokens only
            x = filled(runtime, (tokens, columns), BF16)
            out = runtime.empty((tokens, features), BF16)
            ms = clock.milliseconds(
                lambda i, out=out, x=x, of=copies: gemm.linear(  # type: ignore[misc]
                    out, x, of[i % len(of)]
                ),
                None if tokens <= 64 else 5,
            )
            if tokens <= 64:
                rate = (weight.matrix.nbytes + x.nbytes + out.nbytes) / ms / 1e6
                few.append((f"{name}, {tokens} tokens", ms, rate))
            else:
                rate = 2 * tokens * features * columns / ms / 1e9
                many.append((f"{name}, {tokens} tokens", ms, rate))
    return few, many


def _attention(
    device: Device, clock: Clock, num: int, length: int, new: int
) -> tuple[float, int, int]:
    """Milliseconds, bytes of keys and values, FLOPs of `new` last tokens of `num` sequences."""
    runtime = device.runtime
    num_q, num_kv = (2, 1) if device.dry_run else HEADS
    blocks_each = -(-length // BLOCK_SIZE)
    spec = KVCacheSpec(0, num_kv, HEAD_DIM, HEAD_DIM, "bfloat16", BLOCK_SIZE)
    shape = (num * blocks_each, num_kv, BLOCK_SIZE, HEAD_DIM)
    cache = KVCache(spec, filled(runtime, shape, BF16), filled(runtime, shape, BF16))
    tokens = num * new
    qkv = filled(runtime, (tokens, (num_q + 2 * num_kv) * HEAD_DIM), BF16)
    out = runtime.empty((tokens, num_q * HEAD_DIM), BF16)
    table = np.random.default_rng(6).permutation(shape[0]).astype(np.int32).reshape(num, -1)
    nothing = np.zeros(tokens, np.int32)
    batch = Batch(
        token_ids=nothing,
        positions=nothing,
        query_start=np.arange(0, tokens + 1, new, dtype=np.int32),
        context_len=np.full(num, length, np.int32),
        groups=(GroupTables(table, nothing.astype(np.int64)),),
        copies=np.zeros((0, 2), np.int32),
        logits_tokens=nothing[:0],
        sampling=rows(num=0),
        prompt_logprobs=None,
    )
    step = upload_step(batch, StagingBuffer(runtime, 1 << 20))
    ops = CudaAttention(runtime, "bfloat16")
    ms = clock.milliseconds(
        lambda i: ops.paged_attention(step, out, qkv, cache, HEAD_DIM**-0.5),
        None if new == 1 else 5,
    )
    seen = num * sum(range(length - new + 1, length + 1))  # pairs of a token and a position
    return ms, 2 * cache.k.nbytes, 4 * HEAD_DIM * num_q * seen
