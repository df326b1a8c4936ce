"""RoPE configurations, in both spellings, that `make_golden.py` has transformers compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeCase:
    """One configuration.

    scaling: what stands in `rope_scaling`; its type is spelled "type" or "rope_type".
    top: more keys of the config.json.
    max_model_len: the sequence that "dynamic" is computed for.
    """

    name: str
    head_dim: int
    theta: float
    max_position_embeddings: int
    scaling: dict[str, Any] | None = None
    top: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None

    def _config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "head_dim": self.head_dim,
            "hidden_size": 4 * self.head_dim,
            "intermediate_size": 8,
            "max_position_embeddings": self.max_position_embeddings,
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "vocab_size": 16,
            **self.top,
        }

    def v4(self) -> dict[str, Any]:
        """As transformers 4 writes it."""
        return {**self._config(), "rope_theta": self.theta, "rope_scaling": self.scaling}

    def v5(self) -> dict[str, Any]:
        """As transformers 5 writes it."""
        scaling = dict(self.scaling or {})
        rope_type = scaling.pop("type", "default")
        parameters = {"rope_theta": self.theta, "rope_type": rope_type, **scaling}
        return {**self._config(), "rope_parameters": parameters}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
# fmt: off
ROPE_CASES = (
    RopeCase(name="SmolLM2", head_dim=64, theta=100000, max_position_embeddings=8192),
    RopeCase(name="Mistral Nemo", head_dim=128, theta=1e6, max_position_embeddings=131072),
    RopeCase(name="Llama 3.1 8B", head_dim=128, theta=500000.0, max_position_embeddings=131072,
             scaling=LLAMA3),
    RopeCase(name="Llama 3.2 1B", head_dim=64, theta=500000.0, max_position_embeddings=131072,
             scaling={**LLAMA3, "factor": 32.0}),
    RopeCase(name="llama3, original context not given", head_dim=80, theta=10000.0,
             max_position_embeddings=2048,
             scaling={"rope_type": "llama3", "factor": 3, "low_freq_factor": 2,
                      "high_freq_factor": 2.5}),
    RopeCase(name="linear", head_dim=128, theta=10000.0, max_position_embeddings=4096,
             scaling={"type": "linear", "factor": 4.0}),
    RopeCase(name="linear, not whole", head_dim=80, theta=10000.0, max_position_embeddings=4096,
             scaling={"rope_type": "linear", "factor": 2.5}),
    RopeCase(name="dynamic within the original context", head_dim=128, theta=10000.0,
             max_position_embeddings=4096, max_model_len=4096,
             scaling={"type": "dynamic", "factor": 2.0}),
    RopeCase(name="dynamic beyond it", head_dim=80, theta=10000.0, max_position_embeddings=4096,
             max_model_len=10000, scaling={"rope_type": "dynamic", "factor": 3.0}),
    RopeCase(name="Qwen with yarn", head_dim=128, theta=1000000.0, max_position_embeddings=32768,
             scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    RopeCase(name="yarn, original context not given", head_dim=80, theta=10000.0,
             max_position_embeddings=4096, scaling={"rope_type": "yarn", "factor": 16}),
    RopeCase(name="yarn, original context at the top", head_dim=64, theta=10000.0,
             max_position_embeddings=16384, top={"original_max_position_embeddings": 4096},
             scaling={"rope_type": "yarn", "factor": 4.0}),
    RopeCase(name="DeepSeek, equal mscales", head_dim=64, theta=10000,
             max_position_embeddings=163840,
             scaling={**DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.707}),
    RopeCase(name="DeepSeek, two mscales", head_dim=64, theta=10000,
             max_position_embeddings=163840,
             scaling={**DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 0.5}),
    RopeCase(name="yarn, mscale alone", head_dim=64, theta=10000, max_position_embeddings=163840,
             scaling={**DEEPSEEK, "mscale": 2.0}),
    RopeCase(name="yarn, mscale_all_dim alone", head_dim=64, theta=10000,
             max_position_embeddings=163840, scaling={**DEEPSEEK, "mscale_all_dim": 2.0}),
    RopeCase(name="yarn, all options", head_dim=80, theta=150000.0, max_position_embeddings=8192,
             scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024,
                      "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2,
                      "truncate": False}),
    RopeCase(name="yarn, a ramp of no width", head_dim=64, theta=10000.0,
             max_position_embeddings=8192,
             scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
                      "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False}),
    RopeCase(name="yarn, a ramp cut at both ends", head_dim=64, theta=2.0,
             max_position_embeddings=8192,
             scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100}),
)
# fmt: on
