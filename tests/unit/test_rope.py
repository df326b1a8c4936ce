"""Frequencies and attention factors against transformers, and by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.config import ModelConfig
from cupaged.ops.numpy_ops import NumpyOps
from cupaged.rope import ROPE_TYPES, RopeConfig, inverse_frequencies, yarn_attention_factor
from tests.forced import LoadedModel
from tests.tiny_models import VARIANTS, Style, TinyLlama, hf_config, write_hf_folder

GOLDEN = Path(__file__).parents[1] / "golden"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "rope.json").read_text("utf-8"))["cases"]
BY_NAME = {case["name"]: case for case in CASES}


def frequencies(rope: RopeConfig, head_dim: int = 8, max_model_len: int = 1) -> list[float]:
    result = inverse_frequencies(rope, head_dim, max_model_len)
    assert result.dtype == np.float64 and result.shape == (head_dim // 2,)
    listed: list[float] = result.tolist()
    return listed


# ---- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["v4", "v5"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_frequencies_equal_transformers(case: dict[str, Any], spelling: str) -> None:
    """The golden values are transformers' own code in float64, so 1e-12, not 1e-7."""
    config = ModelConfig.from_hf(case[spelling])
    assert config.head_dim == case["head_dim"]
    result = inverse_frequencies(config.rope, config.head_dim, case["max_model_len"])
    np.testing.assert_allclose(result, case["inverse_frequencies"], rtol=1e-12, atol=0)
    assert math.isclose(config.rope.attention_factor, case["attention_factor"], rel_tol=1e-14)


def test_the_golden_cases_cover_every_type_and_head() -> None:
    configs = [ModelConfig.from_hf(case["v5"]) for case in CASES]
    assert {config.rope.rope_type for config in configs} == ROPE_TYPES.keys()
    assert {config.head_dim for config in configs} == {64, 80, 128}
    assert any("type" in (case["v4"]["rope_scaling"] or {}) for case in CASES)


@pytest.mark.parametrize("style", ["v4", "v5"])
@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.name)
def test_logits_equal_transformers(spec: TinyLlama, style: Style, tmp_path: Path) -> None:
    """Through files, paged attention and chunks: every position as the end of a run."""
    with np.load(GOLDEN / "tiny_variants.npz", allow_pickle=False) as golden:
        ids, expected = golden[f"{spec.name}_ids"].tolist(), golden[f"{spec.name}_logits"]
    loaded = LoadedModel(write_hf_folder(tmp_path, spec, style=style))
    # One token of prompt, the rest forced token by token; and prompts of many lengths.
    (rows,) = loaded.forced_logits([(ids[:1], [*ids[1:], 0])])
    np.testing.assert_allclose(rows, expected, rtol=0, atol=3e-4)
    ends = range(3, 41, 7)
    rows = np.vstack(loaded.forced_logits([(ids[:end], [0]) for end in ends]))
    np.testing.assert_allclose(rows, expected[[end - 1 for end in ends]], rtol=0, atol=3e-4)


# ---- by hand -------------------------------------------------------------------------------------


def test_plain_and_linear() -> None:
    plain = RopeConfig(rope_theta=10000.0, original_max_position_embeddings=100)
    np.testing.assert_allclose(frequencies(plain), [1, 0.1, 0.01, 0.001])
    linear = RopeConfig(
        rope_theta=10000.0, original_max_position_embeddings=100, rope_type="linear", factor=4.0
    )
    np.testing.assert_allclose(frequencies(linear), [0.25, 0.025, 0.0025, 0.00025])
    assert plain.attention_factor == linear.attention_factor == 1.0


def test_llama3_slows_what_turns_seldom() -> None:
    """With a context of 200 pi the pairs turn 100, 10, 1 and 0.1 times."""
    rope = RopeConfig(
        rope_theta=10000.0,
        original_max_position_embeddings=628,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=0.5,
        high_freq_factor=19.5,
    )
    turns = 628 / (2 * math.pi) * 0.1
    share = (turns - 0.5) / 19
    expected = [1, 0.1 * ((1 - share) / 8 + share)]
    share = (turns / 10 - 0.5) / 19
    expected += [0.01 * ((1 - share) / 8 + share), 0.001 / 8]
    np.testing.assert_allclose(frequencies(rope), expected)


def test_yarn_ramps_between_two_pairs() -> None:
    """100 and 1 turns within 200 pi, in base 10^4: pairs 0 and 2, of 4."""
    rope = RopeConfig(
        rope_theta=10000.0,
        original_max_position_embeddings=629,
        rope_type="yarn",
        factor=4.0,
        beta_fast=100.0,
        beta_slow=1.002,
    )
    np.testing.assert_allclose(
        frequencies(rope), [1, 0.1 * (0.5 + 0.5 / 4), 0.01 / 4, 0.001 / 4], rtol=1e-12
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1.0,), 1.0),
        ((0.5,), 1.0),  # no context is lost by a factor below 1
        ((math.e,), 1.1),
        ((math.e, 1.0, 1.0), 1.0),
        ((math.e, 5.0, 0.0), 1.1),  # DeepSeek's weights count only where both are given
        ((math.e, 0.0, 5.0), 1.1),
        ((math.e, 5.0, 2.0), 1.5 / 1.2),
    ],
)
def test_attention_factor_of_yarn(arguments: tuple[float, ...], expected: float) -> None:
    assert math.isclose(yarn_attention_factor(*arguments), expected)


def dynamic(factor: float = 2.0, original: int = 100) -> RopeConfig:
    return RopeConfig(
        rope_theta=10000.0,
        original_max_position_embeddings=original,
        rope_type="dynamic",
        factor=factor,
    )


def test_dynamic_depends_on_the_longest_sequence_that_may_come() -> None:
    plain = frequencies(RopeConfig(rope_theta=10000.0, original_max_position_embeddings=100))
    for max_model_len in (1, 99, 100):
        assert frequencies(dynamic(), max_model_len=max_model_len) == plain
    # At 250 the base is that which slows the last pair down 2 * 2.5 - 1 = 4 times.
    longer = frequencies(dynamic(), max_model_len=250)
    np.testing.assert_allclose(longer, [1, 0.1 / 4 ** (1 / 3), 0.01 / 4 ** (2 / 3), 0.001 / 4])
    assert frequencies(dynamic(), head_dim=2, max_model_len=250) == [1.0]


def test_frequency_factors_divide() -> None:
    rope = RopeConfig(
        rope_theta=10000.0,
        original_max_position_embeddings=100,
        frequency_factors=(1.0, 2.0, 4.0, 8.0),
    )
    np.testing.assert_allclose(frequencies(rope), [1, 0.05, 0.0025, 0.000125])


@pytest.mark.parametrize("max_positions", [1, 37])
def test_the_table_is_scaled_by_the_attention_factor(max_positions: int) -> None:
    angles = np.outer(np.arange(max_positions), [1.0, 0.3, 0.01])
    table = NumpyOps().rotary_table(np.array([1.0, 0.3, 0.01]), max_positions, 1.25)
    assert table.dtype == np.float32 and table.shape == (2, max_positions, 3)
    np.testing.assert_allclose(table[0], 1.25 * np.cos(angles), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(table[1], 1.25 * np.sin(angles), rtol=1e-6, atol=1e-7)


# ---- the context that is reached -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "most", "default"),
    [
        ("SmolLM2", 8192, 8192),
        ("Llama 3.1 8B", 131072, 131072),  # its max_position_embeddings is the scaled context
        ("linear", 4 * 4096, 4 * 4096),
        ("linear, not whole", 10240, 10240),
        ("dynamic beyond it", 3 * 4096, 4096),  # up to 4096 it is what transformers computes
        ("Qwen with yarn", 131072, 131072),  # whose max_position_embeddings is the original one
        ("DeepSeek, two mscales", 163840, 163840),  # whose max_position_embeddings is not
        ("yarn, original context not given", 16 * 4096, 16 * 4096),
        ("yarn, original context at the top", 16384, 16384),
        ("yarn, all options", 8192, 8192),
    ],
)
def test_the_context_of_each_type(name: str, most: int, default: int) -> None:
    config = ModelConfig.from_hf(BY_NAME[name]["v4"])
    assert (config.max_context, config.default_context) == (most, default)


def test_a_context_never_leaves_the_integers_of_a_device() -> None:
    rope = dynamic(factor=2.0**31 - 1, original=2**30)
    assert rope.max_context(2**30) == 2**31 - 1
    assert np.isfinite(inverse_frequencies(rope, 4, 2**31 - 1)).all()


def test_a_window_bounds_the_context() -> None:
    hf = {**hf_config(VARIANTS[2]), "max_position_embeddings": 1024}
    for window, most in ((64, 64), (1024, 1024), (4096, 1024), (None, 1024)):
        config = ModelConfig.from_hf({**hf, "sliding_window": window})
        assert (config.sliding_window, config.max_context) == (window, most)
        assert config.default_context == most
