"""A model in a GGUF file is the same model as in a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from cupaged.config import ModelConfig
from cupaged.errors import CheckpointError, ConfigError, CupagedError, NotSupportedError
from cupaged.loading.model_files import open_model
from cupaged.loading.weights import load_weights
from cupaged.ops.numpy_ops import NumpyOps
from tests.forced import LoadedModel
from tests.tiny_gguf import Quantize, random_superblocks, stored_weights, write_gguf
from tests.tiny_models import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    TINY,
    TINY_WIDE_HEAD,
    TinyLlama,
    hf_config,
    write_hf_folder,
)

TINY_256 = replace(TINY, hidden_size=256, num_heads=4, num_kv_heads=2, intermediate_size=256)
SPECS = pytest.mark.parametrize("spec", [TINY, TINY_WIDE_HEAD], ids=lambda spec: spec.name)
RUN = ([5, 17, 400, 3, 99, 250, 31], [8, 44, 301])
TEXTS = ("Hello, world!", "x = 10\n  20 café 東京", "<|im_start|>user\nhi<|im_end|>", "   3 pages")

# ---- the same model ------------------------------------------------------------------------------


@SPECS
def test_configuration(spec: TinyLlama, tmp_path: Path) -> None:
    files = open_model(write_gguf(tmp_path / "tiny.gguf", spec))
    assert files.config == ModelConfig.from_hf({**hf_config(spec), "eos_token_id": [EOS_ID]})
    assert files.eos_token_ids == (EOS_ID,)
    assert files.form == "gguf"


@pytest.mark.parametrize(
    ("spec", "kind", "quantize"),
    [
        (spec, kind, gguf.quantize)
        for spec in (TINY, TINY_WIDE_HEAD)
        for kind in ("F32", "F16", "Q8_0")
    ]
    + [(TINY_256, kind, random_superblocks) for kind in ("Q4_K", "Q5_K", "Q6_K")],
)
def test_weights_and_logits_equal_the_folder(
    spec: TinyLlama, kind: str, quantize: Quantize, tmp_path: Path
) -> None:
    folder = write_hf_folder(tmp_path / "folder", spec)
    save_file(stored_weights(spec, kind, quantize), folder / "model.safetensors")
    file = write_gguf(tmp_path / "tiny.gguf", spec, kind=kind, quantize=quantize)
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
    assert np.isfinite(logits[0]).all()
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
