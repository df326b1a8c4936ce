"""The float64 reference against transformers' logits, and its ops against hand calculations."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests import reference
from tests.tiny_models import (
    TINY,
    TINY_WIDE_HEAD,
    VARIANTS,
    Style,
    TinyLlama,
    hf_config,
    hf_weights,
)

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("style", ["v4", "v5"])
@pytest.mark.parametrize("spec", [TINY, TINY_WIDE_HEAD, *VARIANTS], ids=lambda spec: spec.name)
def test_logits_equal_transformers(spec: TinyLlama, style: Style) -> None:
    file = "tiny_variants.npz" if spec in VARIANTS else "tiny.npz"
    with np.load(GOLDEN / file, allow_pickle=False) as golden:
        ids, expected = golden[f"{spec.name}_ids"], golden[f"{spec.name}_logits"]
    logits = reference.reference_logits(hf_config(spec, style), hf_weights(spec), ids.tolist())
    assert logits.dtype == np.float64
    assert logits.shape == (40, spec.vocab_size)
    # The golden is fp32: its own rounding reaches 3.6e-5. With the same model computed in double
    # precision throughout, transformers and the reference differ by less than 1e-13.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_tiny_logits_are_worth_comparing() -> None:
    for file, specs in (("tiny.npz", (TINY, TINY_WIDE_HEAD)), ("tiny_variants.npz", VARIANTS)):
        with np.load(GOLDEN / file, allow_pickle=False) as golden:
            for spec in specs:
                ids, logits = golden[f"{spec.name}_ids"], golden[f"{spec.name}_logits"]
                assert 2 < logits.std() < 5
                winners = logits.argmax(axis=1)
                assert len(set(winners.tolist())) > 20
                assert (winners == ids).mean() < 0.2  # a tied model that only repeats its input


@pytest.mark.parametrize("spec", [spec for spec in VARIANTS if spec.rope], ids=lambda s: s.name)
def test_scaling_shows_in_the_logits(spec: TinyLlama) -> None:
    """Without it the same weights give other logits, so the golden values do test it."""
    with np.load(GOLDEN / "tiny_variants.npz", allow_pickle=False) as golden:
        ids, expected = golden[f"{spec.name}_ids"], golden[f"{spec.name}_logits"]
    config = {**hf_config(spec), "rope_scaling": None}
    plain = reference.reference_logits(config, hf_weights(spec), ids.tolist())
    assert np.abs(plain - expected).max() > 0.5


def test_chunked_queries_equal_one_pass() -> None:
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((11, 4, 8)), *rng.standard_normal((2, 11, 2, 8))
    whole = reference.attention(q, k, v)
    for start, stop in [(0, 1), (0, 5), (5, 11), (10, 11)]:
        chunk = reference.attention(q[start:stop], k[:stop], v[:stop], q_start=start)
        np.testing.assert_array_equal(chunk, whole[start:stop])


def test_attention_by_hand() -> None:
    q = np.array([[[0.0]], [[1.0]]])  # two queries, one head, head_dim 1
    k = np.array([[[0.0]], [[math.log(3.0)]]])
    v = np.array([[[4.0]], [[8.0]]])
    out = reference.attention(q, k, v)
    np.testing.assert_allclose(out.ravel(), [4.0, 7.0])  # weights 1; then 1/4 and 3/4
    out = reference.attention(q, k, v, scale=0.0)
    np.testing.assert_allclose(out.ravel(), [4.0, 6.0])


def test_query_heads_share_kv_heads_in_consecutive_groups() -> None:
    k = np.zeros((1, 2, 1))
    v = np.array([[[5.0], [6.0]]])
    out = reference.attention(np.zeros((1, 4, 1)), k, v)
    assert out.ravel().tolist() == [5.0, 5.0, 6.0, 6.0]


def test_rope_by_hand() -> None:
    x = np.array([[[1.0, 1.0, 0.0, 0.0]]])
    out = reference.rope(x, [2], 100.0)  # pairs (0, 2) by 2 radians and (1, 3) by 0.2
    expected = [math.cos(2.0), math.cos(0.2), math.sin(2.0), math.sin(0.2)]
    np.testing.assert_allclose(out.ravel(), expected)
    np.testing.assert_array_equal(reference.rope(x, [0], 100.0), x)


def test_small_ops_by_hand() -> None:
    np.testing.assert_allclose(reference.rms_norm([[3.0, 4.0]], [1.0, 2.0], 12.5), [[0.6, 1.6]])
    np.testing.assert_allclose(
        reference.silu_mul([0.0, math.log(3.0), -1e4], [5.0, 4.0, 1.0]),
        [0.0, 3 * math.log(3.0), 0.0],
    )
    np.testing.assert_array_equal(reference.linear([[1, 2]], [[3, 4]], [5]), [[16]])
    np.testing.assert_array_equal(reference.embedding([1, 0], [[1, 2], [3, 4]]), [[3, 4], [1, 2]])


def test_unknown_rope_type_is_refused() -> None:
    config = hf_config(TINY, "v5")
    config["rope_parameters"]["rope_type"] = "longrope"
    with pytest.raises(ValueError, match="longrope"):
        reference.reference_logits(config, hf_weights(TINY), [3])
