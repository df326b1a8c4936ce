"""Arrays of structs and vectors as arguments, empty arrays, and variables of a module."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.emulator import DataRaceError, EmulatedModule, LaunchError, OutOfBoundsError

ELEMENTS = """
#include <cuda_fp16.h>
struct Particle { float x, y, z; int id; };
struct Wide { double x; int id; };
extern "C" __global__ void particles(Particle* out) { out[threadIdx.x].id = out->x + threadIdx.x; }
extern "C" __global__ void wide(Wide* out) { out[threadIdx.x].x += 1; }
extern "C" __global__ void pairs(float2* out) { out[threadIdx.x].y += 1; }
extern "C" __global__ void doubles(double2* out) { out[threadIdx.x].y += 1; }
extern "C" __global__ void packs(float4* out) { out[threadIdx.x] = out[threadIdx.x + 1]; }
extern "C" __global__ void halves(__half2* out) { out[threadIdx.x].x = out[threadIdx.x].y; }
extern "C" __global__ void write(float* out) { out[threadIdx.x] = 1; }
namespace deep { template <class T> __device__ T shared_by_all[4]; }
extern "C" __global__ void race(float* out) {
  deep::shared_by_all<int>[2] = threadIdx.x;
  out[threadIdx.x] = deep::shared_by_all<int>[2];
}
extern "C" __global__ void count(float* out) { *out = ++deep::shared_by_all<unsigned>[0]; }
"""
PARTICLE = [("x", np.float32), ("y", np.float32), ("z", np.float32), ("id", np.int32)]


def run(module: EmulatedModule, name: str, array: Any, threads: int = 1) -> None:
    module.get_function(name)((1,), (threads,), (array,))


@pytest.fixture(scope="module")
def elements(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    file = tmp_path_factory.mktemp("elements") / "elements.cu"
    file.write_text(ELEMENTS)
    return EmulatedModule(file, global_races=True)


def test_arrays_of_structs(elements: EmulatedModule) -> None:
    array = np.zeros(2, PARTICLE)
    array["x"] = 5
    run(elements, "particles", array, threads=2)
    assert array["id"].tolist() == [5, 6]
    numbers = np.zeros(8, np.float32)  # the kernel reads packs of four
    run(elements, "particles", numbers, threads=2)
    assert numbers.view(np.int32).tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
    padded = np.zeros(2, np.dtype([("x", np.float64), ("id", np.int32)], align=True))
    run(elements, "wide", padded, threads=2)
    assert padded["x"].tolist() == [1, 1]


def test_arrays_of_vectors(elements: EmulatedModule) -> None:
    single, double = np.array([1, 2j], np.complex64), np.array([1, 2j])
    run(elements, "pairs", single, threads=2)
    run(elements, "doubles", double, threads=2)
    assert single.tolist() == double.tolist() == [1 + 1j, 3j]
    fields = np.zeros(2, [("a", np.float32), ("b", np.float32)])
    run(elements, "pairs", fields, threads=2)
    assert fields.tolist() == [(0, 1), (0, 1)]
    halves = np.array([1, 2, 3, 4], np.float16)
    run(elements, "halves", halves, threads=2)
    assert halves.tolist() == [2, 2, 4, 4]
    types: list[Any] = [np.float16, np.int8, np.int64, ml_dtypes.bfloat16]
    for dtype in types:
        array = np.arange(32 // np.dtype(dtype).itemsize).astype(dtype)
        expected = array[len(array) // 2 :].tolist() * 2
        run(elements, "packs", array)
        assert array.tolist() == expected


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("particles", np.zeros(2, PARTICLE[1:]), "elements of 16 bytes, .* elements have 12"),
        ("wide", np.zeros(2, [("x", "f8"), ("id", "i4")]), "elements of 16 bytes, .* have 12"),
        ("particles", np.zeros(2, object), "must be an array of numbers, got object"),
        ("pairs", np.zeros(2, np.complex128), "points to float32, got an array of complex128"),
        ("pairs", np.zeros(2, [("a", "f4"), ("b", "i4")]), "points to float32, got an array of"),
        ("write", np.zeros(2, np.complex64), "points to float32, got an array of complex64"),
        ("halves", np.zeros(2, np.float32), "points to float16, got an array of float32"),
    ],
)
def test_elements_of_another_type(
    elements: EmulatedModule, name: str, array: Any, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        run(elements, name, array)


def test_an_empty_array_is_named(elements: EmulatedModule) -> None:
    with pytest.raises(OutOfBoundsError, match=r"element 0 of 'out' .*, which has no elements"):
        run(elements, "write", np.zeros(0, np.float32))


def test_a_variable_of_the_module_is_named(elements: EmulatedModule) -> None:
    out = np.zeros(4, np.float32)
    with pytest.raises(
        DataRaceError, match=r"bytes 8 to 11 of the module's variable 'deep::shared_by_all<int>'"
    ) as found:
        run(elements, "race", out, threads=4)
    assert found.value.argument == "deep::shared_by_all<int>"


def test_variables_of_templates_belong_to_their_module(elements: EmulatedModule) -> None:
    """The loader merges some of them over all libraries unless the compiler is told."""
    for module in (elements, EmulatedModule(elements.path, {"OTHER": 1})):
        out = np.zeros(1, np.float32)
        run(module, "count", out)
        assert out[0] == 1
