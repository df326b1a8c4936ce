"""From CUDA C++ to host C++: what is rewritten in a preprocessed kernel file.

Works on the output of the preprocessor, so that kernels and shared arrays made by macros are seen
too. Three things change, each on its own line, so that line numbers stay: `__shared__` variables
become references into the emulator's shared memory, `__global__` and `__launch_bounds__` go away,
and a list of the kernels is appended. Everything else is plain C++ with the emulator's headers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cupaged.emulator.errors import CompileError
from cupaged.emulator.toolchain import INCLUDE_DIR
from cupaged.errors import NotSupportedError

_MARKER = re.compile(r'^# (?P<line>\d+) "(?P<file>(?:[^"\\]|\\.)*)"(?P<flags>[ \d]*)$')
_TOKEN = re.compile(
    r"""R"(?P<raw>[^()\\\s]{0,16})\(.*?\)(?P=raw)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"""|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|'?[\w.])*|<<<|::|[^\s]""",
    re.S,
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")
_OPEN = {"(": ")", "[": "]", "{": "}"}
_LARGEST_GAP = 64  # lines of comments and directives that are kept as empty lines
_ASM = frozenset({"asm", "__asm", "__asm__"})


class Token(NamedTuple):
    """text, and where it lies in its chunk."""

    text: str
    start: int
    end: int


@dataclass(slots=True)
class Kernel:
    """A `__global__` function. bounds: the source text of its most threads, empty if not said."""

    name: str
    namespaces: tuple[str, ...]
    parameters: tuple[str, ...]
    bounds: str
    is_template: bool
    c_linkage: bool


@dataclass(slots=True)
class Scope:
    """An open brace."""

    namespace: str | None = None
    c_linkage: bool = False


@dataclass(slots=True)
class _State:
    scopes: list[Scope] = field(default_factory=list)
    kernels: dict[tuple[tuple[str, ...], str], Kernel] = field(default_factory=dict)


def rewrite(preprocessed: str, name_expressions: Sequence[str] = ()) -> str:
    """Host C++ of a preprocessed kernel file.

    Args:
        name_expressions: kernel templates to instantiate, e.g. "softmax<float, 128>".

    Raises:
        NotSupportedError: inline assembly, or a launch from a kernel.
        CompileError: a name expression names no kernel of the file.
    """
    state = _State()
    pieces: list[str] = []
    for chunk in _chunks(preprocessed):
        pieces.append(chunk.marker)
        text = "".join(chunk.lines)
        pieces.append(_rewrite_chunk(text, chunk, state) if chunk.is_user else text)
    pieces.append(_registrations(state, name_expressions))
    return "".join(pieces)


@dataclass(slots=True)
class _Chunk:
    """Lines of one file that follow each other. next_line: the number of the line to come."""

    marker: str
    file: str
    first_line: int
    next_line: int
    is_user: bool
    lines: list[str]

    def join(self, line: int) -> bool:
        """Go on at a line of the same file, if it is near: markers also split single lines."""
        if not self.is_user or line > self.next_line + _LARGEST_GAP:
            return False
        while line < self.next_line and self.lines and self.lines[-1].endswith("\n"):
            self.lines[-1] = self.lines[-1][:-1] + " "
            self.next_line -= 1
        self.lines.append("\n" * (line - self.next_line))
        self.next_line = max(line, self.next_line)
        return self.next_line == line


def _chunks(preprocessed: str) -> list[_Chunk]:
    """The files that a preprocessed file is made of; a user's are those that are no system's."""
    user: dict[str, bool] = {}
    chunks = [_Chunk("", "", 1, 1, False, [])]
    for text in preprocessed.splitlines(keepends=True):
        marker = _MARKER.match(text.rstrip("\n")) if text.startswith("# ") else None
        if marker is None:
            chunks[-1].lines.append(text)
            chunks[-1].next_line += 1
            continue
        file, line = marker["file"], int(marker["line"])
        is_system = file.startswith(("<", str(INCLUDE_DIR))) or "3" in marker["flags"].split()
        is_user = user.setdefault(file, not is_system)
        if file != chunks[-1].file or not chunks[-1].join(line):
            chunks.append(_Chunk(text, file, line, line, is_user, []))
    return chunks


def _rewrite_chunk(text: str, chunk: _Chunk, state: _State) -> str:
    tokens = [Token(m.group(), m.start(), m.end()) for m in _TOKEN.finditer(text)]
    edits: list[tuple[int, int, str]] = []  # start, end, replacement

    def where(token: Token) -> str:
        return f"{chunk.file}:{chunk.first_line + text.count(chr(10), 0, token.start)}"

    statement = 0  # index of the first token of the statement
    bounds = ""
    index = 0
    while index < len(tokens):
        word = tokens[index].text
        if word in _ASM:
            raise NotSupportedError(
                f"{where(tokens[index])}: the emulator cannot run inline assembly; put it behind "
                "#ifndef CUPAGED_EMULATED with C++ beside it, as the wrappers of cuda/ptx.cuh do"
            )
        if word == "<<<":
            raise NotSupportedError(
                f"{where(tokens[index])}: the emulator cannot launch a kernel from a kernel; "
                "launch it from the host"
            )
        if word == "{":
            state.scopes.append(_scope(tokens[statement:index]))
        elif word == "}" and state.scopes:
            state.scopes.pop()
        elif word == "__launch_bounds__" and index + 1 < len(tokens):
            close = _close(tokens, index + 1)
            inside = _split(tokens[index + 2 : close])
            bounds = text[inside[0][0].start : inside[0][-1].end] if inside else ""
            edits.append((tokens[index].start, tokens[close].end, ""))
            index = close
        elif word == "__shared__":
            end = _statement_end(tokens, index)
            first, last = tokens[statement].start, tokens[end].end
            at_top = all(s.namespace is not None or s.c_linkage for s in state.scopes)
            replacement = _shared(text, tokens[statement:end], at_top, where(tokens[index]))
            newlines = "\n" * text.count("\n", first, last)
            edits = [edit for edit in edits if edit[0] < first]
            edits.append((first, last, replacement + newlines))
            index = end
            statement = end + 1
        elif word == "__global__":
            edits.append((tokens[index].start, tokens[index].end, ""))
            declared = _kernel(text, tokens, statement, index, state)
            if declared is not None:
                kernel, close = declared
                inner = [t.text for t in tokens[index:close]]
                if "__launch_bounds__" in inner:
                    at = index + inner.index("__launch_bounds__")
                    inside = _split(tokens[at + 2 : _close(tokens, at + 1)])
                    bounds = text[inside[0][0].start : inside[0][-1].end]
                kernel.bounds = kernel.bounds or bounds
                key = (kernel.namespaces, kernel.name)
                known = state.kernels.get(key)
                if known is not None:  # declared before
                    kernel.bounds = kernel.bounds or known.bounds
                    kernel.c_linkage |= known.c_linkage
                state.kernels[key] = kernel
        if tokens[index].text in (";", "{", "}"):
            statement = index + 1
            bounds = ""
        index += 1
    return _apply(text, edits)


def _apply(text: str, edits: list[tuple[int, int, str]]) -> str:
    pieces = []
    position = 0
    for start, end, replacement in sorted(edits):
        pieces.append(text[position:start])
        pieces.append(replacement or "\n" * text.count("\n", start, end))
        position = end
    pieces.append(text[position:])
    return "".join(pieces)


def _scope(head: Sequence[Token]) -> Scope:
    """What a brace opens, from the tokens of the statement before it."""
    words = [token.text for token in head]
    if "namespace" in words and "using" not in words:
        name = "".join(words[words.index("namespace") + 1 :])
        return Scope(namespace=name)
    if words[:2] == ["extern", '"C"'] and len(words) == 2:
        return Scope(c_linkage=True)
    return Scope()


def _close(tokens: Sequence[Token], index: int) -> int:
    """Index of the bracket that closes the one at index."""
    depth = 0
    for i in range(index, len(tokens)):
        if tokens[i].text in _OPEN:
            depth += 1
        elif tokens[i].text in _OPEN.values():
            depth -= 1
            if depth == 0:
                return i
    return len(tokens) - 1


def _statement_end(tokens: Sequence[Token], index: int) -> int:
    """Index of the semicolon that ends the statement."""
    while index < len(tokens) - 1 and tokens[index].text != ";":
        index = _close(tokens, index) + 1 if tokens[index].text in _OPEN else index + 1
    return index


def _split(tokens: Sequence[Token]) -> list[list[Token]]:
    """At commas outside of every bracket, angle brackets included."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.text in "([{<":
            depth += 1
        elif token.text in ")]}>":
            depth -= 1
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def _kernel(
    text: str, tokens: Sequence[Token], statement: int, index: int, state: _State
) -> tuple[Kernel, int] | None:
    """The kernel declared at `__global__`, and the index of the bracket after its parameters."""
    i = index + 1
    while i + 1 < len(tokens):
        word = tokens[i].text
        if word in ("__launch_bounds__", "__attribute__", "alignas", "__maxnreg__"):
            i = _close(tokens, i + 1)
        elif _IDENTIFIER.match(word) and tokens[i + 1].text == "(":
            break
        elif word in (";", "{"):
            return None
        i += 1
    else:
        return None
    close = _close(tokens, i + 1)
    names = []
    for number, part in enumerate(_split(tokens[i + 2 : close])):
        words = [t.text for t in part]
        cut = min((words.index(w) for w in ("=", "[") if w in words), default=len(words))
        if words[:cut] == ["void"]:
            continue
        named = cut > 1 and _IDENTIFIER.match(words[cut - 1]) is not None
        names.append(words[cut - 1] if named else f"argument {number}")
    before = [t.text for t in tokens[statement:index]]
    c_linkage = '"C"' in before or any(scope.c_linkage for scope in state.scopes)
    namespaces = tuple(s.namespace for s in state.scopes if s.namespace is not None)
    kernel = Kernel(tokens[i].text, namespaces, tuple(names), "", "template" in before, c_linkage)
    return kernel, close


def _shared(text: str, statement: Sequence[Token], at_top: bool, where: str) -> str:
    """Declarations of references in place of `__shared__` variables."""
    attributes: list[str] = []
    kept: list[Token] = []
    is_extern = False
    i = 0
    while i < len(statement):
        word = statement[i].text
        if word in ("__attribute__", "alignas"):
            close = _close(statement, i + 1)
            inside = text[statement[i + 1].start : statement[close].end]
            attributes.append(
                f"__attribute__{inside}"
                if word != "alignas"
                else f"__attribute__((aligned{inside}))"
            )
            i = close
        elif word == "extern":
            is_extern = True
        elif word not in ("__shared__", "static"):
            kept.append(statement[i])
        i += 1
    output = []
    type_text = ""
    for number, part in enumerate(_split(kept)):
        words = [t.text for t in part]
        first_bracket = words.index("[") if "[" in words else len(words)
        if first_bracket == 0 or not _IDENTIFIER.match(words[first_bracket - 1]):
            raise CompileError(f"{where}: the emulator cannot read this __shared__ declaration")
        name = words[first_bracket - 1]
        if number == 0:
            if first_bracket < 2:
                raise CompileError(f"{where}: a __shared__ variable without a type")
            type_text = " ".join(words[: first_bracket - 1])
        dimensions = " ".join(words[first_bracket:])
        if is_extern:
            rest = dimensions.replace("[ ]", "", 1).strip()
            alias = f"emulator_type_{name}"
            storage = "static " if at_top else ""
            output.append(
                f"typedef {type_text} {alias} {rest}; {storage}{alias}* const {name} = "
                f"static_cast<{alias}*>(::emulator::dynamic_shared());"
            )
            continue
        alias, site = f"emulator_type_{name}", f"emulator_site_{name}"
        output.append(
            f"typedef {' '.join(attributes)} {type_text} {alias} {dimensions}; "
            f'static ::emulator::SharedSite {site} = {{"{name}", sizeof({alias}), '
            f"alignof({alias}), sizeof(std::remove_all_extents_t<{alias}>), 0, 0}}; "
            f"{alias}& {name} = *static_cast<{alias}*>(::emulator::shared_variable({site}));"
        )
    return " ".join(output)


def _registrations(state: _State, name_expressions: Sequence[str]) -> str:
    lines = ['\n# 1 "<kernels>"']
    number = 0

    def add(kernel: Kernel, expression: str, name: str, bounds: str, c_linkage: bool) -> None:
        nonlocal number
        opening = "".join(f"namespace {n} {{ " for n in kernel.namespaces)
        closing = "}" * len(kernel.namespaces)
        lines.append(
            f"{opening}static ::emulator::Registration emulator_kernel_{number}("
            f'::emulator::Thunk<&{expression}>::info("{name}", "{",".join(kernel.parameters)}", '
            f"({bounds or '0'}), {'true' if c_linkage else 'false'}));{closing}"
        )
        number += 1

    for kernel in state.kernels.values():
        if not kernel.is_template:
            add(kernel, kernel.name, kernel.name, kernel.bounds, kernel.c_linkage)
    for expression in name_expressions:
        base = re.sub(r"[\s<].*", "", expression.lstrip(":&"), flags=re.S)
        found = [k for k in state.kernels.values() if "::".join((*k.namespaces, k.name)) == base]
        if not found:
            known = ", ".join(sorted({k.name for k in state.kernels.values()})) or "none"
            raise CompileError(
                f"the name expression {expression!r} names no kernel; the file has: {known}"
            )
        quoted = expression.replace('"', "")
        add(Kernel(base, (), found[0].parameters, "", True, True), expression, quoted, "", True)
    return "\n".join(lines) + "\n"
