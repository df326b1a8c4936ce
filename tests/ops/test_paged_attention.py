"""The attention kernels against the float64 reference, and against themselves, bit by bit.

Whatever is not to be read is NaN (see attention_cases). The emulator checks each access besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupaged.errors import NotSupportedError
from cupaged.ops import KVCache
from cupaged.ops.attention_shapes import AttentionShape, check_attention_shape
from cupaged.ops.cuda_attention import CudaAttention
from cupaged.ops.cuda_step import upload_step
from cupaged.ops.launch_checks import OperandError
from cupaged.runtime.host_runtime import HostRuntime
from cupaged.runtime.protocol import DeviceProperties, Runtime
from cupaged.runtime.staging import StagingBuffer
from tests.ops.attention_cases import Sequences
from tests.ops.kernel_arrays import DTYPES, NUMPY, Guarded, normal, same_bits

slow = pytest.mark.slow
# The edges: of a block (16), of a tile of keys (64), of a split (256).
EDGES = [1, 15, 16, 17, 63, 64, 65, 255, 256, 257]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def attentions(runtime: Runtime) -> Iterator[dict[str, CudaAttention]]:
    yield {dtype: CudaAttention(runtime, dtype, workspace_bytes=1 << 20) for dtype in DTYPES}


class Blocks(HostRuntime):
    """An emulated GPU with another number of multiprocessors, which notes what it launches."""

    def __init__(self, multiprocessors: int) -> None:
        super().__init__()
        self._multiprocessors = multiprocessors
        self.launched: list[str] = []

    @property
    def properties(self) -> DeviceProperties:
        """As of the emulated GPU."""
        return replace(super().properties, multiprocessors=self._multiprocessors)

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Note the kernel's name."""
        self.launched.append(kernel.name)
        super().launch(kernel, *args, **kwargs)


# ---- right results -------------------------------------------------------------------------------


def test_decode_at_every_edge(dtype: str, attentions: dict[str, CudaAttention]) -> None:
    """A slot behind the last position, a block of nobody, a number in the padding: all NaN."""
    sequences = Sequences(EDGES, (6, 2), 64, dtype, seed=1)
    sequences.check(attentions[dtype], [(i, n - 1, n) for i, n in enumerate(EDGES)])


@pytest.mark.parametrize("length", [1, 7, 37, 130])
def test_whole_prefill(length: int, dtype: str, attentions: dict[str, CudaAttention]) -> None:
    sequences = Sequences([length], (6, 2), 64, dtype, seed=2)
    sequences.check(attentions[dtype], [(0, 0, length)], most=130)


def test_a_mixed_step(dtype: str, attentions: dict[str, CudaAttention]) -> None:
    """Decode, a chunk at the end of a long sequence, a whole one, a chunk of one token, nothing."""
    sequences = Sequences([300, 290, 65, 16, 5], (6, 2), 64, dtype, seed=3)
    parts = [(0, 299, 300), (1, 253, 290), (2, 0, 65), (3, 15, 16), (4, 5, 5), (4, 1, 5)]
    sequences.check(attentions[dtype], parts)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "block_size"),
    [
        (80, "bfloat16", 8),
        (128, "bfloat16", 128),
        (256, "float32", 32),
        *(
            pytest.param(head_dim, dtype, block_size, marks=slow)
            for head_dim in (16, 32, 80, 96, 112, 128, 144, 160, 192, 256)
            for dtype in DTYPES
            for block_size in (8, 64)
        ),
    ],
)
def test_head_dims_and_block_sizes(
    head_dim: int, dtype: str, block_size: int, attentions: dict[str, CudaAttention]
) -> None:
    sequences = Sequences([270, 70], (3, 1), head_dim, dtype, block_size=block_size, seed=4)
    sequences.check(attentions[dtype], [(0, 269, 270), (1, 0, 70)])
    sequences.check(attentions[dtype], [(0, 250, 270)])


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (16, 1), (20, 1), (71, 1), (8, 8)])
def test_any_number_of_query_heads(
    heads: tuple[int, int], attentions: dict[str, CudaAttention]
) -> None:
    """71 query heads are more than the rows of a tile of work."""
    sequences = Sequences([70, 9], heads, 64, "bfloat16", seed=5)
    sequences.check(attentions["bfloat16"], [(0, 69, 70), (1, 0, 9)])
    sequences.check(attentions["bfloat16"], [(0, 64, 70)])


@pytest.mark.parametrize("window", [1, 5, 64, 100, 299, 300, 2**31 - 1])
def test_windows(window: int, attentions: dict[str, CudaAttention]) -> None:
    sequences = Sequences([300, 40], (6, 2), 64, "bfloat16", seed=6)
    sequences.check(attentions["bfloat16"], [(0, 299, 300), (1, 0, 40)], window=window)
    sequences.check(attentions["bfloat16"], [(0, 240, 300), (1, 39, 40)], window=window)


def test_blocks_before_the_window_are_not_read(attentions: dict[str, CudaAttention]) -> None:
    """Their numbers may be -1 by then, and what shares a tile with the window may be NaN."""
    sequences = Sequences([300], (6, 2), 64, "bfloat16", seed=7)
    window, parts = 70, [(0, 299, 300)]
    expected = sequences.attend(attentions["bfloat16"], parts, window=window)
    first = 300 - window
    sequences.k[0][:first] = sequences.v[0][:first] = np.nan
    sequences.blocks[0][: first // 16] = -1
    shape = (sequences.num_cache_blocks, 2, 16, 64)
    caches = [np.full(shape, np.nan, NUMPY["bfloat16"]) for _ in range(2)]
    for cache, source in zip(caches, (sequences.k[0], sequences.v[0]), strict=True):
        for p in range(first, 300):
            cache[sequences.blocks[0][p // 16], :, p % 16] = source[p]
    ops = attentions["bfloat16"]
    k, v = (Guarded.of(ops.runtime, c).array for c in caches)
    got = sequences.attend(ops, parts, window=window, cache=KVCache(sequences.spec, k, v))
    same_bits(got[0], expected[0])


@pytest.mark.parametrize(
    ("window", "softcap"),
    [(0, 5.0), pytest.param(100, 50.0, marks=slow), pytest.param(0, 0.0, marks=slow)],
)
@pytest.mark.parametrize("multiprocessors", [1, 64])
def test_softcap_and_sinks(window: int, softcap: float, multiprocessors: int) -> None:
    """Also where the splits of a sequence are merged by the second kernel."""
    runtime = Blocks(multiprocessors)
    ops = CudaAttention(runtime, "float16", workspace_bytes=1 << 20)
    sequences = Sequences([770, 40], (6, 2), 64, "float16", seed=8)
    sequences.scale = 0.7
    sequences.sinks = normal(9, (6,), "float16", scale=6.0)
    parts = [(0, 760, 770), (1, 0, 40), (0, 769, 770)]
    sequences.check(ops, parts, window=window, softcap=softcap)
    merged = multiprocessors > 1 and not window
    assert ("merge_attention_splits" in runtime.launched) == merged


def test_large_scores(dtype: str, attentions: dict[str, CudaAttention]) -> None:
    """Most weights underflow; the maximum grows from tile to tile, or is in the first one."""
    for order in (1, -1):
        sequences = Sequences([300], (2, 1), 64, dtype, seed=10)
        growing = np.linspace(1, 60, 300)[::order, None, None]
        sequences.k[0] = (np.sign(sequences.k[0].astype(np.float64)) * growing).astype(NUMPY[dtype])
        sequences.q[0] = np.ones_like(sequences.q[0]) * NUMPY[dtype](0.125)
        sequences.check(attentions[dtype], [(0, 290, 300)])


def test_a_bad_row_harms_no_other(attentions: dict[str, CudaAttention]) -> None:
    """NaN in the query of one head: in its output alone."""
    ops, sequences = attentions["bfloat16"], Sequences([70, 9], (6, 2), 64, "bfloat16", seed=11)
    parts = [(0, 60, 70), (1, 8, 9)]
    expected = sequences.attend(ops, parts)
    sequences.q[0][65, 4, 3] = np.nan
    got = sequences.attend(ops, parts)
    assert np.isnan(got[0][5, 4].astype(np.float32)).all()
    got[0][5, 4] = expected[0][5, 4]
    for a, b in zip(got, expected, strict=True):
        same_bits(a, b)


# ---- equal bits ----------------------------------------------------------------------------------


def check_bits(
    ops: CudaAttention, heads: tuple[int, int], dtype: str, window: int, head_dim: int = 64
) -> None:
    """Whole, in chunks, token by token, alone or with others: the same bits of every token."""
    length = 275
    sequences = Sequences([length, 1, 64, 90], heads, head_dim, dtype, seed=12)

    def attend(*parts: tuple[int, int, int]) -> None:
        for (i, start, stop), got in zip(
            parts, sequences.attend(ops, parts, window=window), strict=True
        ):
            if i == 0:
                same_bits(got, whole[start:stop])

    (whole,) = sequences.attend(ops, [(0, 0, length)], window=window)
    for size in (7, 16):
        edges = range(0, length, size)
        attend(*((0, start, min(start + size, length)) for start in edges))
    tokens = [0, 1, 15, 16, 62, 63, 64, 65, 127, 128, 254, 255, 256, 257, 273, 274]
    attend(*((0, t, t + 1) for t in tokens))
    for token in (0, 64, 256, 274):
        attend((0, token, token + 1))
    attend((0, 250, 266))
    attend((1, 0, 1), (0, 0, length), (2, 60, 64))
    for others in (1, 16):  # batches of 2 and 17
        company = [(1, 0, 1), (2, 0, 64), (3, 89, 90), (2, 63, 64)] * 4
        attend(*company[: others // 2], (0, 274, 275), *company[others // 2 : others])


@pytest.mark.parametrize(
    ("heads", "window"),
    [
        ((6, 2), 0),
        pytest.param((2, 2), 0, marks=slow),
        pytest.param((4, 1), 0, marks=slow),
        pytest.param((6, 2), 70, marks=slow),
        pytest.param((4, 1), 256, marks=slow),
    ],
)
def test_bits_do_not_depend_on_company_or_chunks(
    heads: tuple[int, int], window: int, dtype: str, attentions: dict[str, CudaAttention]
) -> None:
    check_bits(attentions[dtype], heads, dtype, window)


@slow
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(80, "bfloat16"), (128, "float16"), (256, "bfloat16"), (256, "float32")]
)
def test_bits_of_other_head_dims(
    head_dim: int, dtype: str, attentions: dict[str, CudaAttention]
) -> None:
    check_bits(attentions[dtype], (4, 1), dtype, 0, head_dim)


def test_bits_with_windows(attentions: dict[str, CudaAttention]) -> None:
    check_bits(attentions["bfloat16"], (4, 1), "bfloat16", 70)


@pytest.mark.parametrize(
    ("multiprocessors", "workspace_bytes", "shared_kib", "merged"),
    [
        (132, 1 << 20, 227, True),  # about a split a block
        (132, 0, 227, False),  # nothing to divide with
        (3, 620 * 66 * 4, 227, True),  # some of the tiles of work stay whole
        (2, 1 << 20, 48, True),  # other tiles of rows, and other slots
    ],
)
@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(t, marks=slow) for t in DTYPES[1:])])
def test_bits_do_not_depend_on_the_division_of_the_work(
    multiprocessors: int, workspace_bytes: int, shared_kib: int, merged: bool, dtype: str
) -> None:
    """Against a block that walks all splits and merges them in registers. (float32 shows what the
    rounding to 16 bits hides.)"""
    sequences = Sequences([1100, 300], (3, 1), 64, dtype, seed=13)
    parts = [(0, 1099, 1100), (1, 270, 300), (0, 1060, 1100)]
    results = []
    for count, num_bytes, kib in (1, 0, 227), (multiprocessors, workspace_bytes, shared_kib):
        runtime = Blocks(count)
        ops = CudaAttention(runtime, dtype, workspace_bytes=num_bytes, max_shared_bytes=kib << 10)
        results.append(sequences.attend(ops, parts))
    assert ("merge_attention_splits" in runtime.launched) == merged
    for a, b in zip(*results, strict=True):
        same_bits(a, b)


@slow
@pytest.mark.parametrize("length", [40_001, 65_536])
def test_long_contexts(length: int, attentions: dict[str, CudaAttention]) -> None:
    """KN-06: shared memory does not grow with the context."""
    sequences = Sequences([length], (2, 1), 64, "bfloat16", seed=16)
    sequences.check(attentions["bfloat16"], [(0, length - 1, length)])


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=slow), pytest.param(3, marks=slow)])
def test_bits_do_not_depend_on_the_order_of_threads_and_blocks(seed: int) -> None:
    sequences = Sequences([300, 40], (6, 2), 64, "float32", seed=15)
    parts = [(0, 299, 300), (1, 0, 40), (0, 250, 280)]
    in_order, shuffled = (
        sequences.attend(CudaAttention(runtime, "float32", workspace_bytes=1 << 20), parts)
        for runtime in (HostRuntime(), HostRuntime(seed=seed))
    )
    for a, b in zip(in_order, shuffled, strict=True):
        same_bits(a, b)


# ---- far away ------------------------------------------------------------------------------------


def test_blocks_beyond_32_bits() -> None:
    """KN-01: elements of the cache beyond 2^31. On the host, untouched pages take no memory."""
    runtime = HostRuntime()
    ops = CudaAttention(runtime, "bfloat16", workspace_bytes=1 << 20)
    sequences = Sequences([40], (6, 2), 64, "bfloat16", seed=14)
    parts = [(0, 39, 40), (0, 20, 40)]
    expected = sequences.attend(ops, parts)
    low = sequences.caches([40])
    far = (1 << 31) // low[0][0].size + 5
    caches = []
    for cache in low:
        array = runtime.zeros((far + len(cache), *cache.shape[1:]), cache.dtype)
        runtime.copy_to_device(array[far:], cache)
        caches.append(array)
    sequences.blocks = [blocks + far for blocks in sequences.blocks]
    got = sequences.attend(ops, parts, cache=KVCache(sequences.spec, *caches))
    for a, b in zip(got, expected, strict=True):
        same_bits(a, b)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 40, 72, 100, 257, 272, 512, 0])
def test_other_head_dims_are_refused_by_name(head_dim: int) -> None:
    """KN-04: before any weight is read, with what is supported."""
    with pytest.raises(NotSupportedError, match=rf"head_dim {head_dim} .*: 16, 32.* 128, .* 256$"):
        check_attention_shape(AttentionShape(8, 2, head_dim, 16))


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 112, 128, 160, 192, 256])
def test_supported_head_dims(head_dim: int) -> None:
    check_attention_shape(AttentionShape(8, 2, head_dim, 16))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (AttentionShape(8, 3, 64, 16), "8 query heads and 3 key/value heads"),
        (AttentionShape(8, 0, 64, 16), "0 key/value heads"),
        (AttentionShape(0, 2, 64, 16), "0 query heads"),
        (AttentionShape(8, 2, 64, 4), "block_size 4 .*: 8, 16, 32, 64, 128"),
        (AttentionShape(8, 2, 64, 48), "block_size 48"),
        (AttentionShape(8, 2, 64, 16, -1), "window of -1"),
    ],
)
def test_other_shapes_are_refused(shape: AttentionShape, message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        check_attention_shape(shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": float("nan")}, "scale must be a number, got nan"),
        ({"softcap": -1.0}, "softcap"),
        ({"sinks": 5}, r"sinks must be bfloat16 \[6\]"),
        ({"rows": 1}, "qkv must be"),
        ({"width": 8 * 64}, "qkv must be"),
        ({"width": 5 * 64}, "5 query heads and 2 key/value heads"),
        ({"width": 6 * 64 + 32}, "columns of out must be a multiple of k_dim 64"),
        ({"block": 6}, "blocks in block_table must be from 0 to 5, got"),
        ({"block": -1}, "blocks in block_table must be from 0 to 5, got -1"),
        ({"context": 65}, "context_len must be at most 64"),
        ({"query": 3}, "rows of out must be 3 or more, got 2"),
    ],
)
def test_operands_that_do_not_fit(change: dict[str, float], message: str) -> None:
    runtime, dtype = HostRuntime(), NUMPY["bfloat16"]
    ops = CudaAttention(runtime, "bfloat16", workspace_bytes=1 << 16)
    sequences = Sequences([40], (6, 2), 64, "bfloat16")
    k, v = (runtime.from_host(c[:6]) for c in np.zeros((2, 6, 2, 16, 64), dtype))
    sequences.blocks = [np.array([0, 1, int(change.get("block", 2))])]
    batch = sequences.batch([(0, 38, 40)])
    batch.context_len[0] = change.get("context", 40)
    batch.query_start[1] = change.get("query", 2)
    step = upload_step(batch, StagingBuffer(runtime, 1 << 10))
    qkv = runtime.zeros((int(change.get("rows", 2)), 10 * 64), dtype)
    out = runtime.zeros((2, int(change.get("width", 6 * 64))), dtype)
    sinks = runtime.zeros((int(change["sinks"]),), dtype) if "sinks" in change else None
    with pytest.raises((OperandError, NotSupportedError), match=message):
        ops.paged_attention(
            step, out, qkv, KVCache(sequences.spec, k, v), change.get("scale", 1.0),
            softcap=change.get("softcap", 0.0), sinks=sinks,
        )  # fmt: skip
