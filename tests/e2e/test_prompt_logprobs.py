"""Log probabilities of prompt tokens: the same in any chunks, at any block edge, and after anything
that makes a prompt be computed again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.llm import LLM
from cupaged.ops import StepContext
from cupaged.outputs import TokenLogprobs
from cupaged.sampling_params import SamplingParams
from tests.e2e.logprob_oracle import CLOSE, SPECS, as_told, ask, check_output, check_prompt, run
from tests.forced import LoadedModel
from tests.tiny_models import TINY, write_hf_folder

EDGES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17)  # of blocks of 4 tokens


@pytest.fixture(scope="module", params=list(SPECS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("models") / request.param
    return LoadedModel(write_hf_folder(path, SPECS[request.param]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tiny", TINY)


def name_of(model: LoadedModel) -> str:
    return {spec.hidden_size: name for name, spec in SPECS.items()}[model.files.config.hidden_size]


def prompt_of(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(3, 509, length)]


def check_close(first: list[TokenLogprobs], second: list[TokenLogprobs]) -> None:
    """Equal but for what another order of summation makes of the numbers."""
    assert [p.token_ids[0] for p in first] == [p.token_ids[0] for p in second]
    for one, two in zip(first, second, strict=True):
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_prompts_of_every_edge_twice_equal_the_reference(
    chunk: int, count: int, model: LoadedModel
) -> None:
    """Together, and then the same again in the same pool."""
    core = model.core(block_size=4, max_num_batched_tokens=chunk)
    requests = [ask(str(n), prompt_of(n), prompt_logprobs=count) for n in EDGES]
    first, second = run(core, *requests), run(core, *requests)
    for length in EDGES:
        for found in (first, second):
            told = found.prompt_logprobs.get(str(length), [])
            check_prompt(name_of(model), told, prompt_of(length), count)
            check_close(told, first.prompt_logprobs.get(str(length), []))
    assert first.tokens == second.tokens


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_same_in_any_chunks(chunk: int, tiny: Path) -> None:
    """A prompt of 64 tokens beside others that decode, and beside one that does not ask."""
    model = LoadedModel(tiny)
    prompt = prompt_of(64)
    (whole,) = run(model.core(), ask("a", prompt, prompt_logprobs=3)).prompt_logprobs.values()
    core = model.core(max_num_batched_tokens=chunk + 2, long_prefill_token_threshold=chunk)
    found = run(
        core,
        ask("decoding", prompt_of(3), max_tokens=80),
        ask("other", prompt_of(40), prompt_logprobs=1),
        ask("a", prompt, prompt_logprobs=3, max_tokens=5),
        ask("silent", prompt_of(41)),
    )
    assert set(found.prompt_logprobs) == {"other", "a"}
    check_close(found.prompt_logprobs["a"], whole)
    check_prompt("tiny", found.prompt_logprobs["other"], prompt_of(40), 1)


def test_more_rows_than_there_is_room_for_logits(tiny: Path) -> None:
    """Logits are computed a few rows at a time: here 3, of prompts that end anywhere in them."""
    core = LoadedModel(tiny).core(max_num_seqs=3, max_num_batched_tokens=200)
    lengths = (10, 1, 33)
    found = run(core, *(ask(str(n), prompt_of(n), prompt_logprobs=n % 4) for n in lengths))
    for length in lengths:
        told = found.prompt_logprobs.get(str(length), [])
        check_prompt("tiny", told, prompt_of(length), length % 4)


@pytest.mark.parametrize("chunk", [4, 7])
def test_a_prompt_that_is_preempted_in_its_middle(chunk: int, tiny: Path) -> None:
    """What is known already is not asked for again, and what follows is the same."""
    core = LoadedModel(tiny).core(
        block_size=4, num_blocks=16, max_num_batched_tokens=chunk + 2, watermark=0.0,
        long_prefill_token_threshold=chunk,
    )  # fmt: skip
    for request_id, length, tokens in (("a", 9, 40), ("b", 5, 40), ("c", 40, 3)):
        core.add_request(ask(request_id, prompt_of(length), max_tokens=tokens, prompt_logprobs=2))
    request = core._requests["c"]
    halfway = []
    found = None
    while core.has_unfinished_requests:
        before = request.num_preemptions
        for output in core.step():
            if output.request_id == "c" and output.prompt_logprobs:
                found = output.prompt_logprobs
        core.audit()
        if request.num_preemptions > before:
            halfway.append(len(request.prompt_logprobs))
    assert any(0 < num_known < 39 for num_known in halfway)
    assert found is not None
    check_prompt("tiny", found, prompt_of(40), 2)


def test_samples_share_one_report(tiny: Path) -> None:
    """It comes once, with the first sample there is, whatever becomes of the others."""
    model, prompt = LoadedModel(tiny), prompt_of(9)
    how: dict[str, Any] = {"prompt_logprobs": 2, "temperature": 1, "max_tokens": 12}
    tight: dict[str, Any] = {"num_blocks": 8, "block_size": 4, "watermark": 0.0}
    for limits in ({}, tight):
        core = model.core(**limits)
        found = run(core, ask("a", prompt, n=3, **how))
        check_prompt("tiny", found.prompt_logprobs["a"], prompt, 2)
        assert [len(found.tokens["a", i]) for i in range(3)] == [12] * 3
        assert (core.stats().num_preemptions_total > 0) == bool(limits)
    core = model.core(max_num_batched_tokens=4)
    core.add_request(ask("a", prompt, n=3, **how))
    core.step()
    assert core.abort("a", 0)
    found = run(core)
    assert set(found.tokens) == {("a", 1), ("a", 2)}
    check_prompt("tiny", found.prompt_logprobs["a"], prompt, 2)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_sample_that_fails_at_once_takes_no_report_along(failing: int, tiny: Path) -> None:
    """Its logits are not numbers: it has neither tokens nor their logprobs, the others have all."""
    model, prompt = LoadedModel(tiny), prompt_of(9)

    def draw(logits: Any, step: StepContext) -> Any:
        tokens = model.ops.sample(logits, step.sampling)
        return np.where(step.batch.sampling.sample_index == failing, -1, tokens)

    how: dict[str, Any] = {"n": 3, "temperature": 1, "max_tokens": 4, "logprobs": 1}
    found = run(model.core(sampler=draw), ask("a", prompt, prompt_logprobs=2, **how))
    check_prompt("tiny", found.prompt_logprobs["a"], prompt, 2)
    for i in range(3):
        length, reason = (0, "error") if i == failing else (4, "length")
        assert (len(found.tokens["a", i]), found.reasons["a", i]) == (length, reason)
        check_output("tiny", found.logprobs["a", i], prompt, found.tokens["a", i], 1)


def test_what_a_user_sees(tiny: Path) -> None:
    """An entry a prompt token, None for the first, with the texts of the tokens."""
    llm = LLM(tiny, num_gpu_blocks_override=64)
    prompts: Any = [{"prompt_token_ids": prompt_of(n)} for n in (1, 9, 33)]
    how: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 2}
    for n in (1, 3):
        params = SamplingParams(n=n, prompt_logprobs=4, **how)
        for output in llm.generate(prompts, params, use_tqdm=False):
            ids, told = output.prompt_token_ids, output.prompt_logprobs
            assert told is not None and len(told) == len(ids) and told[0] is None
            known = [position for position in told if position is not None]
            assert len(known) == len(ids) - 1
            check_prompt("tiny", [as_told(position, 4) for position in known], ids, 4)
            for token, position in zip(ids[1:], known, strict=True):
                assert next(iter(position)) == token
                assert len(position) == (4 if (position[token].rank or 9) <= 4 else 5)
                for each, entry in position.items():
                    text = llm.get_tokenizer().decode([each], skip_special_tokens=False)
                    assert entry.decoded_token == text
            assert all(sample.logprobs is None for sample in output.outputs)
    (plain,) = llm.generate(prompts[1], SamplingParams(**how), use_tqdm=False)
    assert plain.prompt_logprobs is None


def test_the_whole_vocabulary(tiny: Path) -> None:
    llm = LLM(tiny, num_gpu_blocks_override=64, max_logprobs=509)
    prompts: Any = {"prompt_token_ids": prompt_of(5)}
    params = SamplingParams(prompt_logprobs=-1, max_tokens=1)
    (output,) = llm.generate(prompts, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    for position in output.prompt_logprobs[1:]:
        assert position is not None and sorted(position) == [*range(509)]
        total = sum(np.exp(entry.logprob) for entry in position.values())
        np.testing.assert_allclose(total, 1, atol=1e-4)
