"""Products with packed weights against the float64 reference, and their bits in any company.

Everything lies between guards of NaN. In the tests of bits the outputs are float32, so that no
rounding hides an order of summation that differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.ops import gemm_plan
from cupaged.ops.cuda_gemm import CudaGemm, CudaWeight
from cupaged.ops.gemm_plan import padded_columns, padded_rows
from cupaged.runtime.dtypes import kernel_dtype
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.protocol import Runtime
from tests.ops import reference_gemm
from tests.ops.kernel_arrays import DTYPES, NUMPY, Guarded, close, normal, same_bits

F32 = np.dtype(np.float32)
HALVES = ["float16", "bfloat16"]
TILE_KERNELS = {  # features and tokens of a tile, threads, shared memory
    "gemm_tiles_64": (64, 64, 128, 49152),
    "gemm_tiles_128": (128, 128, 256, 98304),
    "gemm_tiles_256": (256, 128, 256, 98304),
}


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def gemm(runtime: Runtime, dtype: str) -> CudaGemm:
    return CudaGemm(runtime, dtype)


def weight_of(seed: int, shape: tuple[int, int], dtype: str) -> NDArray[np.float32]:
    """Float32 numbers that the storage type holds."""
    return normal(seed, shape, dtype).astype(np.float32)


def product(
    gemm: CudaGemm, x: NDArray[Any], weight: CudaWeight, out_dtype: str = "float32"
) -> NDArray[Any]:
    """As `CudaGemm.linear` computes it, between guards."""
    out = Guarded(gemm.runtime, (len(x), weight.out_features), NUMPY[out_dtype])
    on_device = Guarded.of(gemm.runtime, x)
    gemm.linear(out.array, on_device.array, weight)
    same_bits(on_device.read(), x)
    return out.read()


def tile_product(gemm: CudaGemm, kernel: str, x: NDArray[Any], weight: CudaWeight) -> NDArray[Any]:
    """The float32 output of one of the tile kernels, with bias if the weight has one."""
    features, tokens, threads, shared_bytes = TILE_KERNELS[kernel]
    out = Guarded(gemm.runtime, (len(x), weight.out_features), np.float32)
    bias = [] if weight.bias is None else [weight.bias]
    defines: dict[str, str | int] = {"DTYPE": kernel_dtype(gemm.dtype), "OUT_DTYPE": "f32"}
    loaded = gemm.runtime.load_kernel("gemm_tiles.cu", kernel, {**defines, "BIAS": 1})
    if weight.bias is None:
        loaded = gemm.runtime.load_kernel("gemm_tiles.cu", kernel, defines)
    sizes = (len(x), *weight.shape, padded_columns(weight.in_features), weight.chunk)
    gemm.runtime.launch(
        loaded,
        (-(-weight.out_features // features) * -(-len(x) // tokens),),
        (threads,),
        [
            out.array,
            Guarded.of(gemm.runtime, x).array,
            weight.matrix,
            *bias,
            *(np.int32(n) for n in sizes),
        ],
        shared_memory_bytes=shared_bytes,
    )
    return out.read()


# ---- against the reference -----------------------------------------------------------------------

# Out of every kernel: 1 to 64 tokens take the kernels for few, 65 and 130 those for many.
TOKENS = [1, 3, 7, 8, 9, 16, 17, 37, 64, 65, 130]
SHAPES = [(1, 1), (7, 3), (37, 100), (100, 37), (64, 64), (65, 321), (16, 600), (130, 264)]


@pytest.mark.parametrize("shape", SHAPES)
def test_linear(shape: tuple[int, int], dtype: str, gemm: CudaGemm) -> None:
    """float16 without a bias, the others with one; the smallest are checked in full."""
    weight = weight_of(1, shape, dtype)
    bias = None if dtype == "float16" else normal(2, shape[:1], "float32", 10.0)
    packed = gemm.pack_weight(weight, bias)
    x = normal(3, (max(TOKENS), shape[1]), dtype)
    expected, bound = reference_gemm.linear(x, weight, bias)
    for count in TOKENS:
        got = product(gemm, x[:count], packed)
        close(got, expected[:count], bound[:count], "float32")


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 12, 30, 70])
@pytest.mark.parametrize("shape", [(40, 600), (23, 51)])
def test_rounding_to_the_storage_type(
    shape: tuple[int, int], num_tokens: int, dtype: str, gemm: CudaGemm
) -> None:
    """The float32 result, bias and all, is rounded once."""
    packed = gemm.pack_weight(weight_of(1, shape, dtype), normal(2, shape[:1], "float32"))
    x = normal(3, (num_tokens, shape[1]), dtype)
    exact = product(gemm, x, packed)
    same_bits(product(gemm, x, packed, dtype), exact.astype(NUMPY[dtype]))


@pytest.mark.parametrize("dtype", ["float16"])
def test_large_numbers(dtype: str, gemm: CudaGemm) -> None:
    """Sums beyond float16 are kept in float32 and become inf where they are rounded."""
    weight = np.full((3, 128), 256.0, np.float32)
    packed = gemm.pack_weight(weight)
    x = np.full((1, 128), 4.0, np.float16)
    assert product(gemm, x, packed).tolist() == [[131072.0] * 3]
    out = Guarded(gemm.runtime, (1, 3), np.float16)
    with_bias = gemm.pack_weight(weight, np.array([-131072 + 7, 0, -131072], np.float32))
    gemm.linear(out.array, Guarded.of(gemm.runtime, x).array, with_bias)
    assert out.read().tolist() == [[7.0, np.inf, 0.0]]


# ---- the same bits in any company ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 600), (37, 77)])
def test_a_row_has_the_same_bits_in_any_company(
    shape: tuple[int, int], dtype: str, gemm: CudaGemm
) -> None:
    """For 1 to 40 rows, at the start, and for many; in the middle; in another order."""
    if dtype == "float32":
        shape = (shape[0] // 2, shape[1] // 2)  # it is slow on the host
    packed = gemm.pack_weight(
        weight_of(1, shape, dtype),
        None if dtype == "float16" else normal(2, shape[:1], "float32"),
    )
    x = normal(3, (140, shape[1]), dtype)
    alone = np.concatenate([product(gemm, x[i : i + 1], packed) for i in range(40)])
    assert len(np.unique(alone)) > 20  # they do differ from each other
    for count in range(2, 41):
        same_bits(product(gemm, x[:count], packed), alone[:count])
        start = 40 - count
        same_bits(product(gemm, x[start:40], packed), alone[start:])
    for count in (65, 128, 140):
        same_bits(product(gemm, x[:count], packed)[:40], alone)
    order = np.random.default_rng(4).permutation(140)
    places = np.argsort(order)[:40]
    same_bits(product(gemm, x[order], packed)[places], alone)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_tokens", [37, 130])
@pytest.mark.parametrize("kernel", TILE_KERNELS)
def test_every_tile_kernel_gives_the_bits_of_the_others(
    kernel: str, num_tokens: int, dtype: str, gemm: CudaGemm
) -> None:
    """Three chunks; one for the kernel that takes no more."""
    shape = (270, 200 if kernel == "gemm_tiles_256" else 600)
    packed = gemm.pack_weight(
        weight_of(1, shape, dtype),
        None if dtype == "float16" else normal(2, shape[:1], "float32"),
    )
    x = normal(3, (num_tokens, shape[1]), dtype)
    few = [product(gemm, x[start : start + 60], packed) for start in range(0, num_tokens, 60)]
    same_bits(tile_product(gemm, kernel, x, packed), np.concatenate(few))


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_more_tokens_than_a_group_of_tiles_has(dtype: str, gemm: CudaGemm) -> None:
    """Of tiles of 64 tokens, 16 make a group: the last two tiles are in the next one."""
    packed = gemm.pack_weight(weight_of(1, (70, 9), dtype), normal(2, (70,), "float32"))
    x = normal(3, (17 * 64 + 5, 9), dtype)
    few = [product(gemm, x[start : start + 60], packed) for start in range(0, len(x), 60)]
    same_bits(tile_product(gemm, "gemm_tiles_64", x, packed), np.concatenate(few))


@pytest.mark.parametrize("num_tokens", [5, 12, 40, 70])
@pytest.mark.parametrize("columns", [77, 80, 600])
def test_a_row_of_nan_harms_only_itself(
    columns: int, num_tokens: int, dtype: str, gemm: CudaGemm
) -> None:
    """Neither the row before it, which ends where it begins, nor the one behind."""
    bias = None if dtype == "float16" else np.zeros(20, np.float32)
    packed = gemm.pack_weight(weight_of(1, (20, columns), dtype), bias)
    x = normal(3, (num_tokens, columns), dtype)
    clean = product(gemm, x, packed)
    x[3] = np.nan
    got = product(gemm, x, packed)
    assert np.isnan(got[3]).all()
    got[3] = clean[3]
    same_bits(got, clean)


# ---- the order of summation ----------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_a_chunk_starts_from_zero(num_tokens: int, dtype: str, gemm: CudaGemm) -> None:
    """2^25 swallows every 1 of its own chunk, and takes the sum of the second one whole.

    (A tensor core adds up a product before it rounds, so of 16-bit types only the host's sums,
    which go element by element, are known beforehand.)
    """
    if dtype != "float32" and not isinstance(gemm.runtime, HostRuntime):
        pytest.skip("a GPU rounds within a product as it likes")
    weight = np.ones((5, 512), np.float32)
    x = np.ones((num_tokens, 512), NUMPY[dtype])
    weight[:, 0], x[:, 0] = 4096, 8192
    bias = None if dtype == "float16" else np.zeros(5, np.float32)
    got = product(gemm, x, gemm.pack_weight(weight, bias))
    assert (got == 2.0**25 + 256).all()


@pytest.mark.parametrize("num_tokens", [1, 9, 17, 70])
def test_chunks_are_added_in_ascending_order(num_tokens: int, dtype: str, gemm: CudaGemm) -> None:
    """(2^24 + 1) - 2^24 is 0 in float32; in every other order it is 1."""
    weight = np.zeros((5, 600), np.float32)
    weight[:, 10], weight[:, 300], weight[:, 599] = 4096, 1, -4096
    x = np.zeros((num_tokens, 600), NUMPY[dtype])
    x[:, 10] = x[:, 599] = 4096
    x[:, 300] = 1
    bias = None if dtype == "float16" else np.zeros(5, np.float32)
    assert (product(gemm, x, gemm.pack_weight(weight, bias)) == 0).all()
    weight[:, 300] = 2
    assert (product(gemm, x, gemm.pack_weight(weight, bias)) == 2).all()


def test_any_order_of_threads_and_blocks_gives_the_same_bits(dtype: str) -> None:
    """Whichever block comes last adds up the chunks; the tickets are zero again afterwards."""
    weight = weight_of(1, (70, 600), dtype)
    bias = None if dtype == "float16" else normal(2, (70,), "float32")
    x = normal(3, (37, 600), dtype)
    runs = []
    for runtime in (HostRuntime(), *(HostRuntime(seed=seed) for seed in range(3))):
        gemm = CudaGemm(runtime, dtype)
        packed = gemm.pack_weight(weight, bias)
        runs += [product(gemm, x, packed), product(gemm, x, packed)]
    for run in runs[1:]:
        same_bits(run, runs[0])


# ---- packing and the embedding -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (17, 65), (40, 130)])
def test_packing(shape: tuple[int, int], dtype: str, gemm: CudaGemm) -> None:
    weight = normal(1, shape, "float32")
    packed = gemm.pack_weight(weight)
    assert packed.matrix.shape == (padded_rows(shape[0]), padded_columns(shape[1]))
    expected = reference_gemm.packed(weight.astype(NUMPY[dtype]))
    same_bits(gemm.runtime.to_host(packed.matrix), expected)


def test_packing_in_parts(dtype: str, gemm: CudaGemm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 16 rows, then of 32, from an array with strides."""
    weight = normal(1, (130, 75), "float32").T
    whole = gemm.runtime.to_host(gemm.pack_weight(weight).matrix)
    for rows in (1, 2):
        monkeypatch.setattr(gemm_plan, "_PACKING_BYTES", rows * 16 * 130 * 4 + 5)
        same_bits(gemm.runtime.to_host(gemm.pack_weight(weight).matrix), whole)
    same_bits(whole, reference_gemm.packed(weight.astype(NUMPY[dtype])))


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("hidden", [1, 7, 8, 65, 264])
def test_embedding(hidden: int, num_tokens: int, dtype: str, gemm: CudaGemm) -> None:
    """The rows of the weight as they were, ids clipped."""
    weight = weight_of(1, (37, hidden), dtype)
    weight[0, 0] = np.inf
    ids = np.array([36, -5, 99, 8, 7, 0, 24], np.int32)[:num_tokens]
    out = Guarded(gemm.runtime, (num_tokens, hidden), NUMPY[dtype])
    gemm.embedding(out.array, Guarded.of(gemm.runtime, ids).array, gemm.pack_weight(weight))
    same_bits(out.read(), weight.astype(NUMPY[dtype])[ids.clip(0, 36)])


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_an_embedding_beyond_32_bits(dtype: str, gemm: CudaGemm) -> None:
    """The last row begins beyond element 2^31. On the host, untouched pages take no memory."""
    rows, hidden = (1 << 17) + 16, 1 << 14
    last = weight_of(1, (16, hidden), dtype)
    matrix = gemm.runtime.zeros((rows, hidden), gemm.dtype)
    gemm.runtime.copy_to_device(
        matrix[1 << 17 :], gemm.runtime.to_host(gemm.pack_weight(last).matrix)
    )
    ids = gemm.runtime.from_host(np.array([rows - 1, 0], np.int32))
    out = Guarded(gemm.runtime, (2, hidden), gemm.dtype)
    gemm.embedding(out.array, ids, CudaWeight(matrix, None, rows, hidden, 256))
    same_bits(out.read(), np.stack([last[15], np.zeros_like(last[0])]).astype(gemm.dtype))


# ---- shapes of real models -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(576, 1536), (49152, 576), (4096, 14336)])
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_real_shapes(shape: tuple[int, int], dtype: str, gemm: CudaGemm) -> None:
    """A few features of a few rows are worked out again."""
    weight = np.random.default_rng(1).standard_normal(shape, np.float32).astype(gemm.dtype)
    packed = gemm.pack_weight(weight.astype(np.float32))
    x = normal(3, (66, shape[1]), dtype)
    some = np.random.default_rng(5).integers(0, shape[0], 20)
    expected, bound = reference_gemm.linear(x[:3], weight[some])
    few = product(gemm, x[:3], packed)
    close(few[:, some], expected, bound, "float32")
    if shape[0] * shape[1] < 1 << 20:  # the others take minutes
        same_bits(product(gemm, x, packed)[:3], few)
