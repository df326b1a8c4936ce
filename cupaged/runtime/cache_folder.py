"""The folder of compiled kernels, and the digest by which a compiled kernel is found again.

Owns where the cache lies: $CUPAGED_CACHE_DIR, else $XDG_CACHE_HOME/cupaged, else ~/.cache/cupaged.
What lies there is loaded as code, so the folder must be this user's own and closed to the writing
of others; where it is not, or cannot be made or written, a private folder takes its place until
the process ends, with one warning. A cache never makes a run fail.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "SourceDigests",
    "cache_folder",
    "digest_sources",
    "source_files",
    "store",
    "write_atomically",
]

_logger = logging.getLogger(__name__)

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


def cache_folder(name: str) -> Path:
    """A writable private folder for one kind of compiled code.

    Args:
        name: the subfolder, one plain name, e.g. "nvrtc".

    Returns:
        An existing folder, the same for every call of a process while the environment stays.

    Raises:
        OSError: no folder for temporary files can be written either.
    """
    base = _base()
    if base is None:
        return _private_folder(base, "there is no home folder", name)
    reason = _make_usable(base) or _make_usable(base / name)
    return base / name if reason is None else _private_folder(base, reason, name)


def store(name: str, file_name: str, content: bytes) -> Path:
    """Write a file into the folder `name` of the cache, or elsewhere if its disk refuses it.

    Returns:
        Where the file lies.

    Raises:
        OSError: no folder for temporary files can be written either.
    """
    folder = cache_folder(name)
    try:
        write_atomically(folder / file_name, content)
    except OSError as error:
        reason = f"{folder} cannot be written: {error.strerror}"
        folder = _private_folder(_base(), reason, name)
        write_atomically(folder / file_name, content)
    return folder / file_name


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file or none: readers and other writers never see a part of it.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class SourceDigests:
    """SHA-256 (hex). whole: over a source and all its headers. files: of each of them, by path."""

    whole: str
    files: Mapping[str, str]


def digest_sources(path: Path, include_dirs: Iterable[Path]) -> SourceDigests:
    """A source and every header that it includes, each read once; see `source_files`.

    Raises:
        OSError: the source or a header cannot be read.
    """
    whole = hashlib.sha256()
    files: dict[str, str] = {}
    for spelled, file, content in _read_sources(path, include_dirs):
        own = ""
        if file is not None:
            own = files[str(file)] = hashlib.sha256(content).hexdigest()
        whole.update(f"{spelled}\0{own}\0".encode("utf-8", "surrogateescape"))
    return SourceDigests(whole.hexdigest(), files)


def source_files(path: Path, include_dirs: Iterable[Path]) -> list[tuple[str, Path | None]]:
    """A source and its headers, transitively, each once, in the order of their first mention.

    A quoted include is looked up beside the file that names it, then in `include_dirs`; one in
    angle brackets in `include_dirs` alone. Conditions are not evaluated, so headers that only some
    defines include are there too. An include through a macro is not seen.

    Returns:
        (name as the include spells it, file); the file is None where it was found nowhere: it is
        the compiler's own header, or the compiler will say that it is missing.

    Raises:
        OSError: the source or a header cannot be read.
    """
    return [(spelled, file) for spelled, file, _ in _read_sources(path, include_dirs)]


def _read_sources(
    path: Path, include_dirs: Iterable[Path]
) -> Iterator[tuple[str, Path | None, bytes]]:
    """As `source_files`, each with its content, b"" where there is none."""
    folders = [Path(folder) for folder in include_dirs]
    found: list[tuple[str, Path | None]] = [(path.name, path)]
    seen: set[tuple[str, Path | None]] = {("", path.resolve())}
    looked_up: set[tuple[Path | None, bytes]] = set()  # folder of who asks, and the name
    for spelled_here, file in found:  # grows while it is walked
        content = b"" if file is None else file.read_bytes()
        yield spelled_here, file, content
        if file is None:
            continue
        for match in _INCLUDE.finditer(content):
            quoted, system = match.groups()
            asked = (file.parent if quoted else None, quoted or system)
            if asked in looked_up:
                continue
            looked_up.add(asked)
            spelled = asked[1].decode("utf-8", "surrogateescape")
            places = [file.parent, *folders] if quoted else folders
            header = next((p / spelled for p in places if (p / spelled).is_file()), None)
            key = (spelled, None) if header is None else ("", header.resolve())
            if key not in seen:
                seen.add(key)
                found.append((spelled, header))


def _base() -> Path | None:
    """Where the cache is to be; None without a home."""
    given = os.environ.get("CUPAGED_CACHE_DIR")
    if given:
        return Path(given).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the specification has relative ones ignored
        return Path(xdg) / "cupaged"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "cupaged" if os.path.isabs(home) else None


def _make_usable(folder: Path) -> str | None:
    """Make the folder if need be; None, or why it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return f"{folder} belongs to user {status.st_uid}, not to user {os.getuid()}"
    others = {stat.S_IWOTH: "everybody", stat.S_IWGRP: "its group"} if os.name == "posix" else {}
    for bit, who in others.items():
        if status.st_mode & bit:
            return f"{folder} can be written by {who}; chmod go-w makes it your own"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is read-only"
    return None


def _private_folder(base: Path | None, reason: str, name: str) -> Path:
    folder = _temporary_base(base, reason) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@functools.cache
def _temporary_base(base: Path | None, reason: str) -> Path:
    """Takes the place of `base` until the process ends. One warning a reason."""
    folder = Path(tempfile.mkdtemp(prefix="cupaged-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child goes on using its parent's
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    _logger.warning(
        "compiled kernels are not kept: %s; set CUPAGED_CACHE_DIR to a folder of your own", reason
    )
    return folder
