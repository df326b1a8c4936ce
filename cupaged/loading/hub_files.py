"""Which files of a repository make up a model that can be loaded here.

Owns the choice, as a pure function of names: the same one decides what to download and whether a
cached folder is whole. It never calls out and reads nothing but the index it is handed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from cupaged.errors import CheckpointError, ModelNotFoundError, NotSupportedError
from cupaged.loading.hub_name import HubName

__all__ = ["HubFile", "choose_files", "shown_size"]

_CONFIG = "config.json"
_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SMALL_FILES = (
    _CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_MORE_TEMPLATES = re.compile(r"additional_chat_templates/[^/\\]+\.jinja")
_GGUF_PART = re.compile(r".*-\d{5}-of-\d{5}\.gguf", re.IGNORECASE)
_MAX_INDEX_BYTES = 100_000_000
_SHOWN_FILES = 40


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository.

    name: its path in the repository. size_bytes: of its content.
    digest: hexadecimal SHA-256 of the content where the hub stores it as a large file, else the
        SHA-1 that git gives it; empty where the hub does not say.
    """

    name: str
    size_bytes: int
    digest: str = ""


def choose_files(
    name: HubName, files: Sequence[HubFile], read_index: Callable[[HubFile], bytes]
) -> tuple[HubFile, ...]:
    """The files to have, small ones first and weights last.

    Args:
        files: all that the repository holds.
        read_index: gives the content of the index of a sharded checkpoint.

    Raises:
        ModelNotFoundError: a needed file is not there, or it is not clear which GGUF is meant.
        CheckpointError: the index is damaged. NotSupportedError: only other formats are there.
    """
    if name.file_pattern is not None:
        return (_gguf_file(name, files),)
    by_name = {file.name: file for file in files}
    if _SINGLE_FILE in by_name:
        weights = [by_name[_SINGLE_FILE]]
    elif _INDEX in by_name:
        shards = _shard_names(name, by_name[_INDEX], read_index)
        absent = [shard for shard in shards if shard not in by_name]
        if absent:
            raise ModelNotFoundError(
                f"{name}: {_INDEX} names {absent[0]}, which is not there "
                f"({len(absent)} of {len(shards)} shards are missing)"
            )
        weights = [by_name[_INDEX], *(by_name[shard] for shard in shards)]
    else:
        _no_weights(name, files)
    if _CONFIG not in by_name:
        raise ModelNotFoundError(f"{name}: there is no {_CONFIG}, which a model needs")
    small = [by_name[file] for file in _SMALL_FILES if file in by_name]
    templates = [file for file in files if _MORE_TEMPLATES.fullmatch(file.name)]
    return (*small, *templates, *weights)


def shown_size(size_bytes: int) -> str:
    """A size for people: `861 B`, `256.6 MiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _gguf_file(name: HubName, files: Sequence[HubFile]) -> HubFile:
    """The one GGUF file that the pattern names."""
    assert name.file_pattern is not None
    ggufs = [file for file in files if file.name.lower().endswith(".gguf")]
    if name.file_pattern.lower().endswith(".gguf"):
        found = [file for file in ggufs if file.name == name.file_pattern]
    else:
        # Whole words only: Q4_K is not Q4_K_M, and Q4_0 is not IQ4_0.
        tag = re.compile(
            rf"(?<![a-z0-9]){re.escape(name.file_pattern)}(?![a-z0-9_])", re.IGNORECASE
        )
        found = [
            file
            for file in ggufs
            if tag.search(file.name.rpartition("/")[2]) and "mmproj" not in file.name.lower()
        ]
    whole = [file for file in found if not _GGUF_PART.fullmatch(file.name)]
    if found and not whole:
        raise NotSupportedError(
            f"{name}: {found[0].name} is one of {len(found)} parts of a split model, which is not "
            "supported in this version; choose a file that is whole"
        )
    if len(whole) != 1:
        many = f"{len(whole)} GGUF files match" if whole else "no GGUF file matches"
        raise ModelNotFoundError(
            f"{name}: {many} {name.file_pattern!r}; there are: {_listed(whole or ggufs)}"
        )
    return whole[0]


def _shard_names(
    name: HubName, index: HubFile, read_index: Callable[[HubFile], bytes]
) -> list[str]:
    """The files that an index lists, each of them in the same folder."""
    if index.size_bytes > _MAX_INDEX_BYTES:
        raise CheckpointError(
            f"{name}: {index.name} has {index.size_bytes} bytes, must have at most "
            f"{_MAX_INDEX_BYTES}"
        )
    try:
        shards = sorted(set(json.loads(read_index(index))["weight_map"].values()))
        plain = all(re.fullmatch(r"[^/\\:]+\.safetensors", shard) for shard in shards)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name}: {index.name} is damaged: {error!r:.200}") from error
    if not shards or not plain:
        raise CheckpointError(
            f"{name}: {index.name} must name .safetensors files beside it, names {shards!r:.200}"
        )
    return shards


def _no_weights(name: HubName, files: Sequence[HubFile]) -> NoReturn:
    ggufs = [file for file in files if file.name.lower().endswith(".gguf")]
    if ggufs:
        raise ModelNotFoundError(
            f"{name}: there are only GGUF files; name one, as in {name.repo}:Q4_K_M or "
            f"{name.repo}:{ggufs[0].name}. There are: {_listed(ggufs)}"
        )
    if any(re.match(r"(.*/)?pytorch_model.*\.bin$", file.name) for file in files):
        raise NotSupportedError(
            f"{name}: there are only PyTorch pickles (pytorch_model*.bin), which can run code when "
            "they are read; choose a repository that has safetensors or GGUF files"
        )
    raise ModelNotFoundError(
        f"{name}: there is neither {_SINGLE_FILE} nor {_INDEX}, nor a GGUF file"
    )


def _listed(files: Sequence[HubFile]) -> str:
    if not files:
        return "none"
    texts = [f"{file.name} ({shown_size(file.size_bytes)})" for file in files[:_SHOWN_FILES]]
    more = len(files) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")
