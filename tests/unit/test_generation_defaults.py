"""Sampling defaults of a model's `generation_config.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cupaged.errors import ConfigError
from cupaged.loading.model_files import open_model
from cupaged.sampling_params import SamplingParams
from tests.tiny_gguf import write_gguf
from tests.tiny_models import EOS_ID, TINY, write_hf_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("model"), TINY)


def defaults(folder: Path, generation: dict[str, Any]) -> dict[str, float | int]:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return open_model(folder).generation_defaults


def test_every_key_under_the_name_of_the_field(folder: Path) -> None:
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "eos_token_id": [EOS_ID],
        "transformers_version": "4.57.1",
    }
    found = defaults(folder, generation)
    assert found == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }
    assert [type(value) for value in found.values()] == [float, float, int, float, float, int]
    assert SamplingParams(**found).top_k == 20  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": None}, {}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"top_k": 50}, {"top_k": 50}),  # stated, even where it is a default of transformers
        ({"top_k": -1}, {"top_k": 0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}),  # as vLLM reads it
        ({"do_sample": None, "top_p": 1.0}, {"top_p": 1.0}),
        ({"max_length": 4096, "num_beams": 4, "typical_p": 0.9}, {}),
    ],
)
def test_what_is_stated_and_nothing_else(
    generation: dict[str, Any], expected: dict[str, float | int], folder: Path
) -> None:
    assert defaults(folder, generation) == expected


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "1", True, [1.0]]),
        ("top_p", [-0.1, 1.1, math.nan, "1", False]),
        ("top_k", [-2, 1.5, "50", True, 2**63]),
        ("min_p", [-0.1, 1.5, math.nan, {}]),
        ("repetition_penalty", [0, -1.0, math.inf, "1.1", True]),
        ("max_new_tokens", [0, -1, 1.5, "20", True]),
    ],
)
def test_a_bad_value_is_named_as_the_file_names_it(
    key: str, values: list[Any], folder: Path
) -> None:
    for value in values:
        with pytest.raises(ConfigError) as refused:
            defaults(folder, {key: value})
        assert refused.value.name == f"generation_config.json: {key}"
        assert refused.value.allowed


def test_without_the_file(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "folder", TINY)
    (folder / "generation_config.json").unlink()
    assert open_model(folder).generation_defaults == {}
    assert open_model(write_gguf(tmp_path / "tiny.gguf", TINY)).generation_defaults == {}
