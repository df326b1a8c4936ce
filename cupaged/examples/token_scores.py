"""How likely a text is to a model, token by token, and what the model would have said instead.

Run it with `python -m cupaged.examples.token_scores [MODEL]`.
"""

from __future__ import annotations

import sys

from cupaged import LLM, SamplingParams

TEXT = "The sun rises in the east and sets in the west."


def main() -> None:
    """Load, score, print."""
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None, max_model_len=512)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    output = llm.generate(TEXT, params, use_tqdm=False)[0]
    total = 0.0
    for token_id, told in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
        if told is None:
            continue  # nothing stands before the first token
        own = told[token_id]
        likeliest = max(told.values(), key=lambda t: t.logprob)
        print(f"{own.decoded_token!r:12} {own.logprob:8.3f}  rank {own.rank:5}", end="")
        print("" if own.rank == 1 else f"  likeliest: {likeliest.decoded_token!r}")
        total += own.logprob
    print(f"log probability of the whole text: {total:.2f}")


if __name__ == "__main__":
    main()
