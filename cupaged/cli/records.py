"""Answers and errors as JSON: what `generate --json` and `run-batch` write."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from cupaged.errors import BadValueError, CupagedError

if TYPE_CHECKING:
    from cupaged.outputs import CompletionOutput, RequestOutput, TokenAlternatives


def json_line(record: dict[str, Any]) -> str:
    """One line of JSON, of readable text."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"


def completion_record(completion: CompletionOutput) -> dict[str, Any]:
    """One sample; the fields that need asking for are there only when they were asked for."""
    record: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["cumulative_logprob"] = finite(completion.cumulative_logprob)
        record["logprobs"] = [alternatives_record(position) for position in completion.logprobs]
    return record


def request_record(output: RequestOutput) -> dict[str, Any]:
    """A prompt, and how many tokens it has."""
    record: dict[str, Any] = {"num_prompt_tokens": len(output.prompt_token_ids)}
    if output.prompt is not None:
        record["prompt"] = output.prompt
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            None if position is None else alternatives_record(position)
            for position in output.prompt_logprobs
        ]
    return record


def error_record(error: Exception) -> dict[str, Any]:
    """What was wrong; `param` is the name of the value that was."""
    record = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, BadValueError):
        record["param"] = error.name
    if not isinstance(error, CupagedError):
        record["message"] = f"{type(error).__name__}: {error}"
    return record


def alternatives_record(position: TokenAlternatives) -> dict[str, Any]:
    """Token ids and what is known of them, the token that stands there first."""
    return {
        str(token): {
            "logprob": finite(known.logprob),
            "rank": known.rank,
            "decoded_token": known.decoded_token,
        }
        for token, known in position.items()
    }


def finite(number: float | None) -> float | None:
    """JSON has no infinity: null stands for it."""
    return number if number is not None and math.isfinite(number) else None
