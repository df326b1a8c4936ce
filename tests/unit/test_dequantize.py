"""Dequantisation against the `gguf` package, bit by bit, and against hand-computed blocks."""

from __future__ import annotations

import tracemalloc
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.loading.dequantize import BLOCK_TYPES, GGML_TYPE_NAMES, BlockType, dequantize

BY_NAME = {block_type.name: block_type for block_type in BLOCK_TYPES.values()}
SLICE_ELEMENTS = 1 << 16
# As float16 bits: zeros, subnormals, the smallest normal, 1 and -1, the largest, infinities, NaN.
# fmt: off
SPECIAL_SCALES = np.array([
    0, 0x8000, 1, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF,
    0x7C00, 0xFC00, 0x7E00, 0xFE00,
], np.uint16)
# Where the float16 numbers of a block stand.
HALVES_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}
# fmt: on


def decode(name: str, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    block_type = BY_NAME[name]
    out = np.full(stored.size // block_type.block_bytes * block_type.block_elements, 7, np.float32)
    dequantize(block_type, stored.ravel(), out)
    return out


def oracle(name: str, stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        values = gguf.dequantize(stored, gguf.GGMLQuantizationType[name])
    return np.asarray(values, np.float32).ravel()


def assert_same_bits(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Equal bits, so that -0 differs from 0; a NaN may carry any payload."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def half(value: float) -> bytes:
    return np.array(value, "<f2").tobytes()


SUPERBLOCK_SCALES = bytes([0xC1] * 4 + [0x42] * 4 + [0x35] * 4)


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_blocks_have_the_sizes_ggml_gives_them(number: int) -> None:
    block_type = BLOCK_TYPES[number]
    quantization = gguf.GGMLQuantizationType(number)
    assert quantization.name == block_type.name
    sizes = gguf.GGML_QUANT_SIZES[quantization]
    assert sizes == (block_type.block_elements, block_type.block_bytes)


def test_type_names_are_ggmls() -> None:
    theirs = {member.value: member.name for member in gguf.GGMLQuantizationType}
    assert {number: theirs.get(number, name) for number, name in GGML_TYPE_NAMES.items()} == (
        GGML_TYPE_NAMES
    )
    assert {number: name for number, name in theirs.items() if number <= 30}.items() <= (
        GGML_TYPE_NAMES.items()
    )


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_random_bytes_equal_the_oracle(name: str) -> None:
    # Random bytes hold every kind of number, infinities and NaN included.
    stored = np.random.default_rng(1).integers(0, 256, (64, 4096), np.uint8)
    stored = stored[:, : 4096 // BY_NAME[name].block_bytes * BY_NAME[name].block_bytes].copy()
    assert_same_bits(decode(name, stored), oracle(name, stored))


@pytest.mark.parametrize("name", sorted(HALVES_AT))
def test_every_special_scale_equals_the_oracle(name: str) -> None:
    count = len(SPECIAL_SCALES)
    stored = np.random.default_rng(2).integers(0, 256, (count**2, BY_NAME[name].block_bytes), "u1")
    pairs = (axis.ravel() for axis in np.meshgrid(SPECIAL_SCALES, SPECIAL_SCALES))
    for at, halves in zip(HALVES_AT[name], pairs, strict=False):
        stored[:, at : at + 2] = halves[:, None].view(np.uint8)
    assert_same_bits(decode(name, stored), oracle(name, stored))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("fill", [0x00, 0x3F, 0x55, 0x7F, 0x80, 0xAA, 0xC0, 0xFF])
def test_extreme_bits_of_a_superblock_equal_the_oracle(name: str, fill: int) -> None:
    """All scales, minima and numbers at their ends, under ordinary float16 scales."""
    stored = np.full((64, BY_NAME[name].block_bytes), fill, np.uint8)
    halves = np.linspace(-2, 2, 64).astype("<f2")
    for at in HALVES_AT[name]:
        stored[:, at : at + 2] = halves[:, None].view(np.uint8)
    assert_same_bits(decode(name, stored), oracle(name, stored))


def test_every_half_and_bfloat16() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        halves = bits.view(np.float16).astype(np.float32)
        brains = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    assert_same_bits(decode("F16", bits.view(np.uint8)), halves)
    assert_same_bits(decode("BF16", bits.view(np.uint8)), brains)


@pytest.mark.parametrize(
    ("name", "block", "expected"),
    [
        # Low nibbles of the 16 bytes are elements 0-15, high nibbles are elements 16-31.
        ("Q4_0", half(-0.5) + bytes([0xF0] * 16), [4.0] * 16 + [-3.5] * 16),
        ("Q4_0", half(2) + bytes(range(16)), [2.0 * (q - 8) for q in range(16)] + [-16.0] * 16),
        ("Q4_1", half(0.25) + half(-1) + bytes([0x4F] * 16), [2.75] * 16 + [0.0] * 16),
        ("Q8_0", half(-1.5) + bytes([0x80, 0x7F] * 16), [192.0, -190.5] * 16),
        ("Q8_0", half(2**-24) + bytes([3] * 32), [3 * 2.0**-24] * 32),
        # Groups 0-3 have scale 1 and minimum 2; groups 4-7 have 3 * 16 + 5 = 53 and 16 + 3 = 19.
        (
            "Q4_K",
            half(1) + half(2) + SUPERBLOCK_SCALES + bytes([0xF1] * 128),
            ([-3.0] * 32 + [11.0] * 32) * 2 + ([15.0] * 32 + [757.0] * 32) * 2,
        ),
        # The fifth bits of groups 1 and 7 are set: 31 in place of 15.
        (
            "Q5_K",
            half(1) + half(2) + SUPERBLOCK_SCALES + bytes([0x82] * 32) + bytes([0xF1] * 128),
            [-3.0] * 32 + [27.0] * 32 + [-3.0] * 32 + [11.0] * 32
            + [15.0] * 32 + [757.0] * 32 + [15.0] * 32 + [1605.0] * 32,
        ),
        # Rows of 32: 1, 16 + 1, 32 + 2 and 48 + 2, each less 32; scales -2 / 2 and then 3 / 2.
        (
            "Q6_K",
            bytes([0x21] * 128 + [0b11100100] * 64 + [0xFE] * 8 + [3] * 8) + half(0.5),
            [31.0] * 32 + [15.0] * 32 + [-2.0] * 32 + [-18.0] * 32
            + [-46.5] * 32 + [-22.5] * 32 + [3.0] * 32 + [27.0] * 32,
        ),
        ("BF16", bytes([0x80, 0x3F, 0x00, 0xC0]), [1.0, -2.0]),
        ("F16", bytes([0x00, 0x3C, 0x01, 0x80]), [1.0, -(2.0**-24)]),
        ("F32", bytes([0, 0, 0x20, 0xC1]), [-10.0]),
    ],
)  # fmt: skip
def test_blocks_computed_by_hand(name: str, block: bytes, expected: list[float]) -> None:
    assert decode(name, np.frombuffer(block, np.uint8)).tolist() == expected


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_slice_edges(name: str, extra: int) -> None:
    block_type = BY_NAME[name]
    num_blocks = 2 * SLICE_ELEMENTS // block_type.block_elements + extra
    rng = np.random.default_rng(3)
    stored = rng.integers(0, 256, (1, num_blocks * block_type.block_bytes), np.uint8)
    assert_same_bits(decode(name, stored), oracle(name, stored))


@pytest.mark.parametrize("block_type", BLOCK_TYPES.values(), ids=lambda known: known.name)
def test_decodes_into_part_of_an_array_with_little_memory(block_type: BlockType) -> None:
    # Stored at an odd address, as a safetensors file may have it.
    num_blocks = min(65536, (1 << 21) // block_type.block_elements)
    stored: NDArray[Any] = np.zeros(8 * num_blocks * block_type.block_bytes + 1, np.uint8)[1:]
    large = np.full((10, num_blocks, block_type.block_elements), 7, np.float32)
    tracemalloc.start()
    dequantize(block_type, stored, large[1:9])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    zero_block = oracle(block_type.name, np.zeros((1, block_type.block_bytes), np.uint8))
    assert np.array_equal(large[1:9], np.broadcast_to(zero_block, large[1:9].shape))
    assert (large[[0, 9]] == 7).all()


def test_nothing_decodes_into_nothing() -> None:
    dequantize(BY_NAME["Q4_1"], np.empty(0, np.uint8), np.empty((0, 32), np.float32))
