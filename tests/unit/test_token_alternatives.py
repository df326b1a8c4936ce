"""Token ids as people read them, and words as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from cupaged.engine.token_alternatives import alternatives, bad_words_token_ids
from cupaged.errors import InvalidParameterError
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import Logprob, TokenLogprobs
from tests import sample_tokenizers
from tests.sample_tokenizers import tiny_metadata

# Of `tiny`: "<s>" 0, "</s>" 1, "a" 2, "b" 3, "c" 4, " " 5, "ab" 6, "abc" 7, " a" 8, "<tool>" 9.


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_gguf(tiny_metadata())


# ---- alternatives --------------------------------------------------------------------------------


def test_each_token_once_the_given_one_first(tiny: Tokenizer) -> None:
    told = TokenLogprobs([6, 8, 6, 1], [-2.0, -0.5, -2.0, -3.0], [2, 1, 2, 3])
    found = alternatives(tiny, told)
    assert list(found.items()) == [
        (6, Logprob(-2.0, 2, "ab")),
        (8, Logprob(-0.5, 1, " a")),
        (1, Logprob(-3.0, 3, "</s>")),
    ]


def test_a_token_outside_the_tokenizer_has_no_text(tiny: Tokenizer) -> None:
    """A head may have more rows than the tokenizer has tokens."""
    assert alternatives(tiny, TokenLogprobs([31], [-1.0], [1])) == {31: Logprob(-1.0, 1, "")}


# ---- bad words -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], [(2,), (8,)]),
        ([" a"], [(2,), (8,)]),
        (["   a"], [(2,), (8,)]),
        (["ab"], [(6,)]),  # " ab" is " ", "ab": it would ban "ab" after any space, and is longer
        (["b"], [(3,)]),
        (["aa"], [(2, 2), (8, 2)]),
        (["a a"], [(2, 8), (8, 8)]),
        (["a "], [(2, 5), (8, 5)]),
        (["<tool>"], [(9,)]),
        ([" "], [(5,)]),
        (["  "], [(5, 5)]),
        (["a", "aa", "a"], [(2,), (8,), (2, 2), (8, 2)]),
        ([], []),
    ],
)
def test_spellings_by_hand(
    words: list[str], expected: list[tuple[int, ...]], tiny: Tokenizer
) -> None:
    assert bad_words_token_ids(tiny, words) == tuple(expected)


def test_a_word_of_white_space_is_itself() -> None:
    """And not the space that would stand before it."""
    tokenizer = sample_tokenizers.smollm2()
    (newline,), (space,) = tokenizer.encode("\n"), tokenizer.encode(" ")
    found = bad_words_token_ids(tokenizer, ["\n"])
    assert (newline,) in found and (space,) not in found


def test_a_word_that_is_no_text_is_refused_by_its_name(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match=r"^bad_words must be text that UTF-8") as bad:
        bad_words_token_ids(tiny, ["a", "\ud800"])
    assert bad.value.value == "\ud800"


def vllm_spellings(
    encode: Callable[[str], list[int]], words: Sequence[str]
) -> list[tuple[int, ...]]:
    """The rule as vLLM has it, for words that are not all white space."""
    found: list[list[int]] = []
    for word in words:
        for with_space in (False, True):
            ids = encode((" " if with_space else "") + word.lstrip())
            if not with_space or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return [tuple(ids) for ids in found]


WORDS = (
    "the", " the", "Paris", "paris", "unbelievable", "New York", "don't", "2024", "7", "naïve",
    "<|im_end|>", "a\nb", "x = 10", "ing", "\n\nThe", "café au lait", "!", " ...", "is", "island",
)  # fmt: skip


@pytest.mark.parametrize("make", [sample_tokenizers.smollm2, sample_tokenizers.spm])
def test_spellings_are_those_of_vllm(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for word in WORDS:
        assert list(bad_words_token_ids(tokenizer, [word])) == vllm_spellings(encode, [word])
    every = bad_words_token_ids(tokenizer, WORDS)
    assert list(every) == list(dict.fromkeys(vllm_spellings(encode, WORDS)))
