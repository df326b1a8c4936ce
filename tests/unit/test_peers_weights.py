"""The files that `bench.peers` gives other engines have the numbers of the file they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.peers.weights import float32_folder, float32_gguf
from tests.tiny_gguf import stored_weights, write_gguf
from tests.tiny_models import TINY, TINY_WIDE_HEAD, hf_config

SPECS = {spec.name: spec for spec in (TINY, TINY_WIDE_HEAD)}


@pytest.mark.parametrize("name", SPECS)
def test_a_folder_has_the_numbers_of_a_quantised_file(name: str, tmp_path: Path) -> None:
    spec = replace(SPECS[name], attention_bias=False, mlp_bias=False)
    source = write_gguf(tmp_path / "tiny.gguf", spec, kind="Q8_0")
    folder = float32_folder(source, tmp_path / "made")
    found = load_file(folder / "model.safetensors")
    expected = stored_weights(spec, "Q8_0")
    assert set(found) == set(expected)
    for tensor, array in expected.items():
        assert found[tensor].dtype == np.float32
        np.testing.assert_array_equal(found[tensor], array, err_msg=tensor)
    config = json.loads((folder / "config.json").read_text())
    known = hf_config(spec, "v5")
    for key in ("model_type", "hidden_size", "num_key_value_heads", "head_dim", "rope_parameters",
                "rms_norm_eps", "tie_word_embeddings", "vocab_size", "dtype"):  # fmt: skip
        assert config[key] == known[key], key


def test_a_gguf_in_f32_has_the_numbers_and_the_metadata(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", TINY, kind="Q8_0")
    path = float32_gguf(source, tmp_path)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(path)
    assert {tensor.tensor_type for tensor in after.tensors} == {gguf.GGMLQuantizationType.F32}
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        numbers = gguf.dequantize(old.data, old.tensor_type)
        np.testing.assert_array_equal(new.data, numbers, err_msg=new.name)
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType.ALL_F32
    kept = [name for name in before.fields if not name.startswith("GGUF.")]
    assert len(kept) > 15
    for name in kept:
        assert after.fields[name].contents() == before.fields[name].contents(), name


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", TINY)
    (tmp_path / "unfinished-float32").mkdir()  # as an interruption leaves it
    path = float32_folder(source, tmp_path)
    (path / "config.json").write_text("mine")
    assert float32_folder(source, tmp_path) == path
    assert (path / "config.json").read_text() == "mine"
    assert not (tmp_path / "unfinished-float32").exists()
