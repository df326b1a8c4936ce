"""Weights go up in parts through pinned memory, as they are stored if the device has that type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.loading import weights as loading
from cupaged.loading.model_files import open_model
from cupaged.loading.weights import load_weights
from cupaged.ops import gemm_plan
from cupaged.ops.cuda_gemm import CudaWeight
from cupaged.ops.cuda_ops import CudaOps
from cupaged.ops.gemm_plan import packing_bytes, packing_rows
from cupaged.ops.weight_packer import WeightPacker
from cupaged.runtime.dtypes import storage_dtype
from cupaged.runtime.protocol import Runtime
from tests.deferred_runtime import DeferredRuntime
from tests.fast_runtime import FastRuntime
from tests.ops import reference_gemm
from tests.ops.kernel_arrays import DTYPES, NUMPY, normal, same_bits
from tests.tiny_models import TINIER, DType, write_hf_folder

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e38, 6e-8, 65504.0]


def some_weight(shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        weight = normal(5, shape, dtype)
        weight.reshape(-1)[: len(SPECIAL)] = np.array(SPECIAL).astype(NUMPY[dtype])
    return weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7), (16, 64), (33, 130)])
def test_stored_numbers_give_the_bits_of_float32(
    shape: tuple[int, int], dtype: str, runtime: Runtime
) -> None:
    packer, stored = WeightPacker(runtime, storage_dtype(dtype)), some_weight(shape, dtype)
    with np.errstate(invalid="ignore"):
        converted = stored.astype(np.float32)
    from_stored = runtime.to_host(packer.pack(stored))
    same_bits(from_stored, runtime.to_host(packer.pack(converted)))
    numbers = np.isfinite(stored.astype(np.float64))
    finite = np.where(numbers, stored, stored.dtype.type(0))
    same_bits(runtime.to_host(packer.pack(finite)), reference_gemm.packed(finite))


def test_the_next_part_is_laid_out_while_two_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five parts, through two pinned buffers that the device reads as late as it can."""
    weight = normal(1, (80, 40), "float32")
    monkeypatch.setattr(gemm_plan, "_PACKING_BYTES", 16 * 40 * 4)
    runtime = DeferredRuntime()
    packer = WeightPacker(runtime, np.dtype(np.float32))
    packed = packer.pack(weight)
    assert runtime.asked["upload"] == runtime.asked["launch"] == 5
    assert runtime.asked["wait"] == 3  # for parts 1, 2 and 3, before 3, 4 and 5 are laid out
    assert runtime.submitted - runtime.done == 5  # packing of part 3, and all of 4 and 5
    vector = packer.upload(np.arange(40, dtype=np.float32))
    assert runtime.asked["wait"] == 4 and runtime.asked["blocking copy"] == 0
    packer.release()
    same_bits(runtime.to_host(packed), reference_gemm.packed(weight))
    np.testing.assert_array_equal(runtime.to_host(vector), np.arange(40))


def test_the_memory_that_packing_takes() -> None:
    """Parts of 16 MiB, of whole blocks of 16 rows; small weights are one part."""
    assert packing_rows(4096, 4) == 1024 and packing_rows(4096, 2) == 2048
    assert packing_rows(1 << 22, 4) == 16
    assert packing_bytes([(100_000, 4096), (4096, 14336)]) == 16 << 20
    assert packing_bytes([(20, 100)]) == 32 * 100 * 4
    assert packing_bytes([]) == 0


class Model:
    """A tiny model of a folder on a device, and the types of what was read on the way."""

    def __init__(
        self, folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, reads_floats: bool = False
    ) -> None:
        self.read: dict[str, str] = {}
        read_entry = loading.read_entry

        def noted(entry: Any, *args: Any) -> Any:
            if reads_floats:
                args = (*args[:2], None)
            weight, bias = read_entry(entry, *args)
            self.read[entry.name] = weight.dtype.name
            return weight, bias

        self.runtime = FastRuntime()
        files = open_model(folder)
        with monkeypatch.context() as patch:
            patch.setattr(loading, "read_entry", noted)
            ops = CudaOps(self.runtime, dtype)
            self.weights = load_weights(files.entries, files.reader, files.form, ops)
        files.reader.close()

    def bits(self) -> dict[str, NDArray[Any]]:
        arrays = {n: w.matrix if isinstance(w, CudaWeight) else w for n, w in self.weights.items()}
        return {name: self.runtime.to_host(array) for name, array in arrays.items()}


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_a_checkpoint_in_the_types_of_the_device_is_not_converted(
    stored: DType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_hf_folder(tmp_path / stored, TINIER, dtype=stored)
    model = Model(folder, stored, monkeypatch)
    linear = {name for name, weight in model.weights.items() if isinstance(weight, CudaWeight)}
    assert {model.read[name] for name in linear} == {stored} and len(linear) > 8
    converted = Model(folder, stored, monkeypatch, reads_floats=True)
    assert set(converted.read.values()) == {"float32"}
    for name, array in model.bits().items():
        same_bits(array, converted.bits()[name])


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float32", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "float32")],
)
def test_another_type_goes_by_float32(
    stored: DType, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_hf_folder(tmp_path / stored, TINIER, dtype=stored)
    assert set(Model(folder, dtype, monkeypatch).read.values()) == {"float32"}


def test_a_tied_head_is_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TINIER.tied
    model = Model(write_hf_folder(tmp_path, TINIER), "bfloat16", monkeypatch)
    assert "head" not in model.weights and "embed" in model.weights
