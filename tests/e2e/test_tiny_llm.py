"""Two tiny models end to end: their tokens and logits, in any batch, chunk, pool and company."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.llm import LLM
from cupaged.ops import StepContext
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests import reference
from tests.forced import LoadedModel
from tests.ops.sampling_oracle import as_list, oracle
from tests.tiny_models import (
    TINY,
    TINY_WIDE_HEAD,
    TinyLlama,
    hf_config,
    hf_weights,
    write_hf_folder,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny.npz"
SPECS = {spec.name: spec for spec in (TINY, TINY_WIDE_HEAD)}
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100)
NUM_TOKENS = 20
MARGIN = 1e-3

Ids = Sequence[int]


@pytest.fixture(scope="module", params=list(SPECS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / request.param, SPECS[request.param])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("tiny") / "tiny", TINY)


def prompts_of(spec: TinyLlama, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(17)
    return [rng.integers(3, spec.vocab_size, length).tolist() for length in lengths]


def generate(llm: LLM, prompts: Sequence[Ids], params: Any) -> list[list[list[int]]]:
    """Token ids of every sample of every prompt; the engine must be idle and whole afterwards."""
    asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    stats = llm.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (0, 0, 0)
    assert (stats.num_used_blocks, stats.num_shared_blocks) == (0, 0)
    llm.engine.core.audit()
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


@functools.cache
def reference_logits(name: str, ids: tuple[int, ...]) -> NDArray[np.float64]:
    return reference.reference_logits(hf_config(SPECS[name]), hf_weights(SPECS[name]), ids)


def check_greedy(name: str, prompt: Ids, output: Ids) -> int:
    """Each token is the reference's choice, or as good as that; returns how many were clear."""
    logits = reference_logits(name, (*prompt, *output))[len(prompt) - 1 : -1]
    num_clear = 0
    for row, token in zip(logits, output, strict=True):
        second, first = np.sort(row)[-2:]
        if first - second > MARGIN:
            assert token == row.argmax()
            num_clear += 1
        assert row[token] > first - MARGIN
    return num_clear


# ---- greedy tokens and logits --------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_greedy_tokens_equal_the_reference(chunk: int, folder: Path) -> None:
    llm = LLM(folder, max_num_batched_tokens=chunk, num_gpu_blocks_override=128)
    prompts = prompts_of(SPECS[folder.name])
    tokens = generate(llm, prompts, greedy())
    num_clear = sum(
        check_greedy(folder.name, prompt, output)
        for prompt, (output,) in zip(prompts, tokens, strict=True)
    )
    assert num_clear > 0.98 * NUM_TOKENS * len(prompts)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_preemption_changes_no_token(block_size: int, folder: Path) -> None:
    """Two sequences need more blocks than there are, so the later one starts again and again."""
    llm = LLM(
        folder,
        block_size=block_size,
        num_gpu_blocks_override=-(-200 // block_size),
        max_num_batched_tokens=40,
        watermark=0.0,
    )
    prompts = prompts_of(SPECS[folder.name], (100, 70, 90, 1))
    tokens = generate(llm, prompts, greedy(60))
    assert llm.get_stats().num_preemptions_total > 0
    for prompt, (output,) in zip(prompts, tokens, strict=True):
        check_greedy(folder.name, prompt, output)


def test_one_block_that_the_longest_sequence_fills(folder: Path) -> None:
    llm = LLM(folder, num_gpu_blocks_override=1, max_num_seqs=3)
    prompts = prompts_of(SPECS[folder.name], (9, 10, 16, 1))
    params = [greedy(8), greedy(7), greedy(1), greedy(16)]
    tokens = generate(llm, prompts, params)
    for prompt, (output,), asked in zip(prompts, tokens, params, strict=True):
        assert len(output) == asked.max_tokens
        check_greedy(folder.name, prompt, output)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7, "block_size": 8},
        {"block_size": 128, "max_num_batched_tokens": 2048},
    ],
    ids=str,
)
def test_logits_equal_transformers(limits: dict[str, int], folder: Path) -> None:
    """At every position: after a prompt of that length, and decoding from the first token on."""
    with np.load(GOLDEN, allow_pickle=False) as golden:
        ids = golden[f"{folder.name}_ids"].tolist()
        expected = golden[f"{folder.name}_logits"]
    model = LoadedModel(folder)
    whole = model.forced_logits([(ids[:end], [0]) for end in range(1, 41)], **limits)
    np.testing.assert_allclose(np.vstack(whole), expected, rtol=0, atol=1e-4)
    decoded, second = model.forced_logits([(ids[:1], [*ids[1:], 0]), (ids[:9], ids[9:])], **limits)
    np.testing.assert_allclose(decoded, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(second, expected[8:-1], rtol=0, atol=1e-4)


# ---- seeds and samples ---------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=42, max_tokens=24, ignore_eos=True)
PROMPT = prompts_of(TINY, (30,))[0]
MATE = prompts_of(TINY, (30, 45))[1]


def sampled(seed: int | None = None, **changes: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=24, ignore_eos=True, **changes)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Iterator[list[int]]:
    yield generate(LLM(tiny, num_gpu_blocks_override=64), [PROMPT], SEEDED)[0][0]


@pytest.mark.parametrize(
    "mates",
    [[sampled()], [sampled(7)], [sampled(42, temperature=1.5)], [sampled(), sampled(1), greedy()]],
    ids=["unseeded", "other seed", "same seed", "three"],
)
@pytest.mark.parametrize("last", [False, True])
def test_a_seed_gives_the_same_tokens_in_any_company(
    mates: list[SamplingParams], last: bool, tiny: Path, alone: list[int]
) -> None:
    llm = LLM(tiny, num_gpu_blocks_override=64, max_num_batched_tokens=16, seed=int(last))
    prompts, params = [PROMPT, *[MATE] * len(mates)], [SEEDED, *mates]
    order = slice(None, None, -1 if last else 1)
    tokens = generate(llm, prompts[order], params[order])
    assert tokens[-1 if last else 0] == [alone]


def test_a_seed_gives_the_same_tokens_after_preemption(tiny: Path, alone: list[int]) -> None:
    llm = LLM(tiny, num_gpu_blocks_override=6, watermark=0.0)
    tokens = generate(llm, [MATE, PROMPT], [sampled(), SEEDED])
    assert llm.get_stats().num_preemptions_total > 0
    assert tokens[1] == [alone]


def test_requests_without_a_seed(tiny: Path) -> None:
    """They draw theirs from the engine's: each its own, and all again in an engine made alike."""
    runs = []
    for seed in (0, 0, 1):
        llm = LLM(tiny, num_gpu_blocks_override=64, seed=seed)
        runs.append(generate(llm, [PROMPT] * 3, sampled()))
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(output) for (output,) in runs[0]}) == 3


def test_samples_are_keyed_by_seed_and_index(tiny: Path, alone: list[int]) -> None:
    """Sample i is the same for every n > i, sample 0 that of the request alone."""

    def run(n: int, seed: int, blocks: int = 64) -> list[list[int]]:
        params = SamplingParams(
            n=n, temperature=0.8, top_p=0.95, seed=seed, max_tokens=24, ignore_eos=True
        )
        llm = LLM(tiny, num_gpu_blocks_override=blocks, watermark=0.0)
        (samples,) = generate(llm, [PROMPT], params)
        assert (llm.get_stats().num_preemptions_total > 0) == (blocks < 64)
        return samples

    three = run(3, 42)
    assert three[0] == alone
    assert len({tuple(sample) for sample in three}) == 3
    assert run(2, 42) == three[:2]
    assert run(3, 42, blocks=7) == three  # with preemption after the fork
    other = run(3, 43)
    assert not any(sample in three for sample in other)


def test_every_draw_is_the_one_its_key_gives(tiny: Path) -> None:
    """Seed, sample, and position in the output, whatever was computed again after a preemption."""
    model, seen = LoadedModel(tiny), set()

    def draw(logits: NDArray[np.float32], step: StepContext) -> NDArray[np.int32]:
        sampling = step.batch.sampling
        tokens: NDArray[np.int32] = model.ops.sample(logits, step.sampling)
        for i, row in enumerate(sampling.logits_row):
            assert tokens[i] == oracle(as_list(logits[row]), sampling, i)
            key = (sampling.seed[i], sampling.sample_index[i], sampling.output_position[i])
            assert key not in seen
            seen.add(key)
        return tokens

    core = model.core(sampler=draw, num_blocks=12, block_size=8, watermark=0.0)
    for seed, n in ((11, 1), (2**63 + 5, 3)):
        params = sampled(n=n, top_p=0.9)
        core.add_request(CoreRequest(str(seed), tuple(PROMPT), params, seed=seed))
    while core.has_unfinished_requests:
        core.step()
    assert core.stats().num_preemptions_total > 0
    keys = [(11, 0), *((2**63 + 5, index) for index in range(3))]
    assert seen == {(*key, position) for key in keys for position in range(24)}


def test_samples_share_the_blocks_of_their_prompt(tiny: Path) -> None:
    """A prompt of 30 tokens: one full block for all, and a copy each of the second."""
    llm = LLM(tiny, num_gpu_blocks_override=64)
    params = SamplingParams(n=4, seed=3, max_tokens=8, ignore_eos=True)
    stream = llm.stream([{"prompt_token_ids": PROMPT}], params)
    next(stream)
    assert (llm.get_stats().num_used_blocks, llm.get_stats().num_shared_blocks) == (2, 2)
    next(stream)
    assert (llm.get_stats().num_used_blocks, llm.get_stats().num_shared_blocks) == (5, 1)
    assert [len(sample.token_ids) for sample in list(stream)[-1].outputs] == [8] * 4
    assert llm.get_stats().num_used_blocks == 0


def test_every_way_of_sampling_in_one_batch(tiny: Path) -> None:
    """Edges that other engines refuse late or crash on; each row is as it is alone."""
    params = [
        greedy(),
        sampled(5, top_k=3),
        sampled(5, top_k=-1),
        sampled(5, top_k=9_999_999),
        sampled(5, top_p=0.0),
        sampled(5, top_p=1e-9),
        sampled(5, temperature=0.0, top_p=0.0),
        sampled(5, temperature=1e30),
        sampled(5, temperature=2e-5),
    ]
    llm = LLM(tiny, num_gpu_blocks_override=64)
    together = generate(llm, [PROMPT] * len(params), params)
    for asked, tokens in zip(params, together, strict=True):
        assert generate(llm, [PROMPT], asked) == [tokens]
    assert together[2] == together[3]
    best = [output for (output,) in generate(llm, [PROMPT], greedy(24))]
    assert together[4] == together[5] == together[6] == together[8] == best
