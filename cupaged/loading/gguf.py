"""Reading GGUF files: metadata, tensor table, and tensors decoded to float32.

Owns the GGUF container, versions 2 and 3, little-endian. The file is memory-mapped and its header
is checked completely when it is opened, before anything large is allocated. What the keys mean, and
how a model's tensors are named or permuted, is decided elsewhere.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupaged.errors import CheckpointError, NotSupportedError
from cupaged.loading.dequantize import BLOCK_TYPES, GGML_TYPE_NAMES, BlockType, dequantize
from cupaged.loading.tensors import TensorInfo, check_destination, forget, map_file, shown

__all__ = ["GGUFFile", "MetadataValue"]

MetadataValue: TypeAlias = str | int | float | bool | list[Any] | NDArray[Any]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_NAME_BYTES = 65_535
_MAX_ARRAY_DEPTH = 4
# A vocabulary of a million tokens needs about 40 MiB. The limit keeps a damaged length in a large
# file from copying its weights.
_MAX_HEADER_BYTES = 128 << 20
# The least a metadata entry (empty key, type, one byte) and a tensor entry (empty name, no
# dimensions, type, offset) can take: bounds their counts before anything is read.
_MIN_ENTRY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4"}
_NUMBERS |= {_BOOL: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GGUFFile:
    """An open GGUF file; implements `TensorReader`.

    `metadata` maps keys to Python scalars, to `list[str]`, to NumPy arrays of numbers or booleans,
    and nested arrays to lists of those. `tensors` maps names to `TensorInfo`, in file order, with
    NumPy shapes (GGUF stores them reversed). A model without tensors (vocabulary only) is valid.

    Raises `ModelNotFoundError`, `CheckpointError` for a damaged file, and `NotSupportedError` for
    version 1, big-endian files, one part of a split model, and tensor types that
    `dequantize.BLOCK_TYPES` lacks.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._mapped = map_file(self.path)
        try:
            header = _Header(self.path, self._mapped)
            header.read()
        except BaseException:
            self._mapped.close()
            raise
        self.metadata: dict[str, MetadataValue] = header.metadata
        self.tensors: Mapping[str, TensorInfo] = header.tensors
        self._places = header.places

    def read_into(self, name: str, out: NDArray[Any]) -> None:
        """Decode tensor `name` into `out`, of exactly its shape; see `TensorReader`."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: no tensor {shown(name)}")
        check_destination(info, out)
        block_type, start = self._places[name]
        dequantize(block_type, np.frombuffer(self._mapped, np.uint8, info.nbytes, start), out)
        forget(self._mapped, start, info.nbytes)

    def close(self) -> None:
        """Unmap the file."""
        self._mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Header:
    """One pass over the header, holding the position; every length is checked before it is used."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.metadata: dict[str, MetadataValue] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.places: dict[str, tuple[BlockType, int]] = {}  # name -> (type, first byte in the file)
        self._path = path
        self._mapped = mapped
        self._size = len(mapped)
        self._end = min(self._size, _MAX_HEADER_BYTES)
        self._position = 0

    def read(self) -> None:
        self._read_version()
        num_tensors = self._count("the number of tensors", _MIN_TENSOR_BYTES)
        num_entries = self._count("the number of metadata entries", _MIN_ENTRY_BYTES)
        for _ in range(num_entries):
            key = self._name("a metadata key")
            if key in self.metadata:
                self._fail(f"metadata key {shown(key)} appears twice")
            what = f"metadata key {shown(key)}"
            self.metadata[key] = self._value(self._u32(what), what)
        self._refuse_parts()
        alignment = self._alignment()
        for _ in range(num_tensors):
            self._read_tensor(alignment)
        self._place_tensors(-(-self._position // alignment) * alignment)

    def _read_version(self) -> None:
        magic = self._mapped[: len(_MAGIC)]
        if magic != _MAGIC:
            self._fail(f"not a GGUF file: begins with {magic!r}, must begin with {_MAGIC!r}")
        self._position = len(_MAGIC)
        version = self._u32("the version")
        if version in _VERSIONS:
            return
        if version == 0:
            self._fail("GGUF version 0, must be 2 or 3")
        found = f"GGUF version {version}"
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped < version:
            found = f"big-endian GGUF version {swapped}"
        raise NotSupportedError(
            f"{self._path}: {found}; supported: GGUF versions 2 and 3, little-endian"
        )

    def _refuse_parts(self) -> None:
        parts = self.metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise NotSupportedError(
                f"{self._path}: one of the {parts} parts of a split model; supported: one file "
                "(merge them with `llama-gguf-split --merge`)"
            )

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r:.100}, must be a power of two")
        return alignment

    def _read_tensor(self, alignment: int) -> None:
        """Read one entry of the tensor table; its place is still relative to the data section."""
        name = self._name("a tensor name")
        what = f"tensor {shown(name)}"
        if name in self.tensors:
            self._fail(f"{what} appears twice")
        num_dims = self._u32(what)
        if num_dims > _MAX_DIMS:
            self._fail(f"{what} has {num_dims} dimensions, must have at most {_MAX_DIMS}")
        shape = tuple(self._u64(what) for _ in range(num_dims))[::-1]
        number, offset = self._u32(what), self._u64(what)
        block_type = BLOCK_TYPES.get(number)
        if block_type is None:
            supported = ", ".join(known.name for known in BLOCK_TYPES.values())
            raise NotSupportedError(
                f"{self._path}: {what} has ggml type {number} "
                f"({GGML_TYPE_NAMES.get(number, 'unknown')}); supported: {supported}"
            )
        row = shape[-1] if shape else 1
        if 0 in shape or row % block_type.block_elements:
            self._fail(
                f"{what} has shape {shape}: every dimension must be at least 1, and for "
                f"{block_type.name} the last a multiple of {block_type.block_elements}"
            )
        nbytes = math.prod(shape) // block_type.block_elements * block_type.block_bytes
        if offset % alignment:
            self._fail(f"{what} has offset {offset}, must be a multiple of {alignment}")
        self.tensors[name] = TensorInfo(name, shape, block_type.name, nbytes, self._path)
        self.places[name] = (block_type, offset)

    def _place_tensors(self, data_start: int) -> None:
        """Turn offsets in the data section into places in the file; they must not overlap."""
        free_from, previous = 0, ""
        places = sorted(self.places.items(), key=lambda item: item[1][1])
        for name, (block_type, offset) in places:
            if offset < free_from:
                self._fail(f"tensors {shown(previous)} and {shown(name)} overlap")
            free_from, previous = offset + self.tensors[name].nbytes, name
            if data_start + free_from > self._size:
                self._fail(
                    f"tensor {shown(name)} ends at byte {data_start + free_from}, must end "
                    f"inside the file of {self._size} bytes: the file is cut or damaged"
                )
            self.places[name] = (block_type, data_start + offset)

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {problem}")

    def _overrun(self, stop: int, what: str) -> NoReturn:
        self._fail(
            f"{what} ends at byte {stop}, must end by byte {self._end} "
            f"(the file has {self._size} bytes, a header at most {_MAX_HEADER_BYTES})"
        )

    def _take(self, num_bytes: int, what: str) -> int:
        """Step over `num_bytes` and return where they start."""
        start = self._position
        if start + num_bytes > self._end:
            self._overrun(start + num_bytes, what)
        self._position = start + num_bytes
        return start

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._mapped, self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._mapped, self._take(8, what))[0]
        return value

    def _count(self, what: str, least_bytes: int) -> int:
        count = self._u64(what)
        most = (self._end - self._position) // least_bytes
        if count > most:
            self._fail(f"{what} is {count}, must be at most {most} in a file of {self._size} bytes")
        return count

    def _name(self, what: str) -> str:
        """A string that must be short: a key or the name of a tensor."""
        length = self._u64(what)
        if length > _MAX_NAME_BYTES:
            self._fail(f"{what} has {length} bytes, must have at most {_MAX_NAME_BYTES}")
        start = self._take(length, what)
        try:
            return self._mapped[start : self._position].decode()
        except UnicodeDecodeError as error:
            self._fail(f"{what} at byte {start} is not UTF-8: {error}")

    def _value(self, kind: int, what: str) -> MetadataValue:
        if kind == _STRING:
            return self._strings(1, what)[0]
        if kind == _ARRAY:
            return self._array(what, depth=1)
        value: MetadataValue = self._numbers(kind, 1, what)[0].item()
        return value

    def _array(self, what: str, depth: int) -> MetadataValue:
        if depth > _MAX_ARRAY_DEPTH:
            self._fail(f"{what} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
        kind = self._u32(what)
        count = self._u64(what)
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            return [self._array(what, depth + 1) for _ in range(count)]
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> NDArray[Any]:
        """`count` numbers or booleans as an array of their own: it outlives the mapping."""
        if kind not in _NUMBERS:
            self._fail(f"{what} has value type {kind}, must be 0 to 12")
        dtype: np.dtype[Any] = np.dtype(_NUMBERS[kind])
        start = self._take(count * dtype.itemsize, what)
        numbers = np.frombuffer(self._mapped, dtype, count, start).copy()
        if kind != _BOOL:
            return numbers
        if numbers.max(initial=0) > 1:
            self._fail(f"{what} holds the boolean {numbers.max()}, must be 0 or 1")
        return numbers.astype(np.bool_)

    def _strings(self, count: int, what: str) -> list[str]:
        """`count` strings. A vocabulary has 10^5 of them: the loop uses local names only."""
        mapped, position, end, length_at = self._mapped, self._position, self._end, _U64.unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = position + 8
            if start <= end:
                position = start + length_at(mapped, position)[0]
            if start > end or position > end:
                self._overrun(max(start, position), what)
            try:
                strings.append(mapped[start:position].decode())
            except UnicodeDecodeError as error:
                self._fail(f"{what} at byte {start} is not UTF-8: {error}")
        self._position = position
        return strings
