"""Tokenizers from GGUF metadata, against transformers and sentencepiece."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.errors import NotSupportedError, PromptError, TokenizerError
from cupaged.loading.pre_tokenizers import PRE_TOKENIZERS
from cupaged.loading.tokenizer import Tokenizer
from tests.sample_tokenizers import (
    smollm2,
    smollm2_golden,
    smollm2_metadata,
    spm,
    spm_golden,
    spm_metadata,
    tiny_metadata,
)

PREFIX = "tokenizer.ggml."


# From GGUF: byte-level BPE.


def test_smollm2_equals_transformers() -> None:
    cases = smollm2_golden()["tokenizer"]
    assert len(cases) >= 18
    for case in cases:
        ids = smollm2().encode(case["text"])
        assert ids == case["ids"], case["text"]
        assert smollm2().decode(ids, skip_special_tokens=False) == case["decoded"]
        assert smollm2().decode(ids) == case["decoded_without_special"]


def test_smollm2_prompts_equal_transformers() -> None:
    for case in smollm2_golden()["prompts"]:
        assert smollm2().encode(case["prompt"]) == case["prompt_ids"]


def test_smollm2_special_tokens() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocab_size == 49_152
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.token_text(1) == "<|im_start|>"
    assert tokenizer.token_text(49_152) is None
    assert tokenizer.byte_fallback_ids == frozenset()
    assert tokenizer.chat_template is not None and "SmolLM" in tokenizer.chat_template
    assert tokenizer.named_templates == {}


def test_smollm2_builds_fast() -> None:
    metadata = smollm2_metadata()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        Tokenizer.from_gguf(metadata)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5


def test_bos_is_added_where_the_file_says_so() -> None:
    assert Tokenizer.from_gguf(tiny_metadata()).encode("ab") == [6]
    with_bos = Tokenizer.from_gguf(tiny_metadata(add_bos_token=True, add_eos_token=True))
    assert with_bos.encode("ab") == [0, 6, 1]
    assert with_bos.encode("ab", add_special_tokens=False) == [6]
    assert with_bos.encode("") == [0, 1]
    # Llama 3 adds one unless the file says otherwise.
    assert Tokenizer.from_gguf(tiny_metadata(pre="llama-bpe")).encode("ab") == [0, 6]
    assert Tokenizer.from_gguf(tiny_metadata(pre="llama-bpe", add_bos_token=False)).encode(
        "ab"
    ) == [6]


def test_only_llama3_takes_a_whole_word_against_the_merges() -> None:
    # No merge makes "abc": "ab" + "c" is not listed.
    assert Tokenizer.from_gguf(tiny_metadata(pre="gpt-2")).encode("abc") == [6, 4]
    assert Tokenizer.from_gguf(tiny_metadata(pre="qwen2")).encode("abc") == [6, 4]
    llama3 = Tokenizer.from_gguf(tiny_metadata(pre="llama-bpe", add_bos_token=False))
    assert llama3.encode("abc") == [7]


def test_user_defined_tokens_are_found_but_not_special() -> None:
    tokenizer = Tokenizer.from_gguf(tiny_metadata())
    assert tokenizer.encode("a<tool>b</s>") == [2, 9, 3, 1]
    assert tokenizer.decode([2, 9, 3, 1]) == "a<tool>b"
    assert tokenizer.special_ids == {0, 1}


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["I", "'", "VE", " 12345", "  ", " x", ".", "\n\n"]),
        ("default", ["I", "'", "VE", " 12345", "  ", " x", ".", "\n\n"]),
        ("smollm", ["I", "'", "VE", " ", "1", "2", "3", "4", "5", "  ", " x", ".", "\n\n"]),
        ("llama-bpe", ["I", "'VE", " ", "123", "45", "  ", " x", ".\n\n"]),
        ("qwen2", ["I", "'VE", " ", "1", "2", "3", "4", "5", "  ", " x", ".\n\n"]),
    ],
)
def test_pre_tokenizers_cut(name: str, pieces: list[str]) -> None:
    text = "I'VE 12345   x.\n\n"
    cuts = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cuts] == pieces


def test_qwen2_composes_characters() -> None:
    metadata = tiny_metadata(pre="qwen2", tokens=["\u00c3", "\u00a9", "\u00cc", "\u0123", "e"])
    metadata |= {f"{PREFIX}merges": [], f"{PREFIX}token_type": np.ones(5, np.int32)}
    assert Tokenizer.from_gguf(metadata).encode("e\u0301") == [0, 1]  # the bytes C3 A9 of U+00E9


# From GGUF: sentencepiece.


def test_spm_equals_sentencepiece() -> None:
    cases = spm_golden()["texts"]
    assert len(cases) == 25
    for case in cases:
        ids = spm().encode(case["text"], add_special_tokens=False)
        assert ids == case["ids"], case["text"]
        assert spm().decode(ids) == case["decoded"], case["text"]


def merged_as_sentencepiece(text: str) -> list[str]:
    """The algorithm, plainly: join the pair with the best score, the leftmost of equals."""
    golden = spm_golden()
    entries = zip(golden["pieces"], golden["scores"], golden["types"], strict=True)
    scores = {piece: score for piece, score, kind in entries if kind == 1}
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        ranked = [
            (-scores[parts[i] + parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in scores
        ]
        if not ranked:
            break
        _, index = min(ranked)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [
        piece
        for part in parts
        for piece in ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]


@given(st.text(st.sampled_from("aceinorst  .\n") | st.characters(codec="utf-8"), max_size=60))
@settings(deadline=None, max_examples=150)
def test_spm_equals_the_plain_algorithm(text: str) -> None:
    if any(control in text for control in ("<unk>", "<s>", "</s>")):
        return
    ids = spm().encode(text, add_special_tokens=False)
    assert [spm().token_text(index) for index in ids] == merged_as_sentencepiece(text)
    assert spm().decode(ids) == text.replace("\u2581", " ")


def test_spm_adds_a_bos_unless_told_otherwise() -> None:
    assert spm().encode("") == [1]
    assert spm().encode("a")[0] == 1
    without = Tokenizer.from_gguf(spm_metadata(add_bos_token=False))
    assert without.encode("") == []
    assert (spm().bos_token, spm().eos_token, spm().unk_token) == ("<s>", "</s>", "<unk>")
    assert spm().special_ids == {0, 1, 2}
    assert spm().pad_token is None


def test_spm_space_prefix() -> None:
    without = Tokenizer.from_gguf(spm_metadata(add_space_prefix=False))
    [*_, last] = without.encode("a", add_special_tokens=False)
    assert without.token_text(last) == "a"
    ids = without.encode(" a", add_special_tokens=False)
    assert [without.token_text(index) for index in ids] == ["\u2581a"]
    assert without.decode(ids) == " a"
    assert spm().decode(spm().encode("a")) == "a"


def test_spm_user_defined_spaces() -> None:
    golden = spm_golden()
    double, letter = golden["pieces"].index("\u2581\u2581"), golden["pieces"].index("s")
    types = np.array(golden["types"], np.int32)
    types[double] = 4
    tokenizer = Tokenizer.from_gguf(spm_metadata(token_type=types, add_space_prefix=False))
    # Merging alone would take the second space into a word.
    assert tokenizer.encode("s  s", add_special_tokens=False) == [letter, double, letter]
    assert tokenizer.decode([letter, double, letter]) == "s  s"


def test_spm_byte_fallback_ids() -> None:
    assert spm().byte_fallback_ids == frozenset(range(3, 259))
    assert spm().decode([3 + 0xE6, 3 + 0x9D, 3 + 0xB1]) == "\u6771"


# From GGUF: damage.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": None}, ["tokenizer.ggml.model", "missing"]),
        ({"model": 5}, ["tokenizer.ggml.model", "5"]),
        ({"tokens": None}, ["tokenizer.ggml.tokens", "missing"]),
        ({"tokens": []}, ["tokenizer.ggml.tokens", "empty"]),
        ({"tokens": "abc"}, ["tokenizer.ggml.tokens", "'abc'"]),
        ({"tokens": [*"xxyz012345"]}, ["tokenizer.ggml.tokens", "'x'", "0 and 1"]),
        ({"tokens": ["a", "b", "ab"]}, ["tokenizer.ggml.token_type", "10", "3"]),
        ({"token_type": np.full(10, 7, np.int32)}, ["tokenizer.ggml.token_type", "entry 0 is 7"]),
        ({"token_type": np.zeros(10)}, ["tokenizer.ggml.token_type", "entry 0 is 0"]),
        ({"token_type": [["a"]] * 10}, ["tokenizer.ggml.token_type"]),
        ({"merges": None}, ["tokenizer.ggml.merges", "missing"]),
        ({"merges": ["a b", "a z"]}, ["tokenizer.ggml.merges", "entry 1 is 'a z'"]),
        ({"merges": ["a c"]}, ["tokenizer.ggml.merges", "entry 0 is 'a c'"]),
        ({"merges": ["ab"]}, ["tokenizer.ggml.merges", "entry 0 is 'ab'"]),
        ({"merges": ["a b c"]}, ["tokenizer.ggml.merges", "entry 0 is 'a b c'"]),
        ({"merges": [1]}, ["tokenizer.ggml.merges", "[1]"]),
        ({"bos_token_id": 10}, ["tokenizer.ggml.bos_token_id", "0 to 9", "10"]),
        ({"eos_token_id": -1}, ["tokenizer.ggml.eos_token_id", "-1"]),
        ({"padding_token_id": 2**32 - 1}, ["tokenizer.ggml.padding_token_id", "4294967295"]),
        ({"unknown_token_id": "a"}, ["tokenizer.ggml.unknown_token_id", "'a'"]),
        ({"bos_token_id": True}, ["tokenizer.ggml.bos_token_id", "True"]),
        ({"add_bos_token": 1}, ["tokenizer.ggml.add_bos_token", "1"]),
        ({"add_bos_token": True, "bos_token_id": None}, ["add_bos_token", "bos_token_id"]),
        ({"pre": 3}, ["tokenizer.ggml.pre", "3"]),
        ({"model": "llama"}, ["tokenizer.ggml.scores", "missing"]),
        ({"model": "llama", "scores": np.ones(9)}, ["tokenizer.ggml.scores", "9", "10"]),
        ({"model": "llama", "scores": np.full(10, math.nan)}, ["tokenizer.ggml.scores", "nan"]),
        ({"model": "llama", "scores": ["a"] * 10}, ["tokenizer.ggml.scores", "'a'"]),
        ({"model": "llama", "scores": np.ones((10, 1))}, ["tokenizer.ggml.scores"]),
    ],
)
def test_damaged_metadata_is_refused(changes: dict[str, object], named: list[str]) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_gguf(tiny_metadata(**changes))
    for part in named:
        assert part in str(caught.value)


def test_a_huge_piece_is_refused_quickly() -> None:
    metadata = spm_metadata()
    tokens = list(spm_golden()["pieces"])
    tokens[300] = "x" * 10_000_000
    with pytest.raises(TokenizerError, match=r"entry 300 has 10000000 characters"):
        Tokenizer.from_gguf(metadata | {f"{PREFIX}tokens": tokens})


def test_unknown_kinds_are_named_with_the_known_ones() -> None:
    with pytest.raises(NotSupportedError, match=r"tokenizer\.ggml\.pre is 'tekken'.*smollm"):
        Tokenizer.from_gguf(tiny_metadata(pre="tekken"))
    with pytest.raises(NotSupportedError, match=r"tokenizer\.ggml\.model is 't5'.*gpt2, llama"):
        Tokenizer.from_gguf(tiny_metadata(model="t5"))


def test_gguf_templates() -> None:
    metadata = tiny_metadata()
    metadata |= {"tokenizer.chat_template": "main", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.chat_template == "main"
    assert tokenizer.named_templates == {"tool_use": "tools"}
    with pytest.raises(TokenizerError, match=r"tokenizer\.chat_template must be a string, got 3"):
        Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": 3})


# Encoding and decoding.


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(PromptError, match="prompt must be text that UTF-8 can encode"):
        smollm2().encode("a\ud800b")
    text: Any = b"bytes"
    with pytest.raises(PromptError):
        smollm2().encode(text)


def test_ids_outside_the_vocabulary_decode_to_nothing() -> None:
    hello = smollm2().encode("Hello")
    assert smollm2().decode([*hello, 49_152, 2**32 - 1]) == "Hello"
    for ids in ([-1], [2**32]):
        with pytest.raises(PromptError, match="token ids must be integers from 0"):
            smollm2().decode(ids)
