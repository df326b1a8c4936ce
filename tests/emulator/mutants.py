"""Mutants of kernel sources: one small, wrong change each, by listed operators, at an exact place.

Works on the source text, with comments, preprocessor lines and constants set aside. A mutant is
named by its file, the line's text and the change, not by a line number, so that a list of explained
survivors outlives edits elsewhere. Knows nothing of what the kernels compute: test_mutants.py does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# A rule gives (start, end, new text) for each place of a line it can change.
Change = tuple[int, int, str]
Rule = Callable[[str], Iterator[Change]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace characters [start, end) of line `number` (from 1) of `file` by `new`."""

    file: str
    number: int
    line: str
    start: int
    end: int
    new: str
    operator: str
    occurrence: int = 1

    @property
    def name(self) -> str:
        """`file: changed line`, the change between brackets: `x = a [+ -> -] b;`.

        From the second occurrence of the same line on with its count: `(2)`.
        """
        old = self.line[self.start : self.end]
        changed = f"{self.line[: self.start]}[{old} -> {self.new}]{self.line[self.end :]}"
        count = f" ({self.occurrence})" if self.occurrence > 1 else ""
        return f"{self.file}: {' '.join(changed.split())}{count}"

    def apply(self, text: str) -> str:
        lines = text.split("\n")
        assert lines[self.number - 1] == self.line
        lines[self.number - 1] = self.line[: self.start] + self.new + self.line[self.end :]
        return "\n".join(lines)


def _pattern(pattern: str, new: str | Callable[[re.Match[str]], str]) -> Rule:
    """Replaces group 1 of every match."""

    def rule(line: str) -> Iterator[Change]:
        for match in re.finditer(pattern, line):
            yield match.start(1), match.end(1), new if isinstance(new, str) else new(match)

    return rule


def _closing(line: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`, or -1."""
    depth = 0
    for i in range(opening, len(line)):
        depth += line[i] in "([{"
        depth -= line[i] in ")]}"
        if depth == 0:
            return i
    return -1


def _swap_arguments(name: str) -> Rule:
    """`name(a, b)` becomes `name(b, a)`."""

    def rule(line: str) -> Iterator[Change]:
        for match in re.finditer(rf"\b{name}\(", line):
            end = _closing(line, match.end() - 1)
            inside = line[match.end() : end]
            commas = [i for i, c in enumerate(inside) if c == "," and
                      inside[:i].count("(") == inside[:i].count(")")]  # fmt: skip
            if end > 0 and len(commas) == 1:
                first, second = inside[: commas[0]].strip(), inside[commas[0] + 1 :].strip()
                yield match.end(), end, f"{second}, {first}"

    return rule


def _drop_guard(line: str) -> Iterator[Change]:
    """`if (a) work` does the work always; `if (a) return` (continue, break) leaves never."""
    for match in re.finditer(r"\bif \(", line):
        end = _closing(line, match.end() - 1)
        if end > 0:
            leaves = re.search(r"\b(return|continue|break)\b", line[end:])
            yield match.end(), end, "false" if leaves else "true"


def _shift_index(step: str) -> Rule:
    """`x[i]` becomes `x[i + 1]`."""

    def rule(line: str) -> Iterator[Change]:
        for match in re.finditer(r"(?<=[\w\])])\[", line):
            end = _closing(line, match.start())
            index = line[match.end() : end]
            if end > 0 and index and not re.fullmatch(r"[A-Z_\d]+", index):
                yield match.end(), end, f"{index} {step}"

    return rule


def _shift_last_argument(name: str, place: int) -> Rule:
    """Argument `place` of `name<...>(...)` becomes itself + 1."""

    def rule(line: str) -> Iterator[Change]:
        for match in re.finditer(rf"\b{name}<\w+>\(", line):
            end = _closing(line, match.end() - 1)
            pieces = line[match.end() : end].split(", ")
            if end > 0 and len(pieces) > place:
                start = match.end() + sum(len(piece) + 2 for piece in pieces[:place])
                yield start, start + len(pieces[place]), f"{pieces[place]} + 1"

    return rule


OPERATORS: dict[str, list[Rule]] = {
    "dropped barrier": [
        _pattern(r"(__syncthreads\(\);)", ""), _pattern(r"(__syncwarp\([^;]*\);)", ""),
        _pattern(r"(copy_async_(?:commit|wait|wait_all)(?:<[^;]*>)?\(\);)", ""),
    ],
    "dropped guard": [
        _drop_guard, _pattern(r" (&&) ", "||"), _pattern(r" (\|\|) ", "&&"),
    ],
    "index": [
        _shift_index("+ 1"), _shift_index("- 1"),
        _shift_last_argument("load_pack", 1), _shift_last_argument("store_pack", 1),
    ],
    "comparison": [
        _pattern(r" (<) ", "<="), _pattern(r" (>=) ", ">"), _pattern(r" (>) ", ">="),
        _pattern(r" (==) ", "!="),
    ],
    "sign": [_pattern(r"(?<=[\w)\]]) (\+) ", "-"), _pattern(r"(?<=[\w)\]]) (-) ", "+")],
    "swapped operands": [
        _swap_arguments("__fsub_rn"), _swap_arguments("__fdiv_rn"),
        _pattern(r"((?<![\w.])\w+ / \w+)", lambda m: " / ".join(reversed(m[1].split(" / ")))),
    ],
    "accumulation": [_pattern(r" (\+=) ", "=")],
    "loop": [
        _pattern(r"for \((?:long long|int) \w+ = (threadIdx\.x)", "threadIdx.x + 1"),
        _pattern(r"for \(int \w+ = (0);", "1"),
        _pattern(r"\w+ \+= (blockDim\.x)\)", "2 * blockDim.x"),
        _pattern(r"\w+ \+= (step)\)", "2 * step"),
    ],
    "constant": [
        _pattern(r"(?<![\w.\[])(\d+)(?![\w.])", lambda m: str(int(m[1]) + 1)),
        _pattern(r"(?<![\w.])(\d+\.\d+f)", lambda m: f"{float(m[1][:-1]) + 0.25!r}f"),
        _pattern(r"\b0x(?!f{8}u)([\da-fA-F]+)(?=u?(?:ll)?\b)", lambda m: f"{int(m[1], 16) + 1:x}"),
    ],
    "mask": [_pattern(r"(0xffffffffu)", "0x0fffffffu")],
    "function": [
        _pattern(r"(__fadd_rn)", "__fsub_rn"), _pattern(r"(__fsub_rn)", "__fadd_rn"),
        _pattern(r"(__fmul_rn)", "__fadd_rn"), _pattern(r"\b(max)\(", "min"),
        _pattern(r"\b(fmaxf)\(", "fminf"), _pattern(r" (<<) ", ">>"), _pattern(r" (>>) ", "<<"),
        _pattern(r"ldmatrix_x4(_trans)\(", ""), _pattern(r"\b(mma_f16)\(", "mma_bf16"),
        _pattern(r"\b(min)\(", "max"), _pattern(r"\.(cos)\b", "sin"), _pattern(r"\.(sin)\b", "cos"),
        _pattern(r"\b(larger)\b(?=>)", "add"), _pattern(r" (\*) ", "/"), _pattern(r" (%) ", "/"),
    ],
}  # fmt: skip

_SKIPPED = re.compile(r"\s*(#|//|static_assert|template|using|\"|constexpr int (MAX|MIN)_)")


def _code_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """(number, line, its code): without comments, and without what is compiled for one device alone
    or for the KV sanitizer alone."""
    conditions: list[str] = []
    commented = False
    for number, line in enumerate(text.split("\n"), 1):
        directive = line.strip()
        if commented or directive.startswith("/*"):
            commented = "*/" not in directive
            continue
        if directive.startswith("#if"):
            conditions.append(directive)
        elif directive.startswith("#endif"):
            conditions.pop()
        one_device_only = any(
            name in condition for condition in conditions for name in ("EMULATED", "KV_SANITIZER")
        )
        if not one_device_only and not _SKIPPED.match(line):
            yield number, line, line.split("//")[0].rstrip()


def mutants_of(file: str, text: str) -> list[Mutant]:
    """All mutants of one source, in the order of lines; each result text occurs once."""
    found: dict[tuple[int, str], Mutant] = {}
    seen: Counter[str] = Counter()
    for number, line, code in _code_lines(text):
        seen[line.strip()] += 1
        for operator, rules in OPERATORS.items():
            for rule in rules:
                for start, end, new in rule(code):
                    mutant = Mutant(
                        file, number, line, start, end, new, operator, seen[line.strip()]
                    )
                    found.setdefault((number, line[:start] + new + line[end:]), mutant)
    return list(found.values())
