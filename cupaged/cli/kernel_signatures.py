"""What a kernel file says of itself: kernels with their parameters, and the defines it takes.

A light reading of the text, without a compiler: what macros make is not seen. Owns also which file
a name on the command line means, and the common variants of the files in `cuda/`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cupaged.cli.parser import nearest
from cupaged.errors import ConfigError
from cupaged.runtime.cache_folder import source_files
from cupaged.runtime.kernels import kernel_files, kernel_folder

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_BOUNDS = r"(?:__launch_bounds__\s*\((?P<{}>[^()]*)\)\s*)?"
_KERNEL = re.compile(
    rf"{_BOUNDS.format('before')}__global__\s+(?:static\s+)?{_BOUNDS.format('after')}"
    rf"void\s+{_BOUNDS.format('last')}(?P<name>\w+)\s*\((?P<parameters>[^()]*)\)"
)
_REQUIRED = re.compile(r"^[ \t]*#[ \t]*ifndef[ \t]+(\w+)[ \t]*\n[ \t]*#[ \t]*error\b", re.MULTILINE)
_DEFAULT = re.compile(
    r"^[ \t]*#[ \t]*ifndef[ \t]+(\w+)[ \t]*\n[ \t]*#[ \t]*define[ \t]+\1[ \t]+([^\n]+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Signature:
    """A kernel as it is written.

    parameters: "const T* x" each. threads: most of a block, by its launch bounds; None if not said
    or not a plain number.
    """

    name: str
    parameters: tuple[str, ...]
    threads: int | None


@dataclass(frozen=True, slots=True)
class Defines:
    """required: without a default. optional: name to default, as it is written."""

    required: tuple[str, ...]
    optional: Mapping[str, str]


def find_kernel(name: str) -> tuple[Path, str | None]:
    """The file that a word of the command line means, and the kernel if the word is one's name.

    A word is a path, the name of a file in `cuda/` without .cu, or the name of a kernel there.

    Raises:
        ConfigError: it is none of these, or the file is no text.
        OSError: the file cannot be read.
    """
    if os.path.isfile(name):
        try:
            Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError("the kernel file", name, "text in UTF-8") from None
        return Path(name).absolute(), None
    folder = kernel_folder()
    known: dict[str, tuple[Path, str | None]] = {}
    for file in kernel_files():
        known[Path(file).stem] = (folder / file, None)
    for file in kernel_files():
        for signature in signatures(folder / file):
            known.setdefault(signature.name, (folder / file, signature.name))
    if name in known:
        return known[name]
    if name.endswith((".cu", ".cuh")) or os.sep in name:
        raise ConfigError("the kernel file", name, "an existing file")
    hint = nearest(name, {word: word for word in known})
    allowed = f"a .cu file, or a name that `cupaged kernel list` shows{hint.replace(';', ',')}"
    raise ConfigError("the kernel", name, allowed)


def signatures(path: Path) -> list[Signature]:
    """The kernels of a file, in its order.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    code = _DIRECTIVE.sub("", _COMMENT.sub(" ", text))
    found = []
    for match in _KERNEL.finditer(code):
        parts = [" ".join(part.split()) for part in match["parameters"].split(",")]
        parameters = tuple(part.replace(" __restrict__", "") for part in parts if part)
        bounds = match["before"] or match["after"] or match["last"] or ""
        found.append(Signature(match["name"], parameters, _number(bounds.split(",")[0], text)))
    return found


def defines(path: Path, include_dirs: Iterable[Path] = ()) -> Defines:
    """What a file and its headers ask for by `#ifndef X`, then `#error` or a default."""
    required: dict[str, None] = {}
    optional: dict[str, str] = {}
    for _, file in source_files(path, include_dirs):
        if file is None:
            continue
        text = _COMMENT.sub(" ", file.read_text(encoding="utf-8", errors="replace"))
        required.update(dict.fromkeys(_REQUIRED.findall(text)))
        optional.update({name: value.strip() for name, value in _DEFAULT.findall(text)})
    return Defines(tuple(required), optional)


def variants(path: Path) -> list[dict[str, str]]:
    """The defines of each common variant of a file in `cuda/`; none for other files."""
    folder = kernel_folder()
    if path.parent != folder:
        return []
    listed = tomllib.loads((folder / "variants.toml").read_text(encoding="utf-8"))["variant"]
    return [
        {name: str(value) for name, value in entry["defines"].items()}
        for entry in listed
        if entry["file"] == path.name
    ]


def parsed_defines(words: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE of the command line, NAME alone being 1.

    Raises:
        ConfigError: a name that is no macro's.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError("-D", word, "NAME or NAME=VALUE")
        found[name] = value if equals else "1"
    return found


def shown_defines(values: Mapping[str, object]) -> str:
    """Defines on one line."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def _number(text: str, source: str) -> int | None:
    """A plain number, or a constant of the file that is one."""
    text = text.strip()
    if re.fullmatch(r"[A-Za-z_]\w*", text):
        constant = re.search(rf"\b{text}(?:\s*=\s*|[ \t]+)(\d+)\b", source)
        text = constant[1] if constant else ""
    return int(text) if text.isdigit() else None
