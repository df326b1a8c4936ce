"""Safetensors checkpoints: values known by hand, folders as they are found, and damaged files."""

from __future__ import annotations

import json
import resource
import struct
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from cupaged.errors import CheckpointError, ModelNotFoundError, NotSupportedError
from cupaged.loading.safetensors import SafetensorsFolder
from cupaged.loading.tensors import TensorReader

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def raw(header: bytes | Mapping[str, Any], data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def place(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def read(reader: TensorReader, name: str) -> Any:
    out = np.full(reader.tensors[name].shape, 7, np.float32)
    reader.read_into(name, out)
    return out.tolist()


def write_shards(folder: Path, weight_map: object = None) -> None:
    save_file({"a": np.array([1.0, 2.0], np.float32)}, folder / FIRST)
    save_file({"b": np.array([3.0], np.float16)}, folder / SECOND)
    index = {"metadata": {}, "weight_map": weight_map or {"a": FIRST, "b": SECOND}}
    (folder / INDEX).write_text(json.dumps(index))


VALID = raw(
    {"a": place("F32", [2, 3], 0, 24), "b": place("BF16", [4], 24, 32)},
    np.arange(6, dtype="<f4").tobytes() + bytes([0x80, 0x3F] * 4),
)

# ---------------------------------------------------------------- reading


def test_reads_every_float_type_of_a_single_file(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5], [0.0, 65504.0]])
    tensors: dict[str, NDArray[Any]] = {
        "f32": values.astype(np.float32),
        "f16": values.astype(np.float16),
        "bf16": values.astype(ml_dtypes.bfloat16),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    for source in (tmp_path, path, str(path)):
        with SafetensorsFolder(source) as reader:
            assert sorted(reader.tensors) == ["bf16", "f16", "f32"]
            info = reader.tensors["bf16"]
            assert (info.shape, info.dtype, info.nbytes, info.path) == ((2, 2), "BF16", 8, path)
            assert read(reader, "f32") == read(reader, "f16") == [[1.0, -2.5], [0.0, 65504.0]]
            assert read(reader, "bf16") == [[1.0, -2.5], [0.0, 65536.0]]  # rounded when stored


def test_tensors_at_odd_offsets_scalars_and_empty_ones(tmp_path: Path) -> None:
    header = json.dumps({"x": place("F32", [], 0, 4), "y": place("F16", [0, 5], 4, 4)}).encode()
    path = tmp_path / "model.safetensors"
    for spaces in range(4):
        path.write_bytes(raw(header + b" " * spaces, struct.pack("<f", -0.75)))
        with SafetensorsFolder(path) as reader:
            assert read(reader, "x") == -0.75
            assert read(reader, "y") == []


def test_reads_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with SafetensorsFolder(tmp_path) as reader:
        assert read(reader, "a") == [1.0, 2.0]
        assert read(reader, "b") == [3.0]
        assert reader.tensors["b"].path == tmp_path / SECOND


def test_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"c": np.array([4.0], np.float32)}, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as reader:
        assert list(reader.tensors) == ["c"]


@pytest.mark.parametrize("other", ["consolidated.safetensors", "adapter_model.safetensors"])
def test_files_that_are_no_shards_are_left_alone(other: str, tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / other).write_bytes(b"whatever")
    with SafetensorsFolder(tmp_path) as reader:
        assert sorted(reader.tensors) == ["a", "b"]


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint8, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_open_but_are_not_decoded(dtype: Any, tmp_path: Path) -> None:
    save_file({"x": np.ones(4, dtype), "y": np.ones(1, "f4")}, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as reader:
        name = reader.tensors["x"].dtype
        assert name in ("F64", "I64", "U8", "F8_E4M3")
        with pytest.raises(NotSupportedError, match=f"'x' has dtype {name}; supported: F32, F16"):
            reader.read_into("x", np.zeros(4, np.float32))
        assert read(reader, "y") == [1.0]


def test_wrong_name_or_shape(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(VALID)
    with SafetensorsFolder(tmp_path) as reader:
        with pytest.raises(CheckpointError, match="no tensor 'x'"):
            reader.read_into("x", np.zeros(1, np.float32))
        with pytest.raises(CheckpointError, match=r"'a' has shape \(2, 3\), must be \(3, 2\)"):
            reader.read_into("a", np.zeros((3, 2), np.float32))


# ---------------------------------------------------------------- damaged files

ENTRY = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
DAMAGED = {
    "empty": (b"", r"the file is empty \(0 bytes\)"),
    "seven bytes": (VALID[:7], "cut or damaged"),
    "cut in the header": (VALID[:60], "cut or damaged"),
    "cut by 5 bytes": (VALID[:-5], rf"must be a whole .* \({len(VALID) - 5} bytes"),
    "5 bytes too long": (VALID + bytes(5), "cut or damaged"),
    "header of 2**40 bytes": (struct.pack("<Q", 2**40) + VALID[8:], "cut or damaged"),
    "header longer than the file": (struct.pack("<Q", 5000) + VALID[8:], "cut or damaged"),
    "header is not JSON": (raw(b"{hello}"), "cut or damaged"),
    "header is a list": (raw(b"[1]"), "cut or damaged"),
    "header is not UTF-8": (raw(b"{" + ENTRY.replace(b"a", b"\xff") + b"}"), "cut or damaged"),
    "deep header": (raw(b"[" * 100_000), "cut or damaged"),
    "overlap": (
        raw({"a": place("F32", [2], 0, 8), "b": place("F32", [2], 4, 12)}, bytes(12)),
        "cut or damaged",
    ),
    "hole": (
        raw({"a": place("F32", [2], 0, 8), "b": place("F32", [2], 12, 20)}, bytes(20)),
        "cut or damaged",
    ),
    "shape": (raw({"a": place("F32", [3], 0, 8)}, bytes(8)), "cut or damaged"),
    "shape overflows": (raw({"a": place("F32", [2**40] * 2, 0, 8)}, bytes(8)), "cut or damaged"),
    "empty and vast": (raw({"a": place("F32", [0, 2**62], 0, 0)}), r"'a' has shape \(0, 46116860"),
    "17 dimensions": (raw({"a": place("F32", [1] * 17, 0, 4)}, bytes(4)), "at most 16 dimensions"),
    "dtype": (raw({"a": place("Q9", [2], 0, 8)}, bytes(8)), "cut or damaged"),
    "name twice": (raw(b"{" + ENTRY + b"," + ENTRY + b"}", bytes(4)), "'a' appears twice"),
    "no tensors": (raw({}), "holds 0 tensors"),
    "metadata only": (raw({"__metadata__": {"format": "pt"}}), "holds 0 tensors"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    data, message = DAMAGED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    largest_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFolder(tmp_path)
    assert str(path) in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest_before < 32 * 1024


@settings(max_examples=300, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(1, 255)), max_size=4),
    keep=st.one_of(st.none(), st.integers(0, len(VALID))),
)
def test_random_damage_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], keep: int | None
) -> None:
    data = bytearray(VALID)
    for position, flip in flips:
        data[position] ^= flip
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(data[:keep])
    tracemalloc.start()
    try:
        with SafetensorsFolder(path) as reader:
            for info in reader.tensors.values():
                reader.read_into(info.name, np.empty(info.shape, np.float32))
    except (CheckpointError, NotSupportedError) as error:
        assert str(path) in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


# ---------------------------------------------------------------- contradictory folders


def test_missing_shard_is_named_before_anything_is_read(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / FIRST).write_bytes(b"not even looked at")
    (tmp_path / SECOND).unlink()
    with pytest.raises(CheckpointError, match=rf"{SECOND}: missing, named by {INDEX} \(1 of 2"):
        SafetensorsFolder(tmp_path)
    (tmp_path / SECOND).symlink_to(tmp_path / "purged")
    with pytest.raises(CheckpointError, match=f"{SECOND}: missing"):
        SafetensorsFolder(tmp_path)


def test_damaged_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / SECOND).write_bytes((tmp_path / SECOND).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{SECOND}: cut or damaged"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": FIRST, "b": SECOND, "c": SECOND}, f"{SECOND}: tensor 'c' is missing"),
        ({"a": SECOND, "b": FIRST}, f"{SECOND}: tensor 'a' is in {FIRST}"),
        ({"a": FIRST}, f"{SECOND}: a shard that {INDEX} does not name"),
        ({"b": SECOND}, f"{FIRST}: a shard that {INDEX} does not name"),
        ({"a": "../x.safetensors"}, r"'a' lies in '../x.safetensors', must be the name of a"),
        ({"a": "sub/x.safetensors"}, "'a' lies in 'sub/x.safetensors'"),
        ({"a": "..\\x.safetensors"}, "'a' lies in "),
        ({"a": "/etc/passwd"}, "'a' lies in '/etc/passwd'"),
        ({"a": "model.bin"}, "'a' lies in 'model.bin'"),
        ({"a": 1}, "'a' lies in 1, must be"),
        ([FIRST], "weight_map must be an object .* got list"),
    ],
)
def test_index_that_contradicts_the_shards(
    weight_map: object, message: str, tmp_path: Path
) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFolder(tmp_path)


def test_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"b": np.ones(1, "f4"), "extra": np.ones(1, "f4")}, tmp_path / SECOND)
    with pytest.raises(CheckpointError, match=f"{SECOND}: tensor 'extra' is not listed in {INDEX}"):
        SafetensorsFolder(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"b": np.ones(1, "f4"), "a": np.ones(1, "f4")}, tmp_path / SECOND)
    with pytest.raises(CheckpointError, match=f"{SECOND}: tensor 'a' is also in {FIRST}"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{oops", "must be JSON"),
        ("", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "weight_map must be an object .* got NoneType"),
        ('{"weight_map": {}}', "weight_map must be an object .* got no entries"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' appears twice"),
    ],
)
def test_index_that_is_no_index(index: str, message: str, tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFolder(tmp_path)
    assert str(tmp_path / INDEX) in str(caught.value)


def test_index_of_a_size_no_index_has(tmp_path: Path) -> None:
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(CheckpointError, match="has 100000001 bytes, must have at most 100000000"):
        SafetensorsFolder(tmp_path)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=f"holds neither model.safetensors nor {INDEX}"):
        SafetensorsFolder(tmp_path)
    with pytest.raises(ModelNotFoundError, match="absent: no such file"):
        SafetensorsFolder(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(NotSupportedError, match="convert them to"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(VALID)
    with pytest.raises(CheckpointError, match=r"holds x.safetensors but neither"):
        SafetensorsFolder(tmp_path)
