"""What `CudaOps` does around the kernels: memory, uploads, grids, defines.

Nothing is compiled here: the runtime writes launches down. What kernels compute is tested in
`test_kernels` and `test_cache_kernels`, what is refused in `test_launch_refusals`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.errors import ConfigError
from cupaged.ops import KVCacheSpec
from cupaged.ops.cuda_ops import CudaOps
from cupaged.ops.launch_checks import OperandError
from cupaged.ops.launch_shapes import norm_threads, row_threads, shared_row
from cupaged.ops.numpy_ops import NumpyOps
from tests.ops.test_attention import make_batch
from tests.ops.writing_runtime import WritingRuntime

F16, I32 = np.float16, np.int32


def int32s(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, I32)


@pytest.fixture
def runtime() -> WritingRuntime:
    return WritingRuntime()


@pytest.fixture
def ops(runtime: WritingRuntime) -> CudaOps:
    return CudaOps(runtime, "float16")


# ---- memory and weights --------------------------------------------------------------------------


def test_arrays_become_the_storage_type(runtime: WritingRuntime) -> None:
    ops = CudaOps(runtime, "bfloat16")
    weight = ops.asarray(np.array([1.0, 1 / 3], np.float32))
    assert weight.dtype == np.dtype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(runtime.to_host(weight).astype(np.float64), [1.0, 0.333984375])
    np.testing.assert_array_equal(runtime.to_host(ops.asarray(np.array([1, 2], I32))), [1, 2])
    assert ops.empty((2, 3), np.float32).dtype == np.float32
    with pytest.raises(ConfigError, match="float32, float16, bfloat16, got 'int8'"):
        CudaOps(runtime, "int8")


def test_the_rotary_table_is_the_same_as_on_the_cpu(ops: CudaOps, runtime: WritingRuntime) -> None:
    frequencies = 10000.0 ** -(np.arange(40) / 40)
    table = runtime.to_host(ops.rotary_table(frequencies, 500, 1.25))
    np.testing.assert_array_equal(table, NumpyOps().rotary_table(frequencies, 500, 1.25))


def test_a_cache(ops: CudaOps) -> None:
    spec = KVCacheSpec(0, 3, 80, 80, "float16", 32)
    cache = ops.empty_kv_cache(spec, 7)
    assert cache.k.shape == cache.v.shape == (7, 3, 32, 80)
    assert cache.k.nbytes + cache.v.nbytes == 7 * spec.bytes_per_block


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "dtype must be float16, got float32"),
        ({"block_size": 12}, r"block_size must be in \(8, 16, 32, 64, 128\), got 12"),
        ({"k_dim": 64}, r"must be equal, even, from 2 to 512, got \(64, 80\)"),
        ({"k_dim": 7, "v_dim": 7}, "must be equal, even"),
        ({"scale_dtype": "float16"}, "scale_dtype must be None"),
    ],
)
def test_caches_that_no_kernel_reads(changes: dict[str, Any], message: str, ops: CudaOps) -> None:
    fields: dict[str, Any] = {
        "group": 0, "num_kv_heads": 3, "k_dim": 80, "v_dim": 80, "dtype": "float16",
        "block_size": 32,
    }  # fmt: skip
    with pytest.raises(OperandError, match=message):
        ops.empty_kv_cache(KVCacheSpec(**(fields | changes)), 7)


# ---- the step ------------------------------------------------------------------------------------


def test_a_step_is_one_upload(ops: CudaOps, runtime: WritingRuntime) -> None:
    table = np.array([[3, 1, -1], [0, 2, 4]], I32)
    batch = make_batch([(5, 3), (17, 1)], table, 8)
    batch.token_ids[...] = [7, 8, 9, 10]
    step = ops.begin_step(batch)
    assert runtime.uploads == 1
    for array, expected in (
        (step.token_ids, [7, 8, 9, 10]),
        (step.positions, [5, 6, 7, 17]),
        (step.query_start, [0, 3, 4]),
        (step.context_len, [8, 18]),
        (step.groups[0].block_table, table.tolist()),
        (step.groups[0].slot_mapping, [29, 30, 31, 33]),
    ):
        np.testing.assert_array_equal(runtime.to_host(array), expected)
        assert runtime.address(array) % 16 == 0
    assert step.token_ids.dtype == I32
    assert step.groups[0].slot_mapping.dtype == np.int64
    assert (step.num_tokens, step.max_position, step.groups[0].max_slot) == (4, 17, 33)


def test_a_new_shape_of_attention_is_one_more_upload_once(
    ops: CudaOps, runtime: WritingRuntime
) -> None:
    cache = ops.empty_kv_cache(KVCacheSpec(0, 1, 16, 16, "float16", 8), 4)
    qkv, out = ops.empty((3, 4 * 16), F16), ops.empty((3, 2 * 16), F16)
    batch = make_batch([(5, 3)], np.array([[3, 1]], I32), 8)
    for uploads in (2, 1, 1):
        before = runtime.uploads
        step = ops.begin_step(batch)
        for _ in range(2):  # layers
            ops.paged_attention(step, out, qkv, cache, 1.0)
        assert runtime.uploads - before == uploads
    first, *rest = (
        launch[3][9:11] for launch in runtime.launches if launch[0] == "paged_attention"
    )
    for lists in rest:  # block_work and work_list, wherever they lie
        for got, expected in zip(lists, first, strict=True):
            np.testing.assert_array_equal(runtime.to_host(got), runtime.to_host(expected))


def test_steps_of_one_layout_lie_at_the_same_addresses(
    ops: CudaOps, runtime: WritingRuntime
) -> None:
    """As a captured graph needs it."""
    places = set()
    for number in range(5):
        batch = make_batch([(number, 1), (2 * number, 1)], np.zeros((2, 4), I32), 8)
        batch.token_ids[...] = number
        step = ops.begin_step(batch)
        np.testing.assert_array_equal(runtime.to_host(step.token_ids), [number, number])
        arrays = step.token_ids, step.context_len, step.groups[0].slot_mapping
        places.add(tuple(runtime.address(array) for array in arrays))
    assert len(places) == 1


def test_steps_allocate_nothing_once_they_have_been_seen(
    ops: CudaOps, runtime: WritingRuntime
) -> None:
    x, out = ops.empty((500, 8), F16), ops.empty((500, 8), F16)
    batch = make_batch([(0, 500)], np.zeros((1, 5000), I32), 128)
    ops.begin_step(batch)
    before = runtime.allocations
    for _ in range(3):
        step = ops.begin_step(batch)
        ops.rms_norm(out, x, x[0], 1e-5)
        ops.gather_rows(out, x, step.positions)
    assert runtime.allocations == before


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "threads"),
    [(1, 32), (256, 32), (257, 64), (4096, 512), (7937, 1024), (8192, 1024), (100000, 1024)],
)
def test_the_block_of_a_norm_depends_on_the_row_alone(hidden: int, threads: int) -> None:
    assert norm_threads(hidden) == threads


@pytest.mark.parametrize(
    ("elements", "itemsize", "expected"),
    [
        (1, 2, (32, 1)),
        (8, 2, (32, 1)),
        (256, 2, (32, 1)),  # 32 packs of 8
        (264, 2, (64, 1)),
        (2048, 2, (256, 1)),
        (2056, 2, (256, 2)),  # 257 packs
        (2057, 2, (256, 9)),  # by element
        (4096, 4, (256, 4)),
    ],
)
def test_a_thread_takes_a_pack(elements: int, itemsize: int, expected: tuple[int, int]) -> None:
    assert shared_row(elements, itemsize) == expected
    assert row_threads(elements, itemsize) == expected[0]


def test_launches(ops: CudaOps, runtime: WritingRuntime) -> None:
    x, out = ops.empty((5, 600), F16), ops.empty((5, 600), F16)
    ops.rms_norm(out, x, x[0], 1e-5)
    ops.silu_mul(out[:, :300].reshape(10, 150)[:0], x[:0, :300])
    kernel, grid, block, args = runtime.launches.pop()
    assert (kernel, grid, block) == ("rms_norm", (5,), (96,))
    assert [type(a) for a in args[3:]] == [np.int32, np.float32]
    assert (args[0] is out, args[1] is x, args[3], args[4]) == (True, True, 600, np.float32(1e-5))
    assert runtime.loaded == [("norm.cu", "rms_norm", {"DTYPE": "f16"})]
    ops.rms_norm(out, x, x[0], 1e-6)
    assert len(runtime.loaded) == 1


def test_defines_are_given_where_they_differ_from_the_default(
    ops: CudaOps, runtime: WritingRuntime
) -> None:
    x, out = ops.empty((5, 16), F16), ops.empty((5, 16), F16)
    ops.layer_norm(out, x, x[0], x[1], 1e-5)
    ops.layer_norm(out, x, x[0], None, 1e-5)
    ops.gelu(out, x)
    ops.gelu(out, x, exact=True)
    ops.gather_rows(
        ops.empty((1, 4), np.float32), ops.empty((2, 4), np.float32), ops.empty((1,), I32)
    )
    assert [(name, defines) for _, name, defines in runtime.loaded] == [
        ("layer_norm", {"DTYPE": "f16"}),
        ("layer_norm", {"DTYPE": "f16", "BIAS": 0}),
        ("gelu", {"DTYPE": "f16"}),
        ("gelu", {"DTYPE": "f16", "GELU_ERF": 1}),
        ("gather_rows", {"DTYPE": "f32"}),
    ]
    assert [len(launch[3]) for launch in runtime.launches[:2]] == [6, 5]


def test_large_arrays_share_a_grid_that_fills_the_device(
    ops: CudaOps, runtime: WritingRuntime
) -> None:
    x = ops.empty((1000, 1000), F16)
    ops.relu(x, x)
    assert runtime.launches[0][1:3] == ((8 * runtime.properties.multiprocessors,), (256,))
    assert runtime.launches[0][3][2] == 1_000_000
    assert type(runtime.launches[0][3][2]) is np.int64


def test_nothing_to_do_is_not_launched(ops: CudaOps, runtime: WritingRuntime) -> None:
    empty, weight = ops.empty((0, 16), F16), ops.empty((16,), F16)
    table, ids = ops.empty((3, 16), F16), ops.empty((0,), I32)
    packed = ops.pack_weight(np.zeros((3, 16), np.float32))
    runtime.launches.clear()
    runtime.loaded.clear()
    spec = KVCacheSpec(0, 1, 8, 8, "float16", 8)
    cache = ops.empty_kv_cache(spec, 2)
    step = ops.begin_step(make_batch([(0, 0)], np.zeros((1, 1), I32), 8))
    ops.embedding(empty, ids, packed)
    ops.linear(ops.empty((0, 3), F16), empty, packed)
    ops.gather_rows(empty, table, ids)
    ops.rms_norm(empty, ops.empty((0, 16), F16), weight, 1e-5)
    ops.add_rms_norm(empty, ops.empty((0, 16), F16), ops.empty((0, 16), F16), weight, 1e-5)
    ops.layer_norm(empty, ops.empty((0, 16), F16), weight, weight, 1e-5)
    for gated in (ops.silu_mul, ops.gelu_mul):
        gated(empty, ops.empty((0, 32), F16))
    for elementwise in (ops.gelu, ops.relu):
        elementwise(empty, empty)
    ops.rope_and_cache(step, ops.empty((0, 24), F16), ops.empty((2, 9, 4), np.float32), cache)
    ops.copy_blocks([cache], step)
    ops.gather_blocks(ops.empty((0, 1, 8, 8), F16), cache.k, int32s([]))
    ops.scatter_blocks(cache.k, ops.empty((0, 1, 8, 8), F16), int32s([]))
    ops.all_reduce(table)
    assert not runtime.launches
    assert not runtime.loaded
