# mypy: disable-error-code="import-not-found, import-untyped"
"""Writes `beams.json`: what transformers' beam search finds with SmolLM2-135M-Instruct and a tiny
random model.

Run from the repository root as `python -m tests.golden.make_beams`, in the environment of
`make_golden`. Every length penalty meets every kind of early stopping; what ends an output is taken
from what was found without any end. Only cases whose outputs stay when all logits are moved by up
to `NOISE` are kept, since nearer choices are decided by rounding.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from tests.golden.make_golden import dump_json, tiny_model
from tests.golden.make_processors import load_smollm2
from tests.tiny_models import TINY

HERE = Path(__file__).parent
PENALTIES = (-1.0, 0.0, 0.6, 1.0, 2.0)
EARLY_STOPPING: tuple[Any, ...] = (False, True, "never")
NOISE = 2e-3
Case = dict[str, Any]


class Shaken(LogitsProcessor):  # type: ignore[misc]
    """Adds noise to the scores."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores as before, but for up to `NOISE`."""
        noise = torch.rand(scores.shape, generator=self._generator)
        return scores + (2 * noise - 1) * NOISE


def main() -> None:
    models = []
    random = np.random.default_rng(11)
    prompts = [random.integers(3, TINY.vocab_size, 21).tolist() for _ in range(8)]
    cases = cases_of(tiny_model(TINY), prompts, max_tokens=10, num_cases=30)
    models.append({"name": TINY.name, "cases": cases})
    model, _ = load_smollm2()
    golden = json.loads((HERE / "smollm2.json").read_text(encoding="utf-8"))
    prompts = [p["prompt_ids"] for p in golden["prompts"]]
    models.append(
        {"name": "smollm2", "cases": cases_of(model, prompts, max_tokens=12, num_cases=15)}
    )
    content = {
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "computed_with": "fp32, eager attention",
        "models": models,
    }
    (HERE / "beams.json").write_text(dump_json(content), encoding="utf-8")


def cases_of(
    model: Any, prompts: list[list[int]], *, max_tokens: int, num_cases: int
) -> list[Case]:
    """As many cases as wanted, in turns of prompts, widths and ends."""
    cases: list[Case] = []
    modes = list(product(PENALTIES, EARLY_STOPPING))
    for attempt in range(20 * num_cases):
        if len(cases) == num_cases:
            return cases
        prompt, width = prompts[attempt % len(prompts)], 2 + attempt % 4
        penalty, early = modes[len(cases) % len(modes)]
        case: Case = {
            "prompt_ids": prompt,
            "beam_width": width,
            "max_tokens": max_tokens,
            "length_penalty": penalty,
            "early_stopping": early,
            "eos_token_ids": [],
        }
        endless, _ = search(model, case)
        drawn = np.random.default_rng(attempt)
        tokens = [token for output in endless for token in output[:6]]
        case["eos_token_ids"] = sorted({int(t) for t in drawn.choice(tokens, 1 + attempt % 2)})
        outputs, scores = search(model, case)
        if any(
            search(model, case, LogitsProcessorList([Shaken(i)]))[0] != outputs for i in range(2)
        ):
            continue
        cases.append({**case, "outputs": outputs, "scores": [round(s, 5) for s in scores]})
        print(f"case {len(cases)}: width {width}, lengths {[len(o) for o in outputs]}")
    raise RuntimeError("too many cases are too close to ties")


def search(
    model: Any, case: Case, processors: LogitsProcessorList | None = None
) -> tuple[list[list[int]], list[float]]:
    """The outputs, best first, and their scores."""
    prompt, eos = case["prompt_ids"], case["eos_token_ids"]
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            do_sample=False,
            num_beams=case["beam_width"],
            num_return_sequences=case["beam_width"],
            max_new_tokens=case["max_tokens"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            eos_token_id=eos or None,
            pad_token_id=0,
            logits_processor=processors or LogitsProcessorList(),
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = []
    for row in found.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in eos]
        outputs.append(row[: ends[0] + 1] if ends else row)
    return outputs, found.sequences_scores.tolist()


if __name__ == "__main__":
    main()
