"""What a `config.json` may say of RoPE, and every value that is refused, by name."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from cupaged.errors import ConfigError, NotSupportedError
from cupaged.rope import RopeConfig
from tests.golden.rope_cases import ROPE_CASES, RopeCase

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}
HUGE = 10**400


def read(scaling: object, **top: Any) -> RopeConfig:
    return RopeConfig.from_hf({"rope_theta": 10000.0, "rope_scaling": scaling, **top}, 2048)


# ---- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ROPE_CASES, ids=lambda case: case.name)
def test_both_spellings_give_one_configuration(case: RopeCase) -> None:
    v4, v5 = (RopeConfig.from_hf(hf, case.max_position_embeddings) for hf in (case.v4(), case.v5()))
    assert v4 == v5
    assert v4.rope_theta == case.theta


def test_every_field_of_llama3() -> None:
    assert read(LLAMA3, rope_theta=500000) == RopeConfig(
        rope_theta=500000.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def test_every_field_of_yarn() -> None:
    options = {"beta_fast": 16, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.25}
    assert read({**YARN, **options, "mscale": 1.0, "mscale_all_dim": 1.0}) == RopeConfig(
        rope_theta=10000.0,
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=4096,
        beta_fast=16.0,
        beta_slow=2.0,
        truncate=False,
        attention_factor=1.25,
    )


@pytest.mark.parametrize(
    "top",
    [
        {"rope_scaling": {}},
        {"rope_scaling": None, "rope_parameters": None},
        {"rope_scaling": {"type": None, "factor": None}},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"partial_rotary_factor": 1.0}},
        {"partial_rotary_factor": 1},
        # A key of other types of RoPE, which plain RoPE has no use for.
        {"original_max_position_embeddings": 16},
    ],
)
def test_plain_rope(top: dict[str, Any]) -> None:
    expected = RopeConfig(rope_theta=10000.0, original_max_position_embeddings=2048)
    assert RopeConfig.from_hf(top, 2048) == expected
    assert expected.attention_factor == 1.0


def test_where_two_things_say_it() -> None:
    """The newer name of the type wins; of the tables the older one, as in transformers."""
    assert read({"type": "mrope", "rope_type": "linear", "factor": 2}).rope_type == "linear"
    both = RopeConfig.from_hf(
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_theta": 5.0,
        },
        2048,
    )
    assert (both.rope_type, both.rope_theta, both.factor) == ("linear", 1e6, 2.0)
    assert read({**YARN, "rope_theta": 7.0}).rope_theta == 7.0
    # The original context outside of the table, where Phi-3 and its kin have it, wins.
    assert read(YARN, original_max_position_embeddings=512).original_max_position_embeddings == 512


def test_what_is_not_used_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="cupaged"):
        read({**YARN, "finetuned": True})
        read({"type": "linear", "factor": 2.0, "low_freq_factor": "x"})
    assert [record.getMessage() for record in caplog.records] == [
        "config.json: rope_scaling.finetuned is not used (type 'yarn')",
        "config.json: rope_scaling.low_freq_factor is not used (type 'linear')",
    ]


# ---- what is refused -----------------------------------------------------------------------------

FACTORS = (None, 0, 0.5, 0.999, -2.0, math.nan, math.inf, 2**31, HUGE, True, "4", [4.0])
POSITIVE = (0, -1.0, math.nan, math.inf, HUGE, True, "1", [1])


@pytest.mark.parametrize(
    ("base", "key", "values"),
    [
        ({"type": "linear"}, "factor", FACTORS),
        ({"type": "dynamic"}, "factor", FACTORS),
        (YARN, "factor", FACTORS),
        (LLAMA3, "factor", FACTORS),
        (LLAMA3, "low_freq_factor", (None, *POSITIVE)),
        (LLAMA3, "high_freq_factor", (None, 1, 0.5, math.nan, math.inf, HUGE, False, "4")),
        (LLAMA3, "original_max_position_embeddings", (0, -1, 8192.0, 2**31, HUGE, True, "8192")),
        (YARN, "original_max_position_embeddings", (0, -1, 4096.5, 2**31, True, "4096")),
        (YARN, "attention_factor", POSITIVE),
        (YARN, "beta_slow", POSITIVE),
        (YARN, "beta_fast", (0.5, math.nan, math.inf, HUGE, True, "32")),
        (YARN, "mscale", (-0.1, math.nan, math.inf, HUGE, True, "1")),
        (YARN, "mscale_all_dim", (-0.1, math.nan, math.inf, HUGE, True, "1")),
        (YARN, "truncate", (0, 1, "true", [])),
        (YARN, "frequency_factors", (1.0, "1", [0.5], [math.nan], [math.inf], [True], ["1"])),
    ],
)
@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
def test_a_bad_value_is_named_where_it_stands(
    base: dict[str, Any], key: str, values: tuple[Any, ...], table: str
) -> None:
    for value in values:
        with pytest.raises(ConfigError) as refused:
            RopeConfig.from_hf({table: {**base, key: value}}, 2048)
        assert refused.value.name == f"config.json: {table}.{key}"
        assert refused.value.allowed


def test_errors_say_what_is_allowed() -> None:
    for scaling, message in (
        ({"type": "linear"}, r"rope_scaling\.factor must be given: RoPE of type 'linear' needs it"),
        ({"type": "linear", "factor": 0.5}, r"factor must be a number in \[1, 2\^31\), got 0\.5"),
        ({**LLAMA3, "low_freq_factor": 4}, "must be a finite number > low_freq_factor=4, got 4.0"),
        ({**YARN, "beta_slow": 33}, r"beta_fast must be .* >= beta_slow=33, got 32\.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(scaling)


@pytest.mark.parametrize("theta", [0, -1, 1, 1.0, math.nan, math.inf, HUGE, True, "1e4", [1]])
def test_a_base_that_is_refused(theta: object) -> None:
    """YaRN divides by the logarithm of the base; for the others 1 is a base."""
    with pytest.raises(ConfigError, match=r"config\.json: rope_theta must be"):
        read({**YARN, "rope_theta": theta})
    if theta == 1 and theta is not True:
        assert read({"rope_theta": theta}).rope_theta == 1.0
        return
    with pytest.raises(ConfigError, match=r"config\.json: rope_theta must be"):
        read(None, rope_theta=theta)


@pytest.mark.parametrize("value", [5, True, ["yarn"], "", 1.5])
def test_a_type_that_is_no_name(value: object) -> None:
    with pytest.raises((ConfigError, NotSupportedError), match=r"rope_scaling(\.rope_)? ?.*type"):
        read({"rope_type": value, "factor": 2.0})


@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [[], "linear", 0, False, 2.0])
def test_a_table_that_is_none(table: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {table} must be an object"):
        RopeConfig.from_hf({table: value}, 2048)


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "known: default, dynamic, l"),
        ({"rope_scaling": {"type": "su"}}, "rope_scaling of type 'su' is not supported; known:"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters of type 'proporti"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "a RoPE of its own for each type of layer is not supported",
        ),
    ],
)
def test_what_is_not_built(
    top: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NotSupportedError, match=message):
        RopeConfig.from_hf(top, 2048)
    assert not caplog.records
