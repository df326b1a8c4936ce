"""Same answer whatever the company: on `emulated` a request's bits depend on the request alone.

Hidden states, keys and values, logits, tokens and log probabilities of a request are compared with
those of the request alone, in every storage type: in batches of each size, in chunks, decoded or
computed at once, after preemption, forked, in other blocks. There is no tolerance.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.ops.cuda_ops import CudaOps
from cupaged.sampling_params import SamplingParams
from tests.fast_runtime import FastRuntime, fast_ops
from tests.forced import LoadedModel
from tests.recorded import Asked, Record, Run, check_same, record
from tests.tiny_models import TINIER, TinyLlama, write_hf_folder

DTYPES = ("float32", "float16", "bfloat16")
SOME_DTYPES = ("float32", pytest.param("float16", marks=pytest.mark.slow), "bfloat16")
# 2.0 M parameters; the products have 1, 3 and 4 chunks, two KV heads have two query heads each.
SMALL = TinyLlama(
    name="small",
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=832,
    num_layers=2,
    tied=False,
    vocab_size=509,
    attention_bias=True,
    mlp_bias=True,
)
ALL_SIZES = set(range(1, 18))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("bits") / "tinier", TINIER)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("bits") / "small", SMALL)


@functools.cache
def load(folder: Path, dtype: str) -> LoadedModel:
    return LoadedModel(folder, fast_ops(dtype))


@pytest.fixture(params=SOME_DTYPES)
def model(request: pytest.FixtureRequest, folder: Path) -> LoadedModel:
    """The tiny model on the emulated device."""
    return load(folder, request.param)


def prompt_of(seed: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 509, length).tolist()
    return ids


# Ways to draw: the request's place in a batch decides which.
WAYS = (
    SamplingParams(temperature=0.9, top_p=0.9, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=7, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(temperature=1, min_p=0.02, logprobs=0, ignore_eos=True),
)


def ask(i: int, length: int, num_tokens: int) -> Asked:
    return Asked(
        prompt_of(100 + i, length), replace(WAYS[i % len(WAYS)], max_tokens=num_tokens), seed=7 + i
    )


def alone(model: LoadedModel, asked: Asked) -> Record:
    """What the request computes when there is no other."""
    (kept,) = record(model, [asked]).records.values()
    assert len(kept.token_ids) == asked.params.max_tokens
    return kept


def check_run(model: LoadedModel, run: Run, asked: Sequence[Asked], which: Sequence[int]) -> None:
    """Each of these requests is what it is alone, to its last token and log probability."""
    for i in which:
        expected = alone(model, asked[i])
        got = run.records[i, 0]
        check_same(got, expected)
        assert got.logits.keys() == expected.logits.keys()
        assert (got.token_ids, got.logprobs) == (expected.token_ids, expected.logprobs)


# ---- company -------------------------------------------------------------------------------------


def test_in_batches_of_every_size(model: LoadedModel) -> None:
    """A request more every step, so that the first decodes in batches of 2, 3, ... 17."""
    asked = [ask(i, 1 + 5 * i % 23, 17 - i) for i in range(17)]
    run = record(model, asked, every=1)
    assert set(run.batch_sizes) == ALL_SIZES
    check_run(model, run, asked, (0, 2, 9, 16))


def test_a_step_of_many_tokens(model: LoadedModel) -> None:
    """More tokens than the kernels for few tokens take: other kernels, the same bits."""
    asked = [ask(i, 30 + i, 2) for i in range(3)]
    run = record(model, asked)
    assert run.step_tokens[0] == 93
    check_run(model, run, asked, range(3))


def test_one_unit_in_the_last_place_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: in steps of several tokens, attention scales by the next float."""
    model = load(folder, "float32")
    asked = ask(1, 12, 3)
    expected = alone(model, asked)
    attend = CudaOps.paged_attention

    def planted(self: CudaOps, step: Any, out: Any, qkv: Any, cache: Any, scale: float) -> None:
        attend(self, step, out, qkv, cache, scale * (1 + (step.num_tokens > 1) * 2.0**-23))

    monkeypatch.setattr(CudaOps, "paged_attention", planted)
    check_same(record(model, [asked], max_num_batched_tokens=1).records[0, 0], expected)
    with pytest.raises(AssertionError, match=r"hidden states at positions .* differ"):
        check_same(record(model, [asked]).records[0, 0], expected)


# ---- chunks --------------------------------------------------------------------------------------


def test_in_chunks_whole_decoded_and_computed_again(model: LoadedModel) -> None:
    asked = ask(0, 70, 4)
    whole = record(model, [asked]).records[0, 0]
    for chunk in (1, 7, 16):
        run = record(model, [asked], max_num_batched_tokens=chunk)
        assert max(run.step_tokens) == chunk
        check_same(run.records[0, 0], whole)
        assert run.records[0, 0].token_ids == whole.token_ids
    # What was decoded, as a prompt: the last token that was drawn was never computed.
    prompt = [*asked.prompt, *whole.token_ids[:-1]]
    again = replace(asked, prompt=prompt, params=replace(asked.params, max_tokens=1))
    once = record(model, [again])
    check_same(once.records[0, 0], whole)
    assert [*once.records[0, 0].logits] == [len(prompt) - 1]


def test_after_cached_prefixes(model: LoadedModel) -> None:
    """Each begins with what the one before has left: of its prompt, and of what it had drawn."""
    first = ask(0, 53, 6)
    told = alone(model, first).token_ids
    asked = [
        first,
        replace(ask(1, 0, 5), prompt=first.prompt),
        replace(ask(2, 0, 5), prompt=[*first.prompt[:48], *prompt_of(5, 9)]),
        replace(ask(3, 0, 4), prompt=[*first.prompt, *told, *prompt_of(6, 20)]),
    ]
    for limits in ({}, {"max_num_batched_tokens": 7}):
        run = record(model, asked, every=10, **limits)
        for i, num_cached in enumerate((0, 48, 48, 48)):
            expected = record(model, [asked[i]], enable_prefix_caching=False).records[0, 0]
            got = run.records[i, 0]
            assert [*expected.hidden][:num_cached] == [
                p for p in expected.hidden if p not in got.hidden
            ]
            expected.hidden = {at: expected.hidden[at] for at in got.hidden}
            check_same(got, expected)
            assert got.logits.keys() == expected.logits.keys()
            assert (got.token_ids, got.logprobs) == (expected.token_ids, expected.logprobs)


def test_after_preemption(model: LoadedModel) -> None:
    """Six blocks for three requests of up to three. The runner compares what comes again."""
    asked = [ask(i, 25 + i, 10) for i in range(3)]
    run = record(model, asked, num_blocks=6, watermark=0.0, max_num_batched_tokens=30)
    assert run.num_preemptions > 0
    check_run(model, run, asked, range(3))


def test_forked_samples(model: LoadedModel) -> None:
    """Samples share blocks and part from them by a copy; each is the same in company."""
    asked = replace(ask(0, 21, 6), params=replace(WAYS[0], n=3, max_tokens=6))
    expected = record(model, [asked]).records
    got = record(model, [ask(5, 9, 8), asked, ask(6, 3, 8)]).records
    assert len({tuple(kept.token_ids) for kept in expected.values()}) == 3
    for index in range(3):
        check_same(got[1, index], expected[0, index])
        assert got[1, index].token_ids == expected[0, index].token_ids


# ---- across the edge of a split ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_past_the_first_split(dtype: str, folder: Path) -> None:
    """Attention adds up 256 positions at a time: here one, two and three such parts."""
    model = load(folder, dtype)
    asked = [ask(0, 254, 5), ask(1, 517, 2), ask(2, 3, 5)]
    limits = {"max_model_len": 1024, "num_blocks": 128}
    run = record(model, asked, max_num_batched_tokens=1024, **limits)
    for i in range(2):
        apart = record(model, [asked[i]], max_num_batched_tokens=100, **limits).records[0, 0]
        check_same(run.records[i, 0], apart)
        assert run.records[i, 0].token_ids == apart.token_ids


# ---- other devices -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SOME_DTYPES)
def test_the_device_decides_no_bit(dtype: str, folder: Path) -> None:
    """Neither the order of blocks and threads, nor how many there are at the same time."""
    asked = [*(ask(i, 3 + 52 * i % 100, 2) for i in range(4)), ask(4, 262, 2)]
    expected = record(load(folder, dtype), asked).records
    for runtime in (FastRuntime(seed=1), FastRuntime(seed=2, multiprocessors=33)):
        got = record(LoadedModel(folder, CudaOps(runtime, dtype)), asked).records
        for key, kept in expected.items():
            check_same(got[key], kept)
            assert (got[key].token_ids, got[key].logprobs) == (kept.token_ids, kept.logprobs)


# ---- the larger model ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_million_parameters(dtype: str, small_folder: Path) -> None:
    """All of the above at once: batches of each size from the start, chunks, and preemption."""
    model = load(small_folder, dtype)
    asked = [ask(i, 1 + 11 * i % 50, 6) for i in range(17)]
    expected = [alone(model, one) for one in asked]
    for size in range(2, 18):
        first = size % 5
        chosen = [(first + i) % 17 for i in range(size)]
        run = record(model, [asked[i] for i in chosen])
        assert max(run.batch_sizes) == size
        for place, i in enumerate(chosen):
            check_same(run.records[place, 0], expected[i])
            assert run.records[place, 0].token_ids == expected[i].token_ids
    for chunk in (1, 7, 16):
        for number in (1, 5):
            run = record(model, asked[:number], max_num_batched_tokens=chunk)
            for i in range(number):
                check_same(run.records[i, 0], expected[i])
    run = record(model, asked[:8], num_blocks=8, watermark=0.0)
    assert run.num_preemptions > 0
    for i in range(8):
        check_same(run.records[i, 0], expected[i])
        assert run.records[i, 0].token_ids == expected[i].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_the_size_of_a_block_changes_nothing(
    block_size: int, dtype: str, small_folder: Path
) -> None:
    model = load(small_folder, dtype)
    asked = [ask(i, 5 + 31 * i, 4) for i in range(4)]
    expected = record(model, asked).records
    got = record(model, asked, block_size=block_size).records
    for key, kept in expected.items():
        check_same(got[key], kept)
        assert got[key].token_ids == kept.token_ids
