"""The bytes of one file, from the hub to its place in the cache.

Owns the unfinished file: it lies beside the finished ones under the name `<etag>.incomplete`, is
taken up again by the next attempt, even of another process, and gets its final name only once its
size and digest are right. `huggingface_hub` speaks HTTP and links the file into the snapshot; what
it does not do is keep an unfinished file when a program ends.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cupaged._version import __version__
from cupaged.errors import HubError
from cupaged.loading.hub_errors import hub_errors, is_lost_connection
from cupaged.loading.hub_files import HubFile
from cupaged.loading.hub_name import HubName
from cupaged.loading.hub_progress import Progress

__all__ = ["fetch_file", "partial_bytes", "read_small_file", "repo_folder"]

_logger = logging.getLogger(__name__)

_PARTIAL = ".incomplete"
_ETAG = re.compile(r"[\w-][\w.-]*", re.ASCII)
_LIBRARY_LOGGERS = ("huggingface_hub.file_download", "huggingface_hub.utils._http")
_VAIN_ATTEMPTS = 2
_WAIT_SECONDS = 1.0  # for another process, before saying so


def repo_folder(name: HubName) -> Path:
    """Where the cache keeps a repository: `models--owner--name`."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name.repo, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder


def partial_bytes(name: HubName, file: HubFile) -> int:
    """How much of a file an earlier attempt has left, or all of it under another revision."""
    blob = repo_folder(name) / "blobs" / file.digest
    if not file.digest:
        return 0
    for path in (blob, blob.with_name(blob.name + _PARTIAL)):
        if path.is_file():
            return min(path.stat().st_size, file.size_bytes)
    return 0


def read_small_file(name: HubName, commit: str, file: HubFile) -> bytes:
    """The content of a file, from the cache or the hub; nothing is written."""
    from huggingface_hub import hf_hub_url, try_to_load_from_cache

    cached = try_to_load_from_cache(name.repo, file.name, revision=commit)
    if isinstance(cached, str):
        return Path(cached).read_bytes()
    content = io.BytesIO()
    with hub_errors(name, file.name):
        _get(hf_hub_url(name.repo, file.name, revision=commit), content, file.size_bytes)
    return content.getvalue()


def fetch_file(name: HubName, commit: str, file: HubFile, progress: Progress) -> Path:
    """Download one file, or finish what was begun, and link it into the snapshot of `commit`.

    Returns:
        Its path in the snapshot.

    Raises:
        HubError, ModelNotFoundError: see `hub_errors`; or the file came damaged.
        OSError: the disk is full.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    folder = repo_folder(name)
    with hub_errors(name, file.name):
        url = hf_hub_url(name.repo, file.name, revision=commit)
        timeout = constants.HF_HUB_ETAG_TIMEOUT
        etag = get_hf_file_metadata(url, timeout=timeout, headers=_headers()).etag or ""
        if not _ETAG.fullmatch(etag):
            raise ValueError(f"the ETag of {file.name} is {etag!r:.80}")
        lock = Path(constants.HF_HUB_CACHE) / ".locks" / folder.name / f"{etag}.lock"
        with _locked(lock, file):
            _fetch_blob(url, folder / "blobs" / etag, file, progress)
        progress.reached(file.size_bytes)
        # The blob is there: this makes the link only.
        return Path(hf_hub_download(name.repo, file.name, revision=commit))


@contextmanager
def _locked(path: Path, file: HubFile) -> Iterator[None]:
    """Hold the lock by which all users of the cache agree on who downloads a file."""
    from huggingface_hub.utils import WeakFileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(path, timeout=_WAIT_SECONDS))
        except TimeoutError:
            _logger.warning("%s: waiting for another process that downloads it", file.name)
            stack.enter_context(WeakFileLock(path))
        yield


def _fetch_blob(url: str, blob: Path, file: HubFile, progress: Progress) -> None:
    """Make `blob` a whole file; the lock is held."""
    if blob.is_file():
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(blob.name + _PARTIAL)
    with _CountedWriter(partial, progress) as out:
        if out.tell() > file.size_bytes:
            out.seek(0)
            out.truncate()
        progress.reached(out.tell())
        complete = _get(url, out, file.size_bytes)
    if not complete or not _is_intact(partial, file.digest):
        partial.unlink()
        raise HubError(
            f"{file.name}: came damaged and was removed; run the command again, and look at the "
            "network or the proxy if that does not help"
        )
    os.replace(partial, blob)


def _get(url: str, out: Any, size_bytes: int) -> bool:
    """Append what is missing of a file; False where the hub gave another number of bytes.

    A lost connection is taken up again, as long as some bytes come or few attempts brought none.
    """
    from huggingface_hub.file_download import http_get

    vain = 0
    while True:
        start = out.tell()
        try:
            with _quiet_library():
                http_get(url, out, resume_size=start, headers=_headers(), expected_size=size_bytes)
        except Exception as error:
            if type(error) is OSError and error.errno is None:  # the library has counted
                return False
            vain = 0 if out.tell() > start else vain + 1
            # Connecting has been tried again and again by the library.
            connected = "Connect" not in type(error).__name__
            if not is_lost_connection(error) or (vain and not connected) or vain > _VAIN_ATTEMPTS:
                raise
            _logger.warning("connection lost, going on after %d bytes", out.tell())
        else:
            return bool(out.tell() == size_bytes)


def _headers() -> dict[str, str]:
    """What each request carries, the access token included."""
    from huggingface_hub.utils import build_hf_headers

    headers: dict[str, str] = build_hf_headers(library_name="cupaged", library_version=__version__)
    # Resuming counts bytes of the content, not of a compressed form of it.
    return {**headers, "Accept-Encoding": "identity"}


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Let the library draw no bar of its own, and make each of its warnings one line of our log."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    group = "huggingface_hub.http_get"
    forced = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None  # by the user, who has the say
    draws = not forced and not are_progress_bars_disabled(group)
    loggers = [logging.getLogger(name) for name in _LIBRARY_LOGGERS]
    if draws:
        disable_progress_bars(group)
    for logger in loggers:
        logger.addFilter(_log_here)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_log_here)
        if draws:
            enable_progress_bars(group)


def _log_here(record: logging.LogRecord) -> bool:
    """A filter that takes a record over, as the library has a handler beside the program's."""
    _logger.log(record.levelno, "%s", " ".join(record.getMessage().split()))
    return False


def _is_intact(path: Path, digest: str) -> bool:
    """Whether the content has the digest that the hub gave, as far as it gave one."""
    with path.open("rb") as file:
        if len(digest) == 64:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
        if len(digest) == 40:  # as git names an object
            sha1 = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
            while chunk := file.read(1 << 20):
                sha1.update(chunk)
            return sha1.hexdigest() == digest
    return True


class _CountedWriter(io.BufferedWriter):
    """Appends to a file and tells how long it has become."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(io.FileIO(path, "a"))
        self._progress = progress

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._progress.reached(self.tell())
        return written
