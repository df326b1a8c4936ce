"""Log probabilities of generated tokens, and outputs that are told in advance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.llm import LLM
from cupaged.outputs import CompletionOutput
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests.e2e.logprob_oracle import CLOSE, as_told, ask, check_output, reference_logprobs, run
from tests.e2e.tiny_llm import PROMPT, check_idle, params
from tests.forced import LoadedModel
from tests.tiny_models import EOS_ID, TINY, write_hf_folder

IDS = np.random.default_rng(23).integers(3, 509, 30).tolist()
# Whatever a request asks of its logits, the model's own are reported.
ASKING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "zero": {"logprobs": 0},
    "hot": {"temperature": 3.0, "top_k": 40},
    "edited": {
        "temperature": 0.7,
        "repetition_penalty": 1.8,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "logit_bias": {7: 4.5, 8: -30},
        "min_p": 0.05,
    },
    "limited": {"temperature": 1, "allowed_token_ids": [40, 41, 42, 43], "top_p": 0.9},
    "three": {"temperature": 1, "n": 3, "min_tokens": 24, "stop_token_ids": [9]},
    "traced": {"temperature": 1, "trace_decode_token_ids": [3, 3, 5, 500]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return LoadedModel(folder)


@pytest.fixture(scope="module")
def shared_llm(folder: Path) -> LLM:
    return LLM(folder, num_gpu_blocks_override=32, max_model_len=128)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Whatever a test did, nothing is left of it."""
    yield shared_llm
    check_idle(shared_llm)


def requests() -> list[CoreRequest]:
    """One of each, with prompts of different lengths, and one that does not ask."""
    found = []
    for i, (name, how) in enumerate(ASKING.items()):
        fields: dict[str, Any] = {"logprobs": 4, "max_tokens": 24, **how}
        found.append(ask(name, IDS[: 3 + 4 * i], seed=i, **fields))
    return [*found, ask("silent", IDS[:9], max_tokens=24)]


# ---- in any company ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 10},
        {"block_size": 4, "num_blocks": 24, "watermark": 0.0},
        {"max_num_seqs": 3},
    ],
    ids=str,
)
def test_logprobs_are_the_models_own_in_any_batch(
    limits: dict[str, Any], model: LoadedModel
) -> None:
    core = model.core(**limits)
    asked = requests()
    together = run(core, *asked)
    assert (core.stats().num_preemptions_total > 0) == ("num_blocks" in limits)
    assert "silent" not in {request_id for request_id, _ in together.logprobs}
    for each in asked[:-1]:
        for i in range(each.params.n):
            key = (each.request_id, i)
            told, output = together.logprobs[key], together.tokens[key]
            assert len(output) == 24
            count = each.params.logprobs or 0
            check_output("tiny", told, each.prompt_token_ids, output, count)


def test_logprobs_of_a_batch_are_those_of_each_alone(model: LoadedModel) -> None:
    asked = requests()
    together = run(model.core(), *asked)
    for each in asked:
        alone = run(model.core(), each)
        for key, tokens in alone.tokens.items():
            assert together.tokens[key] == tokens
            for one, two in zip(
                alone.logprobs.get(key, ()), together.logprobs.get(key, ()), strict=True
            ):
                np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=CLOSE)


# ---- what a user sees ----------------------------------------------------------------------------


def complete(llm: LLM, **changes: Any) -> CompletionOutput:
    return llm.generate(PROMPT, params(**changes), use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_each_token_comes_first_with_its_text(count: int, llm: LLM) -> None:
    for how in ({}, {"temperature": 1.5, "seed": 1}):
        sample = complete(llm, logprobs=count, **how)
        told = sample.logprobs
        assert told is not None and len(told) == len(sample.token_ids)
        for token, position in zip(sample.token_ids, told, strict=True):
            first, rank = next(iter(position)), position[token].rank
            assert first == token and rank is not None
            assert len(position) == (count if rank <= count else count + 1)
            ranks = [entry.rank for each, entry in position.items() if each != token]
            assert ranks == [r for r in range(1, count + 1) if r != rank]
            for each, entry in position.items():
                text = llm.get_tokenizer().decode([each], skip_special_tokens=False)
                assert entry.decoded_token == text
        prompt = llm.get_tokenizer().encode(PROMPT)
        check_output("tiny", [as_told(p, count) for p in told], prompt, sample.token_ids, count)
        total = sum(p[t].logprob for p, t in zip(told, sample.token_ids, strict=True))
        assert sample.cumulative_logprob == pytest.approx(total)
        rows = reference_logprobs("tiny", (*prompt, *sample.token_ids))[len(prompt) - 1 : -1]
        drawn = np.take_along_axis(rows, np.array(sample.token_ids)[:, None], axis=1)
        assert sample.cumulative_logprob == pytest.approx(drawn.sum(), abs=1e-3)


def test_who_does_not_ask_is_told_nothing(llm: LLM) -> None:
    sample = complete(llm)
    assert (sample.logprobs, sample.cumulative_logprob) == (None, None)


def test_the_special_tokens_have_their_texts(llm: LLM) -> None:
    sample = complete(llm, logprobs=0, allowed_token_ids=[EOS_ID], max_tokens=1)
    assert sample.logprobs is not None and sample.text == ""
    assert sample.logprobs[0][EOS_ID].decoded_token == "<|im_end|>"


def test_a_stream_tells_them_one_by_one(llm: LLM) -> None:
    """Each output has the positions so far, and none of them changes later."""
    outputs = list(llm.stream(PROMPT, params(logprobs=2, max_tokens=6)))
    last = outputs[-1].outputs[0].logprobs
    assert last is not None
    for i, output in enumerate(outputs, 1):
        assert output.outputs[0].logprobs == last[:i]
        total = sum(next(iter(position.values())).logprob for position in last[:i])
        assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_a_stop_string_ends_them_with_the_tokens(llm: LLM) -> None:
    full = complete(llm, logprobs=1)
    stopped = complete(llm, logprobs=1, stop=full.text[9:12])
    assert stopped.finish_reason == "stop" and full.logprobs is not None
    assert stopped.logprobs == full.logprobs[: len(stopped.token_ids)]
    aborted: list[CompletionOutput] = []
    for output in llm.stream(PROMPT, params(logprobs=1)):
        if len(output.outputs[0].token_ids) == 5:
            llm.abort(output.request_id)
        aborted = output.outputs
    assert aborted[0].finish_reason == "abort"
    assert aborted[0].logprobs == full.logprobs[:5]


# ---- outputs told in advance ---------------------------------------------------------------------


def test_a_trace_is_forced_with_real_logprobs_and_then_goes_on(model: LoadedModel) -> None:
    trace = [500, 3, 3, 77, 400]
    how: dict[str, Any] = {"max_tokens": 12, "logprobs": 3, "trace_decode_token_ids": trace}
    found = run(model.core(), ask("a", IDS, **how))
    output = found.tokens["a", 0]
    assert output[:5] == trace and len(output) == 12
    check_output("tiny", found.logprobs["a", 0], IDS, output, 3)
    after = run(model.core(), ask("a", [*IDS, *trace], max_tokens=7))
    assert after.tokens["a", 0] == output[5:]


def test_an_output_traced_by_itself_is_the_same(model: LoadedModel) -> None:
    """Forced or drawn: the draws that follow are those of their place in the output."""
    how: dict[str, Any] = {"temperature": 1, "max_tokens": 16, "logprobs": 1, "seed": 9}
    drawn = run(model.core(), ask("a", IDS, **how))
    for known in (1, 7, 15, 16, 20):
        trace = (drawn.tokens["a", 0] * 2)[:known]
        again = run(model.core(), ask("a", IDS, **how, trace_decode_token_ids=trace))
        assert again.tokens == drawn.tokens


def test_a_trace_in_samples_and_after_preemption(model: LoadedModel) -> None:
    how: dict[str, Any] = {"max_tokens": 20, "logprobs": 2, "temperature": 1, "n": 3}
    trace = [*range(100, 112)]
    asked = ask("a", IDS[:9], **how, trace_decode_token_ids=trace)
    roomy = run(model.core(), asked)
    core = model.core(block_size=4, num_blocks=10, watermark=0.0)
    tight = run(core, asked)
    assert core.stats().num_preemptions_total > 0
    assert tight.tokens == roomy.tokens
    assert len({tuple(roomy.tokens["a", i]) for i in range(3)}) == 3
    for i in range(3):
        assert roomy.tokens["a", i][:12] == trace
        check_output("tiny", tight.logprobs["a", i], IDS[:9], roomy.tokens["a", i], 2)


def test_a_trace_is_stronger_than_every_rule_but_stopping(model: LoadedModel) -> None:
    trace = [5, 6, 5, 9, 7]
    asked = ask("a", IDS[:4], max_tokens=20, logprobs=0, trace_decode_token_ids=trace)
    rules: dict[str, Any] = {
        "allowed_token_ids": [300, 301],
        "logit_bias": {5: -100},
        "repetition_penalty": 9,
        "stop_token_ids": [9],
        "min_tokens": 2,
    }
    ruled = replace(
        asked,
        params=replace(asked.params, **rules),
        bad_words_token_ids=((6,), (5, 6)),
    )
    found = run(model.core(), ruled)
    assert found.tokens["a", 0] == [5, 6, 5, 9]
    assert found.reasons["a", 0] == "stop"
    check_output("tiny", found.logprobs["a", 0], IDS[:4], [5, 6, 5, 9], 0)
    early = replace(asked, params=replace(asked.params, stop_token_ids=[5, 6], min_tokens=2))
    assert run(model.core(), early).tokens["a", 0] == [5, 6]
    ended = replace(asked, eos_token_ids=(5,), params=replace(asked.params, ignore_eos=False))
    assert run(model.core(), ended).tokens["a", 0] == [5]
    short = replace(asked, params=replace(asked.params, max_tokens=2))
    assert run(model.core(), short).tokens["a", 0] == [5, 6]


def test_a_trace_as_text(llm: LLM) -> None:
    """The text of the forced tokens, with what the model would say of it."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Hello, world!")
    (output,) = llm.generate(
        PROMPT,
        SamplingParams(trace_decode_token_ids=ids, max_tokens=len(ids), logprobs=0),
        use_tqdm=False,
    )
    (sample,) = output.outputs
    assert (sample.text, sample.token_ids) == ("Hello, world!", ids)
    assert sample.logprobs is not None
    assert "".join(str(p[t].decoded_token) for p, t in zip(sample.logprobs, ids, strict=True)) == (
        "Hello, world!"
    )
