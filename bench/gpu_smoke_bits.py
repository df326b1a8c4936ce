"""The tests of operations on the device, and the contract of bits there; part of `gpu_smoke`.

A row of a product, a token of attention and a draw have the same bits alone, in company and in
chunks, on one device. The tests are those of tests/ops, as many as a time limit lets through.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu_smoke_checks import Check, Checks, Device, same
from cupaged.ops.cuda_attention import CudaAttention
from cupaged.ops.cuda_gemm import CudaGemm
from cupaged.runtime.dtypes import storage_dtype
from tests.ops.attention_cases import Sequences
from tests.ops.cuda_sampler import Sampler
from tests.ops.sampling_oracle import rows

__all__ = ["bits", "operations", "read_result"]

ROOT = Path(__file__).resolve().parents[1]
FILES = ("test_kernels", "test_cache_kernels", "test_gemm", "test_paged_attention",
         "test_cuda_sampling", "test_cuda_logprobs")  # fmt: skip
LIMIT_S, DRY_LIMIT_S = 40.0, 120.0
# The parts of names that choose tests. Arrays beyond 2^31 elements do not fit on every GPU.
CHOSEN = "cuda and not emulated and not 32_bits"
DRY_FILES, DRY_CHOSEN = ("test_cache_kernels",), "emulated and copy_blocks"


def operations(device: Device) -> Checks:
    """The files side by side, each in a process of its own."""
    limit = DRY_LIMIT_S if device.dry_run else LIMIT_S
    chosen = DRY_CHOSEN if device.dry_run else CHOSEN
    end = time.monotonic() + limit
    options = [] if device.dry_run else ["--gpu"]
    running = [_Run(file, chosen, options) for file in (DRY_FILES if device.dry_run else FILES)]
    try:
        for run in running:
            yield run.result(end, limit)
    finally:
        for run in running:
            run.stop()


class _Run:
    """One file's tests; what they say goes to a file, which unlike a pipe is never full."""

    def __init__(self, file: str, chosen: str, options: list[str]) -> None:
        self.file = file
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115, stop() closes it
        command = [
            sys.executable, "-m", "pytest", f"tests/ops/{file}.py", "-v", "--no-header",
            "--tb=line", "-p", "no:cacheprovider", "-o", "addopts=",
            "-m", "not slow and not long", "-k", chosen, *options,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._said, stderr=subprocess.STDOUT
        )

    def result(self, end: float, limit: float) -> Check:
        """Of the tests that ended until the limit."""
        stopped = False
        try:
            self._process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = True
            self._process.kill()
            self._process.wait()
        self._said.seek(0)
        code = None if stopped else self._process.returncode
        return read_result(self.file, self._said.read(), code, limit)

    def stop(self) -> None:
        """Leave nothing behind."""
        self._process.kill()
        self._process.wait()
        self._said.close()


def read_result(file: str, said: str, code: int | None, limit: float) -> Check:
    """What pytest -v said. Passed if tests passed and none failed.

    code: what pytest ended with; None if it was stopped at the limit of so many seconds.
    """
    passed = len(re.findall(r" PASSED\b", said))
    failed = re.findall(r"^(\S+::.*?) (?:FAILED|ERROR)\b", said, re.MULTILINE)
    words = [f"{passed} passed", f"{len(failed)} failed", *failed[:3]]
    if code is None:
        words.append(f"stopped after {limit:.0f} s")
    elif code not in (0, 1):
        words.append(said.strip().splitlines()[-1] if said.strip() else "pytest said nothing")
    fine = bool(passed) and not failed and code in (None, 0)
    values = {"passed": passed, "failed": failed, "stopped": code is None}
    return Check(file, ", ".join(words), fine, values)


def bits(device: Device) -> Checks:
    """Products, attention, draws."""
    for dtype in ("float32",) if device.dry_run else ("float32", "float16", "bfloat16"):
        yield _products(device, dtype)
    for dtype in ("bfloat16",) if device.dry_run else ("float16", "bfloat16"):
        yield from _attention(device, dtype)
    yield _draws(device)


def _products(device: Device, dtype: str) -> Check:
    """The first rows of products of many sizes, for which there are several kernels."""
    gemm = CudaGemm(device.runtime, dtype)
    rng = np.random.default_rng(3)
    features, columns = (37, 700) if device.dry_run else (1030, 2600)
    counts = (1, 9, 66) if device.dry_run else (1, 2, 7, 8, 9, 16, 17, 32, 33, 40, 64, 65, 300, 700)
    weight = gemm.pack_weight(rng.standard_normal((features, columns), np.float32))
    x = rng.standard_normal((counts[-1], columns), np.float32).astype(storage_dtype(dtype))
    results = []
    for count in counts:
        out = device.runtime.empty((count, features), np.float32)
        gemm.linear(out, device.runtime.from_host(x[:count]), weight)
        results.append(device.runtime.to_host(out))
    got = np.concatenate([result.reshape(-1) for result in results])
    expected = np.concatenate([results[-1][: len(r)].reshape(-1) for r in results])
    name = f"rows of {len(counts)} products, {dtype}"
    return same(name, got, expected)


def _attention(device: Device, dtype: str) -> Checks:
    """A prompt whole, in chunks with others along, and its last tokens one by one."""
    ops = CudaAttention(device.runtime, dtype, workspace_bytes=1 << 22)
    first, others = (70, (40, 19)) if device.dry_run else (1100, (517, 300, 64))
    sequences = Sequences([first, *others], (8, 2), 64 if device.dry_run else 128, dtype)
    (whole,) = sequences.attend(ops, [(0, 0, first)])
    company = [(i + 1, n - 1, n) for i, n in enumerate(others)]
    for chunk in (7, 16):
        start = first - 3 * chunk
        parts = [
            sequences.attend(ops, [(0, at, at + chunk), *company])[0]
            for at in range(start, first, chunk)
        ]
        yield same(f"attention in chunks of {chunk}, {dtype}", np.concatenate(parts), whole[start:])
    start = first - (3 if device.dry_run else 8)
    decoded = [sequences.attend(ops, [*company, (0, at, at + 1)])[-1] for at in range(start, first)]
    yield same(f"attention, decoded in a batch, {dtype}", np.concatenate(decoded), whole[start:])


def _draws(device: Device) -> Check:
    """Tokens of a batch, and of each of its rows alone."""
    num, vocab_size = (5, 300) if device.dry_run else (17, 128_256)
    rng = np.random.default_rng(4)
    logits = (3 * rng.standard_normal((num, vocab_size))).astype(np.float32)
    kinds = {
        "temperature": [0.0, 0.7, 1.0, 1.3, 4.0],
        "top_k": [0, 40, 0, 5, 0],
        "top_p": [1.0, 1.0, 0.9, 0.5, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.1],
    }
    columns: dict[str, Any] = {
        name: np.resize(np.array(values), num) for name, values in kinds.items()
    }
    sampler = Sampler(device.runtime)
    together = sampler.sample(logits, rows(num=num, seed=np.arange(num), **columns))
    alone = [
        sampler.sample(
            logits[i : i + 1],
            rows(num=1, seed=i, **{name: values[i] for name, values in columns.items()}),
        )[0]
        for i in range(num)
    ]
    return same("draws of a batch and alone", np.array(alone), np.array(together))
