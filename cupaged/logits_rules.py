"""What a request asks of its logits before anything is drawn, prepared once when it arrives.

Penalties, biases, bans and allowed sets are those of vLLM's `SamplingParams`. The arrays here are
ready for the batch page, which turns the rules of all rows of a step into flat lists of edits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cupaged.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """The rules of one request.

    bias_ids, bias_values: added to the logits of those tokens.
    allowed_ids: only these may be drawn; empty for no such limit.
    repetition: divides positive and multiplies negative logits of tokens in prompt or output.
    presence, frequency: taken off the logits of tokens in the output, once and for each time.
    early_ids: not drawn before `min_tokens` tokens are.
    bad_words: token sequences whose last token is not drawn after the others.
    """

    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    allowed_ids: NDArray[np.int32]
    repetition: float
    presence: float
    frequency: float
    early_ids: NDArray[np.int32]
    min_tokens: int
    bad_words: tuple[tuple[int, ...], ...]

    def banned_after(self, output_ids: Sequence[int]) -> list[int]:
        """Last tokens of the bad words whose other tokens the output ends with."""
        return [
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or tuple(output_ids[-len(word) + 1 :]) == word[:-1]
        ]


def rules_of(
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    bad_words_token_ids: Sequence[Sequence[int]],
) -> LogitsRules | None:
    """The rules that the parameters ask for, or None if the logits stay as they are."""
    ending = {*params.stop_ids, *(() if params.ignore_eos else eos_token_ids)}
    asks = (
        params.logit_bias
        or params.allowed_token_ids
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or (params.min_tokens and ending)
        or bad_words_token_ids
    )
    if not asks:
        return None
    bias = params.logit_bias or {}
    return LogitsRules(
        bias_ids=np.array([*bias], np.int32),
        bias_values=np.array([*bias.values()], np.float32),
        allowed_ids=np.unique(np.array(params.allowed_token_ids or (), np.int32)),
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        early_ids=np.array(sorted(ending), np.int32),
        min_tokens=params.min_tokens,
        bad_words=tuple(tuple(word) for word in bad_words_token_ids),
    )
