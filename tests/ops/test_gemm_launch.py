"""How products are launched: chunks, kernels, workspace, refusals; and their machine code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged.ops.cuda_gemm import CudaGemm
from cupaged.ops.gemm_plan import choose_launch, chunk_columns, workspace_bytes
from cupaged.ops.launch_checks import OperandError
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.kernels import compile_kernel
from cupaged.runtime.machine_code import LIMITS, instruction_counts, occupancy
from tests.gpu_tools import SLOW_AND_LONG_ARCHITECTURES, needs_machine_code
from tests.ops.kernel_arrays import normal
from tests.ops.writing_runtime import WritingRuntime

BF16 = "bfloat16"

# ---- chunks and kernels --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out_features", "in_features", "chunk"),
    [
        # 512 blocks wanted; 64 features a block.
        (4096, 4096, 512),  # 64 blocks of features: 8 chunks
        (4096, 14336, 1792),  # 8 chunks
        (6144, 4096, 832),  # 96: 5 chunks, 64 granules / 5 = 12.8 -> 13 of 64
        (28672, 4096, 4096),  # 448: one chunk
        (128256, 4096, 4096),
        (49152, 576, 576),
        (576, 1536, 256),  # 9: more chunks than there are; none below 256
        (1, 1 << 20, 16384),  # 64 chunks at most
        (37, 100, 256),  # longer than the weight
    ],
)
def test_chunks(out_features: int, in_features: int, chunk: int) -> None:
    assert chunk_columns(out_features, in_features) == chunk


@pytest.mark.parametrize(
    ("num_tokens", "shape", "kernel", "grid"),
    [
        (1, (4096, 4096), "gemm_rows_8", (64, 8)),
        (8, (4096, 4096), "gemm_rows_8", (64, 8)),
        (9, (4096, 4096), "gemm_rows_16", (64, 8)),
        (17, (4096, 4096), "gemm_rows_32", (64, 8)),
        (33, (4097, 4096), "gemm_rows_32", (130, 7)),  # two tiles of tokens; chunks of 640
        (65, (4096, 4096), "gemm_tiles_64", (128,)),
        (2048, (4096, 4096), "gemm_tiles_128", (512,)),  # not 256: there are 8 chunks
        (2048, (28672, 4096), "gemm_tiles_256", (1792,)),
        (2048, (28672, 4100), "gemm_tiles_128", (3584,)),  # rows of x not aligned to 16 bytes
    ],
)
def test_the_kernel(
    num_tokens: int, shape: tuple[int, int], kernel: str, grid: tuple[int, ...]
) -> None:
    launch = choose_launch(num_tokens, *shape, BF16, multiprocessors=132)
    assert (launch.kernel, launch.grid) == (kernel, grid)


def test_the_kernel_in_float32() -> None:
    few = choose_launch(17, 100, 600, "float32", multiprocessors=132)
    assert (few.kernel, few.grid) == ("gemm_f32_rows", (4, 3))
    many = choose_launch(65, 100, 600, "float32", multiprocessors=132)
    assert (many.kernel, many.grid) == ("gemm_f32_tiles", (4,))


def test_a_launch_asks_for_what_every_gpu_has() -> None:
    for shape in ((4096, 4096), (28672, 4096)):
        for num_tokens in (1, 65, 4096):
            launch = choose_launch(num_tokens, *shape, BF16, multiprocessors=1)
            for limits in LIMITS.values():
                assert launch.shared_memory_bytes <= limits.block_shared_bytes


# ---- the workspace -------------------------------------------------------------------------------


def test_workspace() -> None:
    # 8 chunks of 64 tiles of features, 64 x 64 sums; tickets for 2 tiles of 32 tokens each.
    assert workspace_bytes(4096, [(4096, 4096)], BF16) == 4 * (8 * 64 * 64 * 64 + 64 * 2)
    assert workspace_bytes(5, [(4096, 4096)], BF16) == 4 * (8 * 64 * 64 * 8 + 64)
    assert workspace_bytes(64, [(37, 600)], "float32") == 4 * (3 * 64 * 64 + 4)
    both = [(128256, 4096), (4096, 4096)]  # the first has one chunk
    assert workspace_bytes(64, both, BF16) == workspace_bytes(64, both[1:], BF16)
    assert workspace_bytes(64, both[:1], BF16) == 8  # never null
    sizes = [workspace_bytes(n, [(576, 1536)], BF16) for n in range(1, 100)]
    assert sizes == sorted(sizes)


def test_the_workspace_is_allocated_once() -> None:
    runtime = WritingRuntime()
    gemm = CudaGemm(runtime, BF16)
    weights = [
        gemm.pack_weight(normal(1, shape, "float32")) for shape in ((37, 600), (200, 300), (50, 9))
    ]
    assert gemm.reserve() == workspace_bytes(64, [weight.shape for weight in weights], BF16)
    arrays = [
        (
            runtime.zeros((n, w.out_features), w.matrix.dtype),
            runtime.zeros((n, w.in_features), gemm.dtype),
            w,
        )
        for w in weights
        for n in (1, 9, 64, 65, 200)
    ]
    before = runtime.allocations
    for out, x, weight in arrays:
        gemm.linear(out, x, weight)
    assert runtime.allocations == before and len(runtime.launches) == 3 + len(arrays)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.fixture
def small() -> tuple[CudaGemm, dict[str, Any]]:
    gemm = CudaGemm(WritingRuntime(), BF16)
    zeros, storage = gemm.runtime.zeros, gemm.dtype
    weight = gemm.pack_weight(np.zeros((16, 8), np.float32), np.zeros(16, np.float32))
    return gemm, {"out": zeros((4, 16), storage), "x": zeros((4, 8), storage), "weight": weight}


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("x", (4, 9), BF16, r"linear: x must be bfloat16 \[4, 8\], got bfloat16 \[4, 9\]"),
        ("x", (4, 8), "float32", r"linear: x must be bfloat16 \[4, 8\]"),
        ("x", (8,), BF16, "linear: x must be of two dimensions"),
        ("out", (4, 15), BF16, r"linear: out must be bfloat16 \[4, 16\]"),
        ("out", (3, 16), "float32", r"linear: out must be float32 \[4, 16\]"),
        ("out", (4, 16), "float16", r"linear: out must be bfloat16 \[4, 16\]"),
    ],
)
def test_operands_that_do_not_fit(
    name: str, shape: tuple[int, ...], dtype: str, message: str, small: Any
) -> None:
    gemm, operands = small
    operands[name] = gemm.runtime.zeros(shape, CudaGemm(gemm.runtime, dtype).dtype)
    with pytest.raises(OperandError, match=message):
        gemm.linear(**operands)


def test_arrays_of_the_host_and_overlaps_are_refused(small: Any) -> None:
    gemm, operands = small
    for name in ("x", "out"):
        host = np.zeros(operands[name].shape, gemm.dtype)
        with pytest.raises(OperandError, match=f"linear: {name} must be an array on the device"):
            gemm.linear(**{**operands, name: host})
    square = gemm.pack_weight(np.zeros((8, 8), np.float32))
    with pytest.raises(OperandError, match="linear: out must be apart from x"):
        gemm.linear(operands["x"], operands["x"], square)
    with pytest.raises(OperandError, match="linear: out must be apart from weight"):
        gemm.linear(square.matrix.reshape(-1)[32:64].reshape(4, 8), operands["x"], square)


def test_weights_that_are_refused() -> None:
    gemm = CudaGemm(WritingRuntime(), BF16)
    weights: list[Any] = [
        np.zeros((4, 4)), np.zeros(4, np.float32), np.zeros((0, 4), np.float32),
        np.zeros((4, 4), np.float16),
    ]  # fmt: skip
    for weight in weights:
        with pytest.raises(OperandError, match="weight must be float32 or bfloat16 of two"):
            gemm.pack_weight(weight)
    with pytest.raises(OperandError, match=r"pack_weight: bias must be float32 \[4\]"):
        gemm.pack_weight(np.zeros((4, 4), np.float32), np.zeros(3, np.float32))
    wide = np.broadcast_to(np.float32(0), (1, (1 << 22) + 1))
    with pytest.raises(OperandError, match="pack_weight: weight must be at most"):
        gemm.pack_weight(wide)


def test_no_tokens_launch_nothing(small: Any) -> None:
    gemm, operands = small
    launches = len(gemm.runtime.launches)
    empty = gemm.runtime.zeros
    gemm.linear(empty((0, 16), gemm.dtype), empty((0, 8), gemm.dtype), operands["weight"])
    gemm.embedding(empty((0, 8), gemm.dtype), empty((0,), np.int32), operands["weight"])
    assert len(gemm.runtime.launches) == launches


def test_embedding_operands_that_do_not_fit(small: Any) -> None:
    gemm, operands = small
    zeros, weight = gemm.runtime.zeros, operands["weight"]
    with pytest.raises(OperandError, match=r"embedding: out must be bfloat16 \[4, 8\]"):
        gemm.embedding(zeros((4, 7), gemm.dtype), zeros((4,), np.int32), weight)
    with pytest.raises(OperandError, match=r"embedding: token_ids must be int32 \[4\]"):
        gemm.embedding(zeros((4, 8), gemm.dtype), zeros((4,), np.int64), weight)


def test_a_weight_is_packed_without_a_second_copy() -> None:
    """Nothing but the packed weight and the part under way is allocated on the device."""
    sizes = []

    class Sized(HostRuntime):
        def empty(self, shape: Any, dtype: Any) -> Any:
            sizes.append(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            return super().empty(shape, dtype)

        def launch(self, *_: Any, **__: Any) -> None:
            pass

    weight = np.zeros((1 << 14, 1 << 11), np.float32)  # 128 MiB
    CudaGemm(Sized(), BF16).pack_weight(weight)
    assert sizes == [weight.nbytes // 2, 16 << 20]


# ---- machine code --------------------------------------------------------------------------------


THREADS = {"gemm_tiles_128": 256, "gemm_tiles_256": 256, "pack_weight": 256}


def check_code(file: str, defines: dict[str, str | int], arch: str) -> None:
    """No spills; and the instructions that the headers speak of."""
    compiled = compile_kernel(file, defines, arch)
    counts = instruction_counts(compiled.path)
    for name, used in compiled.resources.items():
        code = counts[name]
        assert used.spill_store_bytes == used.spill_load_bytes == used.stack_bytes == 0, name
        assert code.spills == 0, name
        assert occupancy(arch, used, THREADS.get(name, 128)).blocks >= 1, name
        if file == "gemm_rows.cu":
            # A granule is 4 loads of W; SLOTS of them before the loop and as many in it.
            slots = {"gemm_rows_8": 4, "gemm_rows_16": 3, "gemm_rows_32": 2}[name]
            assert code.wide_loads >= 8 * slots and code.matrix >= 4 * slots, name
        if file == "gemm_tiles.cu":
            assert code.matrix >= 32 and code.async_copies >= 8, name


@needs_machine_code
@pytest.mark.parametrize("file", ["gemm_rows.cu", "gemm_tiles.cu"])
def test_machine_code(file: str) -> None:
    check_code(file, {"DTYPE": "bf16"}, "sm_90")


@needs_machine_code
@pytest.mark.parametrize("arch", SLOW_AND_LONG_ARCHITECTURES)
@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16"), ("bf16", "f32")],
)
def test_machine_code_for_all(dtype: str, out_dtype: str, bias: int, arch: str) -> None:
    files = ["gemm_f32.cu"] if dtype == "f32" else ["gemm_rows.cu", "gemm_tiles.cu"]
    for file in files:
        check_code(file, {"DTYPE": dtype, "OUT_DTYPE": out_dtype, "BIAS": bias}, arch)
    for file in ("gemm_pack.cu", "embedding_packed.cu"):
        check_code(file, {"DTYPE": dtype}, arch)
