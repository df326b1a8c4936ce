"""The GGUF reader against files written by hand, byte by byte: mostly damaged ones."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cupaged.errors import CheckpointError, ModelNotFoundError, NotSupportedError
from cupaged.loading.gguf import GGUFFile

U32, BOOL, STRING, ARRAY = 4, 7, 8, 9


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def tensor(name: str, dims: Sequence[int] = (2,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    header = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries)
    header += b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def u32(key: str, value: int) -> bytes:
    return entry(key, U32, struct.pack("<I", value))


def nested(depth: int) -> bytes:
    return array(ARRAY, 1) * (depth - 1) + array(0, 0)


DAMAGED = {
    "magic": (b"GGML" + bytes(40), "begins with b'GGML', must begin with b'GGUF'"),
    "three bytes": (b"GGU", "begins with b'GGU'"),
    "no version": (b"GGUF", "the version ends at byte 8, must end by byte 4"),
    "version 0": (b"GGUF" + bytes(20), "version 0, must be 2 or 3"),
    "cut counts": (b"GGUF" + struct.pack("<IQ", 3, 0), "number of metadata entries ends at"),
    "tensor count": (build(counts=(2**63, 0)), f"number of tensors is {2**63}, must be at most"),
    "entry count": (build(counts=(0, 2**40)), f"metadata entries is {2**40}, must be at most"),
    "entry missing": (
        build([u32("long enough a key", 1)], counts=(0, 2), alignment=1),
        "a metadata key ends at byte",
    ),
    "key length": (build([struct.pack("<Q", 2**63) + bytes(20)]), f"{2**63} bytes, must have at"),
    "key past the end": (build([struct.pack("<Q", 99) + bytes(20)]), "a metadata key ends at"),
    "key not UTF-8": (build([entry(b"\xffkey", U32, bytes(4))]), "metadata key at byte 32 is not"),
    "value type": (build([entry("k", 13, bytes(8))]), "'k' has value type 13, must be 0 to 12"),
    "bool": (build([entry("k", BOOL, b"\x02")]), "'k' holds the boolean 2, must be 0 or 1"),
    "string length": (build([entry("k", STRING, b"\xff" * 8)]), "'k' ends at byte 184467440737"),
    "string not UTF-8": (
        build([entry("k", STRING, text(b"\xc3("))]),
        "byte 45 is not UTF-8",
    ),
    "array type": (build([entry("k", ARRAY, array(77, 1))]), "'k' has value type 77"),
    "array length": (build([entry("k", ARRAY, array(U32, 2**62))]), "'k' ends at byte"),
    "array of strings": (build([entry("k", ARRAY, array(STRING, 2**62))]), "'k' ends at byte"),
    "array of arrays": (build([entry("k", ARRAY, array(ARRAY, 2**62))]), "'k' ends at byte"),
    "array too deep": (build([entry("k", ARRAY, nested(5))]), "'k' nests arrays deeper than 4"),
    "same key twice": (build([u32("k", 1), u32("k", 1)]), "metadata key 'k' appears twice"),
    "alignment 0": (build([u32("general.alignment", 0)]), "alignment is 0, must be a power of two"),
    "alignment 48": (build([u32("general.alignment", 48)]), "alignment is 48, must be a power"),
    "alignment text": (
        build([entry("general.alignment", STRING, text("32"))]),
        "alignment is '32', must be a power",
    ),
    "five dimensions": (
        build([], [tensor("t", (1, 1, 1, 1, 1))], bytes(64)),
        "tensor 't' has 5 dimensions, must have at most 4",
    ),
    "dimension 0": (
        build([], [tensor("t", (4, 0))], bytes(64)),
        r"shape \(0, 4\): every",
    ),
    "product overflows": (
        build([], [tensor("t", (2**63, 2**63, 2**63, 2))], bytes(64)),
        f"tensor 't' ends at byte {96 + 2**192}, must end inside the file of 160 bytes",
    ),
    "row of 48": (
        build([], [tensor("t", (48, 2), 8)], bytes(256)),
        r"shape \(2, 48\): .* for Q8_0 the last a multiple of 32",
    ),
    "same tensor twice": (
        build([], [tensor("t"), tensor("t", offset=32)], bytes(64)),
        "tensor 't' appears twice",
    ),
    "tensor name not UTF-8": (
        build([], [text(b"\xff") + struct.pack("<IQIQ", 1, 1, 0, 0)], bytes(64)),
        "a tensor name at byte 32 is not UTF-8",
    ),
    "offset not aligned": (
        build([], [tensor("t", offset=16)], bytes(64)),
        "tensor 't' has offset 16, must be a multiple of 32",
    ),
    "offset past the end": (
        build([], [tensor("t", offset=2**40)], bytes(64)),
        "must end inside the file of 128 bytes",
    ),
    "data cut": (
        build([], [tensor("t", (16, 2))], bytes(127)),
        "'t' ends at byte 224, must end inside the file of 223 bytes: the file is cut",
    ),
    "overlap": (
        build([], [tensor("a", (9,), offset=32), tensor("b", (9,))], bytes(96)),
        "tensors 'b' and 'a' overlap",
    ),
    "empty": (b"", r"the file is empty \(0 bytes\)"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
}
NOT_SUPPORTED = {
    "version 1": (
        b"GGUF" + struct.pack("<I", 1) + bytes(32),
        "GGUF version 1; supported",
    ),
    "version 4": (b"GGUF" + struct.pack("<I", 4) + bytes(32), "GGUF version 4; supported"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(32), "big-endian GGUF version 3"),
    "known type": (build([], [tensor("t", (256,), 23)]), r"'t' has ggml type 23 \(IQ4_XS\); supp"),
    "unknown type": (
        build([], [tensor("t", (2,), 999)]),
        r"999 \(unknown\); supported: F32",
    ),
    "split": (build([entry("split.count", 2, b"\x03\x00")]), "one of the 3 parts of a split model"),
}


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    data, message = DAMAGED[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFFile(write(tmp_path, data))
    assert str(tmp_path / "model.gguf") in str(caught.value)


@pytest.mark.parametrize("case", NOT_SUPPORTED)
def test_formats_not_built_are_refused_by_name(case: str, tmp_path: Path) -> None:
    data, message = NOT_SUPPORTED[case]
    with pytest.raises(NotSupportedError, match=message) as caught:
        GGUFFile(write(tmp_path, data))
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelNotFoundError, match="no such file"):
        GGUFFile(tmp_path)


def test_damaged_lengths_in_a_huge_file_allocate_nothing(tmp_path: Path) -> None:
    """In a file of 8 GiB a length of 4 GiB is inside the file, and still no header's."""
    payloads = [(STRING, struct.pack("<Q", 1 << 32)), (ARRAY, array(U32, 1 << 30))]
    for kind, payload in payloads:
        path = write(tmp_path, build([entry("k", kind, payload)]))
        with path.open("r+b") as file:
            file.truncate(8 << 30)
        tracemalloc.start()
        with pytest.raises(CheckpointError, match="a header at most 134217728"):
            GGUFFile(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    data = build([u32("k", 5)], [tensor("t", (3, 1))], np.array([1, 2, 3], "<f4").tobytes())
    for version in (2, 3):
        with GGUFFile(write(tmp_path, data[:4] + struct.pack("<I", version) + data[8:])) as file:
            assert file.metadata == {"k": 5}
            out = np.zeros((1, 3), np.float32)
            file.read_into("t", out)
            assert out.tolist() == [[1, 2, 3]]


def test_nested_arrays_and_a_scalar_tensor(tmp_path: Path) -> None:
    inner = array(U32, 2, struct.pack("<2I", 1, 2)) + array(STRING, 1, text("é"))
    entries = [entry("k", ARRAY, array(ARRAY, 2, inner)), entry("e", ARRAY, array(STRING, 0))]
    data = build(entries, [tensor("t", ())], struct.pack("<f", 2.5))
    with GGUFFile(write(tmp_path, data)) as file:
        nested_list = file.metadata["k"]
        assert isinstance(nested_list, list)
        assert nested_list[0].tolist() == [1, 2]
        assert nested_list[1] == ["é"]
        assert file.metadata["e"] == []
        out = np.zeros((), np.float32)
        file.read_into("t", out)
        assert out == 2.5
