"""How one request is sampled and when it stops: `SamplingParams`, checked once, then never changed.

Names and defaults are those of vLLM. A name that vLLM has and this version does not build is
accepted at its neutral value and refused with `NotSupportedError` otherwise: nothing is ignored.
Checks that need the model (token ids against the vocabulary) belong to the engine's door.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, fields

from cupaged.errors import InvalidParameterError, NotSupportedError

GREEDY_TEMPERATURE = 1e-5  # below this the most likely token is taken
MAX_SAMPLES = 1024
MAX_STOP_STRINGS = 64
MAX_INTEGER = 2**63 - 1  # what every wire format carries; far more than any context

_NOT_BUILT = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "logprobs": None,
    "prompt_logprobs": None,
    "spaces_between_special_tokens": True,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "trace_decode_token_ids": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Args:
        n: independent samples of the prompt, in [1, 1024]; they share the prompt's KV blocks.
        temperature: >= 0; below 1e-5 the most likely token is taken (lowest id wins a tie).
        top_p: in [0, 1]: keep the most likely tokens whose mass reaches it; 0 keeps one token.
        top_k: keep that many most likely tokens; 0 and -1 mean all.
        seed: equal seeds give equal tokens in any batch; None or -1 draws one from the engine's.
        stop: strings that end the text; the text is cut before the match.
        stop_token_ids: token ids that end the output, also with `ignore_eos`.
        ignore_eos: go on after the model's end-of-sequence token.
        max_tokens: >= 1, or None for the rest of the context.
        min_tokens: neither EOS nor a stop ends the output before that many tokens.
        detokenize: False leaves `text` empty.
        skip_special_tokens: leave special tokens out of `text`.
        include_stop_str_in_output: keep the stop string in `text`.

    Raises:
        InvalidParameterError: a value is out of range or of the wrong type.
        NotSupportedError: a field of vLLM that this version does not build was set.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: object = None
    logit_bias: object = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    trace_decode_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name, neutral in _NOT_BUILT.items():
            value = getattr(self, name)
            is_neutral = isinstance(value, numbers.Real) and value == neutral
            if value is not None and not is_neutral:
                raise NotSupportedError(
                    f"{name}={_shown(value)} is not supported in this version; "
                    f"leave it at {neutral!r}"
                )
        self._set("n", _integer("n", self.n, 1, MAX_SAMPLES))
        self._set("temperature", _real("temperature", self.temperature, 0.0, math.inf))
        self._set("top_p", _real("top_p", self.top_p, 0.0, 1.0))
        self._set("top_k", max(0, _integer("top_k", self.top_k, -1, MAX_INTEGER)))
        if self.seed is not None:
            seed = _integer("seed", self.seed, -1, 2**64 - 1)
            self._set("seed", None if seed == -1 else seed)
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, MAX_INTEGER))
        most = MAX_INTEGER if self.max_tokens is None else self.max_tokens
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, most))
        for flag in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, flag), bool):
                raise InvalidParameterError(flag, getattr(self, flag), "True or False")
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise InvalidParameterError("detokenize", False, "True when stop strings are given")

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Every parameter name, in order."""
        return tuple(field.name for field in fields(cls))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _shown(value: object) -> str:
    try:
        return f"{value!r:.120}"
    except ValueError:  # Python does not print integers of more than 4,300 digits
        return f"<{type(value).__name__}>"


def _integer(name: str, value: object, low: int, high: int) -> int:
    allowed = f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidParameterError(name, value, allowed)
    number = int(value)
    if not low <= number <= high:
        raise InvalidParameterError(name, value, allowed)
    return number


def _real(name: str, value: object, low: float, high: float) -> float:
    if math.isinf(high):
        allowed = f"a finite number >= {low:g}"
    else:
        allowed = f"a number in [{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidParameterError(name, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise InvalidParameterError(name, value, allowed)
    return number


def _stop_strings(value: object) -> tuple[str, ...]:
    allowed = f"a non-empty string or a list of at most {MAX_STOP_STRINGS} non-empty strings"
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or isinstance(strings, bytes):
        raise InvalidParameterError("stop", value, allowed)
    if len(strings) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in strings):
        raise InvalidParameterError("stop", value, allowed)
    return tuple(strings)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    allowed = "a list of token ids >= 0"
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidParameterError(name, value, allowed)
    return tuple(_integer(f"{name}[{i}]", item, 0, MAX_INTEGER) for i, item in enumerate(value))
