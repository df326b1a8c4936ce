"""`LLM`: a model in this process. Text in, text out, many requests at a time.

It drives the engine and gives each caller its own outputs; it decides nothing about scheduling or
memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

from cupaged.engine.engine import Engine, Prompt
from cupaged.engine_args import EngineArgs
from cupaged.errors import ChatTemplateError, EngineError, InvalidParameterError, PromptError
from cupaged.interrupts import Uninterrupted
from cupaged.loading.chat_template import ChatTemplate
from cupaged.loading.template_choice import choose_template
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import EngineStats, RequestOutput
from cupaged.sampling_params import BeamSearchParams, SamplingParams

Message = dict[str, Any]
PrefixCaching = bool | Sequence[bool | None] | None


class LLM:
    """A model, its KV pool and its engine, for one thread.

    Args:
        model: a folder with config.json and safetensors, or a .gguf file; None for the installed
            SmolLM2-135M-Instruct.
        chat_template: replaces the model's own: a file (.jinja), the name of one of the model's
            templates, or Jinja source.
        options: fields of `EngineArgs`.

    Raises:
        CupagedError: the model cannot be loaded or an option is out of range, before large memory
            is taken.
    """

    def __init__(
        self, model: str | Path | None = None, *, chat_template: str | None = None, **options: Any
    ) -> None:
        args = EngineArgs.from_options({"model": model, **options})
        self.engine: Engine = args.build()
        tokenizer = self.engine.tokenizer
        source = choose_template(chat_template, tokenizer)
        special_tokens: dict[str, Any] = dict(tokenizer.special_tokens)
        self._template = ChatTemplate(source, **special_tokens) if source else None
        self._request_ids = count()
        self._outputs: dict[str, deque[RequestOutput]] = {}  # of requests; one queue a call
        self._num_failures = 0
        self._failure: EngineError | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        prefix_caching: PrefixCaching = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs are in the prompts' order.

        Args:
            prompts: one prompt or a list of them: a text, {"prompt": text},
                {"prompt_token_ids": ids}. A bare list of ids is one prompt. A mapping may have a
                "cache_salt", too: cached prefixes are shared only among requests of equal salts.
            sampling_params: one for all, or one for each; by default what
                `get_default_sampling_params` gives.
            use_tqdm: show a progress bar where standard error is a terminal.
            priority: one a prompt, lower is served earlier; the engine's `scheduling_policy` has to
                be "priority".
            prefix_caching: False to compute all of a prompt and to leave nothing of it; one for
                all, or one a prompt.

        Raises:
            PromptError, InvalidParameterError, CapacityError: a request cannot be served; none of
                the call's requests is left running.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._complete(prompts, params, use_tqdm, priority, prefix_caching)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        prefix_caching: PrefixCaching = None,
    ) -> list[RequestOutput]:
        """Search the likeliest continuations of every prompt.

        Args:
            prompts: as for `generate`.
            params: how many beams, how long, and what a long output is worth.

        Returns:
            For each prompt its `beam_width` best outputs, best first, with `cumulative_logprob`.

        Raises:
            PromptError, InvalidParameterError, CapacityError: a request cannot be served, such as
                more beams than the engine has sequences or blocks for; none is left running.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidParameterError("params", params, "a BeamSearchParams")
        return self._complete(prompts, params, use_tqdm, priority, prefix_caching)

    def _complete(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | BeamSearchParams,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        prefix_caching: PrefixCaching,
    ) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with _progress_bar(len(_as_list(prompts)), use_tqdm) as bar:
            request_ids = self._add(prompts, params, priority, prefix_caching)
            for output in self._drain(request_ids):
                if output.finished:
                    finished[output.request_id] = output
                    bar.update()
        return [finished[i] for i in request_ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        priority: Sequence[int] | None = None,
        prefix_caching: PrefixCaching = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], or a list of such lists.
            sampling_params: by default the answer may take the rest of the context.
            priority, prefix_caching: as for `generate`, by conversation.
            cache_salt: of all these conversations.

        Raises:
            ChatTemplateError: the model has no chat template, or it refused the messages.
        """
        single = bool(messages) and isinstance(messages[0], dict)
        conversations = [messages] if single or not messages else messages
        prompts = [
            self.render_chat(
                cast(Sequence[Message], conversation), add_generation_prompt=add_generation_prompt
            )
            | {"cache_salt": cache_salt}
            for conversation in conversations
        ]
        rest = {"max_tokens": None, **self.engine.generation_defaults}
        params = SamplingParams(**rest) if sampling_params is None else sampling_params
        return self._complete(prompts, params, use_tqdm, priority, prefix_caching)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        prefix_caching: PrefixCaching = None,
    ) -> Iterator[RequestOutput]:
        """Complete every prompt; give an output whenever a request has moved on.

        Each output has all text so far; its completions' `delta` is what is new. Requests are
        checked and queued at once, and those still running are aborted when the iterator is closed.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._drain(self._add(prompts, params, priority, prefix_caching))

    def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests; what they have so far comes out with finish_reason "abort".

        Ids that are unknown or have finished are passed over.
        """
        for i in [request_id] if isinstance(request_id, str) else request_id:
            output = self.engine.abort(i)
            if output is not None and i in self._outputs:
                self._outputs[i].append(output)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> dict[str, Any]:
        """A conversation as a prompt of token ids, by the model's chat template."""
        if not self._template:
            raise ChatTemplateError(
                "the model has no chat template; give one as chat_template, or use generate"
            )
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        return {"prompt_token_ids": self.engine.tokenizer.encode(text, add_special_tokens=False)}

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer in use."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend (`generation_config.json`), else vLLM's defaults."""
        return SamplingParams(**self.engine.generation_defaults)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; requests that run go on with what they hold.

        Returns:
            True, as vLLM does where it worked.
        """
        self.engine.core.reset_prefix_cache()
        return True

    def get_stats(self) -> EngineStats:
        """What runs, what waits, and how full the KV pool is."""
        return self.engine.core.stats()

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | BeamSearchParams,
        priority: Sequence[int] | None,
        prefix_caching: PrefixCaching,
    ) -> list[str]:
        """Queue all of a call's requests, or none."""
        batch = _as_list(prompts)
        params: list[SamplingParams | BeamSearchParams]
        if isinstance(sampling_params, SamplingParams | BeamSearchParams):
            params = [sampling_params] * len(batch)
        else:
            params = list(sampling_params)
        if len(params) != len(batch):
            raise InvalidParameterError(
                "number of sampling_params", len(params), f"1 or as many as prompts ({len(batch)})"
            )
        if priority is not None and not self.engine.core.has_priorities:
            raise InvalidParameterError(
                "priority", priority, "None unless scheduling_policy='priority'"
            )
        priorities = [0] * len(batch) if priority is None else list(priority)
        if len(priorities) != len(batch):
            raise InvalidParameterError(
                "number of priorities", len(priorities), f"as many as prompts ({len(batch)})"
            )
        if isinstance(prefix_caching, Sequence) and not isinstance(prefix_caching, str):
            caching = list(prefix_caching)
        else:
            caching = [prefix_caching] * len(batch)
        if len(caching) != len(batch):
            raise InvalidParameterError(
                "number of prefix_caching", len(caching), f"1 or as many as prompts ({len(batch)})"
            )
        request_ids: list[str] = []
        try:
            with Uninterrupted():
                requests = zip(batch, params, priorities, caching, strict=True)
                for prompt, param, rank, wanted in requests:
                    request_id = str(next(self._request_ids))
                    self.engine.add_request(
                        request_id, prompt, param, priority=rank, prefix_caching=wanted
                    )
                    request_ids.append(request_id)
        except BaseException:
            with Uninterrupted():
                for request_id in request_ids:
                    self.engine.abort(request_id)
            raise
        queue: deque[RequestOutput] = deque()
        self._outputs.update((request_id, queue) for request_id in request_ids)
        return request_ids

    def _drain(self, request_ids: list[str]) -> Iterator[RequestOutput]:
        """Give the outputs of these requests; whoever drops the iterator aborts them."""
        outputs = self._run(request_ids)
        next(outputs)  # into its `try`: a generator that was never started cleans nothing up
        return cast(Iterator[RequestOutput], outputs)

    def _run(self, request_ids: list[str]) -> Iterator[RequestOutput | None]:
        """Step the engine until these requests have finished; keep what belongs to others.

        The first item is None.
        """
        unfinished = set(request_ids)
        queue = self._outputs[request_ids[0]] if request_ids else deque()
        num_failures = self._num_failures
        try:
            yield None
            while unfinished:
                if queue:
                    output = queue.popleft()
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output
                elif num_failures != self._num_failures:
                    num_failures = self._num_failures
                    lost = [
                        i for i in request_ids if i in unfinished and not self.engine.core.holds(i)
                    ]
                    if lost:
                        raise EngineError(
                            f"request {lost[0]} was lost in a step that failed: {self._failure}"
                        )
                else:
                    try:
                        with Uninterrupted():
                            outputs = self.engine.step()
                    except EngineError as error:
                        self._num_failures, self._failure = self._num_failures + 1, error
                        continue
                    for output in outputs:
                        if output.request_id in self._outputs:
                            self._outputs[output.request_id].append(output)
        finally:
            with Uninterrupted():
                for request_id in unfinished:
                    self.engine.abort(request_id)
                for request_id in request_ids:
                    self._outputs.pop(request_id, None)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise PromptError("prompts", prompts, "a prompt or a list of prompts")
    if prompts and all(isinstance(p, int) for p in prompts):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _progress_bar(total: int, wanted: bool) -> Any:
    from tqdm import tqdm  # costs an import; only a terminal shows it

    return tqdm(total=total, disable=None if wanted else True, unit="request", leave=False)
