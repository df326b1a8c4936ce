"""The configuration in a GGUF's metadata, in the form of a Hugging Face `config.json`."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from cupaged.errors import CheckpointError, NotSupportedError
from cupaged.loading.gguf import GGUFFile
from cupaged.loading.weights import FREQUENCY_FACTORS
from cupaged.rope import yarn_attention_factor

_ARCHITECTURES = {"llama": "LlamaForCausalLM"}


def hf_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The keys that `ModelConfig.from_hf` reads.

    Raises:
        NotSupportedError: an architecture, a RoPE or a kind of layer that is not built.
        CheckpointError: a key is missing or of the wrong type.
    """
    keys = _Keys(file)
    name = keys.text("general.architecture")
    if name not in _ARCHITECTURES:
        raise NotSupportedError(
            f"{file.path}: GGUF architecture {name!r} is not supported; "
            f"known: {', '.join(sorted(_ARCHITECTURES))}"
        )
    if keys.number(f"{name}.expert_count", 0):
        raise NotSupportedError(f"{file.path}: mixture-of-experts GGUFs are not supported")
    heads = keys.number(f"{name}.attention.head_count")
    hidden = keys.number(f"{name}.embedding_length")
    head_dim = keys.number(f"{name}.attention.key_length", hidden // max(1, heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.number(f"{name}.{key}", head_dim) != head_dim:
            raise NotSupportedError(
                f"{file.path}: {name}.{key} other than the head size {head_dim} is not supported"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    context_length = keys.number(f"{name}.context_length")
    window = keys.number(f"{name}.attention.sliding_window", 0)
    return {
        # Mistral has the same architecture name; it is told apart where there is a window.
        "architectures": ["MistralForCausalLM" if window else _ARCHITECTURES[name]],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.number(f"{name}.feed_forward_length"),
        "num_hidden_layers": keys.number(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.real(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_theta": keys.real(f"{name}.rope.freq_base", 10000.0),
            "frequency_factors": _frequency_factors(file, head_dim),
            **_rope_scaling(keys, f"{name}.rope", context_length),
        },
        "max_position_embeddings": context_length,
        "sliding_window": window or None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "eos_token_id": _eos_token_ids(keys),
    }


def _rope_scaling(keys: _Keys, prefix: str, context_length: int) -> dict[str, Any]:
    """Type and options of the RoPE, with the defaults and the meanings of llama.cpp.

    `attn_factor` multiplies what YaRN itself gives, and `yarn_log_multiplier` is DeepSeek's
    `mscale_all_dim` beside an `mscale` of 1.
    """
    linear = keys.real(f"{prefix}.scale_linear", 1.0)
    factor = keys.real(f"{prefix}.scaling.factor", linear) or 1.0
    rope_type = keys.text(f"{prefix}.scaling.type", "none" if factor == 1.0 else "linear")
    attention_factor = keys.real(f"{prefix}.scaling.attn_factor", 1.0)
    for key, value in (
        ("attn_factor", 1.0 if rope_type == "yarn" else attention_factor),
        ("yarn_ext_factor", keys.real(f"{prefix}.scaling.yarn_ext_factor", 1.0)),
        ("yarn_attn_factor", keys.real(f"{prefix}.scaling.yarn_attn_factor", 1.0)),
    ):
        if value != 1.0:
            raise NotSupportedError(
                f"{keys.path}: {prefix}.scaling.{key}={value:g} is not supported with RoPE "
                f"scaling of type {rope_type!r}; only 1 is"
            )
    if rope_type == "none":
        return {"rope_type": "default"}
    if rope_type != "yarn":
        return {"rope_type": rope_type, "factor": factor}
    log_multiplier = keys.real(f"{prefix}.scaling.yarn_log_multiplier", 0.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.number(
            f"{prefix}.scaling.original_context_length", context_length
        ),
        "beta_fast": keys.real(f"{prefix}.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.real(f"{prefix}.scaling.yarn_beta_slow", 1.0),
        "attention_factor": attention_factor * yarn_attention_factor(factor, 1.0, log_multiplier),
    }


def _frequency_factors(file: GGUFFile, head_dim: int) -> list[float] | None:
    """The tensor by which Llama 3's scaling comes in a GGUF: a divisor for each frequency."""
    info = file.tensors.get(FREQUENCY_FACTORS)
    if info is None:
        return None
    if info.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor {FREQUENCY_FACTORS!r} has shape {list(info.shape)}, "
            f"it must be [{head_dim // 2}]"
        )
    factors = np.empty(info.shape, np.float32)
    file.read_into(FREQUENCY_FACTORS, factors)
    listed: list[float] = factors.tolist()
    return listed


def _eos_token_ids(keys: _Keys) -> list[int]:
    found = (keys.number(f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot"))
    return sorted({token for token in found if token >= 0})


class _Keys:
    """Typed look-ups; a missing or mistyped key names the file and the key."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._file = file

    def text(self, key: str, default: str | None = None) -> str:
        value = self._file.metadata.get(key, default)
        if not isinstance(value, str):
            self._fail(key, value, "a string")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        value = self._file.metadata.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = int(value[0])  # a per-layer list of one and the same value
        if isinstance(value, bool) or not isinstance(value, int):
            self._fail(key, value, "an integer")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._file.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._fail(key, value, "a number")
        return float(np.format_float_positional(np.float32(value), unique=True))

    def _fail(self, key: str, value: object, allowed: str) -> NoReturn:
        state = "is missing" if value is None else f"is {value!r:.80}"
        raise CheckpointError(f"{self._file.path}: {key} {state}; it must be {allowed}")
