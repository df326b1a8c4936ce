"""How many KV blocks beams share: SmolLM2-135M-Instruct searches answers to short instructions.

A block that k sequences hold is k logical blocks and one physical one. Saved is, as in the paper,
1 - 1 / r, where r is the mean over all steps of logical blocks divided by physical ones. Prefix
caching is off, so that nothing is shared between requests. Each instruction is searched with the
model's chat template around it and without. The paper's figures beside it are of another model
(OPT-13B) and another load (Alpaca: prompts of 19 tokens and outputs of 58 on average); how early
beams part is the model's doing. Nothing is timed. Writes bench/results/beam_sharing.json.

Run it with `python bench/beam_sharing.py [--max-tokens N]`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report
from cupaged import LLM, BeamSearchParams

WIDTHS = (2, 4, 6)
PAPER = {"2": 37.6, "4": 53.1, "6": 55.2}  # percent; Kwon et al., SOSP 2023, figure 15
INSTRUCTIONS = (
    "Name three things that a bicycle needs before a long tour.",
    "Explain to a child why the moon changes its shape.",
    "Write a short thank-you note to a neighbour who watered the plants.",
    "Turn this sentence into the past tense: She walks to the station.",
    "List four uses of vinegar in the kitchen.",
    "What is the difference between a lake and a pond?",
    "Suggest a title for a story about a lost umbrella.",
    "Describe the smell of rain in two sentences.",
    "Give advice to somebody who has to speak in public for the first time.",
    "How does a thermos bottle keep tea warm?",
    "Summarise the rules of chess in a few words.",
    "Which fruits can be stored for a whole winter?",
)


def measure(llm: LLM, width: int, max_tokens: int, *, as_chat: bool) -> dict[str, Any]:
    """Search all instructions at once, and count blocks after every step."""
    engine, manager = llm.engine, llm.engine.core.block_manager
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    for i, text in enumerate(INSTRUCTIONS):
        chat = llm.render_chat([{"role": "user", "content": text}])
        engine.add_request(str(i), chat if as_chat else text, params)
    most_logical = most_physical = 0
    ratios = []
    prompts, outputs = [], []
    while engine.has_unfinished_requests:
        for output in engine.step():
            prompts.append(len(output.prompt_token_ids))
            outputs += [len(sample.token_ids) for sample in output.outputs]
        held = int(manager.ref_counts.sum())
        if held:
            ratios.append(held / manager.num_used_blocks)
        most_logical = max(most_logical, held)
        most_physical = max(most_physical, manager.num_used_blocks)
    return {
        "saved_percent": round(100 * (1 - 1 / mean(ratios)), 1),
        "most_logical_blocks": most_logical,
        "most_physical_blocks": most_physical,
        "mean_prompt_tokens": round(mean(prompts), 1),
        "mean_output_tokens": round(mean(outputs), 1),
    }


def main() -> None:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=58)
    arguments = parser.parse_args()
    most = max(WIDTHS) * len(INSTRUCTIONS)
    llm = LLM(
        max_num_seqs=most,
        enable_prefix_caching=False,
        max_model_len=512,
        num_gpu_blocks_override=most * 8,
    )
    loads: dict[str, Any] = {}
    for load in ("chat", "plain"):
        loads[load] = widths = {}
        for width in WIDTHS:
            found = measure(llm, width, arguments.max_tokens, as_chat=load == "chat")
            widths[str(width)] = found
            print(f"{load}, {width} beams: {found} (paper {PAPER[str(width)]} %)", flush=True)
    path = report.write(
        "beam_sharing",
        {
            "model": "SmolLM2-135M-Instruct",
            "requests": f"{len(INSTRUCTIONS)} short instructions, all at once",
            "block_size": llm.engine.core.config.block_size,
            "max_tokens": arguments.max_tokens,
            "loads": loads,
            "paper_saved_percent": {"model": "OPT-13B", "load": "Alpaca", **PAPER},
        },
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
