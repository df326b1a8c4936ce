"""Reading safetensors checkpoints: one file, or shards listed in an index.

Owns which files of a folder are the checkpoint, and that index and shards agree. The `safetensors`
library checks each header; the numbers are then decoded straight from the mapped file, which also
covers bfloat16, for which NumPy has no type. Where a folder has both `model.safetensors` and an
index, the single file is the checkpoint, as in Hugging Face transformers.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from cupaged.errors import CheckpointError, ModelNotFoundError, NotSupportedError
from cupaged.loading.dequantize import BLOCK_TYPES, BlockType, dequantize
from cupaged.loading.tensors import TensorInfo, check_destination, forget, map_file, shown

__all__ = ["SafetensorsFolder"]

logger = logging.getLogger(__name__)

_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-\d+-of-\d+\.safetensors")
_DTYPES: dict[str, BlockType] = {
    known.name: known for known in BLOCK_TYPES.values() if known.name in ("F32", "F16", "BF16")
}
_HEADER_AT = 8  # the header follows its length, a little-endian uint64
_MAX_INDEX_BYTES = 100_000_000  # what the format allows a header
_MAX_DIMS = 16
_MAX_ELEMENTS = 1 << 60  # NumPy limits the product of the dimensions that are not 0


class SafetensorsFolder:
    """An open safetensors checkpoint; implements `TensorReader`.

    `path` is a folder as Hugging Face lays it out, or a single `.safetensors` file. A tensor may
    have any dtype of the format until it is read: only F32, F16 and BF16 decode to float32.

    Raises `ModelNotFoundError` where there are no weights, `CheckpointError` where a file is
    missing, damaged or contradicts the index, and `NotSupportedError` for PyTorch's pickles.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._mapped: dict[Path, mmap.mmap] = {}
        self._starts: dict[str, int] = {}  # tensor name -> its first byte in its file
        tensors: dict[str, TensorInfo] = {}
        try:
            if self.path.is_dir():
                files, weight_map = _checkpoint_files(self.path)
            else:
                files, weight_map = [self.path], None
            for file in files:
                self._open(file, tensors)
            if weight_map is not None:
                _check_index(self.path, weight_map, tensors)
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = tensors

    def read_into(self, name: str, out: NDArray[Any]) -> None:
        """Decode tensor `name` into `out`, of exactly its shape; see `TensorReader`."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: no tensor {shown(name)}")
        block_type = _DTYPES.get(info.dtype)
        if block_type is None:
            raise NotSupportedError(
                f"{info.path}: tensor {shown(name)} has dtype {info.dtype}; "
                f"supported: {', '.join(_DTYPES)}"
            )
        check_destination(info, out)
        mapped = self._mapped[info.path]
        if info.nbytes:  # an empty tensor may lie at the very end, where there is no buffer
            stored = np.frombuffer(mapped, np.uint8, info.nbytes, self._starts[name])
            dequantize(block_type, stored, out)
            forget(mapped, self._starts[name], info.nbytes)

    def close(self) -> None:
        """Unmap the files."""
        for mapped in self._mapped.values():
            mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _open(self, file: Path, tensors: dict[str, TensorInfo]) -> None:
        """Map one file and add its tensors to `tensors`."""
        self._mapped[file] = mapped = map_file(file)
        header = _read_header(file, mapped)
        data_start = _HEADER_AT + int.from_bytes(mapped[:_HEADER_AT], "little")
        for name, entry in header.items():
            if name in tensors:
                raise CheckpointError(
                    f"{file}: tensor {shown(name)} is also in {tensors[name].path.name}, "
                    "must be in one file only"
                )
            shape = tuple(entry["shape"])
            if len(shape) > _MAX_DIMS or math.prod(dim or 1 for dim in shape) > _MAX_ELEMENTS:
                raise CheckpointError(
                    f"{file}: tensor {shown(name)} has shape {shape}, must have at most "
                    f"{_MAX_DIMS} dimensions and {_MAX_ELEMENTS} elements"
                )
            start, stop = entry["data_offsets"]
            tensors[name] = TensorInfo(name, shape, entry["dtype"], stop - start, file)
            self._starts[name] = data_start + start


def _read_header(file: Path, mapped: mmap.mmap) -> dict[str, dict[str, Any]]:
    """The header's entries: `{name: {"dtype": ..., "shape": ..., "data_offsets": ...}}`.

    The library checks that types and shapes are real, that they explain every tensor's size, and
    that the tensors cover the rest of the file without holes or overlaps.
    """
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file}: cut or damaged, must be a whole safetensors file ({len(mapped)} bytes): "
            f"{error}"
        ) from error
    length = int.from_bytes(mapped[:_HEADER_AT], "little")
    header = _json_object(file, mapped[_HEADER_AT : _HEADER_AT + length])
    header.pop("__metadata__", None)
    if not header:
        raise CheckpointError(f"{file}: holds 0 tensors, must hold at least 1")
    return header


def _checkpoint_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files that make up the checkpoint in `folder`, and the index's map if it has one."""
    if (folder / _SINGLE_FILE).is_file():
        if (folder / _INDEX).is_file():
            logger.info("%s: reading %s, ignoring %s", folder, _SINGLE_FILE, _INDEX)
        return [folder / _SINGLE_FILE], None
    try:
        present = {file.name for file in folder.iterdir() if file.is_file()}
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    if _INDEX in present:
        weight_map = _read_index(folder / _INDEX)
        _check_shards(folder, set(weight_map.values()), present)
        return [folder / name for name in sorted(set(weight_map.values()))], weight_map
    loose = sorted(name for name in present if name.endswith(_SUFFIX))
    if loose:
        raise CheckpointError(
            f"{folder}: holds {loose[0]} but neither {_SINGLE_FILE} nor {_INDEX}; "
            "name the file itself to read only that"
        )
    if any(name.startswith("pytorch_model") for name in present):
        raise NotSupportedError(
            f"{folder}: holds only PyTorch pickles (pytorch_model*.bin), which can run code when "
            f"they are read; supported: convert them to {_SINGLE_FILE}"
        )
    raise ModelNotFoundError(f"{folder}: holds neither {_SINGLE_FILE} nor {_INDEX}")


def _read_index(index: Path) -> dict[str, str]:
    """The index's map from tensor name to file name, each a plain `.safetensors` name."""
    try:
        size = index.stat().st_size
        data = index.read_bytes() if size <= _MAX_INDEX_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error}") from error
    if size > _MAX_INDEX_BYTES:
        raise CheckpointError(f"{index}: has {size} bytes, must have at most {_MAX_INDEX_BYTES}")
    weight_map = _json_object(index, data).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map must be an object of at least one tensor name and file name, "
            f"got {'no entries' if weight_map == {} else type(weight_map).__name__}"
        )
    for name, file in weight_map.items():
        plain = isinstance(file, str) and not re.search(r"[\\/:\0]", file)
        if not plain or not file.endswith(_SUFFIX):
            raise CheckpointError(
                f"{index}: tensor {shown(name)} lies in {file!r:.100}, "
                f"must be the name of a {_SUFFIX} file in the same folder"
            )
    return weight_map


def _check_shards(folder: Path, shards: set[str], present: set[str]) -> None:
    """Every shard must be there, and no further shard of the same series.

    Other safetensors files (an adapter, the same weights in another layout) are not our business.
    """
    missing = sorted(shards - present)
    if missing:
        raise CheckpointError(
            f"{folder / missing[0]}: missing, named by {_INDEX} "
            f"({len(missing)} of {len(shards)} shards are missing)"
        )
    series = {match["stem"] for match in map(_SHARD.fullmatch, shards) if match}
    for name in sorted(present - shards):
        match = _SHARD.fullmatch(name)
        if match and match["stem"] in series:
            raise CheckpointError(f"{folder / name}: a shard that {_INDEX} does not name")
        if name.endswith(_SUFFIX):
            logger.info("%s: not part of the checkpoint, ignored", folder / name)


def _check_index(
    folder: Path, weight_map: dict[str, str], tensors: Mapping[str, TensorInfo]
) -> None:
    """Index and shards must list the same tensors in the same files."""
    for name, file in weight_map.items():
        info = tensors.get(name)
        if info is None or info.path.name != file:
            raise CheckpointError(
                f"{folder / file}: tensor {shown(name)} is "
                f"{'missing' if info is None else 'in ' + info.path.name}, {_INDEX} puts it here"
            )
    for name, info in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{info.path}: tensor {shown(name)} is not listed in {_INDEX}")


def _json_object(file: Path, data: bytes) -> dict[str, Any]:
    """`data` as a JSON object in which no key appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise CheckpointError(f"{file}: {shown(name)} appears twice, must appear once")
            found[name] = value
        return found

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: {data[:20]!r}..., must be a JSON object")
    return value
