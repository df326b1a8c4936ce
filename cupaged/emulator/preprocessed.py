"""A preprocessed C++ file: its words, and where in which file they were written.

Owns the line markers that `g++ -E` leaves, and edits that keep every other word on its line. Words
of system headers and of the emulator's own are not looked at. Knows nothing of CUDA.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cupaged.emulator.toolchain import INCLUDE_DIR

_MARKER = re.compile(r'^# (?P<line>\d+) "(?P<file>(?:[^"\\]|\\.)*)"(?P<flags>[ \d]*)\n', re.M)
_TOKEN = re.compile(
    r"""^[^\S\n]*\#[^\n]*"""  # a directive that is left: #pragma
    r"""|R"(?P<raw>[^()\\\s]{0,16})\(.*?\)(?P=raw)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"""|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|'?[\w.])*|<<<|::|[^\s]""",
    re.S | re.M,
)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")
_OPEN = {"(": ")", "[": "]", "{": "}"}
_CLOSE = frozenset(_OPEN.values())


class Token(NamedTuple):
    """text, and where it lies in the preprocessed file."""

    text: str
    start: int
    end: int

    @property
    def is_directive(self) -> bool:
        """Whether it is a whole line that starts with #."""
        return self.text.lstrip().startswith("#")


class Edit(NamedTuple):
    """The characters from start to end become `replacement`."""

    start: int
    end: int
    replacement: str


class _Region(NamedTuple):
    """Lines that follow each other, as offsets. file: as the marker spells it."""

    start: int
    end: int
    line: int
    file: str
    is_user: bool


class PreprocessedFile:
    """The output of the preprocessor. tokens: the words of the user's files, in order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._regions = _regions(text)
        self._starts = [region.start for region in self._regions]
        self.tokens: list[Token] = []
        for region in self._regions:
            if region.is_user:
                self.tokens += [
                    Token(m.group(), m.start(), m.end())
                    for m in _TOKEN.finditer(text, region.start, region.end)
                ]

    def where(self, token: Token) -> str:
        """file:line."""
        region, line = self._place(token.start)
        return f"{region.file}:{line}"

    def edited(self, edits: Iterable[Edit]) -> str:
        """The text with the edits, which do not overlap."""
        pieces: list[str] = []
        position = 0
        for start, end, replacement in sorted(edits):
            pieces += (self._text[position:start], replacement, self._lines(start, end))
            position = end
        pieces.append(self._text[position:])
        return "".join(pieces)

    def _place(self, offset: int) -> tuple[_Region, int]:
        region = self._regions[bisect_right(self._starts, offset) - 1]
        return region, region.line + self._text.count("\n", region.start, offset)

    def _lines(self, start: int, end: int) -> str:
        """What puts the text after an edit on the line where it was."""
        if bisect_right(self._starts, start) == bisect_right(self._starts, end):
            return "\n" * self._text.count("\n", start, end)
        region, line = self._place(end)
        return f'\n# {line} "{region.file}"\n'


def _regions(text: str) -> list[_Region]:
    """The parts between line markers; a user's files are those that are no system's."""
    user: dict[str, bool] = {}
    markers = list(_MARKER.finditer(text))
    ends = [*(marker.start() for marker in markers), len(text)]
    regions = [_Region(0, ends[0], 1, "", False)]
    for marker, end in zip(markers, ends[1:], strict=True):
        file = marker["file"]
        is_system = file.startswith(("<", str(INCLUDE_DIR))) or "3" in marker["flags"].split()
        is_user = user.setdefault(file, not is_system)
        regions.append(_Region(marker.end(), end, int(marker["line"]), file, is_user))
    return regions


def close(tokens: Sequence[Token], index: int) -> int:
    """Index of the bracket that closes the one at index."""
    depth = 0
    for i in range(index, len(tokens)):
        if tokens[i].text in _OPEN:
            depth += 1
        elif tokens[i].text in _CLOSE:
            depth -= 1
            if depth == 0:
                return i
    return len(tokens) - 1


def last_of_group(tokens: Sequence[Token], index: int) -> int:
    """Where the bracketed group that starts at index ends, angle brackets included, else index."""
    if tokens[index].text in _OPEN:
        return close(tokens, index)
    if tokens[index].text != "<":
        return index
    depth = 0
    i = index
    while i < len(tokens):
        word = tokens[i].text
        if word in _OPEN:
            i = close(tokens, i)
        elif word == "<":
            depth += 1
        elif word == ">" and tokens[i - 1].text != "-":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return index  # less than


def groups(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """The tokens, those of a bracketed group together."""
    found = []
    i = 0
    while i < len(tokens):
        end = last_of_group(tokens, i) + 1
        found.append(tokens[i:end])
        i = end
    return found


def split(tokens: Sequence[Token]) -> list[list[Token]]:
    """At commas outside of every bracket."""
    parts: list[list[Token]] = [[]]
    for group in groups(tokens):
        if group[0].text == ",":
            parts.append([])
        else:
            parts[-1].extend(group)
    return [part for part in parts if part]


def statement_end(tokens: Sequence[Token], index: int) -> int:
    """Index of the semicolon that ends the statement."""
    while index < len(tokens) - 1 and tokens[index].text != ";":
        index = close(tokens, index) + 1 if tokens[index].text in _OPEN else index + 1
    return min(index, len(tokens) - 1)


def spell(tokens: Sequence[Token]) -> str:
    """The tokens as source text on one line; what was written together stays together."""
    pieces: list[str] = []
    for i, token in enumerate(tokens):
        pieces += [" ", token.text] if i and tokens[i - 1].end != token.start else [token.text]
    return "".join(pieces)
