"""The sampling kernels as a GPU will run them: no spills, two blocks at a time, wide loads."""

from __future__ import annotations

import pytest

from cupaged.ops.cuda_sampling import row_block
from cupaged.runtime.errors import CompilerUnavailableError, ToolUnavailableError
from cupaged.runtime.kernels import (
    ARCHITECTURES,
    CompiledKernels,
    compile_kernel,
    nvrtc_version,
    toolkit_headers,
)
from cupaged.runtime.machine_code import instruction_counts, occupancy

ROW_KERNELS = {"sampling.cu": "sample", "logits_logprobs.cu": "logprobs"}


def compiled(file: str, arch: str) -> CompiledKernels:
    try:
        toolkit_headers(nvrtc_version()[0])
    except CompilerUnavailableError as error:
        pytest.skip(str(error))
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


@pytest.mark.parametrize(("file", "least"), [("sampling.cu", 16), ("logits_logprobs.cu", 12)])
def test_rows_are_loaded_by_16_bytes(file: str, least: int) -> None:
    """Several quads are under way in each walk of a row: 4 in most of them."""
    kernels = compiled(file, "sm_90")
    try:
        counts = instruction_counts(kernels.path)[ROW_KERNELS[file]]
    except ToolUnavailableError as error:
        pytest.skip(str(error))
    assert counts.wide_loads >= least
    assert counts.spills == 0


def test_forbidden_rows_are_stored_by_16_bytes() -> None:
    kernels = compiled("logits_edits.cu", "sm_90")
    try:
        counts = instruction_counts(kernels.path)["forbid_rows"]
    except ToolUnavailableError as error:
        pytest.skip(str(error))
    assert counts.wide_stores >= 1
