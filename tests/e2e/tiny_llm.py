"""Short ways to ask a tiny model, and the check that a request has left nothing behind."""

from __future__ import annotations

from typing import Any

from cupaged.llm import LLM
from cupaged.outputs import CompletionOutput
from cupaged.sampling_params import SamplingParams

PROMPT = "The memory of a process"
OTHER = "def add(first, second):\n"
NUM_TOKENS = 24


def params(**changes: Any) -> SamplingParams:
    """Greedy, and as many tokens as asked for."""
    fields = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **changes}
    return SamplingParams(**fields)


def complete(llm: LLM, prompt: Any = PROMPT, **changes: Any) -> CompletionOutput:
    """The first sample of one prompt."""
    return llm.generate(prompt, params(**changes), use_tqdm=False)[0].outputs[0]


def check_idle(llm: LLM) -> None:
    """Nothing runs, nothing waits, and every block is free."""
    stats = llm.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (0, 0, 0)
    assert (stats.num_used_blocks, stats.num_shared_blocks) == (0, 0)
    assert not llm.engine.has_unfinished_requests
    llm.engine.core.audit()
