"""The text half of serving: prompts to core requests, the core's tokens to text.

It encodes prompts, draws seeds, and keeps of each request what its samples have said so far. It
holds no core and steps nothing: `Engine` uses it with a core in the same process, a server's front
end with one that is elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cupaged.engine.completion import Completion
from cupaged.engine.token_alternatives import alternatives, bad_words_token_ids
from cupaged.errors import ContextLengthError, InvalidParameterError, PromptError
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import (
    CoreOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenAlternatives,
    TokenLogprobs,
)
from cupaged.request import CoreRequest
from cupaged.sampling_params import BeamSearchParams, SamplingParams

Prompt = str | Mapping[str, Any] | Sequence[int]
_MAX_CHARS_PER_TOKEN = 1024  # a longer prompt cannot fit, whatever its tokens are


class TextShell:
    """Makes core requests of prompts.

    Args:
        tokenizer: of the model.
        max_model_len: most tokens of a sequence; texts that cannot fit are not encoded.
        eos_token_ids: ids that end an answer.
        seed: draws the seeds of requests that bring none; None for seeds that differ each time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        seed: int | None = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self._max_chars = max_model_len * _MAX_CHARS_PER_TOKEN
        self._eos_token_ids = tuple(eos_token_ids)
        self._seeds = random.Random(seed)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text, if there is one, and the token ids of a prompt.

        Args:
            prompt: a text, {"prompt": text}, {"prompt_token_ids": ids} or a list of ids.

        Raises:
            PromptError: it has another form, is empty, or is too long for any context.
        """
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys == {"prompt"}:
                return self._encode_text(prompt["prompt"])
            if keys == {"prompt_token_ids"}:
                return None, _checked_ids(prompt["prompt_token_ids"])
            raise PromptError(
                "prompt", sorted(map(str, keys)), "a mapping with 'prompt' or 'prompt_token_ids'"
            )
        if isinstance(prompt, str):
            return self._encode_text(prompt)
        return None, _checked_ids(prompt)

    def check_text(self, text: str) -> None:
        """Raises ContextLengthError for a text that is too long for any context."""
        if len(text) > self._max_chars:
            allowed = f"at most {self._max_chars}"
            raise ContextLengthError("prompt length in characters", len(text), allowed)

    def core_request(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        priority: int = 0,
        *,
        prefix_caching: bool | None = None,
        cache_salt: str | None = None,
    ) -> CoreRequest:
        """What the core takes; see `CoreRequest`.

        Raises:
            InvalidParameterError: `params` is neither, or a bad word is no text.
        """
        beams = None
        if isinstance(params, BeamSearchParams):
            beams, params = params, params.sampling_params(self._eos_token_ids)
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError("sampling_params", params, "a SamplingParams")
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        return CoreRequest(
            request_id,
            tuple(token_ids),
            params,
            self._eos_token_ids,
            seed,
            priority,
            bad_words_token_ids(self.tokenizer, params.bad_words or ()),
            prefix_caching,
            cache_salt,
            beams,
        )

    def _encode_text(self, text: object) -> tuple[str, list[int]]:
        if not isinstance(text, str):
            raise PromptError("prompt", text, "a string")
        self.check_text(text)
        token_ids = self.tokenizer.encode(text)
        if not token_ids:
            raise PromptError("prompt", text, "a text of at least one token")
        return text, token_ids


class TextRequest:
    """A request as its caller sees it: its samples as text, its times.

    Args:
        tokenizer: of the model.
        prompt: the text, if the request came as one.
        arrival_time: seconds on the clock of all times here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.completions = [
            Completion(index, tokenizer, prompt_token_ids, params) for index in range(params.n)
        ]
        self.arrival_time = arrival_time
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            None if params.prompt_logprobs is None else []
        )  # of all tokens of the prompt but the first
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._prompt_alternatives: list[TokenAlternatives | None] = [None]
        self._tokenizer = tokenizer
        self._num_unfinished = params.n

    @property
    def finished(self) -> bool:
        """True when every sample has ended."""
        return not self._num_unfinished

    def append(self, output: CoreOutput, now: float) -> FinishReason | None:
        """Take what a step has brought for one sample.

        Returns:
            None, or the reason with which the caller has to end the sample `output.index` in the
            core: a stop string ended it here, of which the core does not know.
        """
        if output.num_preemptions > self.num_preemptions:
            self.num_preemptions = output.num_preemptions
        if self.first_scheduled_time is None:
            self.first_scheduled_time = output.first_scheduled_time
            self.num_cached_tokens = output.num_cached_tokens
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += output.prompt_logprobs
        if self.first_token_time is None and output.new_token_ids:
            self.first_token_time = now
        completion = self.completions[output.index]
        if completion.finish_reason is not None:
            return None
        completion.append(output)
        if completion.finish_reason is None:
            return None
        self._num_unfinished -= 1
        return completion.finish_reason if output.finish_reason is None else None

    def append_all(
        self, outputs: Sequence[CoreOutput], now: float, end: Callable[[int, FinishReason], None]
    ) -> list[Completion]:
        """Take what several steps have brought, at the cost of one for each sample.

        Args:
            outputs: used up by the call.
            end: ends a sample in the core, for the reason that `append` would return.

        Returns:
            The samples that have moved on.
        """
        if len(outputs) == 1:  # nearly always
            return self._append_each(outputs, now, end)
        merged: dict[int, CoreOutput] = {}
        for output in outputs:
            first = merged.setdefault(output.index, output)
            if first is not output:
                first.new_token_ids += output.new_token_ids
                if first.logprobs is not None and output.logprobs is not None:
                    first.logprobs += output.logprobs
                first.prompt_logprobs = [*first.prompt_logprobs, *output.prompt_logprobs]
                first.num_preemptions = output.num_preemptions
                first.finish_reason = output.finish_reason
                first.stop_reason = output.stop_reason
        return self._append_each(merged.values(), now, end)

    def _append_each(
        self, outputs: Iterable[CoreOutput], now: float, end: Callable[[int, FinishReason], None]
    ) -> list[Completion]:
        moved = []
        for output in outputs:
            completion = self.completions[output.index]
            if completion.finish_reason is None:
                moved.append(completion)
                stopped = self.append(output, now)
                if stopped is not None:
                    end(output.index, stopped)
        return moved

    def end(self, reason: FinishReason) -> None:
        """End what has not ended; the text that was held back comes out."""
        for completion in self.completions:
            completion.end(reason)
        self._num_unfinished = 0

    def metrics(self, now: float) -> RequestMetrics:
        """The times; `now` is the end, if the request has ended."""
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=now if self.finished else None,
            num_preemptions=self.num_preemptions,
            num_cached_tokens=self.num_cached_tokens,
        )

    def output(self, now: float) -> RequestOutput:
        """All there is so far; the deltas of the next output begin here."""
        prompt_logprobs: list[TokenAlternatives | None] | None = None
        if self.prompt_logprobs is not None:
            untold = self.prompt_logprobs[len(self._prompt_alternatives) - 1 :]
            self._prompt_alternatives += [alternatives(self._tokenizer, p) for p in untold]
            prompt_logprobs = self._prompt_alternatives
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion.output() for completion in self.completions],
            finished=self.finished,
            metrics=self.metrics(now),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )


def _checked_ids(token_ids: object) -> list[int]:
    """A list of plain integers; whether they are in the vocabulary is the core's check."""
    allowed = "a string, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise PromptError("prompt", token_ids, allowed)
    for i, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int) or abs(token) >= 2**63:
            raise PromptError(f"prompt_token_ids[{i}]", token, "a token id")
    return list(token_ids)
