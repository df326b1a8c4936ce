"""Which field of the protos is which parameter: the one table of both names.

`SamplingParams` has vLLM's names, the protos group them and name some otherwise. Errors of the
engine name parameters; a caller of the service is told the path of the field that he has set.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# Name in SamplingParams -> path of the field in a request.
PARAMETER_PATHS = {
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "repetition_penalty": "sampling.repetition_penalty",
    "seed": "sampling.seed",
    "n": "sampling.n",
    "logit_bias": "sampling.logit_bias",
    "allowed_token_ids": "sampling.allowed_token_ids",
    "bad_words": "sampling.bad_words",
    "trace_decode_token_ids": "sampling.trace_decode_token_ids",
    "max_tokens": "stopping.max_new_tokens",
    "min_tokens": "stopping.min_new_tokens",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
    "ignore_eos": "stopping.ignore_eos",
    "include_stop_str_in_output": "stopping.include_stop_str_in_output",
    "detokenize": "output.detokenize",
    "logprobs": "output.logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
    "skip_special_tokens": "output.skip_special_tokens",
    "spaces_between_special_tokens": "output.spaces_between_special_tokens",
}
# Further names that errors have, of what is not a parameter by itself.
_DERIVED_PATHS = {
    "logit_bias key": "sampling.logit_bias",
    "bad_words_token_ids": "sampling.bad_words",
    "messages": "chat.messages",
}
PROMPT_NAMES = ("prompt", "prompt length in tokens", "prompt length in characters")
_INDEXED = re.compile(r"([^\[\].]+)(.*)", re.DOTALL)


def paths_for(input_field: str) -> Callable[[str], str]:
    """A function from the names in errors to paths in a request.

    Args:
        input_field: the field that the prompt came in: "text", "token_ids" or "chat".
    """

    def path(name: str) -> str:
        if name in PROMPT_NAMES:
            return input_field
        if name in _DERIVED_PATHS:
            return _DERIVED_PATHS[name]
        match = _INDEXED.fullmatch(name)
        if match is None:
            return name
        base, index = match.groups()  # "stop_token_ids", "[3]"
        if base == "prompt_token_ids":
            return f"token_ids.ids{index}" if input_field == "token_ids" else input_field
        if base == "bad_words_token_ids":
            return "sampling.bad_words"
        return PARAMETER_PATHS.get(base, _DERIVED_PATHS.get(base, base)) + index

    return path
