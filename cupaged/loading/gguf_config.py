"""The configuration in a GGUF's metadata, in the form of a Hugging Face `config.json`."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from cupaged.errors import CheckpointError, NotSupportedError
from cupaged.loading.gguf import GGUFFile

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
    scaling = file.metadata.get(f"{name}.rope.scaling.type")
    if scaling is None:  # then a factor, of either name, means linear scaling
        factors = [
            keys.real(f"{name}.rope.{key}", 1.0) for key in ("scaling.factor", "scale_linear")
        ]
        scaling = "none" if all(factor in (0.0, 1.0) for factor in factors) else "linear"
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    return {
        "architectures": [_ARCHITECTURES[name]],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.number(f"{name}.feed_forward_length"),
        "num_hidden_layers": keys.number(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.real(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.real(f"{name}.rope.freq_base", 10000.0),
        "rope_scaling": None if scaling == "none" else {"rope_type": scaling},
        "max_position_embeddings": keys.number(f"{name}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "eos_token_id": _eos_token_ids(keys),
    }


def _eos_token_ids(keys: _Keys) -> list[int]:
    found = (keys.number(f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot"))
    return sorted({token for token in found if token >= 0})


class _Keys:
    """Typed look-ups; a missing or mistyped key names the file and the key."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def text(self, key: str) -> str:
        value = self._file.metadata.get(key)
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
