"""Urgent requests overtake others that wait, but nobody waits for ever.

Run it with `python -m cupaged.examples.priorities [MODEL]`.
"""

from __future__ import annotations

import sys

from cupaged import LLM, SamplingParams

PROMPTS = ("A report about rain:", "A report about snow:", "A report about wind:", "Alarm!")
PRIORITIES = (5, 5, 5, 0)  # lower comes first


def main() -> None:
    """Load, generate two at a time, print who began when."""
    model = sys.argv[1] if len(sys.argv) > 1 else None
    llm = LLM(model, max_model_len=512, max_num_seqs=2, scheduling_policy="priority")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False, priority=PRIORITIES)
    waits = {o.prompt: o.metrics.queue_time for o in outputs if o.metrics is not None}
    for prompt in sorted(PROMPTS, key=lambda p: waits[p] or 0.0):
        print(f"{prompt:24} waited {1000 * (waits[prompt] or 0.0):6.0f} ms")


if __name__ == "__main__":
    main()
