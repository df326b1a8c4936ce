"""Log probabilities of the device against those of NumPy and a log-softmax in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupaged.runtime.protocol import Runtime
from tests.ops.cuda_sampler import F32, I32, Sampler, check_logprobs
from tests.ops.kernel_arrays import Guarded, same_bits
from tests.ops.sampling_oracle import rows

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def sampler(runtime: Runtime) -> Sampler:
    return Sampler(runtime)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 7, 37, 509, 4100])
@pytest.mark.parametrize("count", [0, 1, 5, 20, 508, 2**31 - 1])
def test_logprobs_equal_those_of_numpy(sampler: Sampler, vocab_size: int, count: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = (4 * rng.standard_normal((4, vocab_size))).astype(F32)
    logits[::2] = np.rint(logits[::2])
    logits[1, 1::5] = -INF
    tokens = rng.integers(0, vocab_size, 4)
    check_logprobs(sampler, logits, tokens, count)


@pytest.mark.parametrize("count", [4095, 4096, 4097, 9001])
def test_logprobs_of_more_than_are_sorted_at_a_time(sampler: Sampler, count: int) -> None:
    rng = np.random.default_rng(count)
    logits = np.stack([4 * rng.standard_normal(9001), np.zeros(9001), rng.integers(0, 3, 9001)])
    check_logprobs(sampler, logits, [9000, 3, 77], count)


def test_ties_by_hand(sampler: Sampler) -> None:
    logits = [
        [1.0, 3.0, 3.0, 0.0, 3.0],
        [2.0] * 5,
        [0.0, 1.0, 2.0, 3.0, 4.0],
        [0.0, -0.0, -1, -2, -3],
    ]
    ids, values, ranks = sampler.logprobs(logits, [4, 0, 0, 1], 3)
    assert ids.tolist() == [[4, 1, 2, 4], [0, 0, 1, 2], [0, 4, 3, 2], [1, 0, 1, 2]]
    assert ranks.tolist() == [[3, 1, 2, 3], [5, 1, 2, 3], [5, 1, 2, 3], [2, 1, 2, 3]]
    np.testing.assert_allclose(values[1], [-math.log(5)] * 4, rtol=1e-7)


def test_logprobs_of_rows_without_numbers(sampler: Sampler) -> None:
    logits = [[0, NAN, 1], [1, 2, 3], [-INF] * 3, [INF, 0, 0]]
    ids, values, ranks = sampler.logprobs(logits, [2, 2, 0, 1], 2)
    assert ids.tolist() == [[2, 0, 1], [2, 2, 1], [0, 0, 1], [1, 0, 1]]
    assert ranks.tolist() == [[3, 1, 2], [1, 1, 2], [3, 1, 2], [3, 1, 2]]
    assert np.isnan(values[[0, 2, 3]]).all() and np.isfinite(values[1]).all()


def test_logprobs_do_not_depend_on_company_or_block(runtime: Runtime, sampler: Sampler) -> None:
    logits = (4 * np.random.default_rng(8).standard_normal((5, 1003))).astype(F32)
    _, together, _ = sampler.logprobs(logits, range(5), 20)
    for i in range(5):
        _, alone, _ = sampler.logprobs(logits[i : i + 1], [i], 20)
        same_bits(alone, together[i : i + 1])
    given, tokens = runtime.from_host(logits), runtime.from_host(np.arange(5, dtype=I32))
    kernel = runtime.load_kernel("logits_logprobs.cu", "logprobs", {})
    for threads in (32, 96, 384):
        ids, values, ranks = (Guarded(runtime, (5, 21), t) for t in (I32, F32, I32))
        args = (ids.array, values.array, ranks.array, given, tokens, tokens, I32(20), I32(1003))
        runtime.launch(kernel, (5,), (threads,), args)
        same_bits(values.read(), together)
        assert (ids.read()[:, 0] == np.arange(5)).all() and (
            ranks.read()[:, 1:] == range(1, 21)
        ).all()


def test_logprobs_of_what_was_drawn(runtime: Runtime, sampler: Sampler) -> None:
    """No trip to the host: token ids of the device, by number of the sample; -1 becomes 0."""
    logits = runtime.from_host(np.array([[0, 1, 5], [NAN, 0, 0], [7, 0, 0]], F32))
    drawn = sampler.draw(logits, rows(num=3, temperature=0.0))
    own = runtime.from_host(np.array([[0, 1, 5], [0, 0, 1]], F32))
    which = runtime.from_host(np.array([0, 1], I32))
    ids, _, ranks = map(runtime.to_host, sampler.ops.logprobs(own, drawn, 1, which))
    assert ids.tolist() == [[2, 2], [0, 2]] and ranks.tolist() == [[1, 1], [3, 1]]
