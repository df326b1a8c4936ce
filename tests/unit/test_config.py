"""A `config.json` in each of its spellings, and every value that cannot be served, by name."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.config import EngineConfig, ModelConfig, token_id_tuple
from cupaged.errors import ConfigError, ModelError, NotSupportedError
from cupaged.rope import RopeConfig

# The shape of SmolLM2-135M-Instruct, as transformers v4 writes it.
V4: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
# The same as v5 writes it.
V5 = {
    **{k: v for k, v in V4.items() if k not in ("rope_theta", "rope_scaling")},
    "head_dim": 64,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}
EXPECTED = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-05,
    rope=RopeConfig(rope_theta=100000.0, original_max_position_embeddings=8192),
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    eos_token_ids=(2,),
)
HUGE = 10**400


def without(*keys: str) -> dict[str, Any]:
    return {k: v for k, v in V4.items() if k not in keys}


@pytest.mark.parametrize("hf", [V4, V5], ids=["v4", "v5"])
def test_both_spellings_give_one_model(hf: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(hf) == EXPECTED


def test_head_dim_is_computed_only_when_it_is_not_given() -> None:
    assert ModelConfig.from_hf({**V4, "head_dim": None}).head_dim == 64
    assert ModelConfig.from_hf({**V4, "head_dim": 128}).head_dim == 128
    # With an explicit one the hidden size need not be a multiple of the heads.
    assert ModelConfig.from_hf({**V4, "head_dim": 32, "hidden_size": 500}).hidden_size == 500


def test_what_is_left_out_has_the_defaults_of_the_format() -> None:
    config = ModelConfig.from_hf(
        without(
            "num_key_value_heads",
            "rope_theta",
            "rope_scaling",
            "rms_norm_eps",
            "hidden_act",
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            "eos_token_id",
        )
    )
    assert config == replace(
        EXPECTED,
        num_kv_heads=9,
        rope=replace(EXPECTED.rope, rope_theta=10000.0),
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        eos_token_ids=(),
    )
    assert ModelConfig.from_hf({**V4, "num_key_value_heads": None}).num_kv_heads == 9
    assert ModelConfig.from_hf({**V4, "eos_token_id": [7, 9]}).eos_token_ids == (7, 9)
    old = {**V4, "rope_scaling": {"type": "default"}, "partial_rotary_factor": 1}
    assert ModelConfig.from_hf(old) == EXPECTED
    assert ModelConfig.from_hf({**V4, "quantization_config": None}) == EXPECTED


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_a_needed_key_is_missed_by_name(key: str) -> None:
    for hf in (without(key), {**V4, key: None}):
        with pytest.raises(ModelError, match=f"config.json has no '{key}'"):
            ModelConfig.from_hf(hf)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("explicit", [False, True], ids=["computed head_dim", "explicit head_dim"])
def test_a_count_that_is_none_is_named_as_the_file_names_it(key: str, explicit: bool) -> None:
    hf = {**V4, "head_dim": 64} if explicit else V4
    for value in (0, -1, 2**31, HUGE, 1.5, 64.0, "64", True, math.nan, [64]):
        with pytest.raises(ConfigError) as refused:
            ModelConfig.from_hf({**hf, key: value})
        assert refused.value.name == f"config.json: {key}"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"hidden_size": 577}, "hidden_size"),
        ({"head_dim": 63}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": HUGE}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": HUGE}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"mlp_bias": 0}, "mlp_bias"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, 2.0]}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"architectures": None}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": ["A", "B"]}, "architectures"),
        ({"architectures": [None]}, "architectures"),
        ({"quantization_config": "gptq"}, "quantization_config"),
    ],
)
def test_a_bad_value_is_named(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ModelConfig.from_hf({**V4, **change})
    assert refused.value.name == f"config.json: {name}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"bits": 4}}, "unknown"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling of type 'longrope'"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_scaling of type 'su'"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "'mrope' is not .*; known: default, dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ],
)
def test_what_is_not_built_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        ModelConfig.from_hf({**V4, **change})


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    key=st.sampled_from(sorted({*V4, *V5, "quantization_config", "partial_rotary_factor"})),
    value=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=2),
            st.dictionaries(
                st.sampled_from(["rope_type", "type", "rope_theta", "factor", "quant_method"]),
                st.one_of(st.sampled_from(["linear", "dynamic", "yarn", "llama3"]), inner),
            ),
        ),
        max_leaves=3,
    ),
)
def test_any_value_of_json_is_read_or_refused(key: str, value: object) -> None:
    try:
        config = ModelConfig.from_hf({**V5, key: value})
    except (ConfigError, ModelError, NotSupportedError):
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert 0 < config.rope.rope_theta < math.inf
    assert config.default_context <= config.max_context < 2**31


def test_token_ids_may_be_none_one_or_several() -> None:
    assert token_id_tuple("x", None) == ()
    assert token_id_tuple("x", 5) == (5,)
    assert token_id_tuple("x", [5, 7]) == (5, 7)
    with pytest.raises(ConfigError, match=r"x must be .*, got \(5, 7\)"):
        token_id_tuple("x", (5, 7))


# ---- limits of the engine ------------------------------------------------------------------------

LIMITS: dict[str, Any] = {"vocab_size": 50, "num_blocks": 10, "max_model_len": 100}


def test_limits_have_defaults_and_never_change() -> None:
    config = EngineConfig(**LIMITS)
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (16, 64, 512)
    assert (config.watermark, config.max_steps_in_flight) == (0.01, 1)
    with pytest.raises(FrozenInstanceError):
        config.num_blocks = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("block_size", "max_model_len", "widest"),
    [(16, 100, 7), (16, 96, 6), (16, 1000, 10), (4, 1, 1)],
)
def test_a_row_is_as_wide_as_the_longest_sequence(
    block_size: int, max_model_len: int, widest: int
) -> None:
    limits = {**LIMITS, "block_size": block_size, "max_model_len": max_model_len}
    assert EngineConfig(**limits).max_blocks_per_seq == widest


@pytest.mark.parametrize(("watermark", "blocks"), [(0, 0), (0.01, 1), (0.1, 1), (0.11, 2)])
def test_the_watermark_is_rounded_up(watermark: float, blocks: int) -> None:
    assert EngineConfig(**LIMITS, watermark=watermark).watermark_blocks == blocks


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("vocab_size", [0, -1, 2**31, 1.5, "50", True, None, math.nan]),
        ("num_blocks", [0, -1, 2**31, 1.5, "50", True, None]),
        ("max_model_len", [0, 2**31, 1.5, None]),
        ("max_num_seqs", [0, -5, HUGE, 1.5, None]),
        ("max_num_batched_tokens", [0, HUGE, 1.5, None]),
        ("max_steps_in_flight", [0, HUGE, 1.5, True]),
        ("block_size", [0, 3, 256, 16.0, "16", True, None, -16]),
        ("watermark", [-0.1, 1, 1.5, math.nan, math.inf, "0.1", None, True, False]),
    ],
)
def test_a_limit_out_of_range_is_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError) as refused:
            EngineConfig(**{**LIMITS, name: value})
        assert refused.value.name == name
