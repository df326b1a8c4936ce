"""RoPE scaling and attention windows as a GGUF states them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.config import ModelConfig
from cupaged.errors import CheckpointError, ConfigError, CupagedError, NotSupportedError
from cupaged.loading.model_files import open_model
from cupaged.rope import RopeConfig, inverse_frequencies
from tests import reference
from tests.forced import LoadedModel
from tests.tiny_gguf import write_gguf
from tests.tiny_models import EOS_ID, TINY, TINY_LLAMA3, TINY_YARN, TinyLlama, hf_config

F32 = NDArray[np.float32]

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_variants.npz"
FACTORS = "rope_freqs.weight"
TYPE = "llama.rope.scaling.type"
YARN = {
    TYPE: "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 256,
}


def llama3_factors(spec: TinyLlama) -> F32:
    """What llama.cpp's converter stores: plain frequencies over scaled ones."""
    plain, _ = reference.rope_frequencies({"rope_theta": spec.rope_theta}, spec.head_dim)
    scaled, _ = reference.rope_frequencies(hf_config(spec), spec.head_dim)
    return (plain / scaled).astype(np.float32)


def rope_of(path: Path) -> RopeConfig:
    return open_model(path).config.rope


def check_logits(path: Path, name: str) -> None:
    with np.load(GOLDEN, allow_pickle=False) as golden:
        ids, expected = golden[f"{name}_ids"].tolist(), golden[f"{name}_logits"]
    (rows,) = LoadedModel(path).forced_logits([(ids[:30], [*ids[30:], 0])])
    np.testing.assert_allclose(rows, expected[29:], rtol=0, atol=3e-4)


# ---- Llama 3 -------------------------------------------------------------------------------------


def test_llama3_comes_as_a_tensor_of_factors(tmp_path: Path) -> None:
    """Neither left over nor left unread: transformers' frequencies and logits come out."""
    path = write_gguf(
        tmp_path / "tiny.gguf", TINY_LLAMA3, extra={FACTORS: llama3_factors(TINY_LLAMA3)}
    )
    config = open_model(path).config
    assert config.rope.rope_type == "default"
    expected, _ = reference.rope_frequencies(hf_config(TINY_LLAMA3), TINY_LLAMA3.head_dim)
    found = inverse_frequencies(config.rope, config.head_dim, 1024)
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    assert config.max_context == 1024
    check_logits(path, "tiny_llama3")


@pytest.mark.parametrize(
    ("factors", "error", "message"),
    [
        (np.ones(31), CheckpointError, r"'rope_freqs.weight' has shape \[31\], it must be \[32\]"),
        (np.ones((32, 2)), CheckpointError, r"has shape \[32, 2\]"),
        (np.zeros(32), ConfigError, "frequency_factors must be finite numbers >= 1"),
        (np.full(32, np.nan), ConfigError, "frequency_factors must be finite"),
        (np.full(32, np.inf), ConfigError, "frequency_factors must be finite"),
        # Conversions of 2023 may hold the frequencies themselves under that name.
        (10000.0 ** -(np.arange(32) / 32), ConfigError, "frequency_factors must be finite"),
    ],
)
def test_factors_that_are_refused(
    factors: NDArray[Any], error: type[CupagedError], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", TINY, extra={FACTORS: factors.astype(np.float32)})
    with pytest.raises(error, match=message):
        open_model(path)


# ---- metadata ------------------------------------------------------------------------------------


def test_yarn(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", TINY_YARN, changes=YARN)
    expected = ModelConfig.from_hf({**hf_config(TINY_YARN), "eos_token_id": [EOS_ID]})
    assert open_model(path).config == expected
    check_logits(path, "tiny_yarn")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({TYPE: "linear", "llama.rope.scaling.factor": 4.0}, {"factor": 4.0}),
        ({"llama.rope.scaling.factor": 4.0}, {"factor": 4.0}),  # a factor alone means linear
        ({"llama.rope.scale_linear": 4.0}, {"factor": 4.0}),  # and so does its older name
        ({"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 4.0}, {"factor": 2.0}),
        ({TYPE: "linear"}, {"factor": 1.0}),
        ({TYPE: "linear", "llama.rope.scaling.factor": 0.0}, {"factor": 1.0}),  # llama.cpp's none
    ],
)
def test_linear(changes: Mapping[str, Any], expected: Any, tmp_path: Path) -> None:
    rope = rope_of(write_gguf(tmp_path / "tiny.gguf", TINY, changes=changes))
    plain = RopeConfig(rope_theta=10000.0, original_max_position_embeddings=1024)
    assert rope == replace(plain, rope_type="linear", **expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"llama.rope.scaling.attn_factor": 1.5}, 1.5 * (0.1 * math.log(4) + 1)),
        ({"llama.rope.scaling.yarn_log_multiplier": 1.0}, 1.0),
        (
            {"llama.rope.scaling.yarn_log_multiplier": 0.5, "llama.rope.scaling.attn_factor": 2.0},
            2 * (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
    ],
)
def test_attention_factor(changes: Mapping[str, Any], expected: float, tmp_path: Path) -> None:
    rope = rope_of(write_gguf(tmp_path / "tiny.gguf", TINY, changes={**YARN, **changes}))
    assert math.isclose(rope.attention_factor, expected)


def test_options_of_yarn(tmp_path: Path) -> None:
    changes = {
        TYPE: "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
        "llama.rope.scaling.yarn_beta_slow": 2.0,
        "llama.rope.scaling.yarn_ext_factor": 1.0,
        "llama.rope.scaling.yarn_attn_factor": 1.0,
    }
    config = open_model(write_gguf(tmp_path / "tiny.gguf", TINY, changes=changes)).config
    assert (config.rope.beta_fast, config.rope.beta_slow) == (16.0, 2.0)
    assert config.rope.original_max_position_embeddings == 1024  # the context, when not given
    assert config.max_context == 2048


def test_an_attention_window(tmp_path: Path) -> None:
    changes = {"llama.attention.sliding_window": 64}
    config = open_model(write_gguf(tmp_path / "tiny.gguf", TINY, changes=changes)).config
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", 64)
    assert config.max_context == 64


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({TYPE: "longrope"}, NotSupportedError, "'longrope' is not supported"),
        ({TYPE: 4}, CheckpointError, "llama.rope.scaling.type is 4; it must be a string"),
        ({"llama.rope.scale_linear": 0.25}, ConfigError, r"factor must be a number in \[1"),
        ({**YARN, "llama.rope.scaling.factor": 0.5}, ConfigError, r"factor must be .* got 0\.5"),
        ({**YARN, "llama.rope.scaling.original_context_length": 0}, ConfigError, "original_max"),
        ({**YARN, "llama.rope.scaling.attn_factor": -1.0}, ConfigError, "attention_factor must"),
        ({**YARN, "llama.rope.scaling.yarn_beta_fast": 0.5}, ConfigError, "beta_fast must be"),
        ({**YARN, "llama.rope.scaling.yarn_ext_factor": 0.5}, NotSupportedError, "yarn_ext_fac"),
        ({**YARN, "llama.rope.scaling.yarn_attn_factor": 2.0}, NotSupportedError, "yarn_attn_f"),
        (
            {"llama.rope.scaling.factor": 2.0, "llama.rope.scaling.attn_factor": 1.5},
            NotSupportedError,
            "attn_factor=1.5 is not supported with RoPE scaling of type 'linear'; only 1 is",
        ),
        ({"llama.rope.scaling.attn_factor": 1.5}, NotSupportedError, "of type 'none'"),
    ],
)
def test_metadata_that_is_refused(
    changes: Mapping[str, Any], error: type[CupagedError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        open_model(write_gguf(tmp_path / "tiny.gguf", TINY, changes=changes))
