"""Cached prefixes end to end on `cpu`: what is found, and that it changes no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.errors import InvalidParameterError, PromptError
from cupaged.llm import LLM
from cupaged.request import CoreRequest
from cupaged.sampling_params import BeamSearchParams, SamplingParams
from tests.e2e.tiny_llm import check_idle, params
from tests.forced import LoadedModel, RecordingSampler
from tests.tiny_models import TINY, write_hf_folder

BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="module", params=["radix", "hash"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(
        folder, device="cpu", num_gpu_blocks_override=64, max_model_len=256,
        prefix_cache=request.param, chat_template="{{ messages[0].content }}",
    )  # fmt: skip


def ids(seed: int, length: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(3, TINY.vocab_size, length).tolist()
    return drawn


def logits_one_after_another(
    model: LoadedModel, runs: list[tuple[list[int], list[int]]], *, caching: bool
) -> tuple[list[np.ndarray], int]:
    """Logits of forced tokens, and the tokens that were found in the cache."""
    sampler = RecordingSampler(len(runs), model.ops, model.to_host)
    core = model.core(sampler=sampler, block_size=BLOCK, enable_prefix_caching=caching)
    for i, (prompt, forced) in enumerate(runs):
        forcing = SamplingParams(
            temperature=0, max_tokens=len(forced), ignore_eos=True, trace_decode_token_ids=forced
        )
        core.add_request(CoreRequest(str(i), tuple(prompt), forcing, seed=i))
        while core.has_unfinished_requests:
            core.step()
            core.audit()
    return [sampler.logits_of(i) for i in range(len(runs))], core.stats().prefix_cache_hits_total


def test_log_probabilities_with_and_without_hits(folder: Path) -> None:
    model = LoadedModel(folder)
    shared = ids(0, 70)
    runs = [
        (shared, ids(1, 6)),
        (shared, ids(2, 6)),
        ([*shared[:64], *ids(3, 9)], ids(4, 6)),
        ([*shared, *ids(1, 6), *ids(5, 20)], ids(6, 6)),
    ]
    found, hits = logits_one_after_another(model, runs, caching=True)
    computed, none = logits_one_after_another(model, runs, caching=False)
    assert (hits, none) == (64 + 64 + 64, 0)
    for ours, theirs in zip(found, computed, strict=True):
        normal = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (ours, theirs)]
        assert np.abs(normal[0] - normal[1]).max() < 1e-4


def test_outputs_say_what_was_cached(folder: Path) -> None:
    llm = LLM(folder, device="cpu", num_gpu_blocks_override=64, max_model_len=256)
    prompt = {"prompt_token_ids": ids(7, 50)}
    outputs = [llm.generate(prompt, params(max_tokens=4), use_tqdm=False)[0] for _ in range(2)]
    assert [o.num_cached_tokens for o in outputs] == [0, 48]
    assert outputs[1].metrics is not None and outputs[1].metrics.num_cached_tokens == 48
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert llm.reset_prefix_cache()
    again = llm.generate(prompt, params(max_tokens=4), use_tqdm=False)[0]
    assert again.num_cached_tokens == 0
    told = llm.generate(prompt, params(max_tokens=4, prompt_logprobs=1), use_tqdm=False)[0]
    assert told.num_cached_tokens == 0
    assert told.prompt_logprobs is not None and len(told.prompt_logprobs) == 50
    check_idle(llm)


def test_an_engine_without_a_cache(folder: Path) -> None:
    llm = LLM(
        folder, device="cpu", num_gpu_blocks_override=64, max_model_len=256,
        enable_prefix_caching=False,
    )  # fmt: skip
    prompt = {"prompt_token_ids": ids(7, 50)}
    outputs = [llm.generate(prompt, params(max_tokens=2), use_tqdm=False)[0] for _ in range(2)]
    assert [o.num_cached_tokens for o in outputs] == [0, 0]


def test_a_prompt_may_bring_a_salt(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": ids(9, 40)}
    salts = [None, "a", "b", "a", ""]
    found = [
        llm.generate({**prompt, "cache_salt": salt}, params(max_tokens=1), use_tqdm=False)[0]
        for salt in salts
    ]
    assert [o.num_cached_tokens for o in found] == [0, 0, 0, 32, 32]
    (streamed,) = list(llm.stream({**prompt, "cache_salt": "b"}, params(max_tokens=1)))
    assert streamed.num_cached_tokens == 32
    with pytest.raises(InvalidParameterError, match="cache_salt"):
        llm.generate({**prompt, "cache_salt": 5}, use_tqdm=False)
    with pytest.raises(PromptError):
        llm.generate({"cache_salt": "a"}, use_tqdm=False)
    check_idle(llm)


def test_a_prompt_may_opt_out(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": ids(9, 40)}
    short = params(max_tokens=1)

    def found(**changes: Any) -> list[int]:
        outputs = llm.generate([prompt], short, use_tqdm=False, **changes)
        return [o.num_cached_tokens for o in outputs]

    assert found(prefix_caching=False) == [0]  # and it leaves nothing:
    assert found(prefix_caching=[None]) == [0]
    assert found(prefix_caching=True) == [32]
    assert found(prefix_caching=False) == [0]
    assert [o.num_cached_tokens for o in llm.stream(prompt, short, prefix_caching=False)] == [0]
    beams = BeamSearchParams(beam_width=2, max_tokens=2)
    for wanted, tokens in ((False, 0), (None, 32)):
        (searched,) = llm.beam_search(prompt, beams, use_tqdm=False, prefix_caching=wanted)
        assert searched.num_cached_tokens == tokens
    with pytest.raises(InvalidParameterError, match=r"prefix_caching must .* got 'no'"):
        found(prefix_caching="no")
    with pytest.raises(InvalidParameterError, match="number of prefix_caching"):
        found(prefix_caching=[None, False])
    with pytest.raises(InvalidParameterError, match="prefix_caching"):
        found(prefix_caching="no")
    check_idle(llm)


def test_chats_share_their_beginnings_by_salt(llm: LLM) -> None:
    llm.reset_prefix_cache()
    chat = [{"role": "user", "content": "How is memory shared, and with whom? " * 3}]
    short = params(max_tokens=1)

    def found(**changes: Any) -> bool:
        (output,) = llm.chat(chat, short, use_tqdm=False, **changes)
        return output.num_cached_tokens > 0

    assert [found(), found(), found(cache_salt="a"), found(cache_salt="a")] == [
        False, True, False, True,
    ]  # fmt: skip
    assert not found(prefix_caching=False)
    check_idle(llm)
