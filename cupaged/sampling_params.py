"""How one request is sampled and when it stops: `SamplingParams`, checked once, then never changed.

`BeamSearchParams` is for requests that are searched instead. Names and defaults are those of vLLM.
A name that vLLM has and this version does not build is accepted at its neutral value and refused
with `NotSupportedError` otherwise: nothing is ignored. Checks that need the model (token ids
against the vocabulary) belong to the engine's door.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from cupaged.errors import InvalidParameterError, NotSupportedError

GREEDY_TEMPERATURE = 1e-5  # below this the most likely token is taken
MAX_SAMPLES = 1024
MAX_STRINGS = 64  # stop strings, bad words
MAX_INTEGER = 2**63 - 1  # what every wire format carries; far more than any context

MAX_BIAS = 100.0
MAX_LENGTH_PENALTY = 10.0  # any context to that power is a float

_NOT_BUILT = {"spaces_between_special_tokens": True, "structured_outputs": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Args:
        n: independent samples of the prompt, in [1, 1024]; they share the prompt's KV blocks.
        presence_penalty, frequency_penalty: in [-2, 2]; taken off the logits of tokens in the
            output, once, and for each time they stand there.
        repetition_penalty: > 0; logits of tokens in prompt or output are divided by it where
            positive and multiplied where negative.
        temperature: >= 0; below 1e-5 the most likely token is taken (lowest id wins a tie).
        top_p: in [0, 1]: keep the most likely tokens whose mass reaches it; 0 keeps one token.
        top_k: keep that many most likely tokens; 0 and -1 mean all.
        min_p: in [0, 1]: drop tokens less likely than this share of the likeliest's probability.
        seed: equal seeds give equal tokens in any batch; None or -1 draws one from the engine's.
        stop: strings that end the text; the text is cut before the match.
        stop_token_ids: token ids that end the output, also with `ignore_eos`.
        ignore_eos: go on after the model's end-of-sequence token.
        max_tokens: >= 1, or None for the rest of the context.
        min_tokens: neither EOS nor a stop ends the output before that many tokens.
        logprobs: report the log probability of each drawn token and of that many likeliest ones; -1
            for all. They are the model's own, before penalties, biases and temperature.
        prompt_logprobs: the same for the tokens of the prompt.
        detokenize: False leaves `text` empty.
        skip_special_tokens: leave special tokens out of `text`.
        include_stop_str_in_output: keep the stop string in `text`.
        logit_bias: {token id: value in [-100, 100]}, added to the logits.
        allowed_token_ids: only these are drawn.
        bad_words: texts that are not generated.
        trace_decode_token_ids: the first output tokens, whatever would have been drawn.

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
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
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
        for name, low, high in (
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
        ):
            self._set(name, _real(name, getattr(self, name), low, high))
        penalty = _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if penalty == 0:
            raise InvalidParameterError("repetition_penalty", penalty, "a finite number > 0")
        self._set("repetition_penalty", penalty)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), -1, MAX_INTEGER))
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
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _strings("stop", stop))
        for name in ("stop_token_ids", "trace_decode_token_ids"):
            self._set(name, _token_ids(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidParameterError("allowed_token_ids", allowed, "None or not empty")
            self._set("allowed_token_ids", allowed)
        self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("bad_words", _strings("bad_words", self.bad_words))
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

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids`, as a tuple."""
        return tuple(self.stop_token_ids or ())

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Every parameter name, in order."""
        return tuple(field.name for field in fields(cls))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """A search for the likeliest outputs of one request.

    Args:
        beam_width: beams that are kept at each position, and outputs that come back; in [1, 1024].
        max_tokens: most tokens of an output, >= 1.
        ignore_eos: go on after the model's end-of-sequence token.
        temperature: 0; what is searched are the model's own log probabilities.
        length_penalty: in [-10, 10]. An output is worth the sum of its log probabilities divided by
            length ** length_penalty; the length counts output tokens, an end-of-sequence token too.
        include_stop_str_in_output: keep the text of the end-of-sequence token.
        early_stopping: True to end with `beam_width` finished outputs; False to end when no beam
            can become better than the worst of them at its present length; "never" to compare
            with what a beam can reach at `max_tokens`, where longer is better (as transformers).

    Raises:
        InvalidParameterError: a value is out of range or of the wrong type.
        NotSupportedError: a temperature other than 0.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, high in (("beam_width", MAX_SAMPLES), ("max_tokens", MAX_INTEGER)):
            object.__setattr__(self, name, _integer(name, getattr(self, name), 1, high))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(name, getattr(self, name), "True or False")
        if _real("temperature", self.temperature, 0.0, math.inf) != 0.0:
            raise NotSupportedError(
                f"temperature={_shown(self.temperature)} is not supported for beams; leave it at 0"
            )
        limit = MAX_LENGTH_PENALTY
        penalty = _real("length_penalty", self.length_penalty, -limit, limit)
        object.__setattr__(self, "length_penalty", penalty)
        stops = self.early_stopping
        if not isinstance(stops, bool) and not (isinstance(stops, str) and stops == "never"):
            raise InvalidParameterError(
                "early_stopping", self.early_stopping, "True, False or 'never'"
            )

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Every parameter name, in order."""
        return tuple(field.name for field in fields(cls))

    def num_candidates(self, num_ending_ids: int) -> int:
        """Likeliest tokens of a beam that matter: were all ending ones among them, `beam_width`
        others would be left."""
        return max(2, 1 + num_ending_ids) * self.beam_width

    def sampling_params(self, eos_token_ids: Sequence[int]) -> SamplingParams:
        """What is asked of each position: nothing but a report on the likeliest tokens."""
        num_ending_ids = 0 if self.ignore_eos else len(set(eos_token_ids))
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.num_candidates(num_ending_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


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


def _strings(name: str, value: object) -> tuple[str, ...]:
    allowed = f"a list of at most {MAX_STRINGS} non-empty strings"
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidParameterError(name, value, allowed)
    if len(value) > MAX_STRINGS or not all(isinstance(s, str) and s for s in value):
        raise InvalidParameterError(name, value, allowed)
    return tuple(value)


def _logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidParameterError("logit_bias", value, "a mapping of token ids to numbers")
    return {
        _integer("logit_bias key", token, 0, MAX_INTEGER): _real(
            f"logit_bias[{token}]", bias, -MAX_BIAS, MAX_BIAS
        )
        for token, bias in value.items()
    }


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    allowed = "a list of token ids >= 0"
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidParameterError(name, value, allowed)
    return tuple(_integer(f"{name}[{i}]", item, 0, MAX_INTEGER) for i, item in enumerate(value))
