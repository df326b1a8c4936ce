"""Finds what was compiled before, by a record of what it was made from.

Beside every compiled file lies a small JSON file: the name and checksum of what was made, and the
digest of every source that the compiler read. The compiler's own line markers name them, so a
header counts however it is included. What no longer matches is made anew. Never compiles.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from cupaged.emulator.toolchain import INCLUDE_DIR
from cupaged.runtime.cache_folder import store

__all__ = ["CACHE", "find_made", "keep_made", "sources_read"]

CACHE = "emulator"  # the subfolder of the cache

_MARKER = re.compile(r'^# \d+ "(?P<file>(?:[^"\\\n]|\\.)*)"(?P<flags>[ \d]*)$', re.MULTILINE)
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ASKED = re.compile(rb'__has_include(?:_next)?\s*\(\s*["<]([^">\n]+)[">]')
_SYSTEM = "3"  # the flag of a marker

# Path to SHA-256; None where there is no such file, and one would change the outcome.
Sources = Mapping[str, str | None]


def find_made(record: Path, known: Mapping[str, str]) -> Path | None:
    """The compiled file of a record; None if there is none, or it is damaged or out of date.

    known: digests of sources that were read just now, by path.
    """
    try:
        entry = json.loads(record.read_bytes())
        made = record.parent / entry["made"]
        content = made.read_bytes()
        is_whole = [len(content), zlib.crc32(content)] == entry["bytes_and_crc32"]
        is_current = all(
            (known.get(path) or _digest(path)) == digest
            for path, digest in entry["sources"].items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return made if is_whole and is_current else None


def keep_made(record: Path, suffix: str, content: bytes, sources: Sources) -> Path:
    """Store a compiled file, then its record.

    The name holds the content's digest too: the loader gives a library that is loaded already again
    by its name, even if the file is another.

    Returns:
        Where the compiled file lies.

    Raises:
        OSError: no folder can be written.
    """
    name = f"{record.stem}-{hashlib.sha256(content).hexdigest()[:16]}{suffix}"
    made = store(CACHE, name, content)
    checksum = [len(content), zlib.crc32(content)]
    entry = {"made": name, "bytes_and_crc32": checksum, "sources": sources}
    store(CACHE, record.name, json.dumps(entry, indent=1).encode())
    return made


def sources_read(preprocessed: str, include_dirs: Iterable[Path]) -> Sources:
    """The files that a preprocessed text is made of, but for the system's and the emulator's.

    With them go the places where a new file would be read in the place of one of them, or would
    answer an `__has_include`.
    """
    markers = {marker.group("file", "flags") for marker in _MARKER.finditer(preprocessed)}
    named = {
        Path.cwd() / _unescaped(file)
        for file, flags in markers
        if _SYSTEM not in flags.split() and not file.startswith(("<", str(INCLUDE_DIR)))
    }
    files = [file for file in named if file.is_file()]  # a #line may name what is none
    folders = {*include_dirs, *(file.parent for file in files)}
    names = {str(f.relative_to(folder)) for f in files for folder in folders if folder in f.parents}
    for file in files:
        names.update(map(os.fsdecode, _ASKED.findall(file.read_bytes())))
    places = {os.path.join(folder, name) for folder in folders for name in names}
    return {place: _digest(place) for place in sorted({*map(str, files), *places})}


def _unescaped(name: str) -> str:
    def character(escape: re.Match[bytes]) -> bytes:
        code = escape[1]
        return bytes([int(code, 8)]) if len(code) == 3 else {b"n": b"\n"}.get(code, code)

    return os.fsdecode(_ESCAPE.sub(character, os.fsencode(name)))


def _digest(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None
