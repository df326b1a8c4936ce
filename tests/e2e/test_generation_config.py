"""What a request gets that sets no parameters: the recommendations of the model's authors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cupaged import LLM, SamplingParams
from cupaged.errors import ConfigError
from tests.tiny_models import TINY, write_hf_folder

RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_hf_folder(tmp_path_factory.mktemp("model"), TINY)
    config = path / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **RECOMMENDED}))
    return path


def test_auto_takes_the_models_recommendations(folder: Path) -> None:
    llm = LLM(folder)
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_tokens=5)
    default = llm.generate("the cat", use_tqdm=False)[0].outputs[0]
    assert len(default.token_ids) <= 5
    chat = llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)[0].outputs[0]
    assert len(chat.token_ids) <= 5
    given = llm.generate("the cat", SamplingParams(max_tokens=7, ignore_eos=True), use_tqdm=False)
    assert len(given[0].outputs[0].token_ids) == 7  # what a request brings is all its own


def test_vllm_takes_none_of_them(folder: Path) -> None:
    llm = LLM(folder, generation_config="vllm")
    assert llm.get_default_sampling_params() == SamplingParams()


def test_other_names_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="generation_config must be 'auto' or 'vllm'"):
        LLM(folder, generation_config="mine")
