"""What a declaration of `__shared__` variables becomes: references into shared memory.

Where a variable lies is settled by the emulator when a thread comes to the declaration, see
SharedSite in emulator/core.h. `extern` variables are references to the dynamic part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupaged.emulator.errors import CompileError
from cupaged.emulator.preprocessed import IDENTIFIER, Token, groups, spell, split
from cupaged.errors import NotSupportedError

_NO_NAMES = frozenset({"const", "volatile", "__restrict", "__restrict__"})
_POINTERS = ("*", "&")


@dataclass(frozen=True, slots=True)
class _Declarator:
    """One variable. before, after: what surrounds the name, e.g. "*" and "[4]"."""

    name: str
    before: Sequence[Token]
    after: Sequence[Token]

    def declare(self, name: str) -> str:
        return f"{spell(self.before)} {name} {spell(self.after)}"


class SharedDeclarations:
    """Translates declarations one by one and remembers those outside of functions."""

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def translate(self, statement: Sequence[Token], scope: Sequence[str] | None, where: str) -> str:
        """The C++ of a statement without its semicolon.

        Args:
            scope: the namespaces of a declaration outside of functions, else None.
            where: file:line.

        Raises:
            CompileError: it cannot be read.
            NotSupportedError: a variable outside of functions that is not extern.
        """
        kept, attributes, is_extern = _sort(statement)
        if scope is not None and not is_extern:
            raise NotSupportedError(
                f"{where}: the emulator has no __shared__ variables outside of functions; "
                "nearest: one inside the kernel, passed on by reference"
            )
        output = []
        base = ""
        for number, part in enumerate(split(kept)):
            type_words, declarator = _parse(part, where)
            if number == 0:
                if not type_words:
                    raise CompileError(f"{where}: a __shared__ variable without a type")
                base = f"emulator_base_{declarator.name}"
                output.append(f"typedef {spell(type_words)} {base};")
            elif type_words:
                raise _unreadable(where)
            if is_extern and scope is not None:
                key = (*scope, declarator.name)
                if key in self._known:  # declared before
                    continue
                self._known.add(key)
            output.append(_variable(declarator, base, attributes, is_extern, scope is not None))
        return " ".join(output) or ";"


def _variable(
    declarator: _Declarator, base: str, attributes: str, is_extern: bool, at_file_scope: bool
) -> str:
    name = declarator.name
    kind, site = f"emulator_type_{name}", f"emulator_site_{name}"
    kind_text = f"typedef {attributes} {base} {declarator.declare(kind)};"
    if is_extern:
        storage = "static " if at_file_scope else ""
        return (
            f"{kind_text} {storage}{kind}& {name} = "
            f"*static_cast<{kind}*>(::emulator::dynamic_shared());"
        )
    return (
        f'{kind_text} static ::emulator::SharedSite {site} = {{"{name}", sizeof({kind}), '
        f"alignof({kind}), sizeof(std::remove_all_extents_t<{kind}>), 0, 0}}; "
        f"{kind}& {name} = *static_cast<{kind}*>(::emulator::shared_variable({site}));"
    )


def _sort(statement: Sequence[Token]) -> tuple[list[Token], str, bool]:
    """What is left without attributes and storage classes; the attributes; whether it is extern."""
    kept: list[Token] = []
    attributes = []
    is_extern = False
    attribute = ""
    for group in groups(statement):
        word = group[0].text
        if attribute and word == "(":
            inside = spell(group)
            attributes.append(
                f"__attribute__((aligned{inside}))"
                if attribute == "alignas"
                else f"__attribute__{inside}"
            )
            attribute = ""
        elif word in ("__attribute__", "__attribute", "alignas"):
            attribute = word
        elif word == "extern":
            is_extern = True
        elif word not in ("__shared__", "static", "inline") and not group[0].is_directive:
            kept.extend(group)
    return kept, " ".join(attributes), is_extern


def _parse(part: Sequence[Token], where: str) -> tuple[Sequence[Token], _Declarator]:
    """The words of the type, which only the first declarator has, and the declarator."""
    pieces = groups(part)
    heads = [piece[0].text for piece in pieces]
    if "=" in heads:
        raise CompileError(f"{where}: a __shared__ variable cannot have an initialiser")
    start = next(
        (
            i
            for i, piece in enumerate(pieces)
            if heads[i] in _POINTERS
            or (heads[i] == "(" and len(piece) > 1 and piece[1].text in _POINTERS)
        ),
        None,
    )
    last_brace = max((i for i, head in enumerate(heads) if head == "{"), default=-1)
    if start is None:
        end = next((i for i in range(last_brace + 1, len(heads)) if heads[i] == "["), len(heads))
        start = end - 1
    type_words = [token for piece in pieces[:start] for token in piece]
    rest = [token for piece in pieces[max(start, 0) :] for token in piece]
    index = next(
        (i for i, t in enumerate(rest) if IDENTIFIER.match(t.text) and t.text not in _NO_NAMES),
        None,
    )
    if index is None or start <= last_brace:
        raise _unreadable(where)
    return type_words, _Declarator(rest[index].text, rest[:index], rest[index + 1 :])


def _unreadable(where: str) -> CompileError:
    return CompileError(f"{where}: the emulator cannot read this __shared__ declaration")
