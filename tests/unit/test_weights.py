"""From a Hugging Face folder to packed weights, and what is refused on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from cupaged.config import ModelConfig
from cupaged.errors import CheckpointError
from cupaged.loading.model_files import open_model
from cupaged.loading.weights import load_weights
from cupaged.ops.numpy_ops import NumpyOps
from tests.forced import LoadedModel
from tests.tiny_models import (
    TINY,
    TINY_WIDE_HEAD,
    DType,
    Style,
    TinyLlama,
    hf_config,
    hf_weights,
    write_hf_folder,
)

F32 = NDArray[np.float32]
Weights = dict[str, F32]

UNTIED = replace(TINY, tied=False)
IDS = [5, 17, 400, 3, 99]


def rounded(array: F32, dtype: DType) -> F32:
    number_type: Any = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}.get(dtype)
    return array if number_type is None else array.astype(number_type).astype(np.float32)


def load(path: Path) -> dict[str, Any]:
    files = open_model(path)
    return load_weights(files.entries, files.reader, files.form, NumpyOps())


def changed_folder(path: Path, spec: TinyLlama, change: Callable[[Weights], object]) -> Path:
    """A folder of the spec whose tensors were changed after the configuration was written."""
    write_hf_folder(path, spec)
    weights = hf_weights(spec)
    change(weights)
    save_file(weights, path / "model.safetensors")
    return path


# ---- what is loaded ------------------------------------------------------------------------------


def test_few_entries_are_decoded_before_they_are_packed(tmp_path: Path) -> None:
    """A slow device does not make the memory of the host fill up with what waits for it."""
    files = open_model(write_hf_folder(tmp_path, TINY))
    started: list[str] = []

    class Reader:
        tensors = files.reader.tensors

        def read_into(self, name: str, out: NDArray[Any]) -> None:
            started.append(name)
            files.reader.read_into(name, out)

        def close(self) -> None: ...

    class SlowOps(NumpyOps):
        def pack_weight(self, weight: NDArray[Any], bias: Any = None) -> Any:
            if len(started_at_first) == 0:
                time.sleep(0.3)  # for readers that would run ahead
                started_at_first.append(len(started))
            return super().pack_weight(weight, bias)

    started_at_first: list[int] = []
    load_weights(files.entries, Reader(), files.form, SlowOps())
    most_parts = max(len(entry.parts) for entry in files.entries)
    assert started_at_first[0] <= 4 * most_parts < len(started)


@pytest.mark.parametrize("spec", [TINY, TINY_WIDE_HEAD], ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("shards", "style"), [(1, "v4"), (1, "v5"), (3, "v4"), (3, "v5")])
def test_every_tensor_is_in_its_place(
    spec: TinyLlama, dtype: DType, shards: int, style: Style, tmp_path: Path
) -> None:
    write_hf_folder(tmp_path, spec, dtype=dtype, shards=shards, style=style)
    loaded = load(tmp_path)
    source = {name: rounded(array, dtype) for name, array in hf_weights(spec).items()}

    def expect(name: str, *parts: str) -> None:
        weight, biases = loaded.pop(name), [f"{part}.bias" for part in parts]
        expected = np.concatenate([source.pop(f"{part}.weight") for part in parts])
        if expected.ndim == 1:
            np.testing.assert_array_equal(weight, expected)
            return
        np.testing.assert_array_equal(weight.matrix, expected)
        if biases[0] in source:
            np.testing.assert_array_equal(
                weight.bias, np.concatenate([source.pop(bias) for bias in biases])
            )
        else:
            assert weight.bias is None

    expect("embed", "model.embed_tokens")
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        expect(f"{i}.attention_norm", f"{layer}.input_layernorm")
        expect(f"{i}.qkv", *(f"{layer}.self_attn.{x}_proj" for x in "qkv"))
        expect(f"{i}.o", f"{layer}.self_attn.o_proj")
        expect(f"{i}.mlp_norm", f"{layer}.post_attention_layernorm")
        expect(f"{i}.gate_up", f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
        expect(f"{i}.down", f"{layer}.mlp.down_proj")
    expect("norm", "model.norm")
    if not spec.tied:
        expect("head", "lm_head")
    assert not loaded and not source


def test_the_parameters_are_the_numbers_of_the_arrays(tmp_path: Path) -> None:
    for spec in (TINY, TINY_WIDE_HEAD):
        files = open_model(write_hf_folder(tmp_path / spec.name, spec, dtype="float16"))
        expected = sum(array.size for array in hf_weights(spec).values())
        assert files.num_parameters == expected


def test_shard_axes() -> None:
    """Column-parallel layers are cut along their rows, row-parallel ones along their columns."""
    llama = import_module("cupaged.models").model_class("LlamaForCausalLM")
    table = llama.name_table(ModelConfig.from_hf(hf_config(TINY_WIDE_HEAD)))
    axes = {entry.name: entry.shard_axis for entry in table}
    assert {name for name, axis in axes.items() if axis == 0} == {
        "embed", "{i}.qkv", "{i}.gate_up", "head",
    }  # fmt: skip
    assert {name for name, axis in axes.items() if axis == 1} == {"{i}.o", "{i}.down"}


# ---- tied embeddings -----------------------------------------------------------------------------


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    loaded = LoadedModel(write_hf_folder(tmp_path, TINY))
    weights = loaded.model._weights
    assert "head" not in weights
    (before,) = loaded.forced_logits([(IDS, [0])])
    weights["embed"].matrix[7] = 0.0  # a row that no prompt token uses
    (after,) = loaded.forced_logits([(IDS, [0])])
    assert before[0, 7] != 0 and after[0, 7] == 0
    np.testing.assert_array_equal(np.delete(before, 7), np.delete(after, 7))


def test_a_tied_head_in_the_file_is_left_unread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = LoadedModel(write_hf_folder(tmp_path / "plain", TINY))

    def add_head(weights: Weights) -> None:
        weights["lm_head.weight"] = np.full((TINY.vocab_size, TINY.hidden_size), 7, np.float32)

    with caplog.at_level(logging.INFO, logger="cupaged"):
        other = LoadedModel(changed_folder(tmp_path / "other", TINY, add_head))
    assert "lm_head.weight is not needed" in caplog.text
    np.testing.assert_array_equal(
        other.forced_logits([(IDS, [0])]), plain.forced_logits([(IDS, [0])])
    )


def test_stored_rotary_frequencies_are_left_unread(tmp_path: Path) -> None:
    def add(weights: Weights) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(32, np.float32)

    assert "0.qkv" in load(changed_folder(tmp_path, TINY, add))


# ---- what is refused -----------------------------------------------------------------------------


def remove(*names: str) -> Callable[[Weights], object]:
    return lambda weights: [weights.pop(name) for name in names]


def add(name: str, *shape: int) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: np.zeros(shape, np.float32)})


Q_BIAS = "model.layers.1.self_attn.q_proj.bias"
GATE_BIAS = "model.layers.0.mlp.gate_proj.bias"
DOWN = "model.layers.2.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (TINY, remove(DOWN), rf"lacks 1 tensors: '{DOWN}'"),
        (TINY, remove("model.norm.weight"), "lacks 1 tensors: 'model.norm.weight'"),
        (UNTIED, remove("lm_head.weight"), "lacks 1 tensors: 'lm_head.weight'"),
        (TINY_WIDE_HEAD, remove(Q_BIAS, GATE_BIAS), f"lacks 2 tensors: '{Q_BIAS}', '{GATE_BIAS}'"),
        (TINY, add(Q_BIAS, 192), f"no use for 1 tensors: '{Q_BIAS}'"),
        (TINY, add(GATE_BIAS, 320), f"no use for 1 tensors: '{GATE_BIAS}'"),
        (TINY, add("model.layers.3.mlp.up_proj.weight", 2, 2), r"no use for .*layers\.3\.mlp"),
        (TINY, add("score.weight", 2, 192), "no use for 1 tensors: 'score.weight'"),
        (UNTIED, add("lm_head.bias", 509), "no use for 1 tensors: 'lm_head.bias'"),
        (TINY, add(DOWN, 320, 192), rf"'{DOWN}' has shape \[320, 192\], .* \[192, 320\]"),
        (TINY, add(DOWN, 192 * 320), rf"'{DOWN}' has shape \[61440\], .* \[192, 320\]"),
        (TINY, add("model.norm.weight", 191), r"'model.norm.weight' has shape \[191\], .* \[192\]"),
        (TINY_WIDE_HEAD, add(Q_BIAS, 128), rf"'{Q_BIAS}' has shape \[128\], .* \[320\]"),
    ],
)
def test_a_file_that_does_not_fit(
    spec: TinyLlama, change: Callable[[Weights], object], message: str, tmp_path: Path
) -> None:
    """Each is refused before any weight is read, and the tensor is named."""
    with pytest.raises(CheckpointError, match=message):
        open_model(changed_folder(tmp_path, spec, change))


def test_a_long_list_of_missing_tensors_is_cut(tmp_path: Path) -> None:
    names = [name for name in hf_weights(TINY) if ".layers." in name]
    with pytest.raises(CheckpointError, match=r"lacks 27 tensors: .* and 19 more$"):
        open_model(changed_folder(tmp_path, TINY, remove(*names)))


def test_a_wrong_vocabulary_size(tmp_path: Path) -> None:
    """The configuration and the embedding disagree."""
    spec = replace(TINY, vocab_size=512)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight' has shape \[509, 192\]"):
        open_model(changed_folder(tmp_path, spec, lambda w: w.update(hf_weights(TINY))))
