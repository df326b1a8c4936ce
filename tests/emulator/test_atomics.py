"""Atomic functions: what they store and return, and that loops which wait on them end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.emulator.errors import MisalignedError, OutOfBoundsError
from cupaged.emulator.module import EmulatedModule

SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Each thread adds into one cell: all threads of all blocks.
extern "C" __global__ void sums(int* i, unsigned* u, unsigned long long* l, float* f, double* d,
                                __half* h, __half2* h2, __nv_bfloat16* b, __nv_bfloat162* b2) {
  atomicAdd(i, -1);
  atomicAdd(u, 2u);
  atomicAdd(l, 1ull << 40);
  atomicAdd(f, 0.5f);
  atomicAdd_system(d, 0.25);
  atomicAdd(h, __half(2));
  atomicAdd(h2, __half2(1, -1));
  atomicAdd(b, __nv_bfloat16(0.5f));
  atomicAdd(b2, __nv_bfloat162(1, 2));
}

// One thread: what is returned, and what is left. in: [old, operand]
extern "C" __global__ void each(unsigned* returned, unsigned* left, const unsigned* in, int n) {
  for (int i = 0; i < n; ++i) {
    const unsigned value = in[2 * i + 1];
    unsigned* cell = left + 15 * i;
    for (int k = 0; k < 15; ++k) cell[k] = in[2 * i];
    int* number = reinterpret_cast<int*>(cell);
    unsigned* row = returned + 15 * i;
    row[0] = atomicAdd(&cell[0], value);
    row[1] = atomicSub(&cell[1], value);
    row[2] = atomicExch(&cell[2], value);
    row[3] = atomicMin(&cell[3], value);
    row[4] = atomicMax(&cell[4], value);
    row[5] = atomicMin(&number[5], (int)value);
    row[6] = atomicMax(&number[6], (int)value);
    row[7] = atomicInc(&cell[7], value);
    row[8] = atomicDec(&cell[8], value);
    row[9] = atomicAnd(&cell[9], value);
    row[10] = atomicOr(&cell[10], value);
    row[11] = atomicXor_block(&cell[11], value);
    row[12] = atomicCAS(&cell[12], 7u, value);
    row[13] = atomicSub(&number[13], (int)value);
    row[14] = atomicCAS(reinterpret_cast<unsigned short*>(&cell[14]), (unsigned short)7,
                        (unsigned short)value);
  }
}

extern "C" __global__ void wide(unsigned long long* words, long long* numbers, float* f) {
  words[0] = atomicMax(&words[1], 1ull << 63);
  words[2] = atomicCAS(&words[3], 9ull, 1ull << 50);
  numbers[0] = atomicMin(&numbers[1], -(1ll << 40));
  numbers[2] = atomicMax(&numbers[3], -(1ll << 40));
  f[0] = atomicExch(&f[1], 2.5f);
  words[4] = atomicXor(&words[5], 3ull);
}

// Threads take turns by a lock: counter is read and written without atomics in between.
extern "C" __global__ void locked(int* lock, volatile int* counter, int by_exchange) {
  if (by_exchange) {
    while (atomicExch(lock, 1) != 0) {}
  } else {
    while (atomicCAS(lock, 0, 1) != 0) {}
  }
  __threadfence();
  const int before = *counter;
  __nanosleep(10);  // others run, and find the lock taken
  *counter = before + 1;
  __threadfence();
  atomicExch(lock, 0);
}

// Thread 0 waits for the others, by adding zero and by oring nothing.
extern "C" __global__ void waits(int* arrived, int* out) {
  __shared__ int ready;
  if (threadIdx.x == 0) ready = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    while (atomicAdd(&ready, 0) < (int)blockDim.x / 2) {}
    while (atomicOr(&ready, 0) < (int)blockDim.x - 1) {}
    *out = ready;
  } else {
    arrived[threadIdx.x] = atomicAdd(&ready, 1);
  }
}

// A ticket for each element that is not zero: every ticket once.
extern "C" __global__ void compact(int* out, int* count, const int* in, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && in[i] != 0) out[atomicAdd(count, 1)] = in[i];
}

extern "C" __global__ void beyond(float* out, int index) {
  atomicAdd(&out[index], 1.0f);
}
extern "C" __global__ void astray(char* out) {
  atomicAdd(reinterpret_cast<int*>(out + 2), 1);
}
"""


@pytest.fixture(scope="module", params=[("checked", None), ("checked", 1), ("plain", None)])
def module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> EmulatedModule:
    path = tmp_path_factory.mktemp("atomics") / "atomics.cu"
    path.write_text(SOURCE)
    mode, seed = request.param
    return EmulatedModule(path, mode=mode, seed=seed)


def run(module: EmulatedModule, name: str, grid: int, block: int, *arguments: Any) -> None:
    module.get_function(name)((grid,), (block,), arguments)


def test_sums_count_every_thread(module: EmulatedModule) -> None:
    half, bfloat = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
    cells = [
        np.zeros(size, dtype)
        for size, dtype in [
            (1, np.int32), (1, np.uint32), (1, np.uint64), (1, np.float32), (1, np.float64),
            (1, half), (2, half), (1, bfloat), (2, bfloat),
        ]
    ]  # fmt: skip
    run(module, "sums", 3, 40, *cells)  # 120 threads
    assert [cell.tolist() for cell in cells] == [
        [-120], [240], [120 << 40], [60], [30], [240], [120, -120], [60], [120, 240],
    ]  # fmt: skip


def test_each_function_returns_the_old_and_leaves_the_new(module: EmulatedModule) -> None:
    minus_two = 2**32 - 2
    cases = [(7, 3), (3, 7), (0, 5), (7, minus_two), (minus_two, 5), (5, 5)]
    given = np.array(cases, np.uint32)
    returned, left = np.zeros((6, 15), np.uint32), np.zeros((6, 15), np.uint32)
    run(module, "each", 1, 1, returned, left, given, np.int32(6))

    def signed(x: int) -> int:
        return x - 2**32 if x >= 2**31 else x

    expected = [
        [
            (old + new) % 2**32,
            (old - new) % 2**32,
            new,
            min(old, new),
            max(old, new),
            min(signed(old), signed(new)) % 2**32,
            max(signed(old), signed(new)) % 2**32,
            0 if old >= new else old + 1,
            new if old == 0 or old > new else old - 1,
            old & new,
            old | new,
            old ^ new,
            new if old == 7 else old,
            (old - new) % 2**32,
            new & 0xFFFF if old == 7 else old,  # the low half; the high one is 0 where old is 7
        ]
        for old, new in cases
    ]
    assert left.tolist() == expected
    assert returned[:, :14].tolist() == [[old] * 14 for old, _ in cases]
    assert returned[:, 14].tolist() == [old & 0xFFFF for old, _ in cases]


def test_64_bit_forms(module: EmulatedModule) -> None:
    words = np.array([0, 5, 0, 9, 0, 5], np.uint64)
    numbers = np.array([0, 7, 0, 7], np.int64)
    floats = np.array([0, 1.5], np.float32)
    run(module, "wide", 1, 1, words, numbers, floats)
    assert words.tolist() == [5, 1 << 63, 9, 1 << 50, 5, 6]
    assert numbers.tolist() == [7, -(1 << 40), 7, 7]
    assert floats.tolist() == [1.5, 2.5]


@pytest.mark.parametrize("by_exchange", [0, 1])
def test_a_spin_lock_lets_everyone_through(module: EmulatedModule, by_exchange: int) -> None:
    lock, counter = np.zeros(1, np.int32), np.zeros(1, np.int32)
    run(module, "locked", 2, 96, lock, counter, np.int32(by_exchange))
    assert (lock[0], counter[0]) == (0, 192)


def test_waiting_by_an_addition_of_zero_ends(module: EmulatedModule) -> None:
    arrived, out = np.zeros(64, np.int32), np.zeros(1, np.int32)
    run(module, "waits", 1, 64, arrived, out)
    assert out[0] == 63
    assert sorted(arrived[1:].tolist()) == list(range(63))


def test_tickets_are_given_once(module: EmulatedModule) -> None:
    given = np.arange(300, dtype=np.int32) % 3
    out, count = np.zeros(200, np.int32), np.zeros(1, np.int32)
    run(module, "compact", 5, 64, out, count, given, np.int32(300))
    assert count[0] == 200
    assert sorted(out.tolist()) == [1] * 100 + [2] * 100


def test_atomics_are_checked_like_other_accesses(tmp_path: Path) -> None:
    path = tmp_path / "atomics.cu"
    path.write_text(SOURCE)
    module = EmulatedModule(path)
    out = np.zeros(4, np.float32)
    with pytest.raises(OutOfBoundsError) as beyond:
        run(module, "beyond", 1, 1, out, np.int32(4))
    assert beyond.value.line == line_of("atomicAdd(&out[index], 1.0f)")
    assert (beyond.value.argument, beyond.value.element) == ("out", 4)
    with pytest.raises(MisalignedError) as astray:
        run(module, "astray", 1, 1, np.zeros(16, np.int8))
    assert astray.value.line == line_of("reinterpret_cast<int*>(out + 2)")


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(SOURCE.splitlines(), 1) if text in line)
