"""A Llama in float64 NumPy, written to be obviously right and to be nothing else.

One sequence, no cache, no paging, no batching, loops over heads; and the operations that other
families or the paged cache need, element by element. The tests of the engine and of each op take
their expected values from here; this module itself is held against transformers by
`tests/unit/test_reference.py`. It imports nothing from the package under test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]


def embedding(token_ids: ArrayLike, table: ArrayLike) -> F64:
    """Rows of `table` [vocab, hidden] for `token_ids` [n]: [n, hidden]."""
    return _f64(table)[np.asarray(token_ids, dtype=np.int64)]


def linear(x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> F64:
    """`x @ weight.T + bias`: x [n, in], weight [out, in], bias [out], result [n, out]."""
    out = _f64(x) @ _f64(weight).T
    return _f64(out if bias is None else out + _f64(bias))


def rms_norm(x: ArrayLike, weight: ArrayLike, eps: float) -> F64:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""
    values = _f64(x)
    mean_square = np.mean(values * values, axis=-1, keepdims=True)
    return _f64(values / np.sqrt(mean_square + eps) * _f64(weight))


def silu_mul(gate: ArrayLike, up: ArrayLike) -> F64:
    """`silu(gate) * up`, with `silu(g) = g / (1 + exp(-g))`."""
    g = _f64(gate)
    with np.errstate(over="ignore"):  # exp(-g) = inf gives the right 0
        return g / (1.0 + np.exp(-g)) * _f64(up)


def layer_norm(x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None, eps: float) -> F64:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, row by row; x [n, hidden]."""
    rows = []
    for row in _f64(x):
        mean = math.fsum(row) / len(row)
        variance = math.fsum((value - mean) ** 2 for value in row) / len(row)
        rows.append((row - mean) / math.sqrt(variance + eps) * _f64(weight))
    out = np.array(rows).reshape(np.shape(x))
    return _f64(out if bias is None else out + _f64(bias))


def gelu(x: ArrayLike) -> F64:
    """`x Phi(x)`, Phi the normal distribution: Hendrycks and Gimpel, 2016, in its exact form."""
    values = _f64(x)
    shares = [0.5 * math.erfc(-value / math.sqrt(2)) for value in values.flat]
    return _f64(values * np.reshape(shares, values.shape))


def gelu_tanh(x: ArrayLike) -> F64:
    """The approximation of `gelu` by tanh, as the same paper has it."""
    values = _f64(x)
    inner = math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)
    return _f64(0.5 * values * (1 + np.tanh(inner)))


def rope(x: ArrayLike, positions: ArrayLike, theta: float) -> F64:
    """Rotary embedding of x [n, heads, head_dim] at `positions` [n], in Hugging Face's pairing.

    Dimension i is paired with i + head_dim/2 (half-split, not interleaved), and the pair is turned
    by the angle `position * theta^(-2i/head_dim)`.
    """
    half = np.shape(x)[-1] // 2
    return rotate(x, positions, theta ** (-np.arange(half) / half))


def rotate(x: ArrayLike, positions: ArrayLike, frequencies: F64, scale: float = 1.0) -> F64:
    """`rope` with the pairs' own frequencies [head_dim / 2]; the result is multiplied by scale."""
    values = _f64(x)
    half = values.shape[-1] // 2
    angles = np.multiply.outer(_f64(positions), frequencies)[:, None, :]  # [n, 1, half]
    cos, sin = scale * np.cos(angles), scale * np.sin(angles)
    first, second = values[..., :half], values[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def write_slots(cache: NDArray[Any], values: NDArray[Any], slots: ArrayLike) -> None:
    """values [n, heads, dim] into their slots of a paged cache [blocks, heads, block_size, dim].

    Slot s is place s % block_size of block s // block_size; values whose slot is -1 are dropped.
    """
    block_size = cache.shape[2]
    for value, slot in zip(values, np.asarray(slots).tolist(), strict=True):
        for head in range(cache.shape[1] if slot != -1 else 0):
            cache[slot // block_size, head, slot % block_size] = value[head]


def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, q_start: int = 0, scale: float | None = None
) -> F64:
    """Causal attention of one sequence: [num_queries, num_heads, head_dim].

    q is [num_queries, num_heads, head_dim]; k and v are [num_keys, num_kv_heads, head_dim]. Query
    row i stands at position `q_start + i` and sees the keys 0 .. q_start + i, so a chunk of a
    prompt or a single decoded token is the same call. Each KV head serves num_heads / num_kv_heads
    consecutive query heads. `scale` defaults to head_dim^-0.5.
    """
    queries, keys, values = _f64(q), _f64(k), _f64(v)
    num_queries, num_heads, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    factor = head_dim**-0.5 if scale is None else scale
    out = np.zeros((num_queries, num_heads, values.shape[2]))
    for row in range(num_queries):
        visible = q_start + row + 1
        for head in range(num_heads):
            kv_head = head // group
            scores = keys[:visible, kv_head] @ queries[row, head] * factor  # [visible]
            out[row, head] = softmax(scores) @ values[:visible, kv_head]
    return out


def softmax(x: ArrayLike) -> F64:
    """Softmax over the last axis."""
    values = _f64(x)
    exp = np.exp(values - values.max(axis=-1, keepdims=True))
    probs: F64 = exp / exp.sum(axis=-1, keepdims=True)
    return probs


def reference_logits(
    config: Mapping[str, Any], weights: Mapping[str, NDArray[Any]], token_ids: Sequence[int]
) -> F64:
    """Logits [n, vocab] of a Hugging Face Llama for one sequence that starts at position 0.

    `config` is the content of config.json (transformers 4 or 5), `weights` maps the Hugging Face
    names to arrays. GQA, any head_dim, attention_bias, mlp_bias, tied or untied embeddings.
    """
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    eps = float(config["rms_norm_eps"])
    frequencies, scale = rope_frequencies(config, head_dim)
    n = len(token_ids)
    positions = np.arange(n)

    def project(name: str, x: F64) -> F64:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    h = embedding(token_ids, weights["model.embed_tokens.weight"])  # [n, hidden]
    for index in range(int(config["num_hidden_layers"])):
        layer = f"model.layers.{index}"
        x = rms_norm(h, weights[f"{layer}.input_layernorm.weight"], eps)
        q = project(f"{layer}.self_attn.q_proj", x).reshape(n, num_heads, head_dim)
        k = project(f"{layer}.self_attn.k_proj", x).reshape(n, num_kv_heads, head_dim)
        v = project(f"{layer}.self_attn.v_proj", x).reshape(n, num_kv_heads, head_dim)
        q, k = (rotate(each, positions, frequencies, scale) for each in (q, k))
        mixed = attention(q, k, v)
        h = h + project(f"{layer}.self_attn.o_proj", mixed.reshape(n, num_heads * head_dim))
        x = rms_norm(h, weights[f"{layer}.post_attention_layernorm.weight"], eps)
        gate, up = project(f"{layer}.mlp.gate_proj", x), project(f"{layer}.mlp.up_proj", x)
        h = h + project(f"{layer}.mlp.down_proj", silu_mul(gate, up))
    h = rms_norm(h, weights["model.norm.weight"], eps)
    tied = bool(config.get("tie_word_embeddings", False))
    return linear(h, weights["model.embed_tokens.weight" if tied else "lm_head.weight"])


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> tuple[F64, float]:
    """Radians a position [head_dim / 2], and what the result is multiplied by.

    Pair by pair, by cases, as the papers have it: plain RoPE, "llama3", and "yarn" with its
    defaults (a ramp from 32 turns to 1, attention factor 0.1 ln s + 1).
    """
    rope_config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope_config.get("rope_type", "default")
    if rope_type not in ("default", "llama3", "yarn"):
        raise ValueError(f"the reference does not know RoPE of type {rope_type!r}")
    theta = float(rope_config.get("rope_theta") or config["rope_theta"])
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if rope_type == "default":
        return np.array(plain), 1.0
    factor = rope_config["factor"]
    context = rope_config["original_max_position_embeddings"]
    if rope_type == "llama3":
        low, high = rope_config["low_freq_factor"], rope_config["high_freq_factor"]
        scaled = []
        for frequency in plain:
            turns = context * frequency / (2 * math.pi)
            if turns > high:
                scaled.append(frequency)
            elif turns < low:
                scaled.append(frequency / factor)
            else:
                share = (turns - low) / (high - low)
                scaled.append((1 - share) * frequency / factor + share * frequency)
        return np.array(scaled), 1.0
    # Pair i turns context / (2 pi theta^(2i / d)) times; solved for i.
    first, last = (
        head_dim / 2 * math.log(context / (2 * math.pi * turns)) / math.log(theta)
        for turns in (32, 1)
    )
    low, high = max(0, math.floor(first)), min(head_dim - 1, math.ceil(last))
    ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(head_dim // 2)]
    scaled = [f * (1 - r) + f / factor * r for f, r in zip(plain, ramp, strict=True)]
    return np.array(scaled), 0.1 * math.log(factor) + 1


def _f64(array: ArrayLike) -> F64:
    return np.asarray(array, dtype=np.float64)
