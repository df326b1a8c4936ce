"""The text shell around the engine core: prompts to token ids, token ids to text.

It tokenises, detokenises incrementally, matches stop strings and keeps times. Scheduling, memory
and sampling are the core's. One `step` here is one step there.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cupaged.engine.completion import Completion
from cupaged.engine.core import EngineCore
from cupaged.engine.token_alternatives import alternatives, bad_words_token_ids
from cupaged.errors import InvalidParameterError, PromptError
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import FinishReason, RequestMetrics, RequestOutput, TokenAlternatives
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any] | Sequence[int]
_MAX_CHARS_PER_TOKEN = 1024  # a longer prompt cannot fit, whatever its tokens are
_logger = logging.getLogger(__name__)


class Engine:
    """Requests of text in, growing `RequestOutput`s out.

    Args:
        core: does the work on token ids.
        tokenizer: of the model.
        eos_token_ids: ids that end an answer.
        generation_defaults: fields of `SamplingParams` for requests that bring none.
        seed: draws the seeds of requests that bring none.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        generation_defaults: Mapping[str, Any] = MappingProxyType({}),
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self.generation_defaults = dict(generation_defaults)
        self._seeds = random.Random(seed)
        self._clock = clock
        self._requests: dict[str, _TextRequest] = {}

    @property
    def has_unfinished_requests(self) -> bool:
        """True while `step` will bring something."""
        return bool(self._requests)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0
    ) -> None:
        """Queue a request.

        Args:
            prompt: a text, {"prompt": text}, {"prompt_token_ids": ids} or a list of ids.
            priority: lower is served earlier, where the engine's policy is "priority".

        Raises:
            PromptError, InvalidParameterError, CapacityError: it cannot be served; nothing changed.
            QueueFullError: too much waits already; nothing changed.
        """
        arrival_time = self._clock()
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError("sampling_params", params, "a SamplingParams")
        text, token_ids = self._encode(prompt)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        self.core.add_request(
            CoreRequest(
                request_id,
                tuple(token_ids),
                params,
                self._eos_token_ids,
                seed,
                priority,
                bad_words_token_ids(self.tokenizer, params.bad_words or ()),
            )
        )
        completions = [Completion(i, self.tokenizer, token_ids, params) for i in range(params.n)]
        request = _TextRequest(request_id, text, token_ids, completions, arrival_time)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        self._requests[request_id] = request

    def step(self) -> list[RequestOutput]:
        """Make one step; the outputs are of the requests that it moved on.

        Raises:
            EngineError: the step failed. Its requests are lost, the others can go on.
        """
        try:
            core_outputs = self.core.step()
        except BaseException:
            self._requests = {i: r for i, r in self._requests.items() if self.core.holds(i)}
            raise
        now = self._clock()
        moved: dict[str, _TextRequest] = {}
        for output in core_outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            moved[output.request_id] = request
            request.num_preemptions = output.num_preemptions
            request.first_scheduled_time = output.first_scheduled_time
            if request.prompt_logprobs is not None:
                told = [alternatives(self.tokenizer, p) for p in output.prompt_logprobs]
                request.prompt_logprobs += told
            if request.first_token_time is None and output.new_token_ids:
                request.first_token_time = now
            completion = request.completions[output.index]
            completion.append(output)
            if completion.finish_reason is not None and output.finish_reason is None:
                # A stop string ended it: the core does not know yet.
                self.core.abort(output.request_id, output.index, reason=completion.finish_reason)
        return [self._output(request, now) for request in moved.values()]

    def abort(self, request_id: str, *, reason: FinishReason = "abort") -> RequestOutput | None:
        """End a request and give its last output, or None if it is not unfinished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self.core.abort(request_id, reason=reason)
        for completion in request.completions:
            completion.end(reason)
        return self._output(request, self._clock())

    def _output(self, request: _TextRequest, now: float) -> RequestOutput:
        finished = all(c.finish_reason is not None for c in request.completions)
        if finished:
            del self._requests[request.request_id]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[c.output() for c in request.completions],
            finished=finished,
            metrics=RequestMetrics(
                arrival_time=request.arrival_time,
                first_scheduled_time=request.first_scheduled_time,
                first_token_time=request.first_token_time,
                finished_time=now if finished else None,
                num_preemptions=request.num_preemptions,
            ),
            prompt_logprobs=request.prompt_logprobs,
        )

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text, if there is one, and the token ids of a prompt."""
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

    def _encode_text(self, text: object) -> tuple[str, list[int]]:
        if not isinstance(text, str):
            raise PromptError("prompt", text, "a string")
        longest = self.core.config.max_model_len * _MAX_CHARS_PER_TOKEN
        if len(text) > longest:
            raise PromptError("prompt length in characters", len(text), f"at most {longest}")
        token_ids = self.tokenizer.encode(text)
        if not token_ids:
            raise PromptError("prompt", text, "a text of at least one token")
        return text, token_ids


class _TextRequest:
    """What the shell keeps of a request."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        completions: list[Completion],
        arrival_time: float,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.completions = completions
        self.arrival_time = arrival_time
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.prompt_logprobs: list[TokenAlternatives | None] | None = None
        self.num_preemptions = 0


def _checked_ids(token_ids: object) -> list[int]:
    """A list of plain integers; whether they are in the vocabulary is the core's check."""
    allowed = "a string, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise PromptError("prompt", token_ids, allowed)
    for i, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int) or abs(token) >= 2**63:
            raise PromptError(f"prompt_token_ids[{i}]", token, "a token id")
    return list(token_ids)
