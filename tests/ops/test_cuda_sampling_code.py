"""The sampling kernels as a GPU will run them: no spills, two blocks at a time, wide loads."""

from __future__ import annotations

import pytest

from cupaged.ops.cuda_sampling import row_block
from cupaged.runtime.kernels import (
    ARCHITECTURES,
    CompiledKernels,
    compile_kernel,
)
from cupaged.runtime.machine_code import instruction_counts, occupancy
from tests.gpu_tools import needs_machine_code, needs_nvrtc

pytestmark = needs_nvrtc
ROW_KERNELS = {"sampling.cu": "sample", "logits_logprobs.cu": "logprobs"}


def compiled(file: str, arch: str) -> CompiledKernels:
    return compile_kernel(file, {}, arch)


def check(file: str, arch: str) -> CompiledKernels:
    kernels = compiled(file, arch)
    for name, used in kernels.resources.items():
        assert used.spill_store_bytes == used.spill_load_bytes == used.stack_bytes == 0, name
    if file in ROW_KERNELS:
        used = kernels.resources[ROW_KERNELS[file]]
        assert occupancy(arch, used, row_block(128_256)).blocks >= 2
    return kernels


@pytest.mark.parametrize("file", [*ROW_KERNELS, "logits_edits.cu"])
def test_kernels_fit(file: str) -> None:
    check(file, "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("file", [*ROW_KERNELS, "logits_edits.cu"])
def test_kernels_fit_everywhere(file: str, arch: str) -> None:
    check(file, arch)


@needs_machine_code
@pytest.mark.parametrize(("file", "least"), [("sampling.cu", 16), ("logits_logprobs.cu", 12)])
def test_rows_are_loaded_by_16_bytes(file: str, least: int) -> None:
    """Several quads are under way in each walk of a row: 4 in most of them."""
    kernels = compiled(file, "sm_90")
    counts = instruction_counts(kernels.path)[ROW_KERNELS[file]]
    assert counts.wide_loads >= least
    assert counts.spills == 0


@needs_machine_code
def test_forbidden_rows_are_stored_by_16_bytes() -> None:
    kernels = compiled("logits_edits.cu", "sm_90")
    counts = instruction_counts(kernels.path)["forbid_rows"]
    assert counts.wide_stores >= 1
