"""A model in a GGUF file is the same model as in a Hugging Face folder.

The files are written with the `gguf` package, the rows of q and k in the order in which llama.cpp's
converter puts those of the Llama family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from cupaged.config import ModelConfig
from cupaged.errors import CheckpointError, ConfigError, CupagedError, NotSupportedError
from cupaged.loading.model_files import open_model
from cupaged.loading.weights import load_weights
from cupaged.ops.numpy_ops import NumpyOps
from tests.forced import LoadedModel
from tests.tiny_models import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    SPECIAL_TOKENS,
    TINY,
    TINY_WIDE_HEAD,
    TinyLlama,
    build_tokenizer,
    hf_config,
    hf_weights,
    write_hf_folder,
)

F32 = NDArray[np.float32]

SPECS = pytest.mark.parametrize("spec", [TINY, TINY_WIDE_HEAD], ids=lambda spec: spec.name)
RUN = ([5, 17, 400, 3, 99, 250, 31], [8, 44, 301])
TEXTS = ("Hello, world!", "x = 10\n  20 café 東京", "<|im_start|>user\nhi<|im_end|>", "   3 pages")

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
    architecture: str = "llama",
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """The spec as a GGUF; `changes` to the metadata, where None removes a key."""
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
        number_type = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        data = gguf.quantize(np.ascontiguousarray(stored), number_type)
        writer.add_tensor(gguf_name(name), data, raw_dtype=number_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_weights(spec: TinyLlama, kind: str) -> dict[str, F32]:
    """What is left of the weights after rounding; rows are rounded each by itself."""
    number_type = gguf.GGMLQuantizationType[kind]
    return {
        name: array
        if array.ndim == 1
        else np.asarray(gguf.dequantize(gguf.quantize(array, number_type), number_type), np.float32)
        for name, array in hf_weights(spec).items()
    }


# ---- the same model ------------------------------------------------------------------------------


@SPECS
def test_configuration(spec: TinyLlama, tmp_path: Path) -> None:
    files = open_model(write_gguf(tmp_path / "tiny.gguf", spec))
    assert files.config == ModelConfig.from_hf({**hf_config(spec), "eos_token_id": [EOS_ID]})
    assert files.eos_token_ids == (EOS_ID,)
    assert files.form == "gguf"


@SPECS
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_weights_and_logits_equal_the_folder(spec: TinyLlama, kind: str, tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "folder", spec)
    save_file(stored_weights(spec, kind), folder / "model.safetensors")
    file = write_gguf(tmp_path / "tiny.gguf", spec, kind=kind)
    loaded = []
    for path in (folder, file):
        files = open_model(path)
        loaded.append(load_weights(files.entries, files.reader, files.form, NumpyOps()))
    assert list(loaded[0]) == list(loaded[1])
    for name, expected in loaded[0].items():
        found = loaded[1][name]
        if isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(found, expected)
            continue
        np.testing.assert_array_equal(found.matrix, expected.matrix)
        assert (found.bias is None) == (expected.bias is None)
        if expected.bias is not None:
            np.testing.assert_array_equal(found.bias, expected.bias)
    logits = [LoadedModel(path).forced_logits([RUN]) for path in (folder, file)]
    np.testing.assert_array_equal(logits[0], logits[1])


def test_tokenizer_and_template(tmp_path: Path) -> None:
    ours = open_model(write_gguf(tmp_path / "tiny.gguf", TINY)).tokenizer
    theirs = open_model(write_hf_folder(tmp_path / "folder", TINY)).tokenizer
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template == CHAT_TEMPLATE
    assert (ours.bos_token_id, ours.eos_token_id) == (BOS_ID, EOS_ID)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama.attention.value_length": None, "llama.rope.dimension_count": None},
        {"llama.attention.head_count": [3, 3, 3], "llama.attention.head_count_kv": [1, 1, 1]},
        {"llama.attention.key_length": None, "llama.attention.value_length": None},  # 192 / 3
        {"llama.rope.freq_base": None},  # 10000
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 1.0},
        {"llama.expert_count": 0},
        {"tokenizer.ggml.eot_token_id": EOS_ID},
    ],
)
def test_what_may_be_left_out_or_said_otherwise(changes: dict[str, Any], tmp_path: Path) -> None:
    files = open_model(write_gguf(tmp_path / "tiny.gguf", TINY, changes=changes))
    assert files.config == ModelConfig.from_hf({**hf_config(TINY), "eos_token_id": [EOS_ID]})


def test_end_of_turn_ends_too(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.eot_token_id": 7}
    files = open_model(write_gguf(tmp_path / "tiny.gguf", TINY, changes=changes))
    assert files.eos_token_ids == (EOS_ID, 7)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "llama4"])
def test_an_unknown_architecture(architecture: str, tmp_path: Path) -> None:
    """Not read as a Llama: others do not interleave q and k, and differ in more than that."""
    path = write_gguf(tmp_path / "tiny.gguf", TINY, architecture=architecture)
    with pytest.raises(NotSupportedError, match=f"architecture '{architecture}' .*known: llama"):
        open_model(path)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"llama.expert_count": 8}, NotSupportedError, "mixture-of-experts"),
        ({"llama.attention.value_length": 32}, NotSupportedError, "value_length other than .* 64"),
        ({"llama.rope.dimension_count": 32}, NotSupportedError, "dimension_count other than"),
        ({"llama.rope.scaling.type": "yarn"}, NotSupportedError, "'yarn' is not supported"),
        ({"llama.rope.scaling.factor": 4.0}, NotSupportedError, "'linear' is not supported"),
        ({"llama.rope.scale_linear": 0.25}, NotSupportedError, "'linear' is not supported"),
        ({"llama.block_count": None}, CheckpointError, "llama.block_count is missing"),
        ({"llama.embedding_length": 192.0}, CheckpointError, r"192\.0; it must be an integer"),
        ({"llama.embedding_length": True}, CheckpointError, "True; it must be an integer"),
        ({"llama.attention.head_count": [3, 3, 1]}, CheckpointError, "it must be an integer"),
        ({"llama.attention.head_count": 0}, ConfigError, "must be an integer"),
        ({"llama.attention.head_count_kv": 2}, ConfigError, "a divisor of"),
        ({"llama.rope.freq_base": "x"}, CheckpointError, "'x'; it must be a number"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, CheckpointError, "epsilon is missing"),
        ({"llama.block_count": 4}, CheckpointError, r"lacks 9 tensors: 'blk\.3\.attn_norm"),
        ({"llama.block_count": 2}, CheckpointError, r"no use for 9 tensors: 'blk\.2"),
    ],
)
def test_metadata_that_is_refused(
    changes: dict[str, Any], error: type[CupagedError], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", TINY, changes=changes)
    with pytest.raises(error, match=message):
        open_model(path)
