"""Streaming text equals the text in one piece, for any ids, at a constant cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.engine.detokenizer import IncrementalDetokenizer
from cupaged.loading.tokenizer import Tokenizer
from tests.sample_tokenizers import (
    smollm2,
    smollm2_byte_ids,
    smollm2_metadata,
    spm,
    spm_golden,
    spm_metadata,
    tiny_metadata,
)

REPLACEMENT = "\ufffd"
WORDS = ("Hello", " world", " ", "\n", "\u6771", "\u4eac", "\ufffd", "e\u0301", "\U0001f469\u200d")


class Counting(Tokenizer):
    """Counts the ids it decodes."""

    calls: list[int]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.calls.append(len(ids))
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def streamed(
    tokenizer: Tokenizer,
    prompt: list[int],
    steps: list[list[int]],
    skip_special_tokens: bool = True,
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.append(step) for step in steps]
    return [*pieces, detokenizer.finish()]


def expected(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip_special_tokens: bool = True
) -> str:
    full = tokenizer.decode(prompt + output, skip_special_tokens=skip_special_tokens)
    before = tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
    common = 0
    while common < min(len(full), len(before)) and full[common] == before[common]:
        common += 1
    return full[common:]


def steps_of(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def byte_ids(text: str | bytes) -> list[int]:
    data = text if isinstance(text, bytes) else text.encode()
    return [smollm2_byte_ids()[byte] for byte in data]


def spm_byte_ids(text: str | bytes) -> list[int]:
    return [3 + byte for byte in (text if isinstance(text, bytes) else text.encode())]


# Known texts.


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("text", ["삼겹살", "👩\u200d👩\u200d👧", "ď", "a\u6771b👩c"])
@pytest.mark.parametrize("spell", [byte_ids, spm_byte_ids])
def test_characters_are_never_cut(spell: Callable[[str], list[int]], text: str, size: int) -> None:
    tokenizer = smollm2() if spell is byte_ids else spm()
    pieces = streamed(tokenizer, [], steps_of(spell(text), size))
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces) == text


def test_byte_level_characters_come_as_soon_as_they_are_whole() -> None:
    pieces = streamed(smollm2(), [], steps_of(byte_ids("a\u6771é👩"), 1))
    assert pieces == ["a", "", "", "\u6771", "", "é", "", "", "", "👩", ""]


def test_byte_fallback_waits_for_the_end_of_the_run() -> None:
    a = spm_golden()["pieces"].index("a")
    ids = [a, *spm_byte_ids("\u6771"), a]
    assert streamed(spm(), [a], steps_of(ids, 1)) == ["a", "", "", "", "\u6771a", ""]
    # One wrong byte makes the whole run wrong, so nothing of it could have been shown before.
    ids = [a, *spm_byte_ids("\u6771"), 3 + 0xFF, a]
    assert streamed(spm(), [a], steps_of(ids, 1)) == [
        "a",
        "",
        "",
        "",
        "",
        REPLACEMENT * 4 + "a",
        "",
    ]


def test_invalid_bytes_are_held_for_one_id_only() -> None:
    ids = [*byte_ids("a"), *byte_ids(b"\xef"), *byte_ids(b"\xef"), *byte_ids("b")]
    assert streamed(smollm2(), [], steps_of(ids, 1)) == [
        "a",
        "",
        REPLACEMENT,
        REPLACEMENT + "b",
        "",
    ]
    assert streamed(smollm2(), [], [byte_ids(b"\xef\xef")]) == [REPLACEMENT, REPLACEMENT]


def test_spaces_at_the_seam_survive() -> None:
    prompt, output = smollm2().encode("The prompt"), smollm2().encode(" leading  spaces ")
    assert "".join(streamed(smollm2(), prompt, steps_of(output, 1))) == " leading  spaces "
    assert "".join(streamed(smollm2(), [], steps_of(output, 1))) == " leading  spaces "
    prompt = spm().encode("The prompt", add_special_tokens=False)
    output = spm().encode("leading  spaces ", add_special_tokens=False)
    assert "".join(streamed(spm(), prompt, steps_of(output, 1))) == " leading  spaces "
    # Where no text comes before it, sentencepiece's first space is not part of the text.
    assert "".join(streamed(spm(), [], steps_of(output, 1))) == "leading  spaces "
    assert "".join(streamed(spm(), [1], steps_of(output, 1))) == "leading  spaces "


def test_special_tokens_are_hidden_or_shown() -> None:
    ids = [*smollm2().encode("Hi<|im_end|> you"), 49_152]
    assert streamed(smollm2(), [1], [ids]) == ["Hi you", ""]
    assert streamed(smollm2(), [1], [ids], skip_special_tokens=False) == ["Hi<|im_end|> you", ""]
    assert streamed(smollm2(), [1, 2], [[1, 2], [2]]) == ["", "", ""]
    assert streamed(spm(), [1], [[1, 2]], skip_special_tokens=False) == ["<s></s>", ""]


def test_hidden_tokens_do_not_end_a_character() -> None:
    first, *rest = byte_ids("👩")
    assert "".join(streamed(smollm2(), [first], [[2]] * 100 + [rest])) == "👩"
    first, *rest = spm_byte_ids("👩")
    assert "".join(streamed(spm(), [first, 2], [[2]] * 100 + [rest])) == "👩"


def test_a_prompt_that_ends_within_a_character() -> None:
    first, *rest = byte_ids("👩")
    assert streamed(smollm2(), [first], [*steps_of(rest, 1)]) == ["", "", "👩", ""]
    assert streamed(smollm2(), [first], [byte_ids("a")]) == ["a", ""]  # U+FFFD is the prompt's
    assert streamed(smollm2(), [first], []) == [""]
    first, *rest = spm_byte_ids("👩")
    assert streamed(spm(), [first], [rest]) == ["", "👩"]
    assert streamed(spm(), [first], []) == [""]


def test_a_newline_that_the_prompt_ends_with_is_not_repeated() -> None:
    prompt = spm().encode("question\n", add_special_tokens=False)
    assert prompt[-1] == 3 + ord("\n")
    output = spm().encode("answer", add_special_tokens=False)
    assert "".join(streamed(spm(), prompt, steps_of(output, 1))) == " answer"


def test_finish_twice() -> None:
    detokenizer = IncrementalDetokenizer(smollm2(), [])
    assert detokenizer.append(byte_ids("a\u6771")[:3]) == "a"
    assert detokenizer.finish() == REPLACEMENT
    assert detokenizer.finish() == ""


# Any ids.


def empty_token_spm() -> Tokenizer:
    """An empty token ends a run of bytes; no space is stripped."""
    tokens = list(spm_golden()["pieces"])
    tokens[300] = ""
    return Tokenizer.from_gguf(spm_metadata(tokens=tokens, add_space_prefix=False))


KINDS: dict[str, tuple[Callable[[], Tokenizer], Callable[[], list[list[int]]]]] = {
    "byte-level": (
        smollm2,
        lambda: [
            sorted(smollm2_byte_ids().values()),
            sorted(smollm2().special_ids),
            [index for index in range(49_152) if REPLACEMENT in smollm2().decode([index])],
        ],
    ),
    "spm": (spm, lambda: [sorted(spm().byte_fallback_ids), sorted(spm().special_ids)]),
    "spm with an empty token": (
        empty_token_spm,
        lambda: [sorted(spm().byte_fallback_ids), [300]],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_join_to_the_full_text(kind: str) -> None:
    make, make_pools = KINDS[kind]
    tokenizer, pools = make(), make_pools()
    chunks = st.one_of(
        st.integers(0, tokenizer.vocab_size + 3).map(lambda index: [index]),
        *(st.sampled_from(pool).map(lambda index: [index]) for pool in pools),
        st.sampled_from(WORDS).map(lambda word: tokenizer.encode(word, add_special_tokens=False)),
    )

    def joined(size: int) -> st.SearchStrategy[list[int]]:
        parts = st.lists(chunks, max_size=5) | st.lists(chunks, min_size=size // 2, max_size=size)
        repeated = st.builds(lambda part, times: [part] * times, chunks, st.integers(0, size))
        return (parts | repeated).map(lambda lists: [index for part in lists for index in part])

    @given(joined(50), joined(80), st.integers(1, 5), st.booleans())
    @settings(deadline=None, max_examples=300)
    def check(prompt: list[int], output: list[int], size: int, skip: bool) -> None:
        pieces = streamed(tokenizer, prompt, steps_of(output, size), skip)
        assert "".join(pieces) == expected(tokenizer, prompt, output, skip)

    check()


def test_long_streams_of_the_same_bytes() -> None:
    """Some never end at the end of a character, so that no boundary is ever clean."""
    broken = (b"\xf0\x9f\x98", b"\xef", b"\xad\xe4\xb8", b"\x9f", b"a\xf0")
    whole = [f"{'abcd'[:size]}👩\u6771".encode() for size in range(5)]
    for data in (*broken, *whole):
        output = byte_ids(data) * 50
        for size in (1, 2, 3):
            pieces = streamed(smollm2(), byte_ids(data)[:1], steps_of(output, size))
            assert "".join(pieces) == expected(smollm2(), byte_ids(data)[:1], output)


# Cost.


def costly_streams() -> Iterator[tuple[str, Counting, list[int]]]:
    byte_level = Counting.from_gguf(smollm2_metadata())
    sentencepiece = Counting.from_gguf(spm_metadata())
    broken = ["\u00ad\u00e4\u00b8", "\u00f0", "a"]  # the bytes AD E4 B8, F0 and 61
    tiny = Counting.from_gguf(
        tiny_metadata(tokens=broken, merges=[], token_type=np.ones(3, np.int32))
    )
    text = "Caching keys and values, \u6771\u4eac 👩\u200d👧. " * 200
    for tokenizer in (byte_level, sentencepiece, tiny):
        tokenizer.calls = []
    yield "byte-level text", byte_level, byte_level.encode(text)[:4000]
    yield "sentencepiece text", sentencepiece, sentencepiece.encode(text)[:4000]
    yield "invalid bytes", byte_level, byte_ids(b"\xf0\x9f\x98" * 1000)
    yield "a run of byte tokens", sentencepiece, spm_byte_ids("\u6771" * 1000)
    yield "never at the end of a character", tiny, [0] * 3000
    yield "half a character for ever", tiny, [1] * 3000


def test_the_cost_of_an_id_is_constant() -> None:
    for name, tokenizer, ids in costly_streams():
        detokenizer = IncrementalDetokenizer(tokenizer, ids)
        for half in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
            tokenizer.calls = []
            pieces = [detokenizer.append([index]) for index in half]
            assert len(tokenizer.calls) <= 1.2 * len(half), name
            assert max(tokenizer.calls, default=0) <= 40, name
            assert sum(map(len, pieces)) <= 4 * len(half)
        tokenizer.calls = []
        detokenizer.finish()
        assert len(tokenizer.calls) <= 1


def test_a_long_prompt_costs_no_more_than_a_short_one() -> None:
    tokenizer = Counting.from_gguf(smollm2_metadata())
    tokenizer.calls = []
    IncrementalDetokenizer(tokenizer, smollm2().encode("word " * 10_000))
    assert sum(tokenizer.calls) <= 30
