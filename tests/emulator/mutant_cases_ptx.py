"""The host branch of the PTX wrappers, by the tests of its layouts, on a module of its mutant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged.emulator.errors import MisalignedError, OutOfBoundsError
from cupaged.emulator.module import EmulatedModule
from tests.emulator.mutant_cases import Variant
from tests.ops import test_device_headers as headers

HEADERS = (
    headers.SOURCE  # headers.cu
    + r"""
// The lanes that give no address of a row may give any.
extern "C" __global__ void few_addresses(unsigned* out) {
  __shared__ uint4 tile[16];
  const int lane = threadIdx.x;
  if (lane < 16) tile[lane] = make_uint4(lane, lane, lane, lane);
  __syncthreads();
  unsigned one[1];
  unsigned two[2];
  ldmatrix_x1(one, lane < 8 ? &tile[lane] : nullptr);
  ldmatrix_x2(two, lane < 16 ? &tile[lane] : nullptr);
  out[lane] = one[0] + two[0] + two[1];
}

// Waiting for all copies includes those of no group yet.
extern "C" __global__ void wait_for_all(unsigned* out, const unsigned* in) {
  __shared__ __align__(16) unsigned tile[128];
  copy_async<16>(&tile[4 * threadIdx.x], in + 4 * threadIdx.x);
  copy_async_wait_all();
  __syncthreads();
  out[threadIdx.x] = tile[127 - threadIdx.x];
}
"""
)
SIXTEEN_BITS = [("mma_f16", np.dtype(np.float16)), ("mma_bf16", np.dtype("bfloat16"))]


def check_headers(module: EmulatedModule) -> None:
    """Products, matrices from shared memory, asynchronous copies, and what is refused."""

    def launch(name: str, *args: Any, threads: int = 32, blocks: int = 1) -> None:
        module.get_function(name)((blocks,), (threads,), args)

    headers.test_products_of_sixteen_bits_keep_rows_apart(launch)
    headers.test_products_of_bytes(launch)
    for name, dtype in SIXTEEN_BITS:
        headers.test_products_of_sixteen_bits(launch, name, dtype)
    for count in (1, 2, 4):
        for transposed in (False, True):
            headers.test_matrices_from_shared_memory(launch, count, transposed)
    for size in (4, 8, 16):
        headers.test_copies(launch, size)
        headers.test_copies_fill_with_zeros(launch, size)
    out = np.zeros(32, np.uint32)
    launch("few_addresses", out)
    np.testing.assert_array_equal(out, 3 * (np.arange(32) // 4) + 8)
    numbers = np.arange(128, dtype=np.uint32)
    launch("wait_for_all", out, numbers)
    np.testing.assert_array_equal(out, 127 - np.arange(32))
    headers.test_groups_of_copies(launch)
    headers.test_a_warp_sums_by_the_butterfly(launch)
    try:
        headers.test_misuse_is_found(launch, "odd_row", MisalignedError, "ODD", "ldmatrix_x4")
        headers.test_misuse_is_found(
            launch, "global_row", OutOfBoundsError, "GLOBAL", "not in shared memory"
        )
        headers.test_a_misaligned_copy_is_found(launch)
        headers.test_a_copy_of_more_than_there_is_is_found(launch)
    except pytest.fail.Exception as failure:  # it is none of `Exception`
        raise AssertionError(str(failure)) from None


PTX: dict[str, list[Variant]] = {"ptx_host.cuh": [Variant("headers.cu", check_headers)]}
