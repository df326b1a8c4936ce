"""The attention kernels as machine code: no spills, and the instructions that are to be there."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from cupaged.ops.attention_plan import choose_variant
from cupaged.runtime.kernels import (
    CompiledKernels,
    compile_kernel,
)
from cupaged.runtime.machine_code import LIMITS, instruction_counts, occupancy
from tests.gpu_tools import SLOW_AND_LONG_ARCHITECTURES, needs_machine_code

ITEMSIZE = {"f32": 4, "f16": 2, "bf16": 2}
THREADS = 128


pytestmark = needs_machine_code


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes out of the user's own cache."""
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))


def compiled(head_dim: int, dtype: str, arch: str, *flags: str) -> CompiledKernels:
    """The variant for that GPU; it must not spill, and as many blocks must fit as were planned."""
    itemsize = ITEMSIZE[dtype]
    variant = choose_variant(head_dim, itemsize, LIMITS[arch].block_shared_bytes)
    defines: dict[str, str | int] = {
        "DTYPE": dtype,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "ROW_TILES": variant.row_tiles,
        "SLOTS": variant.slots,
        **dict.fromkeys(flags, 1),
    }
    kernels = compile_kernel("paged_attention.cu", defines, arch)
    for name, used in kernels.resources.items():
        assert used.spill_store_bytes == used.spill_load_bytes == 0, name
    used = kernels.resources["paged_attention"]
    assert used.shared_bytes == 0
    assert occupancy(arch, used, THREADS, variant.shared_bytes).blocks >= variant.blocks
    return kernels


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f16", marks=pytest.mark.slow)])
def test_head_dim_128(dtype: str, arch: str) -> None:
    """Four tiles of rows; a warp has 16 of 64 positions, and 4 of 16 tiles of dimensions.

    Products: 8 steps of 16 dimensions, 4 tiles of rows, 2 of positions; then 4 steps of 16
    positions, 4 tiles of rows, 4 of dimensions. Each step of dimensions loads the keys once and
    the queries of 4 tiles; then 2 loads of each tile of values, and the weights 4 by 4.
    Copies: 8 a thread and tile, at the start of each slot but one, and at two places in the loop.
    """
    counts = instruction_counts(compiled(128, dtype, arch).path)
    slots = choose_variant(128, 2, LIMITS[arch].block_shared_bytes).slots
    assert counts["paged_attention"].matrix == 8 * 4 * 2 + 4 * 4 * 4
    assert counts["paged_attention"].ldmatrix == 8 * (1 + 4) + 2 * 4 + 4 * 4
    assert counts["paged_attention"].async_copies >= 8 * (slots - 1 + 2)
    assert counts["paged_attention"].wide_loads >= 2  # the work list
    assert counts["merge_attention_splits"].wide_loads >= 4  # four partial results at a time
    for name in counts:
        assert counts[name].spills == 0, name


@pytest.mark.slow
def test_float32_uses_no_matrix_products() -> None:
    counts = instruction_counts(compiled(64, "f32", "sm_90").path)["paged_attention"]
    assert counts.matrix == counts.ldmatrix == 0 and counts.async_copies > 0


@pytest.mark.parametrize("arch", SLOW_AND_LONG_ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_nothing_spills(dtype: str, arch: str) -> None:
    for head_dim in (64, 80, 96, 128, 256):
        compiled(head_dim, dtype, arch)


@pytest.mark.parametrize("arch", SLOW_AND_LONG_ARCHITECTURES)
def test_no_option_spills(arch: str) -> None:
    options = [(), ("WINDOW",), ("WINDOW", "SOFTCAP"), ("WINDOW", "SINKS")]
    for head_dim, flags in product((64, 128, 256), options):
        compiled(head_dim, "bf16", arch, *flags)
