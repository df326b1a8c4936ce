"""Weights in the native kernels' formats: what a number becomes, and that products know no other.

The oracle is NumPy's decoding of the same blocks, which is compared with ggml's elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import gguf
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.errors import CheckpointError
from cupaged.loading.dequantize import BLOCK_TYPES, dequantize
from cupaged.ops import STORED_DTYPES
from cupaged.ops import _native as native
from cupaged.ops.native_ops import NativeOps, NativeWeight
from tests import reference
from tests.ops.cpu_kernels import INSTRUCTIONS, INTEGER_PRODUCTS, using
from tests.ops.test_cpu_ops import normal, poisoned

F32 = NDArray[np.float32]
QUANTISED = ["Q8_0", "Q4_0", "Q4_1"]
TYPES = {name: next(t for t in BLOCK_TYPES.values() if t.name == name) for name in QUANTISED}


@pytest.fixture(params=INSTRUCTIONS, autouse=True)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


def blocks_of(stored: str, rows: int, blocks: int, seed: int = 0) -> NDArray[np.void]:
    """Any bytes with scales of usual size."""
    rng, dtype = np.random.default_rng(seed), STORED_DTYPES[stored]
    made = rng.integers(0, 256, (rows, blocks * dtype.itemsize), np.uint8).view(dtype)
    for name in set(dtype.names or ()) - {"q"}:
        made[name] = rng.standard_normal((rows, blocks)) / 50
    return made


def decoded(stored: str, blocks: NDArray[np.void]) -> F32:
    out = np.empty((len(blocks), blocks.shape[1] * 32), np.float32)
    dequantize(TYPES[stored], blocks.reshape(-1).view(np.uint8), out)
    return out


def rows_of(weight: NativeWeight) -> F32:
    out = poisoned(weight.out_features, weight.in_features)
    ids = np.arange(weight.out_features, dtype=np.int32)
    NativeOps().embedding(out, ids, weight)
    return out


def product(weight: NativeWeight, x: F32) -> F32:
    out = poisoned(len(x), weight.out_features)
    NativeOps().linear(out, x, weight)
    return out


@pytest.mark.parametrize("stored", QUANTISED)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 2), (37, 3), (130, 18)])
def test_kept_numbers_are_those_of_the_file(stored: str, rows: int, blocks: int) -> None:
    stored_blocks = blocks_of(stored, rows, blocks)
    weight = NativeOps("file").pack_weight(stored_blocks)
    assert weight.packed.nbytes == NativeOps("file").weight_bytes(rows, 32 * blocks, False, stored)
    np.testing.assert_array_equal(rows_of(weight), decoded(stored, stored_blocks))


@pytest.mark.parametrize("stored", QUANTISED)
def test_scales_of_every_kind(stored: str) -> None:
    """Smallest and largest, zeros of both signs, infinities and NaN."""
    scales = np.array([2**-24, 1023 * 2**-24, 2**-14, 8000, 0.0, -0.0, -1.5])
    special = [65504, np.nan, np.inf, -np.inf] if stored != "Q4_0" else []
    scales = np.append(scales, special)
    blocks = blocks_of(stored, len(scales), 1)
    blocks["d"][:, 0] = scales
    weight = NativeOps("file").pack_weight(blocks)
    np.testing.assert_array_equal(rows_of(weight), decoded(stored, blocks))


@pytest.mark.parametrize("scale", [8192.0, np.inf, np.nan])
def test_a_scale_of_q4_0_that_cannot_be_kept(scale: float) -> None:
    blocks = blocks_of("Q4_0", 3, 2)
    blocks["d"][1, 1] = scale
    with pytest.raises(CheckpointError, match=rf"Q4_0 is {scale:g}, at most 8188 can be kept"):
        NativeOps("file").pack_weight(blocks)


@pytest.mark.parametrize("stored", QUANTISED)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 13, 64, 129, 300])
def test_products_of_kept_weights_are_those_of_float32(stored: str, rows: int) -> None:
    """Bit by bit where they are expanded, as near to the exact result where they are integers."""
    blocks = blocks_of(stored, 53, 9)
    kept = NativeOps("file").pack_weight(blocks, normal(1, 53))
    floats = NativeOps("float32").pack_weight(decoded(stored, blocks), normal(1, 53))
    x = normal(2, 300, 9 * 32)
    result, expected = product(kept, x[:rows]), product(floats, x)[:rows]
    exact = reference.linear(x[:rows], decoded(stored, blocks), normal(1, 53))
    if native.instructions() in INTEGER_PRODUCTS:
        assert np.abs(result - exact).max() < 1e-6 * np.abs(exact).max()
    else:
        np.testing.assert_array_equal(result, expected)
    assert np.abs(expected - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("stored", QUANTISED)
@pytest.mark.parametrize(("out_features", "blocks"), [(1, 1), (15, 2), (33, 18), (200, 3)])
def test_a_row_of_kept_weights_does_not_depend_on_its_company(
    stored: str, out_features: int, blocks: int
) -> None:
    """Nor on the unit that multiplies integers, nor on the threads."""
    weight = NativeOps("file").pack_weight(blocks_of(stored, out_features, blocks))
    x = normal(4, 300, 32 * blocks)
    together = product(weight, x)
    asked = native.instructions()
    alike = sorted(INTEGER_PRODUCTS & set(INSTRUCTIONS)) if asked in INTEGER_PRODUCTS else [asked]
    for instructions, threads in [(name, n) for name in alike for n in (1, 3)]:
        with using(instructions, threads):
            for first, count in ((0, 1), (7, 2), (60, 4), (60, 5), (3, 16), (100, 37), (20, 280)):
                part = slice(first, first + count)
                np.testing.assert_array_equal(product(weight, x[part]), together[part])


@pytest.mark.parametrize("stored", QUANTISED)
def test_rows_of_every_size(stored: str) -> None:
    """Each as exact as its own blocks allow, be its neighbours tiny, huge, zero or no numbers."""
    blocks = blocks_of(stored, 19, 3)
    weight = NativeOps("file").pack_weight(blocks)
    x = normal(5, 24, 96)
    sizes = np.array([1e-37, 1e-30, 1e-20, 1e-5, 1.0, 1e5, 1e20, 1e30], np.float32)
    x[:8] *= sizes[:, None]
    x[8] = 0.0
    x[9] = np.float32(2**22 - 1) * np.sign(x[9])
    x[10] = np.nextafter(np.float32(2), np.float32(0)) * np.sign(x[10])  # rounds up to a power of 2
    x[11] = np.where(np.arange(96) % 5, 1.0, -1.0)
    x[12, ::32] *= 1e4  # one large number in each block
    x[13, :32] *= 1e10  # blocks of different sizes
    x[14] = np.float32(1e-45)
    x[15] = np.abs(x[15])  # sums that do not cancel
    x[20, 5], x[21, 40], x[22, 95] = np.nan, np.inf, -np.inf
    result = product(weight, x)
    good = np.isfinite(x).all(axis=1)
    assert not np.isfinite(result[~good]).any()
    exact = reference.linear(x[good], decoded(stored, blocks), None)
    largest = np.abs(x[good]).reshape(-1, 3, 32).max(axis=2).repeat(32, axis=1)
    allowed = 3e-7 * reference.linear(largest, np.abs(decoded(stored, blocks)), None)
    assert (np.abs(result[good] - exact) <= allowed + 2e-37).all()


@pytest.mark.parametrize("in_features", [1, 31, 33, 257, 600, 1100])
@pytest.mark.parametrize("out_features", [1, 15, 17, 200])
def test_a_row_does_not_depend_on_its_company(out_features: int, in_features: int) -> None:
    weight = NativeOps("float32").pack_weight(normal(3, out_features, in_features))
    x = normal(4, 400, in_features)
    together = product(weight, x)
    for first, count in ((0, 1), (7, 2), (60, 5), (3, 11), (100, 37), (20, 128), (30, 257)):
        part = slice(first, first + count)
        np.testing.assert_array_equal(product(weight, x[part]), together[part])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_bit(threads: int) -> None:
    weight = NativeOps("float32").pack_weight(normal(3, 300, 70))
    x = normal(4, 40, 70)
    expected = [product(weight, x[:n]) for n in (1, 5, 40)]
    with using(native.instructions(), threads):
        for rows, values in zip((1, 5, 40), expected, strict=True):
            np.testing.assert_array_equal(product(weight, x[:rows]), values)


def test_bfloat16_is_kept_or_rounded() -> None:
    floats = normal(5, 40, 33)
    floats[0, :6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38]
    floats[1, :2] = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)  # halfway
    rounded = floats.astype(ml_dtypes.bfloat16)
    for weight in (
        NativeOps("bfloat16").pack_weight(floats),
        NativeOps("bfloat16").pack_weight(rounded),
        NativeOps("auto").pack_weight(rounded),
    ):
        np.testing.assert_array_equal(rows_of(weight), rounded.astype(np.float32))
        assert weight.packed.nbytes == 48 * 33 * 2


def test_q8_is_what_ggml_makes_of_it() -> None:
    floats = normal(6, 20, 96)
    floats[3] = 0.0
    floats[4, 5] = 60000.0
    blocks = gguf.quants.quantize(floats, gguf.GGMLQuantizationType.Q8_0)
    expected = decoded("Q8_0", blocks.view(STORED_DTYPES["Q8_0"]))
    weight = NativeOps("q8").pack_weight(floats)
    np.testing.assert_array_equal(rows_of(weight), expected)
    assert weight.packed.nbytes == 32 * 3 * 34


@pytest.mark.parametrize("number", [8.4e6, -8.4e6, np.inf, -np.inf, np.nan])
def test_a_number_that_q8_has_not(number: float) -> None:
    floats = normal(8, 3, 64)
    floats[2, 40] = number
    message = re.escape(f"is {abs(number):g}, at most 8.31901e+06 can be rounded to q8")
    with pytest.raises(CheckpointError, match=message):
        NativeOps("q8").pack_weight(floats)


def test_q8_of_rows_that_are_not_whole_blocks_is_float32() -> None:
    floats = normal(7, 5, 33)
    weight = NativeOps("q8").pack_weight(floats)
    np.testing.assert_array_equal(rows_of(weight), floats)
    assert weight.packed.nbytes == NativeOps("q8").weight_bytes(5, 33, False) == 16 * 33 * 4
