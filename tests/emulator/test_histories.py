"""What the history of a word takes for a race or for uninitialised, and what it must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.emulator import (
    DataRaceError,
    EmulatedModule,
    OutOfBoundsError,
    UndefinedBehaviourError,
    UninitializedReadError,
)

SOURCE = """
#include <cooperative_groups.h>
// Right: the loop that the programming guide gives for an atomic operation that there is not.
__device__ void largest(float* best, float value) {
  int* bits = reinterpret_cast<int*>(best);
  int old = *bits, assumed;
  do {
    assumed = old;
    old = atomicCAS(bits, assumed, __float_as_int(fmaxf(value, __int_as_float(assumed))));
  } while (assumed != old);
}
extern "C" __global__ void largest_shared(float* out, const float* x) {
  __shared__ float best;
  if (threadIdx.x == 0) best = 0;
  __syncthreads();
  largest(&best, x[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = best;
}
extern "C" __global__ void largest_global(float* out, const float* x) {
  largest(out, x[blockIdx.x * 32 + threadIdx.x]);
}
extern "C" __global__ void add_double(double* sum) {
  auto* bits = reinterpret_cast<unsigned long long*>(sum);
  unsigned long long old = *bits, assumed;
  do {
    assumed = old;
    old = atomicCAS(bits, assumed, __double_as_longlong(1.0 + __longlong_as_double(assumed)));
  } while (assumed != old);
}
// Wrong: the counter is read while others still add to it.
extern "C" __global__ void read_early(int* out) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);
  out[threadIdx.x] = count;
}
// Wrong: nothing orders the first store with the other threads' additions.
extern "C" __global__ void initialised_late(int* out) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  atomicAdd(&count, 1);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = count;
}
extern "C" __global__ void initialised_late_global(int* count) {
  if (threadIdx.x == 0) *count = 0;
  atomicAdd(count, 1);
}
struct Pair { short key; int index; };
// Right: the padding of a structure is copied with it, and never written.
extern "C" __global__ void padded(int* out) {
  __shared__ Pair pairs[32];
  pairs[threadIdx.x].key = threadIdx.x;
  pairs[threadIdx.x].index = 2 * threadIdx.x;
  __syncthreads();
  Pair pair = pairs[31 - threadIdx.x];
  out[threadIdx.x] = pair.key + pair.index;
}
extern "C" __global__ void by_library(float* out, const float* x, int n) {
  __shared__ float s[64];
  if (threadIdx.x == 0) {
    memset(s, 0, sizeof(s));
    memcpy(s, x, n * sizeof(float));
    memmove(s + 32, s, 16 * sizeof(float));
  }
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void count_odd(int* out, const int* x) {
  if (x[threadIdx.x] & 1) {
    const unsigned mask = __activemask();
    if (threadIdx.x % 32 == __ffs(mask) - 1) atomicAdd(out, __popc(mask));
  }
}
extern "C" __global__ void count_odd_group(int* out, const int* x) {
  namespace cg = cooperative_groups;
  if (x[threadIdx.x] & 1) {
    cg::coalesced_group active = cg::coalesced_threads();
    int first = 0;
    if (active.thread_rank() == 0) first = atomicAdd(out, active.size());
    first = active.shfl(first, 0);
    atomicMax(out + 1, first + active.thread_rank());
  } else {
    __syncwarp(__activemask());
  }
}
extern "C" __global__ void empty() {}
extern "C" __global__ void last_block(float* out, float* partial, unsigned* count) {
  __shared__ bool last;
  if (threadIdx.x == 0) partial[blockIdx.x] = 1;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(count, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last || threadIdx.x != 0) return;
  __threadfence();
  float sum = 0;
  for (int i = 0; i < gridDim.x; ++i) sum += partial[i];
  *out = sum;
}
extern "C" __global__ void local_atomic(int* out) {
  int local = 0;
  atomicAdd(&local, 1);
  *out = local;
}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("histories") / "histories.cu"
    file.write_text(SOURCE)
    return file


def launch(
    path: Path, name: str, *args: Any, blocks: int = 1, threads: int = 32, **options: Any
) -> None:
    EmulatedModule(path, **options).get_function(name)((blocks,), (threads,), args)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("opt_level", [0, 2])
def test_a_compare_and_swap_loop_may_read_plainly(
    path: Path, seed: int | None, opt_level: int
) -> None:
    options: dict[str, Any] = {"seed": seed, "opt_level": opt_level, "global_races": True}
    x = np.random.default_rng(0).random(96, np.float32)
    out = np.zeros(1, np.float32)
    launch(path, "largest_shared", out, x, threads=96, **options)
    assert out[0] == x.max()
    out = np.zeros(1, np.float32)
    launch(path, "largest_global", out, x, blocks=3, **options)
    assert out[0] == x.max()
    total = np.zeros(1)
    launch(path, "add_double", total, blocks=2, **options)
    assert total[0] == 64


@pytest.mark.parametrize("opt_level", [0, 2])
def test_a_counter_read_too_early_is_a_race(path: Path, opt_level: int) -> None:
    with pytest.raises(DataRaceError, match="s element 0 of shared 'count', and nothing orders"):
        launch(path, "read_early", np.zeros(32, np.int32), opt_level=opt_level)


@pytest.mark.parametrize("name", ["initialised_late", "initialised_late_global"])
@pytest.mark.parametrize("opt_level", [0, 2])
def test_an_atomic_does_not_hide_the_plain_store_before_it(
    path: Path, name: str, opt_level: int
) -> None:
    with pytest.raises((DataRaceError, UninitializedReadError)):
        launch(path, name, np.zeros(1, np.int32), opt_level=opt_level, global_races=True)


@pytest.mark.parametrize("opt_level", [0, 1, 2, 3])
def test_padding_may_be_copied(path: Path, opt_level: int) -> None:
    out = np.zeros(32, np.int32)
    launch(path, "padded", out, opt_level=opt_level)
    assert out.tolist() == [3 * (31 - i) for i in range(32)]


@pytest.mark.parametrize("opt_level", [0, 1, 2, 3])
def test_copies_by_the_library_are_seen(path: Path, opt_level: int) -> None:
    out, x = np.full(64, -1, np.float32), np.arange(1, 17, dtype=np.float32)
    launch(path, "by_library", out, x, np.int32(16), threads=64, opt_level=opt_level)
    assert out.tolist() == [*range(1, 17), *[0] * 16, *range(1, 17), *[0] * 16]
    with pytest.raises(OutOfBoundsError, match=r"of 'x' .*, which has elements 0 to 15"):
        launch(path, "by_library", out, x, np.int32(17), threads=64, opt_level=opt_level)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_active_lanes_are_those_of_the_branch(path: Path, seed: int | None) -> None:
    x = np.random.default_rng(1).integers(0, 100, 256).astype(np.int32)
    odd = int((x % 2).sum())
    out = np.zeros(1, np.int32)
    launch(path, "count_odd", out, x, threads=256, seed=seed)
    assert out[0] == odd
    both = np.zeros(2, np.int32)
    launch(path, "count_odd_group", both, x, threads=256, seed=seed)
    assert both.tolist() == [odd, odd - 1]


def test_orders_between_blocks_hold_after_millions_of_blocks(path: Path) -> None:
    module = EmulatedModule(path, global_races=True)
    for _ in range(3):
        out, partial, count = (
            np.zeros(1, np.float32),
            np.zeros(8, np.float32),
            np.zeros(1, np.uint32),
        )
        module.get_function("last_block")((8,), (32,), (out, partial, count))
        assert out[0] == 8
        module.get_function("empty")((1_100_000,), (1,), ())


def test_an_atomic_on_a_local_variable_is_refused(path: Path) -> None:
    with pytest.raises(UndefinedBehaviourError, match="atomic operation on a thread's local"):
        launch(path, "local_atomic", np.zeros(1, np.int32), threads=1)
