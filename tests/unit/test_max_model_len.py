"""The longest sequence: what the model reaches, its attention window, and what was asked for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cupaged.engine_args import EngineArgs
from cupaged.errors import ConfigError, NotSupportedError
from cupaged.llm import LLM
from cupaged.sampling_params import SamplingParams
from tests.tiny_models import TINY, TINY_MISTRAL, TinyLlama, write_hf_folder


def folder(path: Path, spec: TinyLlama, **changes: Any) -> Path:
    write_hf_folder(path, spec)
    content = {**json.loads((path / "config.json").read_text()), **changes}
    kept = {key: value for key, value in content.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(kept))
    return path


def length(path: Path, max_model_len: int | None = None) -> int:
    args = EngineArgs(model=path, max_model_len=max_model_len, max_num_seqs=2)
    return args.build().core.config.max_model_len


@pytest.mark.parametrize(
    ("window", "context"),
    [(64, 64), (1023, 1023), (1024, 1024), (4096, 1024), (None, 1024), (..., 1024)],
)
def test_a_window_caps_the_default(
    window: Any, context: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A config.json without the key means transformers' own default, 4096."""
    model = folder(tmp_path, TINY_MISTRAL, sliding_window=window)
    with caplog.at_level(logging.WARNING, logger="cupaged"):
        assert length(model) == context
    said = [r.getMessage() for r in caplog.records if "window" in r.getMessage()]
    assert len(said) == (context < 1024)
    assert all(f"max_model_len is {context} of 1024 tokens" in message for message in said)


def test_the_window_that_is_not_in_the_file(tmp_path: Path) -> None:
    model = folder(
        tmp_path, TINY_MISTRAL, sliding_window=..., max_position_embeddings=8192, rope_scaling=None
    )
    assert length(model) == 4096


def test_what_may_be_asked_for_within_a_window(tmp_path: Path) -> None:
    model = folder(tmp_path, TINY_MISTRAL)
    assert [length(model, asked) for asked in (2, 63, 64)] == [2, 63, 64]
    for asked in (65, 1024, 5000):
        with pytest.raises(
            NotSupportedError, match=f"max_model_len={asked} is not .* window of 64 tokens"
        ):
            length(model, asked)
    wide = folder(tmp_path / "wide", TINY_MISTRAL, sliding_window=2000)
    with pytest.raises(ConfigError, match=r"at most the model's own limit, 1024, got 1025"):
        length(wide, 1025)


@pytest.mark.parametrize("window", [0, -1, 64.0, "64", True, [64]])
def test_a_window_that_is_none(window: object, tmp_path: Path) -> None:
    model = folder(tmp_path, TINY_MISTRAL, sliding_window=window)
    with pytest.raises(ConfigError, match=r"config\.json: sliding_window must be an integer"):
        length(model)


def test_a_llama_has_no_window(tmp_path: Path) -> None:
    """transformers does not look at the key there."""
    assert length(folder(tmp_path, TINY, sliding_window=64)) == 1024


def test_the_last_position_of_the_window_is_served(tmp_path: Path) -> None:
    llm = LLM(folder(tmp_path, TINY_MISTRAL))
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 64 - 3
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("scaling", "default", "most"),
    [
        ({"type": "linear", "factor": 2.0}, 2048, 2048),
        ({"type": "dynamic", "factor": 2.0}, 1024, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024, 1024),
    ],
)
def test_scaled_rope_reaches_further(
    scaling: dict[str, Any], default: int, most: int, tmp_path: Path
) -> None:
    model = folder(tmp_path, TINY, rope_scaling=scaling)
    assert (length(model), length(model, most)) == (default, most)
    with pytest.raises(ConfigError, match=f"the model's own limit, {most}, got {most + 1}"):
        length(model, most + 1)
