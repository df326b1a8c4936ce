"""`CudaSampling` against the NumPy device and the naive oracle, on every device there is.

Logits lie between guards of NaN. Draws must equal those of the NumPy device, token by token: the
uniforms are the same, and what float cannot decide is decided in double.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.engine.sampling_batch import LogitsEdits, SamplingBatch
from cupaged.engine.sequence_table import MAX_COUNT, MAX_TEMPERATURE
from cupaged.ops.cuda_sampling import row_block
from cupaged.ops.launch_checks import OperandError
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.protocol import Runtime
from tests.ops.cuda_sampler import F32, I32, Sampler, check_logprobs
from tests.ops.kernel_arrays import Guarded, same_bits
from tests.ops.sampling_oracle import (
    as_list,
    edited,
    edits_of,
    kept_tokens,
    oracle,
    oracle_philox,
    rows,
)
from tests.ops.writing_runtime import WritingRuntime

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def sampler(runtime: Runtime) -> Sampler:
    return Sampler(runtime)


@pytest.fixture(scope="module")
def plain() -> Iterator[Sampler]:
    yield Sampler(HostRuntime(mode="plain"))


def on_numpy(logits: Any, sampling: SamplingBatch) -> list[int]:
    return [int(token) for token in NumpyOps().sample(np.array(logits, F32), sampling)]


def take(s: SamplingBatch, which: Any) -> SamplingBatch:
    """Some of the samples, over the same rows of logits."""
    names = {field.name for field in fields(s)} - {"edits"}
    return SamplingBatch(edits=s.edits, **{name: getattr(s, name)[which] for name in names})


def mixture(vocab_size: int, num: int, seed: int = 0) -> tuple[NDArray[np.float32], SamplingBatch]:
    """Every kind of sample, over rows with and without equal logits; some rows are shared."""
    rng = np.random.default_rng([vocab_size, seed])
    logits = (3 * rng.standard_normal((num, vocab_size))).astype(F32)
    logits[::3] = np.rint(logits[::3])
    sampling = rows(
        num=num,
        logits_row=rng.integers(0, num, num),
        temperature=rng.choice([0.0, 1e-5, 0.3, 1.0, 4.0, MAX_TEMPERATURE], num),
        top_k=rng.choice([0, 1, 2, 5, vocab_size, MAX_COUNT], num),
        top_p=rng.choice([0.0, 1e-9, 0.3, 0.9, 0.999, 1.0], num),
        min_p=rng.choice([0.0, 0.0, 0.0, 1e-9, 0.1, 1.0], num),
        seed=rng.integers(0, 2**64, num, np.uint64),
        index=rng.integers(0, 1024, num),
        position=rng.integers(0, 2**31, num),
    )
    return logits, sampling


# ---- draws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 7, 37, 131])
def test_draws_equal_the_oracle(sampler: Sampler, vocab_size: int) -> None:
    logits, s = mixture(vocab_size, 40)
    expected = [oracle(as_list(logits[s.logits_row[i]]), s, i) for i in range(40)]
    assert sampler.sample(logits, s) == expected


@pytest.mark.parametrize("vocab_size", [128, 1000, 1023, 9001])
def test_draws_equal_those_of_numpy(sampler: Sampler, vocab_size: int) -> None:
    logits, s = mixture(vocab_size, 24)
    assert sampler.sample(logits, s) == on_numpy(logits, s)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_does_not_matter(seed: int) -> None:
    shuffled = Sampler(HostRuntime(seed=seed))
    for vocab_size in (131, 5003):
        logits, s = mixture(vocab_size, 12)
        assert shuffled.sample(logits, s) == on_numpy(logits, s)
        check_logprobs(shuffled, logits[:3], [1, 2, 3], 20)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [49_152, 128_256])
def test_draws_from_whole_vocabularies(plain: Sampler, vocab_size: int) -> None:
    for seed in range(4):
        logits, s = mixture(vocab_size, 32, seed)
        assert plain.sample(logits, s) == on_numpy(logits, s)


@pytest.mark.parametrize("top_k", [0, 20])
def test_ten_thousand_draws_differ_in_none(sampler: Sampler, top_k: int) -> None:
    """Nearly equal scores are decided in double: about one draw in 10^8 may still differ."""
    logits = np.random.default_rng(1).standard_normal((1, 60)).astype(F32)
    s = rows(num=10_000, logits_row=0, top_k=top_k, seed=range(10_000), index=3, position=5)
    assert sampler.sample(logits, s) == on_numpy(logits, s)


@pytest.mark.parametrize("top_k", [0, 2])
def test_scores_that_float_cannot_tell_apart(sampler: Sampler, top_k: int) -> None:
    """Two tokens of different threads whose logits make up for their noise, to the last bits."""
    num, ids = 200, (3, 240)
    logits = np.full((num, 300), -INF, F32)
    for seed in range(num):
        words = (oracle_philox([token // 4, 0, 0, 0], seed)[token % 4] for token in ids)
        first, second = (-math.log(-math.log((word + 0.5) / 2**32)) for word in words)
        logits[seed, ids] = max(0, second - first), max(0, first - second)
    s = rows(num=num, seed=range(num), top_k=top_k)
    expected = on_numpy(logits, s)
    assert 60 < expected.count(3) < 140
    assert sampler.sample(logits, s) == expected


def test_greedy_takes_the_lowest_of_equal_ids(sampler: Sampler) -> None:
    logits = [[0, 5, 5, 5], [7, 7, 7, 7], [-1, -2, -3, -1], [-0.0, 0, -1, 0], [0, -INF, 1e-45, 0]]
    s = rows(num=5, temperature=0.0, top_k=[0, 2, 0, 1, 0], top_p=[1.0, 0.5, 0.0, 1.0, 1.0])
    assert sampler.sample(logits, s) == [1, 0, 0, 0, 2]


def test_greedy_of_a_long_row(sampler: Sampler) -> None:
    """Equal ones in different quads, warps and rounds of a thread."""
    for size in (4095, 4096):
        for ids in ([4094, 2053, 2054], [7, 3000], [4094], [0, 4094]):
            logits = np.full((1, size), -1.5, F32)
            logits[0, ids] = -0.5
            assert sampler.sample(logits, rows(num=1, temperature=0.0)) == [min(ids)]


def test_rows_without_a_number_fail_alone(sampler: Sampler) -> None:
    bad = [[0.0, NAN, 2.0, 1.0], [NAN] * 4, [-INF] * 4, [0, INF, 0, 0], [INF, -INF, NAN, 0]]
    good = [[0, 3, 1, 2], [-INF, -INF, 1, -INF], [4, 4, 4, 4]]
    for temperature, top_k, top_p in [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 2, 1.0), (1.0, 0, 0.5)]:
        how: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        alone = sampler.sample(good, rows(num=3, seed=[1, 2, 3], **how))
        mixed = [bad[0], good[0], bad[1], bad[2], good[1], bad[3], good[2], bad[4]]
        tokens = sampler.sample(mixed, rows(num=8, seed=[9, 1, 9, 9, 2, 9, 3, 9], **how))
        assert tokens == [-1, alone[0], -1, -1, alone[1], -1, alone[2], -1]


def test_logits_at_the_limits_of_float32(sampler: Sampler) -> None:
    s = rows(num=3, temperature=[1e-5, 1.0, MAX_TEMPERATURE], top_k=[0, 3, 0])
    assert sampler.sample([[-3e38, 3e38, -INF, 0]] * 3, s) == [1, 1, 1]


def test_forced_tokens_stand_in_where_asked(sampler: Sampler) -> None:
    s = rows(num=4, temperature=0.0)
    logits = [[0, 9, 0, 0], [0, 9, 0, 0], [0, 9, 0, 0], [NAN, 0, 0, 0]]
    assert sampler.sample(logits, s) == on_numpy(logits, s) == [1, 1, 1, -1]
    s.forced[...] = [-1, 3, 0, 2]
    assert sampler.sample(logits, s) == on_numpy(logits, s) == [1, 3, 0, -1]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0),
     (0.9, 8, 0.9, 0.0), (1.0, 0, 1.0, 0.1)],
)  # fmt: skip
def test_frequencies(
    sampler: Sampler, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Chi-square over the kept tokens; seeds are fixed, so that no luck is needed."""
    logits = [0.0, 1.5, -1.0, 1.5, 0.3, -2.0, 0.9, 2.2, -0.4, 1.0, 0.0, -3.0]
    num = 4000
    how: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    tokens = sampler.sample(
        [logits], rows(num=num, logits_row=0, min_p=min_p, seed=range(num), **how)
    )
    kept = kept_tokens(logits, temperature, top_k, top_p, min_p)
    weights = [math.exp(logits[token] / temperature) for token in kept]
    counts = np.bincount(tokens, minlength=len(logits))
    assert counts.sum() == counts[kept].sum() == num
    expected = [num * w / sum(weights) for w in weights]
    statistic = sum((counts[t] - e) ** 2 / e for t, e in zip(kept, expected, strict=True))
    freedom = len(kept) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_a_sample_does_not_depend_on_its_company(sampler: Sampler) -> None:
    for vocab_size in (37, 5003):
        logits, s = mixture(vocab_size, 12)
        together = sampler.sample(logits, s)
        assert sampler.sample(logits, take(s, slice(None, None, -1))) == together[::-1]
        for i in range(12):
            only = take(s, [i])
            row = int(only.logits_row[0])
            only.logits_row[0] = 0
            assert sampler.sample(logits[row : row + 1], only) == [together[i]]


def test_rows_beyond_32_bits(runtime: Runtime) -> None:
    """The last row begins at element 2^31. On the host, untouched pages take no memory."""
    sampler, vocab_size = Sampler(runtime), 1 << 16
    logits = runtime.zeros(((1 << 15) + 1, vocab_size), F32)
    last = np.arange(vocab_size, dtype=F32)[None] / 8
    runtime.copy_to_device(logits[1 << 15 :], last)
    banned = [(1 << 15, vocab_size - 1)]
    s = rows(num=2, logits_row=1 << 15, temperature=[0.0, 1.0], top_k=[0, 1], banned=banned)
    assert runtime.to_host(sampler.draw(logits, s)).tolist() == [vocab_size - 2] * 2


def test_no_samples(sampler: Sampler) -> None:
    assert sampler.sample(np.zeros((0, 7)), rows(num=0)) == []
    assert sampler.sample(np.zeros((2, 7)), rows(num=0)) == []


# ---- edits ---------------------------------------------------------------------------------------


def some_edits(vocab_size: int, num_rows: int) -> LogitsEdits:
    """Of each kind, on the same and on different pairs; allowed and banned pairs stand twice."""
    rng = np.random.default_rng(vocab_size)

    def changes(value: float) -> dict[tuple[int, int], float]:
        pairs = rng.integers(0, [num_rows, vocab_size], (3 * num_rows, 2)).tolist()
        return {(row, token): value * float(rng.uniform(0.5, 2)) for row, token in pairs}

    limited = [
        (row, int(token)) for row in (0, num_rows - 1) for token in rng.integers(vocab_size, size=6)
    ]
    banned = [(row, row % vocab_size) for row in range(1, num_rows - 1)]
    return edits_of(
        bias=changes(3.0),
        repetition=changes(1.5),
        subtracted=changes(-0.5),
        allowed=limited + limited[:1],
        banned=[*banned, *banned[:1], limited[0]],
    )


@pytest.mark.parametrize("vocab_size", [7, 37, 128, 9004])
def test_edits_equal_those_of_numpy(sampler: Sampler, vocab_size: int) -> None:
    logits = np.random.default_rng(2).standard_normal((5, vocab_size)).astype(F32)
    edits = some_edits(vocab_size, 5)
    expected, given = logits.copy(), Guarded.of(sampler.runtime, logits)
    NumpyOps().sample(expected, rows(num=0, edits=edits))
    sampler.draw(given.array, rows(num=0, edits=edits))
    same_bits(given.read(), expected)
    np.testing.assert_allclose(expected, edited(logits.tolist(), edits), rtol=1e-6)


def test_edits_by_hand(sampler: Sampler) -> None:
    """All five on one pair: ((2 + 1) / 2 - 1) is kept, where another of the row is not."""
    edits = edits_of(
        bias={(1, 2): 1.0}, repetition={(1, 2): 2.0, (0, 0): 2.0}, subtracted={(1, 2): 1.0},
        allowed=[(1, 2), (1, 0)], banned=[(1, 0)],
    )  # fmt: skip
    given = Guarded.of(sampler.runtime, np.array([[-1, 2, 2], [9, 2, 2]], F32))
    tokens = sampler.draw(given.array, rows(num=2, temperature=0.0, edits=edits))
    np.testing.assert_array_equal(given.read(), [[-2, 2, 2], [-INF, -INF, 0.5]])
    assert sampler.runtime.to_host(tokens).tolist() == [1, 2]


def test_edits_that_overflow_fail_their_row(sampler: Sampler) -> None:
    edits = edits_of(bias={(0, 1): 3e38})
    assert sampler.sample([[0, 3e38], [0, 3e38]], rows(num=2, temperature=0.0, edits=edits)) == [
        -1,
        1,
    ]


# ---- what the host does --------------------------------------------------------------------------


def test_a_step_is_one_upload_and_allocates_nothing_later() -> None:
    runtime = WritingRuntime()
    sampler, edits = Sampler(runtime), some_edits(50, 4)
    logits, ids = runtime.empty((4, 50), F32), runtime.zeros((4,), I32)
    sampler.ops.reserve(4, 1 << 10)
    sampler.draws(rows(num=4, edits=edits))
    sampler.draw(logits, rows(num=4))
    assert [name for name, *_ in runtime.launches] == ["sample"] and runtime.uploads == 2
    runtime.launches.clear()
    before = runtime.allocations
    sampler.draw(logits, rows(num=4, edits=edits))
    sampler.ops.logprobs(logits, ids, 5)
    assert [launch[:3] for launch in runtime.launches] == [
        *((name, (1,), (256,)) for name in ("add_bias", "penalize", "subtract", "save_allowed")),
        ("forbid_rows", (2, 1), (256,)), ("restore_allowed", (1,), (256,)), ("ban", (1,), (256,)),
        ("sample", (4,), (32,)), ("logprobs", (4,), (32,)),
    ]  # fmt: skip
    assert runtime.uploads == 3 and runtime.allocations == before


def test_tokens_outlive_the_next_draw(sampler: Sampler) -> None:
    runtime = sampler.runtime
    first, second = (
        sampler.draw(runtime.from_host(np.eye(3, dtype=F32)[order]), rows(num=3, temperature=0.0))
        for order in ([0, 1, 2], [2, 0, 1])
    )
    assert runtime.to_host(first).tolist() == [0, 1, 2]
    assert runtime.to_host(second).tolist() == [2, 0, 1]


def test_blocks_of_a_row() -> None:
    assert [row_block(v) for v in (1, 128, 129, 1000, 2048, 128_256)] == [32, 32, 64, 256, 384, 384]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_row": np.array([0, 2], I32)}, "logits_row must be from 0 to 1, got 0 to 2"),
        ({"top_k": np.zeros(2, np.int64)}, r"top_k must be int32 \[2\], got int64 \[2\]"),
        (
            {"temperature": np.zeros(3, F32)},
            r"temperature must be float32 \[2\], got float32 \[3\]",
        ),
        ({"seed": np.zeros(2, np.int64)}, r"seed must be uint64 \[2\], got int64"),
        ({"edits": edits_of(bias={(2, 0): 1.0})}, "edits.bias must be from 0 to 1, got 2 to 2"),
        ({"edits": edits_of(banned=[(0, -1)])}, "edits.banned must be from 0 to 6, got -1 to -1"),
        ({"edits": edits_of(allowed=[(0, 7)])}, "edits.allowed must be from 0 to 6, got 7 to 7"),
    ],
)
def test_batches_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    runtime, good = WritingRuntime(), rows(num=2)
    columns = {field.name: getattr(good, field.name) for field in fields(good)} | change
    with pytest.raises(OperandError, match=f"sample: {message}"):
        Sampler(runtime).draw(runtime.empty((2, 7), F32), SamplingBatch(**columns))
    assert not runtime.launches


def test_arrays_that_do_not_fit() -> None:
    runtime = WritingRuntime()
    ops, logits = Sampler(runtime).ops, runtime.empty((2, 7), F32)
    ids = runtime.zeros((2,), I32)
    for given, tokens, count, which, message in (
        (np.zeros((2, 7), F32), ids, 1, None, "logits must be an array on the device"),
        (runtime.empty((2, 7), np.float16), ids, 1, None, "logits must be float32"),
        (logits, ids[:1], 1, None, r"token_ids must be int32 \[2\], got int32 \[1\]"),
        (logits, ids, 1, ids[:1], r"which must be int32 \[2\], got int32 \[1\]"),
        (logits, np.zeros(2, I32), 1, None, "token_ids must be an array on the device"),
        (logits, ids.view(np.uint32), 1, None, "token_ids must be int32"),
        (logits, ids, -1, None, "count must be from 0"),
    ):
        with pytest.raises(OperandError, match=f"logprobs: {message}"):
            ops.logprobs(given, tokens, count, which)
    assert not runtime.launches
