"""Which tokens the sampling kernel keeps, exactly, and the numbers that decide it.

The kernel is launched by hand with REPORT_KEPT = 1, which tells where the kept tokens end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.ops.cuda_draws import likely_distance
from cupaged.ops.cuda_sampling import row_block
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.kernels import kernel_folder
from cupaged.runtime.protocol import Runtime
from tests.ops.kernel_arrays import Guarded
from tests.ops.reference_sampling import kept_by_sorting, tokens_up_to
from tests.ops.sampling_oracle import oracle_philox

MAX_COUNT = 2**31 - 1
Limits = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
F32 = NDArray[np.float32]


def kept(
    runtime: Runtime, logits: F32, limits: list[Limits], threads: int | None = None
) -> list[list[int]]:
    """The kept tokens of one row under each of the limits."""
    n, vocab_size = len(limits), len(logits)
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*limits, strict=True))
    columns: list[NDArray[Any]] = [
        np.zeros(n, np.int32),
        temperature.astype(np.float32),
        top_p.astype(np.float32),
        likely_distance(min_p.astype(np.float32)),
        top_k.astype(np.int32),
        np.arange(n, dtype=np.uint64),
        np.zeros(n, np.int32),
        np.zeros(n, np.int32),
        np.full(n, -1, np.int32),
    ]
    out, end = Guarded(runtime, (n,), np.int32), Guarded(runtime, (n,), np.uint64)
    row = Guarded.of(runtime, logits[None])
    arrays = [Guarded.of(runtime, column).array for column in columns]
    kernel = runtime.load_kernel("sampling.cu", "sample", {"REPORT_KEPT": 1})
    args = (out.array, end.array, row.array, *arrays, np.int32(vocab_size))
    runtime.launch(kernel, (n,), (threads or row_block(vocab_size),), args)
    sets = [tokens_up_to(int(e), logits, limits[i][0]) for i, e in enumerate(end.read())]
    assert all(token in those for token, those in zip(out.read(), sets, strict=True))
    return sets


def check(runtime: Runtime, logits: F32, limits: list[Limits], threads: int | None = None) -> None:
    for got, limit in zip(kept(runtime, logits, limits, threads), limits, strict=True):
        assert got == kept_by_sorting(logits, *limit), limit


def all_limits(vocab_size: int) -> list[Limits]:
    """One limit alone and several together, at their edges."""
    alone: list[Limits] = [
        *((1.0, k, 1.0, 0.0) for k in (1, 2, max(1, vocab_size - 1))),
        *((1.0, 0, p, 0.0) for p in (0.0, 1e-9, 0.1, 0.5, 0.75, 0.9, 0.999, 0.9999999)),
        *((1.0, 0, 1.0, p) for p in (1e-30, 1e-9, 0.1, 0.5, 1.0)),
    ]
    together: list[Limits] = [
        (0.7, 40, 0.9, 0.0), (2.0, vocab_size, 0.8, 0.05), (1e6, 3, 0.5, 0.0),
        (1e-5, 3, 0.5, 0.0), (1.0, MAX_COUNT, 0.6, 1e-3), (0.3, max(1, vocab_size // 2), 1.0, 0.01),
        (1.0, max(1, vocab_size // 2), 0.99, 0.0),
    ]  # fmt: skip
    return alone + together


def adversarial_rows(vocab_size: int) -> dict[str, F32]:
    rng = np.random.default_rng(vocab_size)
    normal = rng.standard_normal(vocab_size).astype(np.float32)
    huge, mostly_banned, two = normal.copy(), np.full(vocab_size, -np.inf, np.float32), normal * 0
    huge[vocab_size // 2] = 1e30
    mostly_banned[rng.integers(0, vocab_size, 5)] = [0, 1, 1, 0, 2]
    two[::2] = math.log(3)
    return {
        "normal": 3 * normal,
        "steps": np.rint(2 * normal),
        "equal": np.full(vocab_size, -7.5, np.float32),
        "two values": two.astype(np.float32),
        "one huge": huge,
        "mostly -inf": mostly_banned,
        "nearly equal": (1 + 1e-6 * normal).astype(np.float32),
        "falling": -np.arange(vocab_size, dtype=np.float32) / 8,
        "limits of float": np.where(normal > 0, np.float32(3e38), np.float32(-3e38)),
        "far down": np.where(normal > 1, 0, -28.4 + normal / 100).astype(np.float32),
    }


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 37, 128, 1000])
@pytest.mark.parametrize("name", adversarial_rows(1))
def test_kept_tokens_are_exact(runtime: Runtime, vocab_size: int, name: str) -> None:
    check(runtime, adversarial_rows(vocab_size)[name], all_limits(vocab_size))


LARGE: list[Limits] = [  # with more than 4096 tokens a part is narrowed first
    (1.0, 0, 0.9, 0.0), (1.0, 5000, 0.7, 0.0), (1.0, 20, 0.95, 0.0), (1.5, 0, 1.0, 1e-6),
    (1.0, 8999, 1.0, 0.0), (1.0, 0, 0.999, 1e-3),
]  # fmt: skip


@pytest.mark.parametrize("name", adversarial_rows(1))
def test_kept_tokens_of_large_rows(runtime: Runtime, name: str) -> None:
    check(runtime, adversarial_rows(9001)[name], LARGE)


@pytest.fixture(scope="module")
def plain() -> Iterator[Runtime]:
    yield HostRuntime(mode="plain")


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [49_152, 128_256])
@pytest.mark.parametrize("name", adversarial_rows(1))
def test_kept_tokens_of_whole_vocabularies(plain: Runtime, vocab_size: int, name: str) -> None:
    check(plain, adversarial_rows(vocab_size)[name], all_limits(vocab_size))


@pytest.mark.parametrize("threads", [32, 96, 384])
def test_the_block_does_not_matter(runtime: Runtime, threads: int) -> None:
    for name in ("normal", "steps", "equal"):
        check(runtime, adversarial_rows(5003)[name], LARGE[:4], threads)


@pytest.mark.parametrize(
    ("top_p", "count"),
    [(0.75, 3), (np.nextafter(np.float32(0.75), np.float32(1)), 4), (0.25, 1), (1e-9, 1)],
)
def test_limits_that_are_met_exactly(runtime: Runtime, top_p: float, count: int) -> None:
    """Four equal tokens of mass 1/4 among others of none, by hand."""
    logits = np.full(50, -np.inf, np.float32)
    logits[[3, 11, 12, 49]] = 1.5
    assert kept(runtime, logits, [(1.0, 0, float(top_p), 0.0)]) == [[3, 11, 12, 49][:count]]


def test_min_p_is_decided_in_double() -> None:
    """The distance of a min_p is the last float whose weight reaches it."""
    min_p = np.array([1e-30, 1e-9, 0.05, 0.1, 0.3, 0.5, 0.999, 1 - 2**-24], np.float32)
    distance = likely_distance(min_p)
    beyond = np.nextafter(distance, np.float32(np.inf))
    for p, inside, outside in zip(min_p.tolist(), distance.tolist(), beyond.tolist(), strict=True):
        assert math.exp(-inside) >= p > math.exp(-outside)
    assert likely_distance(np.zeros(1, np.float32)) == np.inf
    # exp rounds to 1 down to here, give or take what implementations of exp do at the very edge.
    np.testing.assert_allclose(likely_distance(np.ones(1, np.float32)), 2.0**-54, rtol=1e-6)


# ---- mass and noise ------------------------------------------------------------------------------

SOURCE = r"""
#include "FOLDER/philox.cuh"
#include "FOLDER/sampling_mass.cuh"
extern "C" __global__ void masses(u64* out, const float* distance, int n) {
  __shared__ u64 powers[POWERS];
  make_powers(powers);
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = fixed_mass(distance[i], powers);
}
extern "C" __global__ void noises(float* single, double* twice, const unsigned* words, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    single[i] = noise_in_float(words[i]);
    twice[i] = noise_in_double(words[i]);
  }
}
extern "C" __global__ void words(unsigned* out, const u64* seed, const int* position,
                                 const int* index, const int* token, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    out[i] = token_word({seed[i], (unsigned)position[i], (unsigned)index[i]}, token[i]);
  }
}
"""


def run(runtime: Runtime, folder: Path, name: str, outs: list[Any], *inputs: Any) -> list[Any]:
    """The outputs of a kernel of SOURCE, of the types in `outs`."""
    path = folder / "parts.cu"
    path.write_text(SOURCE.replace("FOLDER", str(kernel_folder())))
    n = len(inputs[0])
    targets = [Guarded(runtime, (n,), dtype) for dtype in outs]
    given = [Guarded.of(runtime, array).array for array in inputs]
    kernel = runtime.load_kernel(path, name, {})  # type: ignore[arg-type]
    runtime.launch(kernel, (1,), (64,), [*(t.array for t in targets), *given, np.int32(n)])
    return [target.read() for target in targets]


def test_mass(runtime: Runtime, tmp_path: Path) -> None:
    """At most a unit beside the exact one, equal to it nearly always, and falling."""
    edge = np.array([0x41E35A2E], np.uint32).view(np.float32)
    random = np.random.default_rng(1).uniform(0, 28.4, 4000)
    special = [0, 1e-45, 1e-38, 2.0**-36, 2.0**-35, math.log(2) / 64, math.log(2), 1.0, 28.0]
    distance = np.sort(np.concatenate([random, special, edge]).astype(np.float32))
    (got,) = run(runtime, tmp_path, "masses", [np.uint64], distance)
    exact = np.exp(-distance.astype(np.longdouble)) * 2**40
    wrong = got.astype(np.int64) - np.rint(exact).astype(np.int64)
    assert np.abs(wrong).max() <= 1 and np.count_nonzero(wrong) < 40
    assert np.abs(got.astype(np.longdouble) - exact).max() < 0.5 + 2**-3
    assert got[0] == 2**40 and got[-1] == 1
    assert (np.diff(got.astype(np.int64)) <= 0).all()
    assert math.exp(-float(edge[0])) * 2**40 > 0.5
    assert math.exp(-float(np.nextafter(edge, np.float32(99))[0])) * 2**40 < 0.5


def test_noise(runtime: Runtime, tmp_path: Path) -> None:
    words = np.random.default_rng(2).integers(0, 2**32, 4000, np.uint64)
    special = [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    words = np.concatenate([words, np.array(special, np.uint64)]).astype(np.uint32)
    single, twice = run(runtime, tmp_path, "noises", [np.float32, np.float64], words)
    exact = [-math.log(-math.log((int(word) + 0.5) / 2**32)) for word in words]
    np.testing.assert_allclose(twice, exact, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(single, exact, rtol=0, atol=2.0**-18)  # a quarter of NOISE_ERROR
    assert -3.12 > single.min() > -3.14 and 22.87 < single.max() < 22.88


def test_words(runtime: Runtime, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    seed = rng.integers(0, 2**64, 40, np.uint64)
    position, index, token = rng.integers(0, 2**31, (3, 40)).astype(np.int32)
    token[:4] = range(4)
    (got,) = run(runtime, tmp_path, "words", [np.uint32], seed, position, index, token)
    for i in range(40):
        counter = [int(token[i]) // 4, int(position[i]), int(index[i]), 0]
        assert got[i] == oracle_philox(counter, int(seed[i]))[token[i] % 4]
