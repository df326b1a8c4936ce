"""The engine in one process: a core and the text shell around it, stepped by the caller.

Scheduling, memory and sampling are the core's, text is the shell's. One `step` here is one step
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cupaged.engine.core import EngineCore
from cupaged.engine.text_shell import Prompt, TextRequest, TextShell
from cupaged.errors import InvalidParameterError
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import FinishReason, RequestOutput
from cupaged.sampling_params import BeamSearchParams, SamplingParams

__all__ = ["Engine", "Prompt"]


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
        self.generation_defaults = dict(generation_defaults)
        self._shell = TextShell(
            tokenizer,
            max_model_len=core.config.max_model_len,
            eos_token_ids=eos_token_ids,
            seed=seed,
        )
        self._clock = clock
        self._requests: dict[str, TextRequest] = {}

    @property
    def has_unfinished_requests(self) -> bool:
        """True while `step` will bring something."""
        return bool(self._requests)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        prefix_caching: bool | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request.

        Args:
            prompt: a text, {"prompt": text}, {"prompt_token_ids": ids} or a list of ids; a mapping
                may have a "cache_salt", too, which goes before the argument.
            params: how it is sampled, or with how many beams it is searched; the best hypotheses
                are then its outputs, all at the end.
            priority: lower is served earlier, where the engine's policy is "priority".
            prefix_caching: False to compute all of the prompt and to leave nothing of it.
            cache_salt: prefixes are shared only among requests of equal salts.

        Raises:
            PromptError, InvalidParameterError, CapacityError: it cannot be served; nothing changed.
            QueueFullError: too much waits already; nothing changed.
        """
        arrival_time = self._clock()
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise InvalidParameterError("sampling_params", params, "a SamplingParams")
        if isinstance(prompt, Mapping) and "cache_salt" in prompt:
            cache_salt = prompt["cache_salt"]
            prompt = {key: value for key, value in prompt.items() if key != "cache_salt"}
        text, token_ids = self._shell.encode(prompt)
        request = self._shell.core_request(
            request_id,
            token_ids,
            params,
            priority,
            prefix_caching=prefix_caching,
            cache_salt=cache_salt,
        )
        self.core.add_request(request)
        self._requests[request_id] = TextRequest(
            self.tokenizer, request_id, text, token_ids, request.params, arrival_time
        )

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
        moved: dict[str, TextRequest] = {}
        for output in core_outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            moved[output.request_id] = request
            stopped = request.append(output, now)
            if stopped is not None:
                self.core.abort(output.request_id, output.index, reason=stopped)
        return [self._output(request, now) for request in moved.values()]

    def abort(self, request_id: str, *, reason: FinishReason = "abort") -> RequestOutput | None:
        """End a request and give its last output, or None if it is not unfinished.

        Beams come out as far as they have come, best first; as many as there are.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        now = self._clock()
        for output in self.core.best_so_far(request_id):
            request.append(output, now)
        self.core.abort(request_id, reason=reason)
        request.end(reason)
        return self._output(request, now)

    def _output(self, request: TextRequest, now: float) -> RequestOutput:
        if request.finished:
            del self._requests[request.request_id]
        return request.output(now)
