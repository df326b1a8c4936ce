"""Stop strings across pieces: what is held back, where the text is cut, and at what cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupaged.engine.stop_strings import StopStringMatcher
from cupaged.errors import InvalidParameterError


def fed(
    stop: Sequence[str], pieces: Sequence[str], include_stop: bool = False
) -> tuple[list[str], str | None]:
    """What is delivered for each piece and at the end, and the match."""
    matcher = StopStringMatcher(stop, include_stop=include_stop)
    delivered = []
    match = None
    for piece in pieces:
        text, match = matcher.feed(piece)
        delivered.append(text)
    return [*delivered, matcher.flush()], match


def test_a_stop_string_across_pieces_is_never_delivered() -> None:
    assert fed(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == (["", "", "", "", ""], "DEFGHIJ")
    assert fed(["DEFGHIJ"], ["DEF", "G", "X"]) == (["", "", "DEFGX", ""], None)
    assert fed(["DEFGHIJ"], ["DEF", "G"]) == (["", "", "DEFG"], None)


def test_a_stop_string_within_a_piece() -> None:
    assert fed(["STOP"], ["hello", " foo.STOPbar"]) == (["hello", " foo.", ""], "STOP")
    assert fed(["STOP"], ["foo.STOPbar"], include_stop=True) == (["foo.STOP", ""], "STOP")


def test_only_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert fed(["b,c"], ["<think>", "x"]) == (["<think>", "x", ""], None)
    assert fed(["b,c"], ["ab", "b,", "d"]) == (["a", "b", "b,d", ""], None)
    assert fed(["aab"], ["aaaa", "a", "b"]) == (["aa", "a", "", ""], "aab")


def test_what_is_included_is_not_held_back() -> None:
    pieces = ["x", "DEF", "GHI", "Jyz"]
    assert fed(["DEFGHIJ"], pieces, include_stop=True) == (["x", "DEF", "GHI", "J", ""], "DEFGHIJ")


def test_the_first_that_is_complete_wins() -> None:
    assert fed(["world", "lo"], ["hello world"]) == (["hel", ""], "lo")
    assert fed(["lo", "world"], ["hello world"]) == (["hel", ""], "lo")
    # "ab" is complete before "abc" could be, "bc" before "abcd".
    assert fed(["abc", "ab"], ["xabc"]) == (["x", ""], "ab")
    assert fed(["abcd", "bc"], ["xabcd"]) == (["xa", ""], "bc")


def test_of_those_complete_at_the_same_character_the_longest_wins() -> None:
    assert fed(["c", "bc", "abc"], ["xabc"]) == (["x", ""], "abc")
    assert fed(["abc", "bc", "c"], ["xa", "b", "c"]) == (["x", "", "", ""], "abc")
    assert fed(["abd", "bc"], ["xab", "c"]) == (["x", "a", ""], "bc")


def test_nothing_comes_after_a_match() -> None:
    matcher = StopStringMatcher(["."])
    assert matcher.feed("a.b") == ("a", ".")
    assert matcher.feed("c") == ("", ".")
    assert matcher.flush() == ""


def test_without_stop_strings() -> None:
    assert fed([], ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_stop_strings_of_any_characters() -> None:
    assert fed(["\n\n"], ["a\n", "\nb"]) == (["a", "", ""], "\n\n")
    assert fed(["京都👩"], ["東京都", "👩"]) == (["東", "", ""], "京都👩")
    assert fed(["END", "END"], ["THE END"]) == (["THE ", ""], "END")


@pytest.mark.parametrize("stop", ["STOP", [""], ["a", ""], [b"a"], [None]])
def test_what_is_no_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(InvalidParameterError, match="stop must be a list of strings"):
        StopStringMatcher(stop)


def cut_plainly(text: str, stop: Sequence[str], include_stop: bool) -> tuple[str, str | None]:
    """The definition: stop at the first character at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [entry for entry in stop if text[:end].endswith(entry)]
        if found:
            match = max(found, key=len)
            return text[: end if include_stop else end - len(match)], match
    return text, None


LETTERS = st.sampled_from("ab")


@given(
    st.text(LETTERS, max_size=40),
    st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=6), max_size=4),
    st.lists(st.integers(0, 40), max_size=12),
    st.booleans(),
)
def test_any_split_gives_the_same_text(
    text: str, stop: list[str], cuts: list[int], include_stop: bool
) -> None:
    edges = [0, *sorted(cuts), max([40, *cuts])]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert "".join(pieces) == text
    delivered, match = fed(stop, pieces, include_stop)
    assert ("".join(delivered), match) == cut_plainly(text, stop, include_stop)


@given(st.text(LETTERS, max_size=30), st.lists(st.text(LETTERS, min_size=1), max_size=3))
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stop: list[str]) -> None:
    matcher = StopStringMatcher(stop)
    delivered = ""
    for position, char in enumerate(text, start=1):
        piece, match = matcher.feed(char)
        delivered += piece
        if match is not None:
            break
        held = text[len(delivered) : position]
        lengths = [
            n for entry in stop for n in range(len(entry)) if text[:position].endswith(entry[:n])
        ]
        assert len(held) == max(lengths, default=0)


def test_the_cost_is_linear() -> None:
    """A search that starts over at each character would take 4 * 10^8 comparisons here."""
    stop = ["a" * 2_000 + "b", "a" * 1_999 + "c"]
    delivered, match = fed(stop, ["a" * 100] * 2_000 + ["b"])
    assert match == stop[0]
    assert sum(map(len, delivered)) == 200_000 - 2_000
