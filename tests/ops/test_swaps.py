"""Blocks of all layers on their way to the host and back, on every kind of operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupaged.config import EngineConfig
from cupaged.engine.warm_up import warm_up_batch
from cupaged.ops import KVCacheSpec, StepLimits
from cupaged.ops.cuda_ops import CudaOps
from cupaged.ops.launch_checks import OperandError
from cupaged.ops.numpy_ops import NumpyOps
from tests.deferred_runtime import DeferredRuntime
from tests.fast_runtime import FastRuntime

NUM_BLOCKS, NUM_HOST_BLOCKS = 9, 70
OUT = [(8, 2), (0, 0), (3, 1), (5, 69)]  # (device, host): two runs of neighbours on the host
IN = [(1, 4), (69, 7), (0, 0)]  # (host, device)


def limits(num_host_blocks: int) -> StepLimits:
    return StepLimits(
        max_tokens=8, max_seqs=2, max_logits=2, max_context=64, max_blocks_per_seq=8,
        vocab_size=32, max_logprobs=1, max_steps_in_flight=1, num_q_heads=2,
        kv_specs=(spec(),), num_host_blocks=num_host_blocks,
    )  # fmt: skip


def spec(dtype: str = "bfloat16") -> KVCacheSpec:
    return KVCacheSpec(0, 2, 32, 32, dtype, 8)


class Swaps:
    """Two layers of random blocks, and blocks of the host that hold other numbers."""

    def __init__(self, ops: Any, num_host_blocks: int = NUM_HOST_BLOCKS) -> None:
        self.ops = ops
        self.to_host = ops.runtime.to_host if isinstance(ops, CudaOps) else np.array
        ops.reserve(limits(num_host_blocks))
        dtype = "float32" if isinstance(ops, NumpyOps) else "bfloat16"
        self.caches = [ops.empty_kv_cache(spec(dtype), NUM_BLOCKS) for _ in range(2)]
        self.host = [ops.empty_host_cache(spec(dtype), num_host_blocks) for _ in range(2)]
        random = np.random.default_rng(0)
        for cache in self.caches:
            for array in (cache.k, cache.v):
                self.fill(array, random.integers(-99, 99, array.shape).astype(ops.dtype))
        for cache in self.host:
            cache.k[...], cache.v[...] = 100, 101

    def fill(self, array: Any, values: NDArray[Any]) -> None:
        if isinstance(self.ops, CudaOps):
            self.ops.runtime.copy_to_device(array, values)
        else:
            array[...] = values

    def arrays(self) -> list[NDArray[Any]]:
        """K and V of each layer, as numbers."""
        kept = [array for cache in self.caches for array in (cache.k, cache.v)]
        return [self.to_host(array).astype(np.float32) for array in kept]

    def host_arrays(self) -> list[NDArray[Any]]:
        return [a.astype(np.float32) for cache in self.host for a in (cache.k, cache.v)]

    def step(self, out: list[tuple[int, int]], back: list[tuple[int, int]]) -> Any:
        config = EngineConfig(vocab_size=32, num_blocks=8, block_size=8, max_model_len=64)
        batch = warm_up_batch(1, config)
        pairs = [np.array(p, np.int32).reshape(-1, 2) for p in (out, back)]
        return self.ops.begin_step(replace(batch, swap_out=pairs[0], swap_in=pairs[1]))


@pytest.fixture(params=["numpy", "emulated"])
def swaps(request: pytest.FixtureRequest) -> Swaps:
    return Swaps(NumpyOps() if request.param == "numpy" else CudaOps(FastRuntime(), "bfloat16"))


def test_blocks_go_out_and_come_back(swaps: Swaps) -> None:
    before, other = swaps.arrays(), swaps.host_arrays()
    step = swaps.step(OUT, IN)
    swaps.ops.swap_out(swaps.caches, swaps.host, step)
    for now, device, kept in zip(swaps.host_arrays(), before, other, strict=True):
        for source, destination in OUT:
            kept[destination] = device[source]
        assert (now == kept).all()
    swaps.ops.swap_in(swaps.caches, swaps.host, step)
    for now, device, kept in zip(swaps.arrays(), before, swaps.host_arrays(), strict=True):
        for source, destination in IN:
            device[destination] = kept[source]
        assert (now == device).all()


def test_more_blocks_than_the_staging_area_holds() -> None:
    """One block at a time goes through it."""
    swaps = Swaps(CudaOps(FastRuntime(), "bfloat16"))
    swaps.ops._swap._area = swaps.ops._swap._area[: swaps.caches[0].k[0].nbytes]
    test_blocks_go_out_and_come_back(swaps)


def test_a_block_larger_than_the_staging_area_is_refused() -> None:
    swaps = Swaps(CudaOps(FastRuntime(), "bfloat16"))
    swaps.ops._swap._area = swaps.ops._swap._area[: swaps.caches[0].k[0].nbytes - 1]
    with pytest.raises(OperandError, match="swap_out: bytes of a block"):
        swaps.ops.swap_out(swaps.caches, swaps.host, swaps.step(OUT, []))


def test_no_block() -> None:
    swaps = Swaps(CudaOps(FastRuntime(), "bfloat16"))
    before, other = swaps.arrays(), swaps.host_arrays()
    step = swaps.step([], [])
    swaps.ops.swap_out(swaps.caches, swaps.host, step)
    swaps.ops.swap_in(swaps.caches, swaps.host, step)
    for now, then in zip(swaps.arrays() + swaps.host_arrays(), before + other, strict=True):
        assert (now == then).all()


@pytest.mark.parametrize(
    ("pairs", "what"),
    [
        ([(9, 0)], "blocks"),
        ([(-1, 0)], "blocks"),
        ([(0, 70)], "host blocks"),
        ([(0, -1)], "host blocks"),
    ],
)
def test_what_is_outside_is_refused(pairs: list[tuple[int, int]], what: str) -> None:
    swaps = Swaps(CudaOps(FastRuntime(), "bfloat16"))
    with pytest.raises(OperandError, match=what):
        swaps.ops.swap_out(swaps.caches, swaps.host, swaps.step(pairs, []))
    back = [(host, device) for device, host in pairs]
    with pytest.raises(OperandError, match=what):
        swaps.ops.swap_in(swaps.caches, swaps.host, swaps.step([], back))


def test_no_block_is_written_twice() -> None:
    swaps = Swaps(CudaOps(FastRuntime(), "bfloat16"))
    with pytest.raises(OperandError, match="swap_out: host blocks"):
        swaps.ops.swap_out(swaps.caches, swaps.host, swaps.step([(0, 3), (1, 3)], []))
    with pytest.raises(OperandError, match="swap_in: device blocks"):
        swaps.ops.swap_in(swaps.caches, swaps.host, swaps.step([], [(3, 0), (4, 0)]))


def test_one_block_of_the_host_comes_back_to_several(swaps: Swaps) -> None:
    host = swaps.host_arrays()
    back = [(3, 0), (4, 5), (3, 7), (4, 1), (3, 2)]
    swaps.ops.swap_in(swaps.caches, swaps.host, swaps.step([], back))
    for now, kept in zip(swaps.arrays(), host, strict=True):
        for source, destination in back:
            assert (now[destination] == kept[source]).all()


def test_nothing_waits_and_nothing_is_allocated() -> None:
    """The device does nothing until somebody waits for it; the swaps are in order all the same."""
    runtime = DeferredRuntime()
    swaps = Swaps(CudaOps(runtime, "bfloat16"))
    before = swaps.arrays()
    step = swaps.step([*OUT, (1, 68)], [(68, 1), (2, 8)])
    with runtime.forbidding("wait", "blocking copy", "empty", "empty_pinned"):
        swaps.ops.swap_out(swaps.caches, swaps.host, step)
        swaps.ops.copy_blocks(swaps.caches, step)  # from 0 to 1, which has left
        swaps.ops.swap_in(swaps.caches, swaps.host, step)
    for now, then in zip(swaps.arrays(), before, strict=True):
        assert (now == then).all()
