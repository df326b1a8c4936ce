"""Reference cases for the products, sharp enough to tell mutants from the original.

The sums are NumPy's, in float32 and in the order that `cuda/gemm.cuh` states: products of the
numbers used here are exact in float32, so that results must agree in every bit. That they are right
is checked in float64. Outputs and workspaces begin as NaN, and one row of x is NaN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupaged.emulator.module import EmulatedModule
from tests.emulator.mutant_cases import F16, F32, I32, MANY_STEPS, Variant
from tests.ops.reference_gemm import packed

Array = NDArray[Any]
later = functools.partial(Variant, max_steps=MANY_STEPS, global_races=True)
BF16 = ml_dtypes.bfloat16
TILE = 64  # features of a block that computes one chunk
NAN_ROW = 3
TINY = (-1e-30, 1e-30)


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _cast(values: Array, dtype: type) -> Array:
    return values.astype(np.dtype(dtype))


def _nan(shape: tuple[int, ...], dtype: type) -> Array:
    return np.full(shape, np.nan, np.dtype(dtype))


@dataclass(frozen=True, slots=True)
class Product:
    """A launch: the kernel, the tokens of its tile, the sizes of the product.

    tiny: every product is a negative number, too small for float32: all sums are -0.0.
    """

    kernel: str
    tile_tokens: int
    num_tokens: int
    out_features: int
    in_features: int
    chunk: int
    tiny: bool = False


@functools.cache
def _operands(case: Product, dtype: type) -> tuple[Array, Array, Array]:
    """x, W, bias; of float32 only numbers that float16 has, unless they are tiny."""
    rng = np.random.default_rng(1)
    shapes = ((case.num_tokens, case.in_features), (case.out_features, case.in_features))
    if case.tiny:
        x, weight = (np.full(shape, value, F32) for shape, value in zip(shapes, TINY, strict=True))
        return x, weight, np.full(case.out_features, -0.0, F32)
    narrow = F16 if dtype is F32 else dtype
    x, weight = (_cast(_cast(rng.standard_normal(shape), narrow), dtype) for shape in shapes)
    if case.num_tokens > NAN_ROW:
        x[NAN_ROW] = np.nan
    return x, weight, (10 * rng.standard_normal(case.out_features)).astype(F32)


@functools.cache
def _expected(case: Product, dtype: type, has_bias: bool) -> Array:
    """x W^T (+ b) in float32: chunk by chunk, step by step of 32 columns."""
    x, weight, bias = _operands(case, dtype)
    if case.tiny:
        return np.full((case.num_tokens, case.out_features), -0.0, F32)
    stride = _padded(case.in_features, 64)
    columns = np.arange(32)
    if dtype is not F32:  # how a step's two products on the tensor cores take them
        first = [8 * t + 2 * half + j for half in (0, 1) for t in range(4) for j in (0, 1)]
        columns = np.array(first + [column + 4 for column in first])
    order = (np.arange(0, stride, 32)[:, None] + columns).reshape(-1)
    x32, weight32 = (
        np.pad(a.astype(F32), ((0, 0), (0, stride - case.in_features))) for a in (x, weight)
    )
    x32[:, case.in_features :] = 0
    total = np.full((case.num_tokens, case.out_features), -0.0, F32)
    for begin in range(0, stride, case.chunk):
        of_chunk = np.zeros_like(total)
        for column in order[begin : min(begin + case.chunk, stride)]:
            of_chunk += x32[:, column, None] * weight32[:, column]
        total += of_chunk
    added = bias if has_bias else F32(0)
    total += added
    wide = x.astype(np.float64) @ weight.astype(np.float64).T + added
    np.testing.assert_allclose(total, wide, rtol=1e-5, atol=1e-4)
    return total


def _sizes(case: Product) -> list[np.int32]:
    stride = _padded(case.in_features, 64)
    sizes = (case.num_tokens, case.out_features, case.in_features, stride, case.chunk)
    return [I32(size) for size in sizes]


def _check(module: EmulatedModule, case: Product, dtype: type, out_dtype: type) -> None:
    """One launch; a bias of an output that is not float32 is left out."""
    x, weight, bias = _operands(case, dtype)
    has_bias = out_dtype is F32
    expected = _expected(case, dtype, has_bias)
    operands = [x, packed(weight), bias] if has_bias else [x, packed(weight)]
    out = _nan(expected.shape, out_dtype)
    kernel = module.get_function(case.kernel)
    token_tiles = -(-case.num_tokens // case.tile_tokens)
    if "rows" in case.kernel:
        chunks = -(-_padded(case.in_features, 64) // case.chunk)
        tiles = -(-case.out_features // TILE) * token_tiles
        floats = tiles * chunks * TILE * case.tile_tokens if chunks > 1 else 1
        partial = np.full(floats, np.nan, F32)
        tickets = np.zeros(tiles, I32)
        kernel((tiles, chunks), (128,), [out, partial, tickets, *operands, *_sizes(case)])
        np.testing.assert_array_equal(tickets, 0)
    else:
        features, threads, shared = SHAPES[case.kernel]
        kernel.max_dynamic_shared_size_bytes = max(shared, 48 * 1024)
        tiles = -(-case.out_features // features) * token_tiles
        kernel((tiles,), (threads,), [out, *operands, *_sizes(case)], shared_mem=shared)
    np.testing.assert_array_equal(out.astype(F32), _cast(expected, out_dtype).astype(F32))
    assert not case.tiny or np.signbit(out).all()


SHAPES = {  # features of a tile, threads, shared memory
    "gemm_tiles_64": (64, 128, 49152),
    "gemm_tiles_128": (128, 256, 98304),
    "gemm_tiles_256": (256, 256, 98304),
    "gemm_f32_tiles": (64, 128, 0),
}
ROWS = (
    Product("gemm_rows_8", 8, 16, 70, 77, 64),
    Product("gemm_rows_16", 16, 13, 20, 600, 384),
    Product("gemm_rows_32", 32, 13, 40, 320, 192),
    Product("gemm_rows_8", 8, 11, 17, 584, 640),
    Product("gemm_rows_8", 8, 9, 20, 72, 64),
    Product("gemm_rows_8", 8, 1, 16, 64, 64),
    Product("gemm_rows_16", 16, 16, 20, 136, 64),
    Product("gemm_rows_32", 32, 32, 20, 136, 64),
    Product("gemm_rows_32", 32, 37, 24, 51, 64),
)
TILES = (
    Product("gemm_tiles_64", 64, 70, 75, 77, 64),
    Product("gemm_tiles_64", 64, 66, 68, 320, 128),
    Product("gemm_tiles_128", 128, 130, 20, 72, 64),
    Product("gemm_tiles_256", 128, 20, 200, 192, 192),
    Product("gemm_tiles_256", 128, 100, 20, 64, 64),
    Product("gemm_tiles_64", 64, 5, 80, 40, 64),
    Product("gemm_tiles_64", 64, 5, 81, 40, 64),
)
F32_KERNELS = (
    Product("gemm_f32_rows", 16, 21, 70, 77, 64),
    Product("gemm_f32_rows", 16, 13, 20, 136, 128),
    Product("gemm_f32_tiles", 64, 70, 68, 136, 128),
    Product("gemm_f32_tiles", 64, 9, 20, 77, 64),
    Product("gemm_f32_rows", 16, 2, 20, 128, 64, tiny=True),
    Product("gemm_f32_tiles", 64, 2, 20, 128, 64, tiny=True),
    Product("gemm_f32_tiles", 64, 1081, 2, 8, 64),
    Product("gemm_f32_tiles", 64, 1081, 2, 7, 64),
)


def check_rows(module: EmulatedModule, dtype: type = F16, out_dtype: type = F32) -> None:
    """gemm_rows_8, 16 and 32: rows of x that are aligned and not, one chunk and several.

    Some chunks are shorter than what is loaded ahead.
    """
    for case in ROWS:
        _check(module, case, dtype, out_dtype)


def check_tiles(module: EmulatedModule, dtype: type = F16, out_dtype: type = F32) -> None:
    """gemm_tiles_64, 128 and 256: a part of a tile, rows of y that are aligned and not.

    The last block of W is full or has one row only; some products have fewer stages than fit.
    """
    for case in TILES:
        _check(module, case, dtype, out_dtype)


def check_f32(module: EmulatedModule) -> None:
    """gemm_f32_rows and gemm_f32_tiles, also with more tiles of tokens than go together."""
    for case in F32_KERNELS:
        _check(module, case, F32, F32)


def check_tile_order(module: EmulatedModule) -> None:
    """16 tiles of tokens go through the features together, tokens first; then the next 16."""
    for tiles, features_missing, tokens_missing in (
        ((3, 35), 0, 31), ((3, 35), 63, 0), ((1, 16), 0, 31), ((5, 1), 0, 31),
    ):  # fmt: skip
        feature_tiles, token_tiles = tiles
        out = np.full((feature_tiles * token_tiles, 2), -1, I32)
        numbers = (32 * token_tiles - tokens_missing, 64 * feature_tiles - features_missing, 64, 32)
        module.get_function("tile_order")((len(out),), (1,), [out, *map(I32, numbers)])
        expected = [
            (64 * feature, 32 * token)
            for group in range(0, token_tiles, 16)
            for feature in range(feature_tiles)
            for token in range(group, min(group + 16, token_tiles))
        ]
        np.testing.assert_array_equal(out, expected)


def check_pack(module: EmulatedModule, dtype: type = BF16, source: type = F32) -> None:
    """pack_weight: to rows and columns that are there already, and to some that are added."""
    for rows, columns in ((1, 1), (16, 64), (20, 33), (40, 130)):
        weight = _cast(np.random.default_rng(2).standard_normal((rows, columns)), source)
        expected = packed(_cast(weight, dtype))
        out = _nan(expected.shape, dtype)
        blocks = -(-out.nbytes // (16 * 256))
        sizes = [I32(size) for size in (*out.shape, rows, columns)]
        module.get_function("pack_weight")((blocks,), (256,), [out, weight, *sizes])
        np.testing.assert_array_equal(out.astype(F32), expected.astype(F32))


def check_embedding(module: EmulatedModule, dtype: type = F16) -> None:
    """embedding_packed: whole packs and not, more of them than threads."""
    ids = np.array([36, -5, 99, 8, 7, 0, 24, 37], I32)
    for hidden in (1, 7, 65, 8, 264):
        weight = _cast(np.random.default_rng(3).standard_normal((37, hidden)), dtype)
        table, out = packed(weight), _nan((len(ids), hidden), dtype)
        sizes = [I32(37), I32(hidden), I32(table.shape[1])]
        module.get_function("embedding_packed")((len(ids),), (16,), [out, ids, table, *sizes])
        np.testing.assert_array_equal(out, weight[ids.clip(0, 36)])


WIDE_F16 = {"DTYPE": "f16", "OUT_DTYPE": "f32", "BIAS": 1}
ROWS_F16 = later("gemm_rows.cu", check_rows, WIDE_F16)
ROWS_F16_OPTIMISED = replace(ROWS_F16, opt_level=1)
ROWS_BF16 = later("gemm_rows.cu", lambda m: check_rows(m, BF16, BF16), {"DTYPE": "bf16"})
TILES_F16 = later("gemm_tiles.cu", check_tiles, WIDE_F16)
TILES_BF16 = later("gemm_tiles.cu", lambda m: check_tiles(m, BF16, BF16), {"DTYPE": "bf16"})
ALL_F32 = later("gemm_f32.cu", check_f32, {"DTYPE": "f32", "BIAS": 1})
EMBEDDING_F16 = later("embedding_packed.cu", check_embedding, {"DTYPE": "f16"})
EMBEDDING_F32 = later("embedding_packed.cu", lambda m: check_embedding(m, F32))

GEMM: dict[str, list[Variant]] = {
    "gemm.cuh": [ROWS_F16, ROWS_BF16, ALL_F32, ROWS_F16_OPTIMISED],
    "gemm_chunks.cuh": [ROWS_F16],
    "gemm_rows.cu": [ROWS_F16, ROWS_F16_OPTIMISED],
    "gemm_f32.cu": [ALL_F32],
    "gemm_tiles.cu": [TILES_F16],
    "gemm_tile_stages.cuh": [TILES_F16],
    "gemm_tile_store.cuh": [TILES_F16, TILES_BF16],
    "gemm_tile_order.cuh": [later("tile_order.cu", check_tile_order, {"DTYPE": "f16"})],
    "gemm_pack.cu": [
        later("gemm_pack.cu", check_pack, {"DTYPE": "bf16"}),
        later("gemm_pack.cu", lambda m: check_pack(m, F32)),
        later(
            "gemm_pack.cu",
            lambda m: check_pack(m, F16, BF16),
            {"DTYPE": "f16", "SOURCE_DTYPE": "bf16"},
        ),
    ],
    "packed_weight.cuh": [EMBEDDING_F16, ROWS_F16],
    "embedding_packed.cu": [EMBEDDING_F16, EMBEDDING_F32],
}
