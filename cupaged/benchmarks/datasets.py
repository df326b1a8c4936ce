"""What is asked: prompts and lengths, made up, or from a file of texts.

`random` makes up token ids; `sharegpt` and `custom` read texts; `trace` (see `traces.py`) replays
recorded lengths. All are drawn from a seed. Formulas and defaults are vLLM's.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.errors import ConfigError, CupagedError

__all__ = [
    "DATASETS",
    "CountTokens",
    "DatasetError",
    "DatasetOptions",
    "ModelFacts",
    "Sample",
    "samples_of",
]

DATASETS = ("random", "sharegpt", "custom", "trace")
# vLLM's bounds on conversations, from the PagedAttention paper's evaluation.
_MIN_TOKENS, _MAX_PROMPT_TOKENS, _MAX_TOTAL_TOKENS = 4, 1024, 2048
_COUNTED_AT_ONCE = 64

CountTokens = Callable[[Sequence[str]], list[int]]


class DatasetError(CupagedError):
    """A file of requests that cannot be read, is not of its format, or holds nothing that fits."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests have to know of a model. `special_token_ids` are kept out of made-up prompts.

    `max_model_len` counts prompt and answer together.
    """

    name: str
    vocab_size: int
    max_model_len: int
    special_token_ids: tuple[int, ...] = ()
    has_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """A request.

    Attributes:
        prompt: a text or token ids.
        max_tokens: most tokens of the answer, and how many it has where the end of a text is
            ignored.
        prompt_tokens: None where only the server knows.
        is_chat: the prompt is a user's message, for the model's chat template.
        time_s: seconds after the start of a trace; None where there are no times.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    prompt_tokens: int | None = None
    is_chat: bool = False
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Which requests; None is the default of the field, which `DEFAULTS` holds.

    Args:
        name: one of `DATASETS`.
        path: the file of all but `random`.
        num_prompts: how many at most.
        seed: equal seeds give equal requests.
        random_input_len, random_output_len: tokens.
        random_range_ratio: lengths are uniform in [length * (1 - r), length * (1 + r)].
        random_prefix_len: tokens that all prompts begin with, not counted in random_input_len.
        sharegpt_output_len, custom_output_len: tokens of an answer; by default that of the file
            (its answers, or "output_tokens" of a line).
        skip_chat_template: send the prompts of `custom` as plain texts.
        disable_shuffle: keep the order of the file.

    Raises:
        ConfigError: out of range, or given for another dataset.
    """

    name: str = "random"
    path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int | None = None
    random_output_len: int | None = None
    random_range_ratio: float | None = None
    random_prefix_len: int | None = None
    sharegpt_output_len: int | None = None
    custom_output_len: int | None = None
    skip_chat_template: bool = False
    disable_shuffle: bool = False

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise ConfigError("--dataset-name", self.name, f"one of {', '.join(DATASETS)}")
        if (self.path is None) != (self.name == "random"):
            allowed = "left out" if self.name == "random" else "a file"
            raise ConfigError("--dataset-path", self.path, f"{allowed} for {self.name}")
        if not 0 <= self.seed < 2**32:
            raise ConfigError("--seed", self.seed, "in [0, 2^32)")
        _in_range("--num-prompts", self.num_prompts, 1)
        for name, least in (
            ("random_input_len", 0), ("random_output_len", 1), ("random_prefix_len", 0),
            ("sharegpt_output_len", 1), ("custom_output_len", 1),
        ):  # fmt: skip
            if (value := getattr(self, name)) is not None:
                _in_range(_flag(name), value, least)
        if self.random_range_ratio is not None and not 0 <= self.random_range_ratio < 1:
            raise ConfigError("--random-range-ratio", self.random_range_ratio, "in [0, 1)")
        for field in fields(self):
            owner = field.name.partition("_")[0]
            value = getattr(self, field.name)
            if owner in DATASETS and owner != self.name and value is not None:
                raise ConfigError(_flag(field.name), value, f"given with --dataset-name {owner}")
        if self.skip_chat_template and self.name != "custom":
            raise ConfigError("--skip-chat-template", True, "given with --dataset-name custom")
        if self.disable_shuffle and self.name not in ("sharegpt", "custom"):
            raise ConfigError("--disable-shuffle", True, "given with sharegpt or custom")


def samples_of(
    options: DatasetOptions, model: ModelFacts, count_tokens: CountTokens | None
) -> list[Sample]:
    """The requests, at most `num_prompts`; fewer where a file has no more that fit the model.

    count_tokens: of texts; only `sharegpt` needs it.

    Raises:
        ConfigError: lengths that the model's context does not hold.
        DatasetError: the file cannot be read, or nothing in it fits.
    """
    if options.name == "random":
        return _random(options, model)
    if options.name == "trace":
        from cupaged.benchmarks.traces import trace_samples

        return trace_samples(options, model)
    if options.name == "sharegpt":
        assert count_tokens is not None, "who measures by texts has asked for a tokenizer"
        found = _sharegpt(options, model, count_tokens)
    else:
        found = _custom(options, model)
    samples = list(islice(found, options.num_prompts))
    if not samples:
        raise DatasetError(
            f"{options.path}: nothing in it fits; prompt and answer of {model.name} have at most "
            f"{model.max_model_len} tokens"
        )
    return samples


def drawn_ids(seed: Sequence[int] | int, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a made-up prompt: uniform in [1000, 49000), or what the vocabulary has of it."""
    low, high = min(1000, vocab_size // 2), min(49000, vocab_size)
    return tuple(np.random.default_rng(seed).integers(low, high, num_tokens).tolist())


def read_json(path: str, text: str, line: int | None = None) -> Any:
    """A JSON value of a file.

    Raises:
        DatasetError: names the file and the line.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        place = getattr(error, "lineno", 1) if line is None else line
        reason = getattr(error, "msg", "too deep")
        raise DatasetError(f"{path}: line {place}: no valid JSON: {reason}") from None


def read_file(path: str) -> str:
    """The text of a file.

    Raises:
        DatasetError: it cannot be read, or is no UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: is not UTF-8 at byte {error.start}") from None


def json_lines(path: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line that is not empty; DatasetError for what is none."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            entry = read_json(path, line, number)
            if not isinstance(entry, dict):
                raise DatasetError(f"{path}: line {number}: must be an object, got {line:.80}")
            yield number, entry


def _random(options: DatasetOptions, model: ModelFacts) -> list[Sample]:
    """Ascending runs of allowed ids from random starts: prompts hardly share a prefix by chance."""
    rng = np.random.default_rng(options.seed)
    input_len = 1024 if options.random_input_len is None else options.random_input_len
    output_len = 128 if options.random_output_len is None else options.random_output_len
    ratio, prefix_len = options.random_range_ratio or 0.0, options.random_prefix_len or 0
    input_low, input_high = _bounds(input_len, ratio, least=0 if prefix_len else 1)
    output_low, output_high = _bounds(output_len, ratio, least=1)
    most = prefix_len + input_high + output_high
    if most > model.max_model_len:
        raise ConfigError(
            "--random-input-len with --random-output-len", most,
            f"at most {model.max_model_len} tokens together, the context of {model.name}",
        )  # fmt: skip
    size = options.num_prompts
    input_lens = rng.integers(input_low, input_high + 1, size)
    output_lens = rng.integers(output_low, output_high + 1, size)
    starts = rng.integers(0, model.vocab_size, size)
    special = np.asarray(model.special_token_ids, np.int64)
    allowed = np.setdiff1d(np.arange(model.vocab_size), special)
    prefix = allowed[rng.integers(0, len(allowed), prefix_len)].tolist()
    samples = []
    for i in range(size):
        places = (starts[i] + i + np.arange(input_lens[i])) % len(allowed)
        ids = (*prefix, *allowed[places].tolist())
        samples.append(Sample(ids, int(output_lens[i]), len(ids)))
    return samples


def _sharegpt(
    options: DatasetOptions, model: ModelFacts, count_tokens: CountTokens
) -> Iterator[Sample]:
    """The first message of each conversation; the second one gives the length of the answer."""
    path = str(options.path)
    conversations = read_json(path, read_file(path))
    if not isinstance(conversations, list):
        raise DatasetError(f"{path}: must be a list of conversations")
    pairs = [pair for pair in map(_first_two, conversations) if pair is not None]
    _shuffle(pairs, options)
    longest = min(_MAX_TOTAL_TOKENS, model.max_model_len)
    for at in range(0, len(pairs), _COUNTED_AT_ONCE):
        some = pairs[at : at + _COUNTED_AT_ONCE]
        prompt_lens = count_tokens([prompt for prompt, _ in some])
        if options.sharegpt_output_len is None:
            output_lens, least = count_tokens([answer for _, answer in some]), _MIN_TOKENS
        else:
            output_lens, least = [options.sharegpt_output_len] * len(some), 1
        for (prompt, _), given, wanted in zip(some, prompt_lens, output_lens, strict=True):
            is_long_enough = given >= _MIN_TOKENS and wanted >= least
            if is_long_enough and given <= _MAX_PROMPT_TOKENS and given + wanted <= longest:
                yield Sample(prompt, wanted, given)


def _first_two(conversation: object) -> tuple[str, str] | None:
    """Texts of the first two messages, None where there are none."""
    try:
        first, second = conversation["conversations"][:2]  # type: ignore[index]
        prompt, answer = first["value"], second["value"]
    except (KeyError, TypeError, ValueError):
        return None
    return (prompt, answer) if _is_text(prompt) and _is_text(answer) else None


def _custom(options: DatasetOptions, model: ModelFacts) -> Iterator[Sample]:
    """Lines such as {"prompt": "..."} or {"prompt": "...", "output_tokens": 40}."""
    path = str(options.path)
    entries = list(json_lines(path, read_file(path)))
    is_chat = model.has_chat_template and not options.skip_chat_template
    for number, entry in entries:
        if not entry.get("prompt") or not _is_text(entry["prompt"]):
            raise DatasetError(f"{path}: line {number}: must have a text as its prompt")
        length = entry.get("output_tokens", 1)
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise DatasetError(f"{path}: line {number}: output_tokens must be >= 1, got {length!r}")
    _shuffle(entries, options)
    for _, entry in entries:
        length = options.custom_output_len or entry.get("output_tokens", 256)
        if length < model.max_model_len:
            yield Sample(entry["prompt"], length, is_chat=is_chat)


def _is_text(value: object) -> bool:
    """Whether it is a text that can be sent: JSON may have half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shuffle(entries: list[Any], options: DatasetOptions) -> None:
    if not options.disable_shuffle:
        random.Random(options.seed).shuffle(entries)


def _bounds(length: int, ratio: float, *, least: int) -> tuple[int, int]:
    """Smallest and largest length of a range, both of them included."""
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(low, least), max(high, least)


def _in_range(flag: str, value: int, least: int) -> None:
    if not least <= value < 2**31:
        raise ConfigError(flag, value, f"in [{least}, 2^31)")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
