"""Marks for tests that need the compiler for GPUs, or the disassembler of what it makes.

And which GPUs the larger of those tests compile for: some in slow tests, the others in long ones.
"""

from __future__ import annotations

import pytest

from cupaged.runtime.errors import CompilerUnavailableError, ToolUnavailableError
from cupaged.runtime.kernels import ARCHITECTURES, nvrtc_version, toolkit_headers
from cupaged.runtime.machine_code import disassembler


def without_nvrtc() -> str | None:
    """Why there is no NVRTC with its headers; None if there is."""
    try:
        toolkit_headers(nvrtc_version()[0])
    except CompilerUnavailableError as error:
        return str(error)
    return None


def without_disassembler() -> str | None:
    """Why there is no nvdisasm; None if there is."""
    try:
        disassembler()
    except ToolUnavailableError as error:
        return str(error)
    return None


SLOW_ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
SLOW_AND_LONG_ARCHITECTURES = [
    pytest.param(arch, marks=pytest.mark.slow if arch in SLOW_ARCHITECTURES else pytest.mark.long)
    for arch in ARCHITECTURES
]
NO_NVRTC = without_nvrtc()
NO_MACHINE_CODE = NO_NVRTC or without_disassembler()
needs_nvrtc = pytest.mark.skipif(NO_NVRTC is not None, reason=str(NO_NVRTC))
needs_machine_code = pytest.mark.skipif(NO_MACHINE_CODE is not None, reason=str(NO_MACHINE_CODE))
