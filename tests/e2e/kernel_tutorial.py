"""The kernel files in a README, and the commands on them with what they are shown to print."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cli import ROOT, environment
from tests.gpu_tools import without_disassembler, without_nvrtc

READMES = (ROOT / "README.md", ROOT / "cuda" / "README.md")
_FENCE = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FUNCTIONS = 'cupaged() { "$0" -m cupaged "$@"; }\npython() { "$0" "$@"; }\n'


@dataclass(frozen=True, slots=True)
class File:
    """A file that the reader saves."""

    name: str
    content: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command that the reader types, and what is shown below it."""

    line: str
    shown: str


def steps(readme: Path) -> Iterator[File | Command]:
    """What the reader does, in order."""
    for language, name, content in _FENCE.findall(readme.read_text(encoding="utf-8")):
        if name:
            yield File(name, content)
        elif language == "console":
            for piece in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
                line, _, shown = piece.partition("\n")
                yield Command(line, shown)


def printed(command: Command, folder: Path) -> str:
    """What the command prints, on both streams, in a folder."""
    return subprocess.run(
        ["bash", "-c", _FUNCTIONS + command.line, sys.executable],
        cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    ).stdout  # fmt: skip


def has(what: str) -> bool:
    """Whether "nvrtc" or "nvdisasm" is installed."""
    return (without_nvrtc() if what == "nvrtc" else without_disassembler()) is None
