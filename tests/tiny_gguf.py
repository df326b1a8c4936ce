"""The tiny models as GGUF files, written with the `gguf` package.

The rows of q and k are in the order in which llama.cpp's converter puts those of the Llama family.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.tiny_models import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    SPECIAL_TOKENS,
    TinyLlama,
    build_tokenizer,
    hf_weights,
)

F32 = NDArray[np.float32]
Quantize = Callable[[F32, Any], NDArray[Any]]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    return f"{prefix}{_NAMES[stem]}.{kind}"


def interleaved(rows: F32, num_heads: int) -> F32:
    """Rows i and i + d/2 of every head become the neighbours 2i and 2i + 1."""
    head_dim = len(rows) // num_heads
    order = [
        head * head_dim + i + half * head_dim // 2
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return rows[order]


def metadata(spec: TinyLlama) -> dict[str, Any]:
    tokenizer = json.loads(build_tokenizer(spec.vocab_size).to_str())
    tokens = {index: text for text, index in tokenizer["model"]["vocab"].items()}
    tokens |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    return {
        "llama.context_length": spec.max_position_embeddings,
        "llama.embedding_length": spec.hidden_size,
        "llama.block_count": spec.num_layers,
        "llama.feed_forward_length": spec.intermediate_size,
        "llama.attention.head_count": spec.num_heads,
        "llama.attention.head_count_kv": spec.num_kv_heads,
        "llama.attention.key_length": spec.head_dim,
        "llama.attention.value_length": spec.head_dim,
        "llama.rope.dimension_count": spec.head_dim,
        "llama.rope.freq_base": spec.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [tokens[i] for i in range(spec.vocab_size)],
        "tokenizer.ggml.token_type": [
            3 if i < len(SPECIAL_TOKENS) else 4 if tokens[i].startswith("<filler") else 1
            for i in range(spec.vocab_size)
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(
    path: Path,
    spec: TinyLlama,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    architecture: str = "llama",
    changes: Mapping[str, Any] | None = None,
    extra: Mapping[str, F32] | None = None,
    quantize: Quantize = gguf.quantize,
) -> Path:
    """The spec as a GGUF.

    kinds: of tensors, by their names in the file, that are of another kind.
    changes: to the metadata, where None removes a key. extra: tensors beside the model's.
    quantize: stored bytes of an array, row by row.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**metadata(spec), **(changes or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_int32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
    for name, array in hf_weights(spec).items():
        num_heads = heads.get(name.split(".")[-2])
        stored = array if num_heads is None else interleaved(array, num_heads)
        own_kind = (kinds or {}).get(gguf_name(name), kind)
        number_type = gguf.GGMLQuantizationType[own_kind if array.ndim == 2 else "F32"]
        data = quantize(np.ascontiguousarray(stored), number_type)
        writer.add_tensor(gguf_name(name), data, raw_dtype=number_type)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_weights(
    spec: TinyLlama, kind: str, quantize: Quantize = gguf.quantize
) -> dict[str, F32]:
    """What is left of the weights after rounding; rows are rounded each by itself."""
    number_type = gguf.GGMLQuantizationType[kind]
    return {
        name: array
        if array.ndim == 1
        else np.asarray(gguf.dequantize(quantize(array, number_type), number_type), np.float32)
        for name, array in hf_weights(spec).items()
    }


def random_superblocks(array: F32, number_type: Any) -> NDArray[Any]:
    """Any blocks, but equal ones for equal rows: the `gguf` package cannot quantise to K types."""
    if array.ndim == 1:
        return array
    elements, nbytes = gguf.GGML_QUANT_SIZES[number_type]
    rows = []
    for row in array:
        rng = np.random.default_rng(zlib.crc32(row.tobytes()))
        blocks = rng.integers(0, 256, (len(row) // elements, nbytes), np.uint8)
        scales = (1e-4 * rng.standard_normal((len(blocks), 2))).astype("<f2").view(np.uint8)
        if number_type == gguf.GGMLQuantizationType.Q6_K:
            blocks[:, 208:] = scales[:, :2]
        else:
            blocks[:, :4] = scales
        rows.append(blocks.ravel())
    return np.stack(rows)
