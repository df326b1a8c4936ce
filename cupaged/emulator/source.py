"""From CUDA C++ to host C++: what is rewritten in a preprocessed kernel file.

Works on the output of the preprocessor, so that kernels and shared arrays made by macros are seen
too. Three things change, each on its own line, so that line numbers stay: `__shared__` variables
become references into the emulator's shared memory, `__global__` and `__launch_bounds__` go away,
and a list of the kernels is appended. Everything else is plain C++ with the emulator's headers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cupaged.emulator.errors import CompileError
from cupaged.emulator.preprocessed import (
    IDENTIFIER,
    Edit,
    PreprocessedFile,
    Token,
    close,
    groups,
    spell,
    split,
    statement_end,
)
from cupaged.emulator.shared_declarations import SharedDeclarations
from cupaged.emulator.unsupported import UnsupportedWords
from cupaged.errors import NotSupportedError


@dataclass(slots=True)
class Kernel:
    """A `__global__` function.

    bounds: the source text of its most threads, empty if not said. template_head: the source text
    from `template` to the bracket behind its parameters, empty if it is no template.
    """

    name: str
    namespaces: tuple[str, ...]
    parameters: tuple[str, ...]
    bounds: str
    template_head: str
    c_linkage: bool

    @property
    def is_template(self) -> bool:
        """Whether it has template parameters."""
        return bool(self.template_head)


@dataclass(slots=True)
class Scope:
    """An open brace."""

    namespace: str | None = None
    c_linkage: bool = False


def rewrite(preprocessed: str, name_expressions: Sequence[str] = ()) -> str:
    """Host C++ of a preprocessed kernel file.

    Args:
        name_expressions: kernel templates to instantiate, e.g. "softmax<float, 128>".

    Raises:
        NotSupportedError: a part of CUDA that is not emulated, such as inline assembly.
        CompileError: a `__shared__` declaration cannot be read, or a name expression names no
            kernel of the file.
    """
    file = PreprocessedFile(preprocessed)
    rewriter = _Rewriter(file)
    rewriter.run()
    kernels = list(rewriter.kernels.values())
    return file.edited(rewriter.edits) + _registrations(kernels, name_expressions)


class _Rewriter:
    """Goes through the words of a file once. edits, kernels: what it found."""

    def __init__(self, file: PreprocessedFile) -> None:
        self.edits: list[Edit] = []
        self.kernels: dict[tuple[tuple[str, ...], str], Kernel] = {}
        self._file = file
        self._tokens = file.tokens
        self._scopes: list[Scope] = []
        self._shared = SharedDeclarations()
        self._bounds = ""  # of the statement, where they come before __global__

    def run(self) -> None:
        tokens = self._tokens
        unsupported = UnsupportedWords()
        statement = 0  # index of the first token of the statement
        index = 0
        while index < len(tokens):
            word = tokens[index].text
            reason = unsupported.reason(tokens, index)
            if reason is not None:
                raise NotSupportedError(f"{self._file.where(tokens[index])}: {reason}")
            if word == "{":
                self._scopes.append(_scope(tokens[statement:index]))
            elif word == "}" and self._scopes:
                self._scopes.pop()
            elif word == "__launch_bounds__" and index + 1 < len(tokens):
                end = close(tokens, index + 1)
                self._bounds = _most_threads(tokens, index)
                self.edits.append(Edit(tokens[index].start, tokens[end].end, ""))
                index = end
            elif word == "__shared__":
                index = self._rewrite_shared(statement, index)
            elif word == "__global__":
                self.edits.append(Edit(tokens[index].start, tokens[index].end, ""))
                self._add_kernel(statement, index)
            if _ends_statement(tokens, statement, index):
                statement = index + 1
                self._bounds = ""
            index += 1

    def _rewrite_shared(self, statement: int, index: int) -> int:
        """The index of the semicolon."""
        end = statement_end(self._tokens, index)
        words = self._tokens[statement : end + 1]
        scope = None
        if all(s.namespace is not None or s.c_linkage for s in self._scopes):
            scope = self._namespaces()
        where = self._file.where(self._tokens[index])
        text = self._shared.translate(words[:-1], scope, where)
        first = words[0].start
        self.edits = [edit for edit in self.edits if edit.start < first]
        self.edits.append(Edit(first, words[-1].end, text))
        return end

    def _namespaces(self) -> tuple[str, ...]:
        return tuple(s.namespace for s in self._scopes if s.namespace is not None)

    def _add_kernel(self, statement: int, index: int) -> None:
        """Note the kernel declared at `__global__`."""
        tokens = self._tokens
        found = _find_name(tokens, index)
        if found is None:
            return
        name, end = found
        bounds = self._bounds
        inner = [t.text for t in tokens[index:end]]
        if "__launch_bounds__" in inner:
            bounds = _most_threads(tokens, index + inner.index("__launch_bounds__"))
        before = [t.text for t in tokens[statement:index]]
        c_linkage = '"C"' in before or any(scope.c_linkage for scope in self._scopes)
        kernel = Kernel(
            tokens[name].text,
            self._namespaces(),
            _parameter_names(tokens[name + 2 : end]),
            bounds,
            _template_head(tokens[statement:index]),
            c_linkage,
        )
        key = (kernel.namespaces, kernel.name)
        known = self.kernels.get(key)
        if known is not None:  # declared before
            kernel.bounds = kernel.bounds or known.bounds
            kernel.template_head = known.template_head or kernel.template_head
            kernel.c_linkage |= known.c_linkage
        if kernel.is_template and bounds and not (known and known.bounds):
            # Bounds may name the template's parameters: a function with the same ones evaluates.
            start = tokens[statement].start
            helper = f"constexpr int {_bounds_helper(kernel.name)}() {{ return ({bounds}); }}"
            self.edits.append(Edit(start, start, f"{kernel.template_head} {helper} "))
        self.kernels[key] = kernel


def _ends_statement(tokens: Sequence[Token], statement: int, index: int) -> bool:
    """Whether the next token starts another statement: labels and directives end one, too."""
    token = tokens[index]
    if token.text in (";", "{", "}") or token.is_directive:
        return True
    if token.text != ":":
        return False
    first = tokens[statement].text
    is_label = index == statement + 1 and IDENTIFIER.match(first) is not None
    return is_label or first in ("case", "default")


def _scope(head: Sequence[Token]) -> Scope:
    """What a brace opens, from the tokens of the statement before it."""
    words = [token.text for token in head]
    if "namespace" in words and "using" not in words:
        name = "".join(words[words.index("namespace") + 1 :])
        return Scope(namespace=name)
    if words[:2] == ["extern", '"C"'] and len(words) == 2:
        return Scope(c_linkage=True)
    return Scope()


def _most_threads(tokens: Sequence[Token], index: int) -> str:
    """The first argument of the `__launch_bounds__` at index, as source text."""
    inside = split(tokens[index + 2 : close(tokens, index + 1)])
    return spell(inside[0]) if inside else ""


def _template_head(tokens: Sequence[Token]) -> str:
    """From `template` to the bracket behind its parameters, if there is one."""
    pieces = groups(tokens)
    for word, parameters in itertools.pairwise(pieces):
        if word[0].text == "template":
            return f"template {spell(parameters)}"
    return ""


def _bounds_helper(name: str) -> str:
    return f"emulator_bounds_of_{name}"


def _find_name(tokens: Sequence[Token], index: int) -> tuple[int, int] | None:
    """Indices of the name of the kernel declared at index, and of the end of its parameters."""
    i = index + 1
    while i + 1 < len(tokens):
        word = tokens[i].text
        if word in ("__launch_bounds__", "__attribute__", "alignas"):
            i = close(tokens, i + 1)
        elif IDENTIFIER.match(word) and tokens[i + 1].text == "(":
            return i, close(tokens, i + 1)
        elif word in (";", "{"):
            return None
        i += 1
    return None


def _parameter_names(tokens: Sequence[Token]) -> tuple[str, ...]:
    names = []
    for number, part in enumerate(split(tokens)):
        words = [t.text for t in part]
        cut = min((words.index(w) for w in ("=", "[") if w in words), default=len(words))
        if words[:cut] == ["void"]:
            continue
        named = cut > 1 and IDENTIFIER.match(words[cut - 1]) is not None
        names.append(words[cut - 1] if named else f"argument {number}")
    return tuple(names)


def _registrations(kernels: Sequence[Kernel], name_expressions: Sequence[str]) -> str:
    lines = ['\n# 1 "<kernels>"']

    def add(kernel: Kernel, expression: str, name: str, bounds: str, c_linkage: bool) -> None:
        namespaces = () if kernel.is_template else kernel.namespaces
        opening = "".join(f"namespace {n} {{ " for n in namespaces)
        lines.append(
            f"{opening}static ::emulator::Registration emulator_kernel_{len(lines)}("
            f'::emulator::Thunk<&{expression}>::info("{name}", "{",".join(kernel.parameters)}", '
            f"({bounds or '0'}), {'true' if c_linkage else 'false'}));{'}' * len(namespaces)}"
        )

    for kernel in kernels:
        if not kernel.is_template:
            add(kernel, kernel.name, kernel.name, kernel.bounds, kernel.c_linkage)
    for expression in name_expressions:
        written = expression.lstrip(":&")
        base = re.sub(r"[\s<].*", "", written, flags=re.S)
        found = [k for k in kernels if "::".join((*filter(None, k.namespaces), k.name)) == base]
        if not found:
            known = ", ".join(sorted({k.name for k in kernels})) or "none"
            raise CompileError(
                f"the name expression {expression!r} names no kernel; the file has: {known}"
            )
        kernel = found[0]
        bounds = kernel.bounds
        if kernel.is_template and bounds:
            scope = base[: len(base) - len(kernel.name)]
            bounds = f"{scope}{_bounds_helper(kernel.name)}{written[len(base) :]}()"
        add(kernel, expression, expression.replace('"', ""), bounds, True)
    return "\n".join(lines) + "\n"
