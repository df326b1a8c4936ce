"""Loops in a kernel's machine code, and how many instructions they take a byte.

Reads what `nvdisasm -c` prints: a loop is what lies between a label and a branch back to it. Every
instruction counts once, also one in a branch that is not always taken, so that the counts are upper
bounds for a loop without another one inside. It knows no kernel and no GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Loop", "code_of", "find_loops", "main_loop", "whole_code"]

_SECTION = re.compile(r"^//-+ \.text\.(\S+)\s+-+$", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_x?_?\d+):")
_BRANCH = re.compile(r"\bBRA(?:\.\w+)* .*`\((\.L_x?_?\d+)\)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_WARP = 32
_WIDTHS = {"128": 16, "256": 32}


@dataclass(frozen=True, slots=True)
class Loop:
    """What one pass takes of a warp.

    instructions: issue slots. loads, stores: bytes of global memory, through any cache, of
    instructions that move 16 bytes a lane or more: what is streamed. matrix: products of matrices.
    has_loop: another loop lies inside, which was counted once.
    """

    instructions: int
    loads: int
    stores: int
    matrix: int
    has_loop: bool = False


def code_of(listing: str, kernel: str) -> list[str]:
    """The lines of one kernel out of a listing.

    Raises:
        KeyError: there is no such kernel.
    """
    parts = _SECTION.split(listing)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    return sections[kernel].splitlines()


def find_loops(lines: list[str]) -> list[Loop]:
    """All loops of a kernel, in the order of their ends."""
    spans = _spans(lines)
    return [
        _count(lines[start : end + 1], any(start <= s and e < end for s, e in spans))
        for start, end in spans
    ]


def main_loop(lines: list[str]) -> Loop | None:
    """The innermost loop that loads the most bytes in a pass; None if none loads any.

    Of several with as many the one with the most instructions, which is the safe side.
    """
    loops = [loop for loop in find_loops(lines) if loop.loads and not loop.has_loop]
    return max(loops, key=lambda loop: (loop.loads, loop.instructions), default=None)


def whole_code(lines: list[str]) -> Loop:
    """A kernel as if it were one pass: an upper bound where threads have one piece of work each."""
    return _count(lines, False)


def _spans(lines: list[str]) -> list[tuple[int, int]]:
    """Lines of each loop's label and of its branch back; the last branch to a label counts."""
    labels: dict[str, int] = {}
    ends: dict[int, int] = {}
    for i, line in enumerate(lines):
        label, branch = _LABEL.match(line), _BRANCH.search(line)
        if label:
            labels[label[1]] = i
        elif branch and branch[1] in labels and not _is_stop(lines, labels[branch[1]], i):
            ends[labels[branch[1]]] = i
    return sorted(ends.items(), key=lambda span: span[1])


def _is_stop(lines: list[str], start: int, end: int) -> bool:
    """A branch to itself, which pads a kernel's end."""
    return not any(_INSTRUCTION.match(line) for line in lines[start + 1 : end])


def _count(lines: list[str], has_loop: bool) -> Loop:
    instructions = loaded = stored = matrix = 0
    for line in lines:
        found = _INSTRUCTION.match(line)
        if not found or found[1] == "NOP":
            continue
        instructions += 1
        name, *modifiers = found[1].split(".")
        width = next((_WIDTHS[m] for m in modifiers if m in _WIDTHS), 0) * _WARP
        loaded += width * (name in ("LDG", "LDGSTS"))
        stored += width * (name == "STG")
        matrix += name.endswith("MMA")
    return Loop(instructions, loaded, stored, matrix, has_loop)
