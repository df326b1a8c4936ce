"""Tiny random Llamas and a Mistral in the layout of a Hugging Face folder, made by NumPy alone.

Owns the specs, the weights (a function of spec and seed), the configs in both spellings that
transformers has used, a byte-level BPE tokenizer and the safetensors files. It imports nothing
from the package under test, so a fixture can never inherit a loader's mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Style = Literal["v4", "v5"]
DType = Literal["float32", "bfloat16", "float16"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SAFETENSORS_NAMES: Mapping[DType, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

# What the tokenizer's merges are learned from: prose, code, digits and some non-ASCII.
_TOKENIZER_TEXT = """\
The operating system keeps the memory of a process in pages of a fixed size. A page table maps the
pages of the process to frames of the machine, so that the process sees one long address space
while its frames lie anywhere. The same idea serves a language model: the keys and values of a
sequence are kept in blocks, and a block table tells where each block of the sequence lies.
When two sequences begin with the same words, they share the blocks of those words until one of
them writes; then the block is copied. What is the capital of France? Hello, world! Thank you.
def add(first, second):
    return first + second
for index in range(10):
    print(index, 2024, 3.14159, "text", [1, 2, 3], {"key": None, "other": True})
Größe, naïve café, 東京 と 北京, привет мир, 😀 🚀.
"""


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """The shape of one tiny model; the names are those of a Hugging Face config.

    rope: what stands in `rope_scaling`. sliding_window: written for a Mistral only.
    """

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_layers: int
    tied: bool
    vocab_size: int = 509
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1024
    rope: Mapping[str, Any] = field(default_factory=dict, hash=False)
    architecture: str = "LlamaForCausalLM"
    sliding_window: int | None = None


TINY = TinyLlama(
    name="tiny",
    hidden_size=192,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    intermediate_size=320,
    num_layers=3,
    tied=True,
)

TINIER = replace(TINY, name="tinier", hidden_size=128, num_layers=2)  # 0.4 M parameters

TINY_WIDE_HEAD = TinyLlama(
    name="tiny_wide_head",
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=80,
    intermediate_size=224,
    num_layers=2,
    tied=False,
    attention_bias=True,
    mlp_bias=True,
    rope_theta=500000.0,
)


# Their original contexts are so short that every part of the scaling shows within a few tokens.
TINY_LLAMA3 = replace(
    TINY,
    name="tiny_llama3",
    rope_theta=500000.0,
    rope={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)
TINY_YARN = replace(
    TINY_WIDE_HEAD,
    name="tiny_yarn",
    rope={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
)
TINY_MISTRAL = TinyLlama(
    name="tiny_mistral",
    hidden_size=128,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,  # 3 * 64 = 192: wider than the hidden states, as in Mistral Nemo
    intermediate_size=192,
    num_layers=2,
    tied=False,
    rope_theta=1000000.0,
    architecture="MistralForCausalLM",
    sliding_window=64,
)
VARIANTS = (TINY_LLAMA3, TINY_YARN, TINY_MISTRAL)


def hf_config(spec: TinyLlama, style: Style = "v4", *, dtype: DType = "float32") -> dict[str, Any]:
    """The content of `config.json`, as transformers 4 or transformers 5 writes it."""
    config: dict[str, Any] = {
        "architectures": [spec.architecture],
        "attention_bias": spec.attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "mlp_bias": spec.mlp_bias,
        "model_type": spec.architecture.removesuffix("ForCausalLM").lower(),
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "pad_token_id": PAD_ID,
        "pretraining_tp": 1,
        "rms_norm_eps": spec.rms_norm_eps,
        "tie_word_embeddings": spec.tied,
        "use_cache": True,
        "vocab_size": spec.vocab_size,
    }
    if style == "v4":
        config["rope_theta"] = spec.rope_theta
        config["rope_scaling"] = dict(spec.rope) or None
        config["torch_dtype"] = dtype
        config["transformers_version"] = "4.57.1"
    else:
        rope = {"rope_theta": spec.rope_theta, "rope_type": "default", **spec.rope}
        config["rope_parameters"] = rope
        config["dtype"] = dtype
        config["transformers_version"] = "5.24.0"
    if spec.architecture == "MistralForCausalLM":
        config["sliding_window"] = spec.sliding_window
    return config


def hf_weights(spec: TinyLlama, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights under their Hugging Face names; linear weights are [out, in].

    The embedding is small beside what the layers add to it, and the final norm scales up: a tied
    model would otherwise repeat its input token, and close logits would make argmax a coin toss.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, NDArray[np.float32]] = {}

    def normal(name: str, *shape: int, scale: float, mean: float = 0.0) -> None:
        weights[name] = (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    def linear(name: str, out: int, fan_in: int, *, bias: bool, gain: float = 1.0) -> None:
        normal(f"{name}.weight", out, fan_in, scale=gain * fan_in**-0.5)
        if bias:
            normal(f"{name}.bias", out, scale=0.2)

    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    normal("model.embed_tokens.weight", spec.vocab_size, hidden, scale=0.08)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        normal(f"{layer}.input_layernorm.weight", hidden, scale=0.1, mean=1.0)
        attn, attn_bias = f"{layer}.self_attn", spec.attention_bias
        linear(f"{attn}.q_proj", q_size, hidden, bias=attn_bias, gain=1.5)
        linear(f"{attn}.k_proj", kv_size, hidden, bias=attn_bias, gain=1.5)
        linear(f"{attn}.v_proj", kv_size, hidden, bias=attn_bias)
        linear(f"{attn}.o_proj", hidden, q_size, bias=attn_bias)
        normal(f"{layer}.post_attention_layernorm.weight", hidden, scale=0.1, mean=1.0)
        mlp, mlp_bias = f"{layer}.mlp", spec.mlp_bias
        linear(f"{mlp}.gate_proj", inner, hidden, bias=mlp_bias)
        linear(f"{mlp}.up_proj", inner, hidden, bias=mlp_bias)
        linear(f"{mlp}.down_proj", hidden, inner, bias=mlp_bias)
    normal("model.norm.weight", hidden, scale=0.3, mean=3.0)
    if not spec.tied:
        normal("lm_head.weight", spec.vocab_size, hidden, scale=0.08)
    return weights


def build_tokenizer(vocab_size: int = 509) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` entries; digits are split one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_TOKENIZER_TEXT.splitlines(keepends=True), trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<filler_{index}>" for index in range(missing)])
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def write_hf_folder(
    path: Path,
    spec: TinyLlama,
    *,
    dtype: DType = "float32",
    shards: int = 1,
    style: Style = "v4",
    seed: int = 0,
) -> Path:
    """Write a complete model folder and return it; more than one shard also writes the index."""
    path.mkdir(parents=True, exist_ok=True)
    special = {"bos_token": SPECIAL_TOKENS[BOS_ID], "eos_token": SPECIAL_TOKENS[EOS_ID]}
    _write_json(path / "config.json", hf_config(spec, style, dtype=dtype))
    _write_json(
        path / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, PAD_ID], "pad_token_id": PAD_ID},
    )
    _write_json(
        path / "tokenizer_config.json",
        {
            **special,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": spec.max_position_embeddings,
            "pad_token": SPECIAL_TOKENS[PAD_ID],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    build_tokenizer(spec.vocab_size).save(str(path / "tokenizer.json"))
    _write_weights(path, hf_weights(spec, seed), dtype, shards)
    return path


def _write_weights(
    path: Path, weights: Mapping[str, NDArray[np.float32]], dtype: DType, shards: int
) -> None:
    if shards == 1:
        _write_safetensors(path / "model.safetensors", weights, dtype)
        return
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file_name = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in list(weights)[index::shards]}
        _write_safetensors(path / file_name, part, dtype)
        weight_map.update(dict.fromkeys(part, file_name))
    item_bytes = 4 if dtype == "float32" else 2
    total = sum(array.size for array in weights.values()) * item_bytes
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index_json)


def _write_safetensors(
    path: Path, weights: Mapping[str, NDArray[np.float32]], dtype: DType
) -> None:
    # Written by hand: NumPy has no bfloat16, and the format is a length, a JSON header and bytes.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs: list[bytes] = []
    offset = 0
    for name, array in weights.items():
        blob = _to_bytes(array, dtype)
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # the data starts on a multiple of eight
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))


def _to_bytes(array: NDArray[np.float32], dtype: DType) -> bytes:
    if dtype == "float32":
        return array.astype("<f4").tobytes()
    if dtype == "float16":
        return array.astype("<f2").tobytes()
    bits = array.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # to nearest even
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
