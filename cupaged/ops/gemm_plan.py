"""How products and their weights are laid out and launched: pure functions of numbers.

Owns the padding and the chunks of a weight, the choice of the kernel for a number of tokens, and
the size of the workspace. A chunk is a function of the weight's shape alone; which kernel runs
changes no bit of a result. It knows no device and starts nothing; see `cuda/gemm.cuh` for the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

__all__ = [
    "MAX_FEW_TOKENS",
    "GemmLaunch",
    "ceil_div",
    "choose_launch",
    "chunk_columns",
    "packed_bytes",
    "packing_bytes",
    "packing_rows",
    "padded_columns",
    "padded_rows",
    "token_counts",
    "workspace_bytes",
    "workspace_sizes",
]

_GRANULE = 64  # columns; in packed_weight.cuh
_BLOCK_ROWS = 16  # in packed_weight.cuh
_MIN_CHUNK = 256
_MAX_CHUNKS = 64
_FEATURES = 64  # of a tile of the kernels for few tokens
# Blocks that such a launch should have where the weight is large enough: about four on each
# multiprocessor of a large GPU. A constant, because the order of summation follows from it.
_BLOCKS = 512
MAX_FEW_TOKENS = 64  # from here on reading the weight once more costs more than computing
_PACKING_BYTES = 16 << 20  # of numbers that are packed at a time, as they come
_TILE_TOKENS = 64  # the kernels for many tokens are chosen by multiples of it


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    """Which kernel computes a product, and how it is launched.

    partial_floats, tickets: sizes of the workspace that it uses; both 0 if it uses none.
    has_workspace: whether the kernel has parameters for it.
    """

    file: str
    kernel: str
    grid: tuple[int, ...]
    threads: int
    shared_memory_bytes: int = 0
    has_workspace: bool = False
    partial_floats: int = 0
    tickets: int = 0


@dataclass(frozen=True, slots=True)
class _TileKernel:
    """A kernel of gemm_tiles.cu. speed: per output, relative, when the device is full of tiles."""

    name: str
    features: int
    tokens: int
    threads: int
    shared_memory_bytes: int
    speed: float


_TILE_KERNELS = (
    _TileKernel("gemm_tiles_64", 64, 64, 128, 49152, 0.6),
    _TileKernel("gemm_tiles_128", 128, 128, 256, 98304, 0.85),
)
_ONE_CHUNK_KERNEL = _TileKernel("gemm_tiles_256", 256, 128, 256, 98304, 1.0)


def padded_rows(out_features: int) -> int:
    """Rows of a packed weight: a multiple of 16."""
    return ceil_div(out_features, _BLOCK_ROWS) * _BLOCK_ROWS


def padded_columns(in_features: int) -> int:
    """Columns of a packed weight: a multiple of 64."""
    return ceil_div(in_features, _GRANULE) * _GRANULE


def chunk_columns(out_features: int, in_features: int) -> int:
    """Columns of a chunk of the sum: a multiple of 64.

    As few chunks as give `_BLOCKS` blocks to the kernels for few tokens; none below 256 columns.
    The same for all storage types.
    """
    granules = padded_columns(in_features) // _GRANULE
    wanted = max(1, _BLOCKS // ceil_div(out_features, _FEATURES))
    chunk = ceil_div(granules, min(wanted, _MAX_CHUNKS)) * _GRANULE
    return max(_MIN_CHUNK, chunk)


@lru_cache(maxsize=1024)
def choose_launch(
    num_tokens: int, out_features: int, in_features: int, dtype: str, multiprocessors: int
) -> GemmLaunch:
    """How a product is computed. num_tokens: at least 1; dtype: "float32" and so on."""
    chunks = ceil_div(padded_columns(in_features), chunk_columns(out_features, in_features))
    if num_tokens <= MAX_FEW_TOKENS:
        return _few_tokens(num_tokens, out_features, chunks, dtype)
    if dtype == "float32":
        tiles = ceil_div(out_features, 64) * ceil_div(num_tokens, 64)
        return GemmLaunch("gemm_f32.cu", "gemm_f32_tiles", (tiles,), 128)
    fits_one_chunk_kernel = chunks == 1 and in_features % 8 == 0
    kernels = (*_TILE_KERNELS, _ONE_CHUNK_KERNEL) if fits_one_chunk_kernel else _TILE_KERNELS

    def tiles_of(kernel: _TileKernel) -> int:
        return ceil_div(out_features, kernel.features) * ceil_div(num_tokens, kernel.tokens)

    def time(kernel: _TileKernel) -> float:
        rounds = ceil_div(tiles_of(kernel), multiprocessors)
        return rounds * kernel.features * kernel.tokens / kernel.speed

    best = min(kernels, key=time)
    grid = (tiles_of(best),)
    return GemmLaunch("gemm_tiles.cu", best.name, grid, best.threads, best.shared_memory_bytes)


def workspace_bytes(max_tokens: int, shapes: Iterable[tuple[int, int]], dtype: str) -> int:
    """Bytes of the workspace for products of up to max_tokens tokens, one after another.

    Args:
        max_tokens: of a step; at least 1.
        shapes: (out_features, in_features) of each weight.
        dtype: storage type of the weights, "float32" and so on.
    """
    floats, tickets = workspace_sizes(max_tokens, shapes, dtype)
    return 4 * (floats + tickets)


def _few_tokens(num_tokens: int, out_features: int, chunks: int, dtype: str) -> GemmLaunch:
    if dtype == "float32":
        file, kernel, tokens = "gemm_f32.cu", "gemm_f32_rows", 16
    else:
        tokens = 8 if num_tokens <= 8 else 16 if num_tokens <= 16 else 32
        file, kernel = "gemm_rows.cu", f"gemm_rows_{tokens}"
    tiles = ceil_div(out_features, _FEATURES) * ceil_div(num_tokens, tokens)
    several = chunks > 1
    return GemmLaunch(
        file,
        kernel,
        (tiles, chunks),
        threads=128,
        has_workspace=True,
        partial_floats=several * chunks * tiles * _FEATURES * tokens,
        tickets=several * tiles,
    )


def workspace_sizes(
    max_tokens: int, shapes: Iterable[tuple[int, int]], dtype: str
) -> tuple[int, int]:
    """Floats and tickets: the largest that any number of tokens takes; more tokens never less."""
    floats, tickets = 1, 1  # a kernel's parameters are never null
    for out_features, in_features in shapes:
        tokens = min(max_tokens, MAX_FEW_TOKENS)
        launch = choose_launch(tokens, out_features, in_features, dtype, multiprocessors=1)
        floats, tickets = max(floats, launch.partial_floats), max(tickets, launch.tickets)
    return floats, tickets


def packed_bytes(out_features: int, in_features: int, has_bias: bool, itemsize: int) -> int:
    """Memory of a weight on the device; its bias is of float32."""
    matrix = padded_rows(out_features) * padded_columns(in_features) * itemsize
    return matrix + has_bias * 4 * out_features


def packing_rows(in_features: int, itemsize: int) -> int:
    """Rows that are packed at a time, of numbers of so many bytes; whole blocks of the layout."""
    return _BLOCK_ROWS * max(1, _PACKING_BYTES // (itemsize * in_features * _BLOCK_ROWS))


def packing_bytes(shapes: Iterable[tuple[int, int]]) -> int:
    """Memory that packing weights of these shapes takes meanwhile, at most."""
    parts = (
        4 * in_features * min(padded_rows(out_features), packing_rows(in_features, 4))
        for out_features, in_features in shapes
    )
    return max(parts, default=0)


def token_counts(
    max_tokens: int, shapes: Iterable[tuple[int, int]], dtype: str, multiprocessors: int
) -> list[int]:
    """Numbers of tokens whose products take every kernel that those of up to max_tokens take.

    Ascending, from 1 on. shapes: (out_features, in_features) of each weight.
    """
    shapes = list(shapes)
    edges = [
        n for n in (1, 8, 16, *range(_TILE_TOKENS, max_tokens, _TILE_TOKENS)) if n < max_tokens
    ]
    seen: set[tuple[tuple[int, int], str]] = set()
    counts = []
    for n in [*edges, max_tokens]:
        new = {(shape, choose_launch(n, *shape, dtype, multiprocessors).kernel) for shape in shapes}
        if n == 1 or not new <= seen:
            counts.append(n)
            seen |= new
    return counts


def ceil_div(number: int, unit: int) -> int:
    """number / unit, rounded up."""
    return -(-number // unit)
