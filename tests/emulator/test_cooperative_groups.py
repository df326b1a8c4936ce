"""Cooperative groups and the primitives of cuda_pipeline.h, against counting by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.emulator.errors import CompileError, UndefinedBehaviourError
from cupaged.emulator.module import EmulatedModule
from cupaged.errors import NotSupportedError

SOURCE = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cuda_pipeline.h>
namespace cg = cooperative_groups;

// A block of 2 x 3 x 4 threads, a grid of 2 x 2
extern "C" __global__ void ranks(unsigned* out) {
  cg::thread_block block = cg::this_thread_block();
  cg::grid_group grid = cg::this_grid();
  unsigned* row = out + 8 * grid.thread_rank();
  row[0] = block.thread_rank();
  row[1] = block.size();
  row[2] = block.group_index().x + 10 * block.group_index().y;
  row[3] = block.thread_index().z;
  row[4] = block.dim_threads().y;
  row[5] = grid.size();
  row[6] = grid.block_rank();
  row[7] = cg::thread_rank(block) + cg::group_size(block);
}

// Neighbours swap through shared memory.
extern "C" __global__ void swaps(int* out, const int* in) {
  __shared__ int cells[64];
  auto block = cg::this_thread_block();
  cells[block.thread_rank()] = in[block.thread_rank()];
  block.sync();
  const int value = cells[block.thread_rank() ^ 1];
  cg::sync(block);
  cells[block.thread_rank()] = value;
  auto pair = cg::tiled_partition<2>(block);
  pair.sync();
  out[block.thread_rank()] = 100 * value + cells[block.thread_rank() ^ 1];
}

extern "C" __global__ void tiles(int* out) {
  auto block = cg::this_thread_block();
  cg::thread_block_tile<8> tile = cg::tiled_partition<8>(block);
  auto pair = cg::tiled_partition<2>(tile);
  const int lane = threadIdx.x;
  int* row = out + 18 * lane;
  row[0] = tile.thread_rank();
  row[1] = tile.meta_group_rank();
  row[2] = tile.meta_group_size();
  row[3] = tile.shfl(lane, 3);
  row[4] = tile.shfl_up(lane, 1);
  row[5] = tile.shfl_down(lane, 2);
  row[6] = tile.shfl_xor(lane, 4);
  row[7] = tile.any(lane == 9);
  row[8] = tile.all(lane < 16);
  row[9] = tile.ballot(lane % 3 == 0);
  row[10] = tile.match_any(lane % 2);
  row[11] = cg::reduce(tile, lane, cg::plus<int>());
  row[12] = cg::reduce(tile, lane % 5, cg::greater<int>());
  row[13] = cg::inclusive_scan(tile, lane);
  row[14] = cg::exclusive_scan(tile, lane, cg::plus<int>());
  row[15] = pair.meta_group_rank();
  row[16] = cg::reduce(pair, lane, [](int a, int b) { return a * b; });
  row[17] = tile.size() * 100 + cg::tiled_partition<32>(block).size();
}

// A struct is shuffled whole.
struct Best {
  float score;
  int index;
  int more[3];
};
extern "C" __global__ void structs(int* out, const float* scores) {
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  Best best = {scores[threadIdx.x], (int)threadIdx.x, {1, 2, (int)threadIdx.x}};
  for (int distance = 16; distance > 0; distance /= 2) {
    const Best other = warp.shfl_xor(best, distance);
    if (other.score > best.score) best = other;
  }
  out[threadIdx.x] = best.index + best.more[2];
}

extern "C" __global__ void coalesced(int* out) {
  const int lane = threadIdx.x;
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  cg::coalesced_group group = cg::binary_partition(warp, lane % 4 == 1);
  int* row = out + 8 * lane;
  row[0] = group.thread_rank();
  row[1] = group.size();
  row[2] = group.shfl(lane, 1);
  row[3] = group.shfl_up(lane, 1);
  row[4] = group.shfl_down(lane, 1);
  row[5] = group.ballot(lane < 6);
  row[6] = cg::reduce(group, 1, cg::plus<int>());
  row[7] = cg::labeled_partition(warp, lane / 10).size();
}

extern "C" __global__ void grid_wait(int* out) {
  out[0] = 1;
  cg::this_grid().sync();
}

// Two stages of copies; row by row.
extern "C" __global__ void pipelined(float* out, const float* in, int rows) {
  __shared__ alignas(16) float stage[2][128];
  const int t = threadIdx.x;
  __pipeline_memcpy_async(&stage[0][4 * t], &in[4 * t], 16);
  __pipeline_commit();
  for (int row = 0; row < rows; ++row) {
    if (row + 1 < rows)
      __pipeline_memcpy_async(&stage[(row + 1) % 2][4 * t], &in[(row + 1) * 128 + 4 * t], 16);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    for (int i = t; i < 128; i += 32) out[row * 128 + i] = 2 * stage[row % 2][127 - i];
    __syncthreads();
  }
}
extern "C" __global__ void filled(int* out, const int* in) {
  __shared__ alignas(16) int cells[4];
  __pipeline_memcpy_async(cells, in, 16, 8);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  for (int i = 0; i < 4; ++i) out[i] = cells[i];
}
extern "C" __global__ void odd_size(int* out, const int* in) {
  __shared__ alignas(16) int cells[4];
  __pipeline_memcpy_async(cells, in, 12);
}
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    path = tmp_path_factory.mktemp("groups") / "groups.cu"
    path.write_text(SOURCE)
    return EmulatedModule(path, seed=2)


def run(module: EmulatedModule, name: str, threads: int, out: np.ndarray, *rest: Any) -> np.ndarray:
    module.get_function(name)((1,), (threads,), (out, *rest))
    return out


def test_ranks_count_x_first(module: EmulatedModule) -> None:
    out = np.zeros((4, 24, 8), np.uint32)
    module.get_function("ranks")((2, 2), (2, 3, 4), (out,))
    for block in range(4):
        for thread in range(24):
            z = thread // 6
            expected = [thread, 24, block % 2 + 10 * (block // 2), z, 3, 96, block, thread + 24]
            assert out[block, thread].tolist() == expected


def test_blocks_and_tiles_are_barriers(module: EmulatedModule) -> None:
    given = np.arange(64, dtype=np.int32)
    out = run(module, "swaps", 64, np.zeros(64, np.int32), given)
    assert out.tolist() == (100 * (given ^ 1) + given).tolist()


def test_tiles_shuffle_and_vote_among_themselves(module: EmulatedModule) -> None:
    out = run(module, "tiles", 40, np.zeros((40, 18), np.int32))
    for lane in range(40):
        tile, rank = divmod(lane, 8)
        first = 8 * tile
        members = range(first, first + 8)
        assert out[lane].tolist() == [
            rank,
            tile,
            5,
            first + 3,
            lane - 1 if rank > 0 else lane,
            lane + 2 if rank < 6 else lane,
            lane ^ 4,
            int(tile == 1),
            int(tile < 2),
            sum(1 << i for i, other in enumerate(members) if other % 3 == 0),
            0x55 if lane % 2 == 0 else 0xAA,
            sum(members),
            max(other % 5 for other in members),
            sum(range(first, lane + 1)),
            sum(range(first, lane)),
            rank // 2,
            (lane | 1) * (lane & ~1),
            832,
        ], lane


def test_structs_are_shuffled_whole(module: EmulatedModule) -> None:
    scores = np.random.default_rng(1).permutation(32).astype(np.float32)
    out = run(module, "structs", 32, np.zeros(32, np.int32), scores)
    assert out.tolist() == [2 * int(scores.argmax())] * 32


def test_coalesced_groups_rank_their_lanes(module: EmulatedModule) -> None:
    out = run(module, "coalesced", 32, np.zeros((32, 8), np.int32))
    for lane in range(32):
        group = [other for other in range(32) if (other % 4 == 1) == (lane % 4 == 1)]
        rank = group.index(lane)
        assert out[lane].tolist() == [
            rank,
            len(group),
            group[1],
            group[max(rank - 1, 0)],
            group[min(rank + 1, len(group) - 1)],
            sum(1 << i for i, other in enumerate(group) if other < 6),
            len(group),
            10 if lane < 30 else 2,
        ], lane


def test_a_grid_cannot_wait(module: EmulatedModule) -> None:
    with pytest.raises(NotSupportedError, match=r"waits for other blocks.* split the kernel"):
        run(module, "grid_wait", 1, np.zeros(1, np.int32))


def test_pipelined_copies_arrive_by_their_wait(module: EmulatedModule) -> None:
    given = np.random.default_rng(2).standard_normal((5, 128)).astype(np.float32)
    out = run(module, "pipelined", 32, np.zeros((5, 128), np.float32), given, np.int32(5))
    assert np.array_equal(out, 2 * given[:, ::-1])


def test_a_copy_fills_with_zeros(module: EmulatedModule) -> None:
    out = run(module, "filled", 1, np.zeros(4, np.int32), np.array([1, 2], np.int32))
    assert out.tolist() == [1, 2, 0, 0]


def test_a_copy_of_another_size_is_refused(module: EmulatedModule) -> None:
    with pytest.raises(UndefinedBehaviourError, match=r"4, 8 or 16 bytes.* asked for 12") as found:
        run(module, "odd_size", 1, np.zeros(4, np.int32), np.zeros(4, np.int32))
    lines = SOURCE.splitlines()
    assert "cells, in, 12" in lines[(found.value.line or 0) - 1]


def test_a_tile_over_several_warps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wide.cu"
    path.write_text(
        "#include <cooperative_groups.h>\n"
        'extern "C" __global__ void wide(int* out) {\n'
        "  auto block = cooperative_groups::this_thread_block();\n"
        "  out[0] = cooperative_groups::tiled_partition<64>(block).size();\n"
        "}\n"
    )
    with pytest.raises(CompileError, match="larger ones span warps"):
        EmulatedModule(path)
