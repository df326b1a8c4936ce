"""Requests of `vllm.grpc.engine` as what the intake takes, with errors that name their fields.

The fields of its SamplingParams have the names of `SamplingParams` here. Most of them have no
presence: a zero is the same as nothing, and then the model's default holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from cupaged.errors import InvalidParameterError, NotSupportedError, PromptError
from cupaged.server.conversions import Asked, OutputForm

_NOT_SUPPORTED = (
    "kv_transfer_params", "mm_inputs", "kv_transfer_params_json", "media_refs", "extra_mm_inputs",
)  # fmt: skip
_PROMPT = re.compile(r"prompt(?:_token_ids)?(\[\d+\])?")
_PARAMETER = re.compile(r"(\w+)( key)?(\[\d+\])?")
_FORM = OutputForm(token_ids=True, echo=False)


def asked_of(request: Any) -> Asked:
    """What a GenerateRequest asks for.

    Raises:
        PromptError: there is no prompt.
        NotSupportedError: it asks for what this version does not build.
        InvalidParameterError: a value that cannot even be handed on.
    """
    for name in _NOT_SUPPORTED:
        value = getattr(request, name)
        if value if name == "extra_mm_inputs" else request.HasField(name):
            raise NotSupportedError(f"{name} is not supported in this version")
    if request.data_parallel_rank:
        rank = request.data_parallel_rank
        raise InvalidParameterError("data_parallel_rank", rank, "0, or absent")
    kind = request.WhichOneof("input")
    if kind is None:
        raise PromptError("input", None, "tokenized or text")
    prompt = request.text if kind == "text" else request.tokenized.input_ids
    return Asked(prompt=prompt, parameters=_parameters(request.sampling_params), form=_FORM)


def _parameters(params: Message) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for field, value in params.ListFields():
        if field.containing_oneof is not None and field.containing_oneof.name == "constraint":
            text = f"sampling_params.{field.name} (structured output) is not supported"
            raise NotSupportedError(f"{text} in this version")
        if field.name == "truncate_prompt_tokens":
            raise NotSupportedError(
                "sampling_params.truncate_prompt_tokens is not supported in this version"
            )
        given[field.name] = value
    given["skip_special_tokens"] = bool(given.get("skip_special_tokens"))
    given["detokenize"] = "stop" in given  # there is no text but to find these in
    return given


def paths_for(kind: str | None) -> Callable[[str], str]:
    """A function from the names in errors to paths in a GenerateRequest.

    Args:
        kind: the field that the prompt came in: "text" or "tokenized".
    """
    prompt_path = "text" if kind == "text" else "tokenized.input_ids"

    def path(name: str) -> str:
        if name.startswith("prompt length"):
            return prompt_path
        if (match := _PROMPT.fullmatch(name)) is not None:
            return prompt_path + (match[1] or "" if kind != "text" else "")
        match = _PARAMETER.fullmatch(name)
        if match is None or match[1] in _OWN:
            return name
        return f"sampling_params.{match[1]}{match[3] or ''}"

    return path


_OWN = ("request_id", "input", "data_parallel_rank", "request")
