"""Complete many prompts at once, each with parameters of its own, and print what each cost.

Run it with `python -m cupaged.examples.offline_batch [MODEL]`.
"""

from __future__ import annotations

import sys

from cupaged import LLM, SamplingParams

PROMPTS = {
    "The capital of France is": SamplingParams(temperature=0.0, max_tokens=8),
    "Once upon a time": SamplingParams(temperature=0.9, top_p=0.95, seed=1, max_tokens=20),
    "A list of colours: red,": SamplingParams(temperature=0.0, stop=["\n"], max_tokens=16),
    "Two names for a cat:": SamplingParams(n=2, temperature=0.9, seed=2, max_tokens=8),
}


def main() -> None:
    """Load, generate, print."""
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None, max_model_len=512)
    for output in llm.generate(list(PROMPTS), list(PROMPTS.values()), use_tqdm=False):
        for sample in output.outputs:
            print(f"{output.prompt!r} -> {sample.text!r} ({sample.finish_reason})")
        metrics = output.metrics
        assert metrics is not None and metrics.time_to_first_token is not None
        print(f"    first token after {1000 * metrics.time_to_first_token:.0f} ms")


if __name__ == "__main__":
    main()
