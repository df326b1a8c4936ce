"""Lines of OpenAI's batch files: `{"custom_id", "method", "url", "body"}`.

A body has the fields of its URL's API, and those of `SamplingParams` as well, as in vLLM. Fields
that change no text are passed over; any other field that is not built is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cupaged.cli.batch_forms import BatchRequest, Record, check_keys, rendered, sampling_params
from cupaged.cli.records import error_record, finite
from cupaged.errors import EngineError, InvalidParameterError, NotSupportedError, PromptError

if TYPE_CHECKING:
    from cupaged.llm import LLM
    from cupaged.outputs import CompletionOutput, RequestOutput, TokenAlternatives

_KEYS = frozenset({"custom_id", "method", "url", "body"})
_WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "stream_options", "parallel_tool_calls",
)  # fmt: skip
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}


class OpenAIForm:
    """A line for one URL.

    Args:
        defaults: fields of `SamplingParams` where a body has none.
    """

    url = ""
    object_name = ""
    own_keys: tuple[str, ...] = ()

    def __init__(self, llm: LLM, defaults: Mapping[str, Any], model: str) -> None:
        self._llm = llm
        self._defaults = defaults
        self._model = model

    def head(self, number: int, line: Mapping[str, Any]) -> Record:
        """An id of our own, and the caller's."""
        return {"id": f"batch_req_{number}", "custom_id": line.get("custom_id")}

    def request(self, line: Mapping[str, Any]) -> BatchRequest:
        """The prompts and parameters of the body."""
        check_keys("line", line, _KEYS)
        if not isinstance(line.get("custom_id"), str):
            raise InvalidParameterError("custom_id", line.get("custom_id"), "a string")
        if line.get("method") != "POST":
            raise InvalidParameterError("method", line.get("method"), "'POST'")
        body = line.get("body")
        if not isinstance(body, Mapping):
            raise InvalidParameterError("body", body, "an object")
        own, fields = {}, dict(self._defaults)
        for key, value in body.items():
            if value is None or key in _WITHOUT_EFFECT:
                continue
            if key in _ONLY_VALUES:
                if value not in _ONLY_VALUES[key]:
                    raise NotSupportedError(f"{key}={value!r:.80} is not supported")
            elif key in self.own_keys:
                own[key] = value
            else:
                fields["max_tokens" if key == "max_completion_tokens" else key] = value
        priority = fields.pop("priority", 0)
        self.translate(own, fields)
        return BatchRequest(self.prompts(own), sampling_params(fields), priority)

    def translate(self, own: Record, fields: Record) -> None:
        """Move what the API spells in its own way to fields of `SamplingParams`."""

    def prompts(self, own: Record) -> list[Any]:
        """The prompts of a body."""
        raise NotImplementedError

    def choice(self, completion: CompletionOutput, num_likeliest: int | None) -> Record:
        """A sample, without its index. num_likeliest: how many alternatives a position shows."""
        raise NotImplementedError

    def answer(self, head: Record, request: BatchRequest, outputs: list[RequestOutput]) -> Record:
        """The API's response; the samples of all prompts are counted on."""
        shown = request.params.logprobs
        choices = [self.choice(c, shown) for output in outputs for c in output.outputs]
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_answer = sum(len(c.token_ids) for output in outputs for c in output.outputs)
        body = {
            "id": head["id"],
            "object": self.object_name,
            "created": int(time.time()),
            "model": self._model,
            "choices": [{"index": i, **choice} for i, choice in enumerate(choices)],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_answer,
                "total_tokens": num_prompt + num_answer,
            },
        }
        response = {"status_code": 200, "request_id": head["id"], "body": body}
        return {**head, "response": response, "error": None}

    def failure(self, head: Record, error: Exception) -> Record:
        """No body, and the reason under `error`."""
        status = 500 if isinstance(error, EngineError) else 400
        response = {"status_code": status, "request_id": head["id"], "body": None}
        record = error_record(error)
        return {**head, "response": response, "error": {"code": record["type"], **record}}


class ChatForm(OpenAIForm):
    """`/v1/chat/completions`."""

    url = "/v1/chat/completions"
    object_name = "chat.completion"
    own_keys = ("messages", "logprobs", "top_logprobs", "add_generation_prompt")

    def translate(self, own: Record, fields: Record) -> None:
        """`logprobs` is a flag here."""
        asked, count = own.get("logprobs", False), own.get("top_logprobs")
        if not isinstance(asked, bool):
            raise InvalidParameterError("logprobs", asked, "true or false")
        if count is not None and not asked:
            raise InvalidParameterError("top_logprobs", count, "given together with logprobs=true")
        if asked:
            fields["logprobs"] = count or 0

    def prompts(self, own: Record) -> list[Any]:
        """One conversation."""
        begins = own.get("add_generation_prompt", True)
        return [rendered(self._llm, own.get("messages"), add_generation_prompt=bool(begins))]

    def choice(self, completion: CompletionOutput, num_likeliest: int | None) -> Record:
        """A message."""
        told = completion.logprobs
        content = [_chat_logprob(position, num_likeliest or 0) for position in told or ()]
        return {
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None if told is None else {"content": content},
            "finish_reason": completion.finish_reason,
        }


class CompletionForm(OpenAIForm):
    """`/v1/completions`; a prompt is a text, a list of token ids, or a list of these."""

    url = "/v1/completions"
    object_name = "text_completion"
    own_keys = ("prompt",)

    def prompts(self, own: Record) -> list[Any]:
        """One or several."""
        prompt = own.get("prompt")
        if not isinstance(prompt, str | list):
            raise PromptError("prompt", prompt, "a text, a list of token ids, or a list of these")
        several = isinstance(prompt, list) and bool(prompt)
        if several and all(isinstance(one, str | list) for one in prompt):
            return list(prompt)
        return [prompt]

    def choice(self, completion: CompletionOutput, num_likeliest: int | None) -> Record:
        """A text."""
        told = completion.logprobs
        return {
            "text": completion.text,
            "logprobs": None if told is None else _completion_logprobs(told),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }


def _chat_logprob(position: TokenAlternatives, num_likeliest: int) -> Record:
    """The token that was drawn, and the likeliest ones, of which it may be one."""
    tokens = [
        {
            "token": known.decoded_token,
            "logprob": finite(known.logprob),
            "bytes": list((known.decoded_token or "").encode()),
        }
        for known in position.values()
    ]
    drawn_is_extra = len(tokens) > num_likeliest
    return {**tokens[0], "top_logprobs": tokens[drawn_is_extra:]}


def _completion_logprobs(positions: list[TokenAlternatives]) -> Record:
    drawn = [next(iter(position.values())) for position in positions]
    offsets, length = [], 0
    for known in drawn:
        offsets.append(length)
        length += len(known.decoded_token or "")
    return {
        "tokens": [known.decoded_token for known in drawn],
        "token_logprobs": [finite(known.logprob) for known in drawn],
        "top_logprobs": [
            {str(known.decoded_token): finite(known.logprob) for known in position.values()}
            for position in positions
        ],
        "text_offset": offsets,
    }


class UnsupportedForm(OpenAIForm):
    """Any other URL."""

    def request(self, line: Mapping[str, Any]) -> BatchRequest:
        """Refuse it."""
        known = f"{ChatForm.url}, {CompletionForm.url}"
        raise NotSupportedError(f"url {line.get('url')!r:.80} is not supported; known: {known}")


def openai_forms(
    llm: LLM, given: Mapping[str, Any], model: str
) -> Callable[[Mapping[str, Any]], OpenAIForm | None]:
    """Which of these forms a line has, None for none of them.

    The API's own defaults hold: an answer has 16 tokens where a text is continued, and no limit in
    a chat. given: options that replace them.
    """
    by_url = {
        ChatForm.url: ChatForm(llm, {"max_tokens": None, **given}, model),
        CompletionForm.url: CompletionForm(llm, given, model),
    }
    other = UnsupportedForm(llm, given, model)

    def form_of(line: Mapping[str, Any]) -> OpenAIForm | None:
        if not _KEYS.intersection(line):
            return None
        url = line.get("url")
        return by_url.get(url, other) if isinstance(url, str) else other

    return form_of
