"""Turning stored numbers, plain or in quantised blocks, into float32.

Owns the block layouts of ggml and the table of those that can be decoded. It never allocates the
result and never touches a file: bytes come in, a float32 array that exists already is filled, a
cache-sized slice at a time. Decoded values are bit-equal to ggml's own reference.

To add a type, write its decode function and its row in `BLOCK_TYPES`; nothing else names types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK_TYPES", "GGML_TYPE_NAMES", "BlockType", "dequantize"]

Blocks = NDArray[np.uint8]
Floats = NDArray[np.float32]

_SLICE_ELEMENTS = 1 << 16  # 256 KiB of float32: a slice and its temporaries stay in the L2 cache


@dataclass(frozen=True, slots=True)
class BlockType:
    """How numbers are stored: `block_elements` of them in every `block_bytes`.

    `decode(blocks, out)` takes uint8 `[num_blocks, block_bytes]` and fills float32
    `[num_blocks, block_elements]`.
    """

    name: str
    block_elements: int
    block_bytes: int
    decode: Callable[[Blocks, Floats], None]


def dequantize(block_type: BlockType, stored: Blocks, out: NDArray[Any]) -> None:
    """Decode `stored`, uint8 `[nbytes]`, into `out`: float32, C-contiguous, of any shape.

    An `out` of the stored type takes the bits as they are.

    The sizes must agree: `stored` holds `out.size / block_elements` blocks. Scales that are
    infinite or NaN give infinite or NaN weights, silently, as ggml does.
    """
    assert out.flags.c_contiguous, "reshaping would decode into a copy"
    if out.dtype != np.float32:
        np.copyto(out.reshape(-1).view(np.uint8), stored)
        return
    num_blocks = out.size // block_type.block_elements
    assert num_blocks * block_type.block_elements == out.size
    assert num_blocks * block_type.block_bytes == stored.size
    blocks = stored.reshape(num_blocks, block_type.block_bytes)
    floats = out.reshape(num_blocks, block_type.block_elements)
    step = _SLICE_ELEMENTS // block_type.block_elements
    with np.errstate(all="ignore"):
        for start in range(0, num_blocks, step):
            block_type.decode(blocks[start : start + step], floats[start : start + step])


def _scale(blocks: Blocks, offset: int) -> Floats:
    """The float16 at byte `offset` of each block, as float32 `[num_blocks, 1]`."""
    return blocks[:, offset : offset + 2].view("<f2").astype(np.float32)


def _f32(blocks: Blocks, out: Floats) -> None:
    np.copyto(out, blocks.view("<f4"))


def _f16(blocks: Blocks, out: Floats) -> None:
    np.copyto(out, blocks.view("<f2"))


def _bf16(blocks: Blocks, out: Floats) -> None:
    """A bfloat16 is the upper half of a float32."""
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q8_0(blocks: Blocks, out: Floats) -> None:
    """float16 d, int8 q[32]: d * q."""
    np.multiply(blocks[:, 2:].view(np.int8), _scale(blocks, 0), out=out)


def _q4_0(blocks: Blocks, out: Floats) -> None:
    """float16 d, 16 bytes: d * (q - 8), q the low nibbles of all bytes and then the high ones."""
    d, packed = _scale(blocks, 0), blocks[:, 2:]
    np.subtract(packed & 15, np.float32(8), out=out[:, :16])
    np.subtract(packed >> 4, np.float32(8), out=out[:, 16:])
    np.multiply(out, d, out=out)


def _q4_1(blocks: Blocks, out: Floats) -> None:
    """float16 d, float16 m, 16 bytes: d * q + m, nibbles as in Q4_0."""
    d, m, packed = _scale(blocks, 0), _scale(blocks, 2), blocks[:, 4:]
    np.multiply(packed & 15, d, out=out[:, :16])
    np.multiply(packed >> 4, d, out=out[:, 16:])
    np.add(out, m, out=out)


def _k_scales(blocks: Blocks) -> tuple[Floats, Floats]:
    """Scales and minima of the 8 groups of a Q4_K or Q5_K block, each float32 `[num_blocks, 8, 1]`.

    float16 d and m, then 12 bytes of 6-bit numbers: 4 bytes with the scales of groups 0-3, 4 bytes
    with their minima, 4 bytes whose nibbles are the lower bits of the scales (low) and minima
    (high) of groups 4-7. The two bits that these lack are the upper ones of the first 8 bytes.
    """
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    scales, minima, nibbles = packed[:, 0], packed[:, 1], packed[:, 2]
    both = np.empty((len(blocks), 2, 8), np.float32)
    both[:, 0, :4] = scales & 63
    both[:, 1, :4] = minima & 63
    both[:, 0, 4:] = (nibbles & 15) | (scales >> 2 & 48)
    both[:, 1, 4:] = (nibbles >> 4) | (minima >> 2 & 48)
    both *= blocks[:, :4].view("<f2").astype(np.float32)[:, :, None]
    return both[:, 0, :, None], both[:, 1, :, None]


def _nibble_groups(packed: Blocks) -> Blocks:
    """uint8 `[num_blocks, 128]` to `[num_blocks, 8, 32]`: low nibbles of 32 bytes, then high."""
    packed = packed.reshape(-1, 4, 32)
    q = np.empty((len(packed), 4, 2, 32), np.uint8)
    np.bitwise_and(packed, 15, out=q[:, :, 0])
    np.right_shift(packed, 4, out=q[:, :, 1])
    return q.reshape(-1, 8, 32)


def _q4_k(blocks: Blocks, out: Floats) -> None:
    """Scales and minima of 8 groups of 32, 128 bytes: d * q - m, q the nibbles."""
    d, m = _k_scales(blocks)
    values = out.reshape(-1, 8, 32)
    np.copyto(values, _nibble_groups(blocks[:, 16:]))
    np.multiply(values, d, out=values)
    np.subtract(values, m, out=values)


def _q5_k(blocks: Blocks, out: Floats) -> None:
    """As Q4_K, with 32 bytes before the nibbles: bit i of byte j is bit 4 of group i's number j."""
    d, m = _k_scales(blocks)
    q = _nibble_groups(blocks[:, 48:])
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q |= fifth << 4
    values = out.reshape(-1, 8, 32)
    np.copyto(values, q)
    np.multiply(values, d, out=values)
    np.subtract(values, m, out=values)


def _q6_k(blocks: Blocks, out: Floats) -> None:
    """128 bytes of nibbles, 64 of upper bits, int8 scales of 16 groups of 16, float16 d:
    d * scale * (q - 32).

    Each half of a block is 4 rows of 32 numbers: the low nibbles of its 64 bytes are rows 0 and 1,
    the high ones rows 2 and 3, and bits 2r and 2r + 1 of its 32 upper bytes belong to row r.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    q = np.empty((len(blocks), 2, 4, 32), np.uint8)
    np.right_shift(low, np.array([0, 4], np.uint8)[:, None, None], out=q.reshape(-1, 2, 2, 2, 32))
    q &= 15
    q |= (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3) << 4
    np.subtract(q.reshape(out.shape), np.float32(32), out=out)
    d = blocks[:, 192:208].view(np.int8) * _scale(blocks, 208)
    groups = out.reshape(-1, 16, 16)
    np.multiply(groups, d[:, :, None], out=groups)


# ggml's number of a type -> how it is decoded: name, elements and bytes of a block, function.
BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _bf16),
}

# Every number that ggml has given to a type, so that one we cannot decode is refused by name.
# fmt: off
GGML_TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}
# fmt: on
