"""Llama and everything of its shape: Llama 2 and 3, Mistral, SmolLM2, TinyLlama.

Pre-norm decoder layers of grouped-query attention with rotary positions and a SwiGLU MLP (Touvron
et al., 2023). Written against `Ops` only; the name table says where each weight is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cupaged.config import ModelConfig
from cupaged.loading.weights import Part, WeightEntry
from cupaged.ops import Array, KVCache, KVCacheSpec, Ops, StepContext
from cupaged.rope import inverse_frequencies


class LlamaForCausalLM:
    """One model on one device.

    Args:
        weights: by the names of `name_table`, packed or on the device.
        max_model_len: most positions a sequence may have.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Any], ops: Ops, *, max_model_len: int
    ) -> None:
        self.config = config
        self._weights = weights
        self._ops = ops
        frequencies = inverse_frequencies(config.rope, config.head_dim, max_model_len)
        scale = config.rope.attention_factor
        self._rotary = ops.rotary_table(frequencies, max_model_len, scale)

    @staticmethod
    def name_table(c: ModelConfig) -> tuple[WeightEntry, ...]:
        """Every weight; `{i}` stands for the layer. Shard axis 0 is out_features, 1 in_features."""
        hidden, mlp = c.hidden_size, c.intermediate_size
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        hf, gguf = "model.layers.{i}.", "blk.{i}."
        table = (
            WeightEntry(
                "embed", "linear", hidden, 0, Part("model.embed_tokens", "token_embd", c.vocab_size)
            ),
            WeightEntry(
                "{i}.attention_norm", "vector", hidden, None,
                Part(hf + "input_layernorm", gguf + "attn_norm"),
            ),
            WeightEntry(
                "{i}.qkv", "linear", hidden, 0,
                Part(hf + "self_attn.q_proj", gguf + "attn_q", q, gguf_heads=c.num_heads),
                Part(hf + "self_attn.k_proj", gguf + "attn_k", kv, gguf_heads=c.num_kv_heads),
                Part(hf + "self_attn.v_proj", gguf + "attn_v", kv),
                bias=c.attention_bias,
            ),
            WeightEntry(
                "{i}.o", "linear", q, 1,
                Part(hf + "self_attn.o_proj", gguf + "attn_output", hidden), bias=c.attention_bias,
            ),
            WeightEntry(
                "{i}.mlp_norm", "vector", hidden, None,
                Part(hf + "post_attention_layernorm", gguf + "ffn_norm"),
            ),
            WeightEntry(
                "{i}.gate_up", "linear", hidden, 0,
                Part(hf + "mlp.gate_proj", gguf + "ffn_gate", mlp),
                Part(hf + "mlp.up_proj", gguf + "ffn_up", mlp), bias=c.mlp_bias,
            ),
            WeightEntry(
                "{i}.down", "linear", mlp, 1,
                Part(hf + "mlp.down_proj", gguf + "ffn_down", hidden), bias=c.mlp_bias,
            ),
            WeightEntry("norm", "vector", hidden, None, Part("model.norm", "output_norm")),
        )  # fmt: skip
        if c.tie_word_embeddings:
            return table
        return (
            *table,
            WeightEntry("head", "linear", hidden, 0, Part("lm_head", "output", c.vocab_size)),
        )

    @staticmethod
    def kv_cache_specs(c: ModelConfig, block_size: int, dtype: str) -> list[KVCacheSpec]:
        """One entry a layer: all read through the one block table."""
        spec = KVCacheSpec(0, c.num_kv_heads, c.head_dim, c.head_dim, dtype, block_size)
        return [spec] * c.num_layers

    @staticmethod
    def workspace_widths(c: ModelConfig) -> dict[str, int]:
        """The buffers of a step: each is [tokens of the step, width]."""
        return {
            "residual": c.hidden_size,
            "normed": c.hidden_size,
            "projected": c.hidden_size,
            "qkv": (c.num_heads + 2 * c.num_kv_heads) * c.head_dim,
            "attended": c.num_heads * c.head_dim,
            "gate_up": 2 * c.intermediate_size,
            "activated": c.intermediate_size,
        }

    def forward(
        self, step: StepContext, kv_caches: Sequence[KVCache], work: Mapping[str, Array]
    ) -> Array:
        """Hidden states after the last norm, [T, hidden_size], in the workspace."""
        ops, w, eps = self._ops, self._weights, self.config.rms_norm_eps
        residual, normed, projected, qkv, attended, gate_up, activated = (
            work[name][: step.num_tokens]
            for name in (
                "residual", "normed", "projected", "qkv", "attended", "gate_up", "activated"
            )
        )  # fmt: skip
        scale = self.config.head_dim**-0.5
        ops.embedding(residual, step.token_ids, w["embed"])
        ops.rms_norm(normed, residual, w["0.attention_norm"], eps)
        for i, cache in enumerate(kv_caches):
            ops.linear(qkv, normed, w[f"{i}.qkv"])
            ops.rope_and_cache(step, qkv, self._rotary, cache)
            ops.paged_attention(step, attended, qkv, cache, scale)
            ops.linear(projected, attended, w[f"{i}.o"])
            ops.all_reduce(projected)
            ops.add_rms_norm(normed, residual, projected, w[f"{i}.mlp_norm"], eps)
            ops.linear(gate_up, normed, w[f"{i}.gate_up"])
            ops.silu_mul(activated, gate_up)
            ops.linear(projected, activated, w[f"{i}.down"])
            ops.all_reduce(projected)
            following = f"{i + 1}.attention_norm" if i + 1 < len(kv_caches) else "norm"
            ops.add_rms_norm(normed, residual, projected, w[following], eps)
        return normed

    def compute_logits(self, out: Array, hidden: Array) -> None:
        """out: [n, vocab_size]; hidden: [n, hidden_size]. A tied head is the embedding itself."""
        self._ops.linear(out, hidden, self._weights.get("head", self._weights["embed"]))
