"""Warp functions against a model of the PTX instruction `shfl`, and against counting by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.emulator.errors import CompileError, WarpMaskError
from cupaged.emulator.module import EmulatedModule

SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
constexpr unsigned ALL = 0xffffffffu;

// out [4, 32]: what each lane gets by index, up, down and xor
extern "C" __global__ void shuffles(int* out, int selector, int width) {
  const int lane = threadIdx.x;
  out[lane] = __shfl_sync(ALL, 100 + lane, selector, width);
  out[32 + lane] = __shfl_up_sync(ALL, 100 + lane, selector, width);
  out[64 + lane] = __shfl_down_sync(ALL, 100 + lane, selector, width);
  out[96 + lane] = __shfl_xor_sync(ALL, 100 + lane, selector, width);
}

extern "C" __global__ void types(double* out) {
  const int lane = threadIdx.x;
  out[lane] = __shfl_sync(ALL, lane * 0.1f, 31 - lane);
  out[32 + lane] = __shfl_sync(ALL, lane * 0.1, 31 - lane);
  out[64 + lane] = __shfl_sync(ALL, (1ll << 40) + lane, 31 - lane);
  out[96 + lane] = __shfl_sync(ALL, ~0ull - lane, 31 - lane) == ~0ull - (31 - lane);
  out[128 + lane] = __half2float(__shfl_sync(ALL, __half(lane), 31 - lane));
  out[160 + lane] = __low2float(__shfl_xor_sync(ALL, __half2(lane, -lane), 1));
  out[192 + lane] = __bfloat162float(__shfl_down_sync(ALL, __nv_bfloat16(lane), 2));
  out[224 + lane] = __high2float(__shfl_up_sync(ALL, __nv_bfloat162(lane, -lane), 1));
}

extern "C" __global__ void votes(unsigned* out, unsigned mask) {
  const unsigned lane = threadIdx.x;
  if ((mask >> lane & 1) == 0) return;
  unsigned* row = out + 8 * lane;
  row[0] = __ballot_sync(mask, lane % 3 == 0);
  row[1] = __any_sync(mask, lane == 6);
  row[2] = __any_sync(mask, lane == 7);
  row[3] = __all_sync(mask, lane % 2 == 0);
  row[4] = __all_sync(mask, lane % 4 == 0);
  row[5] = __match_any_sync(mask, lane / 8);
  int all = 7;
  row[6] = __match_all_sync(mask, 5.0f, &all) + all;
  row[7] = __match_all_sync(mask, (unsigned long long)lane, &all) + all;
}

extern "C" __global__ void reductions(int* out, unsigned* bits, const int* in) {
  const int lane = threadIdx.x;
  const int value = in[lane];
  int* row = out + 3 * lane;
  row[0] = __reduce_add_sync(ALL, value);
  row[1] = __reduce_min_sync(ALL, value);
  row[2] = __reduce_max_sync(ALL, value);
  unsigned* words = bits + 6 * lane;
  words[0] = __reduce_add_sync(ALL, (unsigned)value);
  words[1] = __reduce_min_sync(ALL, (unsigned)value);
  words[2] = __reduce_max_sync(ALL, (unsigned)value);
  words[3] = __reduce_and_sync(ALL, (unsigned)value);
  words[4] = __reduce_or_sync(ALL, (unsigned)value);
  words[5] = __reduce_xor_sync(ALL, (unsigned)value);
}

// Both halves of a warp at once, by different paths, with masks of their own.
extern "C" __global__ void two_branches(int* out) {
  const int lane = threadIdx.x;
  if (lane < 16) {
    out[lane] = __shfl_sync(0x0000ffffu, lane, 3);
  } else {
    const int first = __shfl_xor_sync(0xffff0000u, lane, 1);
    out[lane] = __reduce_add_sync(0xffff0000u, first);
  }
}

// The last warp of the block has blockDim.x % 32 lanes; the mask may name all 32.
extern "C" __global__ void partial_warp(unsigned* out) {
  out[threadIdx.x] = __ballot_sync(ALL, 1);
  out[threadIdx.x + blockDim.x] = __activemask();
}

extern "C" __global__ void reads_exited(int* out, int source) {
  if (threadIdx.x == 5) return;
  out[threadIdx.x] = __shfl_sync(ALL, 1, source);
}
extern "C" __global__ void reads_outside_the_mask(int* out) {
  if (threadIdx.x < 8)
    out[threadIdx.x] = __shfl_down_sync(0x000000ffu, 1, 1);
}
extern "C" __global__ void outside_its_own_mask(int* out) {
  out[threadIdx.x] =
      __shfl_sync(0x0000ffffu, 1, 0);
}
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    path = tmp_path_factory.mktemp("warp") / "warp.cu"
    path.write_text(SOURCE)
    return EmulatedModule(path, seed=5)


def run(module: EmulatedModule, name: str, out: np.ndarray, *arguments: Any) -> np.ndarray:
    module.get_function(name)((1,), (32,), (out, *arguments))
    return out


def ptx_shfl(mode: str, lane: int, b: int, c: int) -> int:
    """The source lane of `shfl.mode d, a, b, c`, as the PTX manual defines it."""
    bval, cval, segment = b & 31, c & 31, (c >> 8) & 31
    highest = (lane & segment) | (cval & ~segment & 31)
    lowest = lane & segment
    match mode:
        case "up":
            source, valid = lane - bval, lane - bval >= highest
        case "down":
            source, valid = lane + bval, lane + bval <= highest
        case "bfly":
            source, valid = lane ^ bval, lane ^ bval <= highest
        case _:
            source = lowest | (bval & ~segment & 31)
            valid = source <= highest
    return source if valid else lane


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_shuffles_read_the_lane_that_ptx_says(module: EmulatedModule, width: int) -> None:
    segment = (32 - width) << 8  # what the CUDA functions pass for the width
    for selector in [*range(40), -1]:
        out = run(
            module, "shuffles", np.zeros((4, 32), np.int32), np.int32(selector), np.int32(width)
        )
        expected = [
            [100 + ptx_shfl(mode, lane, selector, segment | clamp) for lane in range(32)]
            for mode, clamp in [("idx", 31), ("up", 0), ("down", 31), ("bfly", 31)]
        ]
        assert out.tolist() == expected, selector


def test_shuffles_of_every_type_keep_the_value(module: EmulatedModule) -> None:
    out = run(module, "types", np.zeros((8, 32)))
    lanes = np.arange(32)
    mirrored = lanes[::-1]
    assert out[0].tolist() == (mirrored.astype(np.float32) * np.float32(0.1)).tolist()
    assert out[1].tolist() == (mirrored * 0.1).tolist()
    assert out[2].tolist() == (2**40 + mirrored).tolist()
    assert out[3].tolist() == [1] * 32
    assert out[4].tolist() == mirrored.tolist()
    assert out[5].tolist() == (lanes ^ 1).tolist()
    assert out[6].tolist() == [*range(2, 32), 30, 31]
    assert out[7].tolist() == [0, *(-lanes[:31])]


def test_votes_and_matches_count_the_lanes_of_the_mask(module: EmulatedModule) -> None:
    mask = 0x00005555  # lanes 0, 2, ..., 14
    out = run(module, "votes", np.zeros((32, 8), np.uint32), np.uint32(mask))
    threes = 1 << 0 | 1 << 6 | 1 << 12
    for lane in range(0, 16, 2):
        same = 0x55 if lane < 8 else 0x5500
        assert out[lane].tolist() == [threes, 1, 0, 1, 0, same, mask + 1, 0], lane
    assert not out[1::2].any()
    assert not out[16:].any()


def test_reductions_of_integers_wrap_around(module: EmulatedModule) -> None:
    values = np.random.default_rng(3).integers(-(2**31), 2**31, 32).astype(np.int32)
    values[:2] = -(2**31)
    numbers, bits = np.zeros((32, 3), np.int32), np.zeros((32, 6), np.uint32)
    run(module, "reductions", numbers, bits, values)
    unsigned = values.view(np.uint32)
    total = sum(int(value) for value in values)
    wrapped = (total + 2**31) % 2**32 - 2**31
    assert numbers.tolist() == [[wrapped, -(2**31), int(values.max())]] * 32
    assert (
        bits.tolist()
        == [
            [
                total % 2**32,
                int(unsigned.min()),
                int(unsigned.max()),
                int(np.bitwise_and.reduce(unsigned)),
                int(np.bitwise_or.reduce(unsigned)),
                int(np.bitwise_xor.reduce(unsigned)),
            ]
        ]
        * 32
    )


def test_halves_of_a_warp_may_be_in_different_branches(module: EmulatedModule) -> None:
    out = run(module, "two_branches", np.zeros(32, np.int32))
    assert out.tolist() == [3] * 16 + [sum(range(16, 32))] * 16


@pytest.mark.parametrize("threads", [1, 7, 33, 40])
def test_a_mask_may_name_lanes_beyond_the_block(module: EmulatedModule, threads: int) -> None:
    out = np.zeros((2, threads), np.uint32)
    module.get_function("partial_warp")((1,), (threads,), (out,))
    tail = (1 << threads % 32) - 1
    expected = [0xFFFFFFFF] * (threads // 32 * 32) + [tail] * (threads % 32)
    assert out[0].tolist() == expected
    # Lanes may have exited before another one asks: a guess, but never of lanes that are not there.
    assert [int(got) & ~want for got, want in zip(out[1], expected, strict=True)] == [0] * threads


def test_reading_a_lane_that_has_exited_is_found(module: EmulatedModule) -> None:
    out = np.zeros(32, np.int32)
    run(module, "reads_exited", out, np.int32(6))
    assert out.tolist() == [1] * 5 + [0] + [1] * 26
    with pytest.raises(WarpMaskError, match="__shfl_sync reads lane 5, which has exited") as found:
        run(module, "reads_exited", out, np.int32(5))
    assert found.value.line == line_of("__shfl_sync(ALL, 1, source)")


def test_reading_a_lane_outside_the_mask_is_found(module: EmulatedModule) -> None:
    with pytest.raises(WarpMaskError, match=r"lane 8, .* not in the mask 0x000000ff") as found:
        run(module, "reads_outside_the_mask", np.zeros(32, np.int32))
    assert found.value.thread == (7, 0, 0)
    assert found.value.line == line_of("__shfl_down_sync(0x000000ffu, 1, 1)")


def test_a_lane_outside_its_own_mask_is_found(module: EmulatedModule) -> None:
    with pytest.raises(WarpMaskError) as found:
        run(module, "outside_its_own_mask", np.zeros(32, np.int32))
    assert found.value.line == line_of("__shfl_sync(0x0000ffffu, 1, 0)")
    assert found.value.thread[0] >= 16


@pytest.mark.parametrize("width", [0, 3, 33, 64, -8])
def test_a_width_that_is_no_power_of_two_up_to_32_is_found(
    module: EmulatedModule, width: int
) -> None:
    with pytest.raises(WarpMaskError, match=f"__shfl_sync has width {width};") as found:
        run(module, "shuffles", np.zeros((4, 32), np.int32), np.int32(1), np.int32(width))
    assert found.value.line == line_of("__shfl_sync(ALL, 100 + lane, selector, width)")


def test_the_old_forms_name_their_replacement(tmp_path: Path) -> None:
    forms = {
        "__shfl(1, 2)": "__shfl_sync(",
        "__shfl_up(1.0f, 2)": "__shfl_up_sync(",
        "__shfl_down(1.0f, 2, 16)": "__shfl_down_sync(",
        "__shfl_xor(1, 2)": "__shfl_xor_sync(",
        "__any(1)": "__any_sync(",
        "__all(1)": "__all_sync(",
        "__ballot(1)": "__ballot_sync(",
    }
    path = tmp_path / "old.cu"
    lines = [f"  out[0] = {form};" for form in forms]
    path.write_text("\n".join(['extern "C" __global__ void old(float* out) {', *lines, "}\n"]))
    with pytest.raises(CompileError) as error:
        EmulatedModule(path)
    assert [new for new in forms.values() if f"7.0: use {new}" not in str(error.value)] == []


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(SOURCE.splitlines(), 1) if text in line)
