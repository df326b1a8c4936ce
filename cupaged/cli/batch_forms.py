"""What a line of `run-batch` may be: the forms, how each is read, and how each is answered.

A form is a strategy: it names a line, makes prompts and parameters of it, and writes its answer or
its failure. This module has the plain form; `openai_forms` has those of OpenAI's batch files.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cupaged.cli.records import completion_record, error_record, request_record
from cupaged.errors import BadValueError, InvalidParameterError, NotSupportedError, PromptError

if TYPE_CHECKING:
    from cupaged.llm import LLM
    from cupaged.outputs import RequestOutput
    from cupaged.sampling_params import SamplingParams

Record = dict[str, Any]
_PROMPTS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What one line asks the engine for; more than one prompt where the form allows it."""

    prompts: list[Any]
    params: SamplingParams
    priority: int = 0


class Form(Protocol):
    """A kind of line."""

    def head(self, number: int, line: Mapping[str, Any]) -> Record:
        """What names the line in the output. number: counted from 1."""

    def request(self, line: Mapping[str, Any]) -> BatchRequest:
        """What it asks for; CupagedError if it is malformed."""

    def answer(self, head: Record, request: BatchRequest, outputs: list[RequestOutput]) -> Record:
        """The record of a line that was served. outputs: one a prompt."""

    def failure(self, head: Record, error: Exception) -> Record:
        """The record of a line that was not."""


class PlainForm:
    """`{"prompt" | "messages" | "prompt_token_ids": ..., "sampling_params": {...}, "id": ...}`.

    Args:
        llm: renders messages.
        defaults: fields of `SamplingParams` where a line has none.
    """

    def __init__(self, llm: LLM, defaults: Mapping[str, Any]) -> None:
        self._llm = llm
        self._defaults = defaults

    def head(self, number: int, line: Mapping[str, Any]) -> Record:
        """The number of the line, and its id if it has one."""
        return {"line": number, **({"id": line["id"]} if "id" in line else {})}

    def request(self, line: Mapping[str, Any]) -> BatchRequest:
        """One prompt."""
        check_keys("line", line, (*_PROMPTS, "sampling_params", "id", "priority"))
        given = [key for key in _PROMPTS if key in line]
        if len(given) != 1:
            raise PromptError("line", sorted(line), f"an object with one of {', '.join(_PROMPTS)}")
        own = line.get("sampling_params") or {}
        if not isinstance(own, Mapping):
            raise InvalidParameterError("sampling_params", own, "an object")
        key, value = given[0], line[given[0]]
        prompt = {key: value} if key != "messages" else rendered(self._llm, value)
        params = sampling_params({**self._defaults, **own})
        return BatchRequest([prompt], params, line.get("priority", 0))

    def answer(self, head: Record, request: BatchRequest, outputs: list[RequestOutput]) -> Record:
        """The samples under `outputs`."""
        (output,) = outputs
        record = request_record(output)
        record.pop("prompt", None)  # the line has it
        return {**head, **record, "outputs": [completion_record(c) for c in output.outputs]}

    def failure(self, head: Record, error: Exception) -> Record:
        """The reason under `error`."""
        return {**head, "error": error_record(error)}


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """From JSON, where the token ids of a `logit_bias` are strings."""
    from cupaged.sampling_params import SamplingParams

    check_keys("sampling_params", fields, SamplingParams.field_names())
    bias = fields.get("logit_bias")
    if isinstance(bias, Mapping):
        try:
            bias = {int(token): value for token, value in bias.items()}
        except ValueError:
            raise InvalidParameterError("logit_bias", bias, "an object of token ids") from None
    return SamplingParams(**{**fields, **({} if bias is None else {"logit_bias": bias})})


def check_keys(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a key that nobody would look at, and name the nearest one."""
    allowed = tuple(known)
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1)
            hint = f"known, as {near[0]!r} is" if near else f"one of {', '.join(allowed)}"
            raise InvalidParameterError(f"a key of {name}", key, hint)


def rendered(llm: LLM, messages: Any, **options: Any) -> dict[str, Any]:
    """Messages as a prompt. Content may be a list of text parts; keys that are null are dropped."""
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise PromptError("messages", messages, 'a list of {"role": text, "content": text}')
    plain = [
        {
            key: _text(value) if key == "content" else value
            for key, value in message.items()
            if value is not None or key == "content"
        }
        for message in messages
    ]
    return llm.render_chat(plain, **options)


def _text(content: Any) -> Any:
    """The text parts of a content, joined; what is no list of parts stays as it is."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise NotSupportedError(f"content of type {kind!r:.80} is not supported; only text is")
        if not isinstance(part.get("text"), str):
            raise BadValueError("text of a content part", part.get("text"), "a text")
    return "\n".join(part["text"] for part in content)
