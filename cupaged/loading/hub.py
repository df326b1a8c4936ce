"""Models by name: found in the cache of `huggingface_hub`, or downloaded into it.

Owns when the hub is asked, what is checked before the first byte, and when the cache alone will do.
The cache is the one that other programs share. A path on the local disk never comes here, and
`huggingface_hub` is imported by the functions that need it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cupaged._version import __version__
from cupaged.errors import (
    CapacityError,
    HubError,
    HubUnreachableError,
    ModelError,
    NotSupportedError,
)
from cupaged.loading.hub_download import fetch_file, partial_bytes, read_small_file, repo_folder
from cupaged.loading.hub_errors import DISK_FULL, check_token, hub_errors
from cupaged.loading.hub_files import HubFile, choose_files
from cupaged.loading.hub_name import HubName, parse_model_name
from cupaged.loading.hub_progress import Progress, new_progress

__all__ = ["HubName", "PullPlan", "cached_model", "find_hub_model", "parse_model_name", "pull"]

_logger = logging.getLogger(__name__)

_MAX_HTTP_BYTES = 50_000_000_000
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAFE_NAME = re.compile(r"(?!.*(^|/)\.\.?(/|$))[^/\\:\0][^\\:\0]*")


@dataclass(frozen=True, slots=True)
class PullPlan:
    """A download that is decided but not begun.

    commit: what the revision means now.
    files: all that make up the model. missing: those of them whose content has to come.
    missing_bytes: how much that is; less than their sizes where an attempt broke off.
    """

    name: HubName
    commit: str
    files: tuple[HubFile, ...]
    missing: tuple[HubFile, ...]
    missing_bytes: int


def find_hub_model(name: str) -> Path:
    """What a text that is no local path means: the model of that name.

    Raises:
        ModelError: neither here nor on the hub. ConfigError, CapacityError, NotSupportedError: see
            `parse_model_name` and `pull`.
    """
    parsed = parse_model_name(name)
    try:
        return pull(parsed)
    except ModelError as error:
        raise type(error)(f"model {name!r}: no such file or folder here, and {error}") from None


def pull(
    name: str | HubName,
    *,
    progress: bool = True,
    on_plan: Callable[[PullPlan], None] | None = None,
) -> Path:
    """Make a model's files lie in the cache, downloading those that do not.

    The hub is asked for the newest commit of the revision; where it cannot be reached, and for a
    revision that is a commit, a whole copy in the cache is enough. A download that was interrupted
    goes on where it stopped. Two processes do not download the same file.

    Args:
        progress: show a bar on a terminal, one line a file elsewhere.
        on_plan: told what is going to be downloaded, before it is.

    Returns:
        The folder of the snapshot, or the GGUF file in it.

    Raises:
        ModelNotFoundError: no such repository, revision or file, or only other files are there.
        HubUnreachableError: no network or offline mode, and not whole in the cache.
        HubError: gated, refused, or the cache cannot be written.
        CapacityError: the disk is too small. NotSupportedError: only formats that are not built.
    """
    from huggingface_hub import constants

    if isinstance(name, str):
        name = parse_model_name(name)
    if _COMMIT.fullmatch(name.revision) and (cached := cached_model(name)):
        return cached
    try:
        plan = _plan(name)
        if on_plan is not None:
            on_plan(plan)
        return _download(plan, progress=progress)
    except HubUnreachableError as error:
        cached = cached_model(name)
        if cached is None:
            where = f"{name} is not whole in the cache {constants.HF_HUB_CACHE}"
            raise HubUnreachableError(f"{error}; {where}") from None
        level = logging.INFO if constants.HF_HUB_OFFLINE else logging.WARNING
        _logger.log(level, "%s; using %s", error, cached)
        return cached


def cached_model(name: HubName) -> Path | None:
    """The model's folder or file if the cache holds all of it; the hub is not asked."""
    folder = repo_folder(name)
    commit = name.revision
    try:
        if not _COMMIT.fullmatch(commit):
            commit = (folder / "refs" / name.revision).read_text(encoding="utf-8").strip()
        snapshot = folder / "snapshots" / commit
        held = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
        sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in held}
        files = [HubFile(file, size) for file, size in sizes.items()]
        chosen = choose_files(name, files, lambda index: (snapshot / index.name).read_bytes())
    except (ModelError, NotSupportedError, OSError, UnicodeDecodeError):
        return None
    return _model_path(name, snapshot, chosen)


def _plan(name: HubName) -> PullPlan:
    """Ask the hub what there is, and choose."""
    with hub_errors(name):
        commit, listed = _listing(name)
        files = choose_files(name, listed, lambda index: read_small_file(name, commit, index))
        for file in files:
            if file.size_bytes > _MAX_HTTP_BYTES:
                raise NotSupportedError(
                    f"{name}: {file.name} has {file.size_bytes} bytes; supported: what the hub "
                    f"gives over HTTP, files of at most {_MAX_HTTP_BYTES} bytes"
                )
        absent = _absent(name, commit, files)
        missing = tuple(f for f in absent if partial_bytes(name, f) < f.size_bytes)
        return PullPlan(name, commit, files, missing, _missing_bytes(name, missing))


def _absent(name: HubName, commit: str, files: Iterable[HubFile]) -> list[HubFile]:
    """The files that the snapshot lacks; the content may be there, under another commit."""
    from huggingface_hub import try_to_load_from_cache

    return [
        file
        for file in files
        if not isinstance(try_to_load_from_cache(name.repo, file.name, revision=commit), str)
    ]


def _listing(name: HubName) -> tuple[str, list[HubFile]]:
    """The commit that the revision means now, and the files of it."""
    from huggingface_hub import HfApi, constants

    check_token()
    api = HfApi(library_name="cupaged", library_version=__version__)
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    files = []
    try:
        info = api.model_info(
            name.repo, revision=name.revision, files_metadata=True, timeout=timeout
        )
        for sibling in info.siblings or ():
            digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
            if sibling.size is None:
                raise ValueError(f"the size of {sibling.rfilename!r:.80} is not given")
            files.append(HubFile(sibling.rfilename, sibling.size, digest or ""))
        if not _COMMIT.fullmatch(info.sha or ""):
            raise ValueError(f"the commit is {info.sha!r:.80}")
    except (AttributeError, KeyError, TypeError) as error:  # JSON, but of something else
        raise ValueError(f"the list of files is none: {error!r:.80}") from None
    return str(info.sha), [file for file in files if _SAFE_NAME.fullmatch(file.name)]


def _missing_bytes(name: HubName, missing: Iterable[HubFile]) -> int:
    return sum(file.size_bytes - partial_bytes(name, file) for file in missing)


def _download(plan: PullPlan, *, progress: bool) -> Path:
    """Fetch what is missing, then let the revision's name mean this commit."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    absent = _absent(plan.name, plan.commit, plan.files)
    if absent:
        _check_writable(cache)
        if plan.missing_bytes > (free := shutil.disk_usage(cache).free):
            raise _too_large(plan, cache, free)
    shown = new_progress(sum(file.size_bytes for file in plan.missing), wanted=progress)
    try:
        for file in absent:
            if file in plan.missing:
                shown.begin(file)
            fetch_file(plan.name, plan.commit, file, shown if file in plan.missing else Progress())
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise _too_large(plan, cache, shutil.disk_usage(cache).free) from None
    finally:
        shown.close()
    folder = repo_folder(plan.name)
    _write_ref(folder / "refs" / plan.name.revision, plan)
    return _model_path(plan.name, folder / "snapshots" / plan.commit, plan.files)


def _model_path(name: HubName, snapshot: Path, files: Sequence[HubFile]) -> Path:
    """What is opened: a GGUF file, or the whole folder."""
    return snapshot / files[0].name if name.file_pattern is not None else snapshot


def _check_writable(cache: Path) -> None:
    """Make the cache folder, and a file in it that vanishes at once."""
    from huggingface_hub import constants

    how = "set HF_HOME or HF_HUB_CACHE to a folder that can be written"
    if cache.parts[0].startswith("~"):
        raise HubError(f"the cache folder {cache} is unknown, as this user has no home: {how}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise HubError(
            f"the cache folder {constants.HF_HUB_CACHE} cannot be written ({reason}): {how}"
        ) from None


def _too_large(plan: PullPlan, cache: Path, free: int) -> CapacityError:
    needed = _missing_bytes(plan.name, plan.missing)
    allowed = (
        f"at most {free} (free in {cache}; make room, or set HF_HOME to a folder on a larger disk)"
    )
    return CapacityError(f"download of {plan.name} in bytes", needed, allowed)


def _write_ref(path: Path, plan: PullPlan) -> None:
    """Note the commit of a branch or tag, last of all: what it meant before was whole, too."""
    if plan.name.revision == plan.commit:
        return
    try:
        if path.is_file() and path.read_text(encoding="ascii") == plan.commit:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        unfinished.write_text(plan.commit, encoding="ascii")
        os.replace(unfinished, path)
    except OSError as error:  # a cache that others fill may be read-only
        _logger.warning("%s: cannot be written: %s", path, error.strerror)
