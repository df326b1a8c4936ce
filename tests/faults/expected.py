"""What a server has to answer: the tokens and texts of an undisturbed run, in one process.

Prompts whose likeliest tokens are nearly as likely as others are left out, so that rounding decides
nothing. All that is asked of a prompt is the beginning of its longest answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cupaged.llm import LLM
from cupaged.outputs import CompletionOutput
from cupaged.sampling_params import SamplingParams

_WORDS = ("memory", "of", "a", "process", "page", "frame", "keys", "values", "block", "table")
_MARGIN = 1e-3  # of log probabilities; they agree to 1e-4
_HALF_CHARACTER = "\ufffd"
_TRIED = 2  # times as many prompts as are wanted


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and its longest answer."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str

    def begins_with(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether that may have come of it so far: ids or a text, what is empty tells nothing."""
        is_beginning = self.token_ids[: len(token_ids)] == (*token_ids,)
        whole = text.rstrip(_HALF_CHARACTER)  # a shorter answer may end in the middle of one
        return is_beginning and self.text.startswith(whole)


def expected_answers(model: str, *, number: int, num_tokens: int, seed: int) -> list[Answer]:
    """So many prompts with what a model folder answers to them, greedily.

    Args:
        num_tokens: of the longest answer; exactly as many.
    """
    draw = random.Random(seed)
    lengths = [draw.randint(3, 60) for _ in range(_TRIED * number)]
    prompts = [" ".join(draw.choices(_WORDS, k=length)) for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    outputs = LLM(model, device="cpu").generate(prompts, params, use_tqdm=False)
    answers = [
        Answer(prompt, (*output.prompt_token_ids,), (*one.token_ids,), one.text)
        for prompt, output in zip(prompts, outputs, strict=True)
        if _is_clear(one := output.outputs[0])
    ]
    assert len(answers) >= number, f"only {len(answers)} of {len(prompts)} prompts are clear"
    return answers[:number]


def _is_clear(output: CompletionOutput) -> bool:
    """Whether every token was likelier than the next one by far."""
    assert output.logprobs is not None
    likeliest = (sorted(p.values(), key=lambda told: -told.logprob)[:2] for p in output.logprobs)
    return all(first.logprob - second.logprob > _MARGIN for first, second in likeliest)
