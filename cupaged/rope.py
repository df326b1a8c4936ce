"""Rotary positions (RoPE; Su et al., 2021): their configuration, and how far a position turns.

Owns the types that transformers knows, from plain RoPE to those that stretch it over a longer
context: what each reads of a `config.json`, the context it reaches, and its frequencies. It never
makes the table of cosines and sines: that is `Ops.rotary_table`.

To add a type, write its function and its row in `ROPE_TYPES`; nothing else names types but the
context that each reaches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupaged.errors import ConfigError, NotSupportedError
from cupaged.json_values import flag, integer, number, numbers

__all__ = ["ROPE_TYPES", "RopeConfig", "RopeType", "inverse_frequencies", "yarn_attention_factor"]

_logger = logging.getLogger(__name__)

Frequencies: TypeAlias = NDArray[np.float64]

_LIMIT = 2**31
_TABLES = ("rope_parameters", "rope_scaling")  # of transformers v5 and v4; where both are, v4 wins


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn the pairs of a head.

    Attributes:
        rope_theta: base of the frequencies, theta^(-2i / head_dim) before any scaling.
        rope_type: a key of `ROPE_TYPES`.
        original_max_position_embeddings: context of the model before scaling, in tokens.
        factor: how many times longer than that its context becomes.
        low_freq_factor, high_freq_factor: "llama3": pairs that turn fewer times than `low` within
            the original context are slowed down by `factor`, those that turn more often than
            `high` are left alone.
        beta_fast, beta_slow: "yarn": the same with `fast` for `high` and `slow` for `low`; between
            them it goes by the number of the pair, with `truncate` from a whole one to a whole one.
        attention_factor: cosines and sines are multiplied by it.
        frequency_factors: each frequency is divided by its own; empty, or head_dim / 2 of them.
        table: where these stand in `config.json`, for errors.

    Raises:
        ConfigError: a value is out of range.
        NotSupportedError: a type that is not built.
    """

    rope_theta: float
    original_max_position_embeddings: int
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] = ()
    table: str = field(default=_TABLES[0], compare=False, repr=False)

    def __post_init__(self) -> None:
        _row(self.table, self.rope_type)
        least = 1 if self.rope_type == "yarn" else 0  # yarn divides by its logarithm
        if not least < self.rope_theta < math.inf:
            raise ConfigError(
                "config.json: rope_theta", self.rope_theta, f"a finite number > {least}"
            )
        integer(f"config.json: {self.table}.{_ORIGINAL}", self.original_max_position_embeddings)
        low = self.low_freq_factor
        self._check("factor", 1 <= self.factor < _LIMIT, "a number in [1, 2^31)")
        self._check("low_freq_factor", 0 < low < math.inf, "a finite number > 0")
        allowed = f"a finite number > low_freq_factor={low:g}"
        self._check("high_freq_factor", low < self.high_freq_factor < math.inf, allowed)
        slow = self.beta_slow
        self._check("beta_slow", 0 < slow < math.inf, "a finite number > 0")
        allowed = f"a finite number >= beta_slow={slow:g}"
        self._check("beta_fast", slow <= self.beta_fast < math.inf, allowed)
        self._check("attention_factor", 0 < self.attention_factor < math.inf, "a finite number > 0")
        in_range = all(0.999 <= each < math.inf for each in self.frequency_factors)  # 1, rounded
        self._check("frequency_factors", in_range, "finite numbers >= 1")

    def _check(self, key: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ConfigError(f"config.json: {self.table}.{key}", getattr(self, key), allowed)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Read `rope_parameters` (v5), or `rope_theta` and `rope_scaling` (v4), of a config.json.

        Where both tables are given, `rope_scaling` wins key by key. `frequency_factors` are no key
        of transformers: a GGUF's tensor `rope_freqs.weight` comes here as such a list.

        Raises:
            ConfigError: a value is missing, of the wrong type or out of range.
            NotSupportedError: a type or an option that is not built.
        """
        values: dict[str, Any] = {}
        table = _TABLES[0]
        for name in _TABLES:
            read = _read_table(hf, name)
            if read:
                values.update(read)
                table = name
        partial = values.pop("partial_rotary_factor", hf.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise NotSupportedError(
                f"partial_rotary_factor={partial!r} is not supported; only 1 is"
            )
        rope_type = values.pop("rope_type", "default")
        row = _row(table, rope_type)
        theta = values.pop("rope_theta", hf.get("rope_theta"))
        if _ORIGINAL in row.optional and hf.get(_ORIGINAL) is not None:
            values[_ORIGINAL] = hf[_ORIGINAL]  # some files have it outside of the table
        fields: dict[str, Any] = {}
        for key in (*row.needed, *row.optional, "frequency_factors"):
            name = f"config.json: {table}.{key}"
            if key in values:
                fields[key] = _READERS.get(key, number)(name, values[key])
            elif key in row.needed:
                raise ConfigError(name, None, f"given: RoPE of type {rope_type!r} needs it")
        for key in sorted(values.keys() - fields.keys()):
            _logger.warning("config.json: %s.%s is not used (type %r)", table, key, rope_type)
        if rope_type == "yarn":
            mscales = [fields.pop(key, 0.0) for key in _MSCALES]
            for key, value in zip(_MSCALES, mscales, strict=True):
                if not 0 <= value < math.inf:
                    raise ConfigError(f"config.json: {table}.{key}", value, "a finite number >= 0")
            inferred = yarn_attention_factor(fields["factor"], *mscales)
            fields.setdefault("attention_factor", inferred)
        fields.setdefault(_ORIGINAL, max_position_embeddings)
        return cls(
            rope_theta=10000.0 if theta is None else number("config.json: rope_theta", theta),
            rope_type=rope_type,
            table=table,
            **fields,
        )

    def max_context(self, max_position_embeddings: int) -> int:
        """The longest context that the type reaches, in tokens.

        `max_position_embeddings` means the scaled context for "llama3" (and for "default", which
        has no other), the original one for "linear" and "dynamic", and either of them for "yarn",
        where only original_max_position_embeddings can be relied on.
        """
        if self.rope_type in ("default", "llama3"):
            return max_position_embeddings
        return min(int(self.original_max_position_embeddings * self.factor), _LIMIT - 1)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_model_len: int) -> Frequencies:
    """Radians by which each position turns each pair of a head: float64 [head_dim / 2].

    Args:
        max_model_len: the longest sequence to be served; only the type "dynamic" looks at it.
    """
    plain = rope.rope_theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    frequencies = ROPE_TYPES[rope.rope_type].scale(rope, plain, max_model_len)
    if rope.frequency_factors:
        frequencies = frequencies / np.array(rope.frequency_factors)
    return frequencies


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """What YaRN multiplies cosines and sines by: 0.1 ln(factor) + 1 (section 3.4 of its paper).

    Where both weights of the logarithm are given, DeepSeek's `mscale` and `mscale_all_dim`, it is
    the quotient of two such terms.
    """
    grown = 0.1 * math.log(max(1.0, factor))
    if mscale and mscale_all_dim:
        return (mscale * grown + 1) / (mscale_all_dim * grown + 1)
    return grown + 1


def _default(rope: RopeConfig, plain: Frequencies, max_model_len: int) -> Frequencies:
    """Nothing is scaled."""
    return plain


def _linear(rope: RopeConfig, plain: Frequencies, max_model_len: int) -> Frequencies:
    """Positions are squeezed into the original context (Chen et al., 2023)."""
    return plain / rope.factor


def _dynamic(rope: RopeConfig, plain: Frequencies, max_model_len: int) -> Frequencies:
    """NTK-aware scaling: a larger base, by which the slowest pair turns `stretch` times slower.

    transformers takes the base from the longest sequence seen so far, so that an answer depends on
    those before it, and a key on when it was computed. Here the base is fixed once, by the longest
    sequence that may come: with a max_model_len up to the original context nothing is scaled, as
    in transformers. Above it every sequence is, short ones too, as transformers scales one that
    has max_model_len tokens from the start.
    """
    original = rope.original_max_position_embeddings
    stretch = rope.factor * max(max_model_len, original) / original - (rope.factor - 1)
    slowed: Frequencies = stretch ** (np.arange(len(plain)) / max(1, len(plain) - 1))
    return plain / slowed


def _yarn(rope: RopeConfig, plain: Frequencies, max_model_len: int) -> Frequencies:
    """A ramp over the pairs, from left alone to slowed down by `factor` (Peng et al., 2023)."""

    def pair_that_turns(times: float) -> float:
        """The pair, a real number, that turns so often within the original context."""
        wavelength = rope.original_max_position_embeddings / times
        return len(plain) * math.log(wavelength / (2 * math.pi)) / math.log(rope.rope_theta)

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    if first == last:
        last += 0.001
    slowed: Frequencies = np.clip((np.arange(len(plain)) - first) / (last - first), 0, 1)
    return plain * (slowed / rope.factor + (1 - slowed))


def _llama3(rope: RopeConfig, plain: Frequencies, max_model_len: int) -> Frequencies:
    """A ramp over the turns within the original context, from slowed down to left alone."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept: Frequencies = np.clip((turns - low) / (high - low), 0, 1)
    return plain * ((1 - kept) / rope.factor + kept)


@dataclass(frozen=True, slots=True)
class RopeType:
    """A type of RoPE.

    scale: from (configuration, plain frequencies [head_dim / 2], max_model_len) to frequencies.
    needed, optional: keys it reads of `config.json`, beside rope_theta.
    """

    scale: Callable[[RopeConfig, Frequencies, int], Frequencies]
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_ORIGINAL = "original_max_position_embeddings"
_MSCALES = ("mscale", "mscale_all_dim")
ROPE_TYPES = {
    "default": RopeType(_default),
    "linear": RopeType(_linear, ("factor",)),
    "dynamic": RopeType(_dynamic, ("factor",)),
    "yarn": RopeType(
        _yarn,
        ("factor",),
        (_ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor", *_MSCALES),
    ),
    "llama3": RopeType(_llama3, ("factor", "low_freq_factor", "high_freq_factor"), (_ORIGINAL,)),
}


def _row(table: str, rope_type: object) -> RopeType:
    if not isinstance(rope_type, str):
        raise ConfigError(f"config.json: {table}.rope_type", rope_type, "a name")
    if rope_type not in ROPE_TYPES:
        raise NotSupportedError(
            f"config.json: {table} of type {rope_type!r} is not supported; "
            f"known: {', '.join(sorted(ROPE_TYPES))}"
        )
    return ROPE_TYPES[rope_type]


def _read_table(hf: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One table of a config.json, without nulls, with `type` under its newer name."""
    table = hf.get(name)
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"config.json: {name}", table, "an object")
    if any(isinstance(value, Mapping) for value in table.values()):
        raise NotSupportedError(
            f"config.json: {name} with a RoPE of its own for each type of layer is not supported"
        )
    values = {key: value for key, value in table.items() if value is not None}
    older = values.pop("type", None)
    if older is not None:
        values.setdefault("rope_type", older)
    return values


_READERS: dict[str, Callable[[str, object], Any]] = {
    _ORIGINAL: integer,
    "truncate": flag,
    "frequency_factors": numbers,
}
