"""`bench/ops`: loops are read out of machine code, and the kernels for few tokens are not bound by
the issue of instructions."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.ops.cases import CASES
from bench.ops.limits import GPUS, limit, verdicts
from bench.ops.loops import Loop, code_of, find_loops, main_loop, whole_code
from cupaged.runtime.errors import CompilerUnavailableError, ToolUnavailableError
from cupaged.runtime.kernels import ARCHITECTURES, kernel_files, kernel_names

# As nvdisasm prints: a loop inside of another, and the branch to itself that pads a kernel's end.
LISTING = """
//--------------------- .text.other               --------------------------
        /*0000*/                   EXIT ;
//--------------------- .text.walk                --------------------------
.text.walk:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR6][R2.64] ;
        /*0020*/                   LDG.E R8, desc[UR6][R2.64] ;
.L_x_0:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR6][R2.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R9+0x10], desc[UR6][R2.64] ;
        /*0050*/                   HMMA.16816.F32.BF16 R12, R4, R8, R12 ;
        /*0060*/                   NOP ;
        /*0070*/               @P1 BRA `(.L_x_0) ;
        /*0080*/                   STG.E.128 desc[UR6][R2.64], R12 ;
        /*0090*/               @P2 BRA `(.L_x_2) ;
        /*00a0*/              @!P0 BRA `(.L_x_1) ;
.L_x_2:
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
        /*00d0*/                   NOP;
"""


def test_loops_are_found() -> None:
    lines = code_of(LISTING, "walk")
    inner, outer = find_loops(lines)
    assert inner == Loop(instructions=4, loads=2 * 512, stores=0, matrix=1)
    assert outer == Loop(instructions=9, loads=3 * 512, stores=512, matrix=1, has_loop=True)
    assert main_loop(lines) == inner
    assert main_loop(code_of(LISTING, "other")) is None
    assert whole_code(code_of(LISTING, "other")) == Loop(1, 0, 0, 0)


def test_every_kernel_has_a_case() -> None:
    there = {(file, kernel) for file in kernel_files() for kernel in kernel_names(file)}
    told = {(case.file, case.kernel) for case in CASES}
    assert told <= there
    # A few numbers a row are edited, which forbid_rows stands for.
    assert {file for file, _ in there - told} <= {"logits_edits.cu"}
    assert len({case.name for case in CASES}) == len(CASES)
    assert list(GPUS) == list(ARCHITECTURES)


def test_bytes_and_operations_by_hand() -> None:
    cases = {case.name: case for case in CASES}
    decode = cases["attention, decode"]
    assert decode.num_bytes == 64 * 2048 * 4096  # 4 KiB of keys and values a position
    assert decode.flops == 64 * 2048 * 8 * 16 * 512  # 8 KV heads, 16 rows, 4 x 128
    assert cases["rms_norm"].num_bytes == 2 * 2048 * 8192
    assert cases["gemm_rows_8"].num_bytes == 2 * (28672 * 4096 + 8 * (28672 + 4096))
    assert cases["sample"].num_bytes == 64 * 128256 * 4


def test_slots_of_a_gpu() -> None:
    """4 schedulers x 108 multiprocessors x 1.41 GHz for 2039 GB/s."""
    assert GPUS["sm_80"].slots_per_byte == pytest.approx(0.29874, rel=1e-4)


def test_gpus_do_what_their_multiprocessors_do() -> None:
    """Operations of a multiprocessor and clock, as the white papers of the architectures have them.

    Float runs at a higher clock than products on some, and a data sheet rounds.
    """
    products = {"sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90": 4096, "sm_100": 8192,
                "sm_120": 512}  # fmt: skip
    for arch, gpu in GPUS.items():
        clocks = 1e-3 * gpu.multiprocessors * gpu.ghz
        assert gpu.tensor_tflops == pytest.approx(clocks * products[arch], rel=0.015), arch
        cores = 64 if arch == "sm_80" else 128
        assert 0.998 < gpu.fp32_tflops / (2 * cores * clocks) < 1.09, arch
    b200 = GPUS["sm_100"]
    assert b200.gb_per_s == pytest.approx(2 * 3.996 * 7680 / 8, abs=1)


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=pytest.mark.slow)])
def test_few_tokens_are_not_bound_by_issue(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither decode attention nor products of up to 32 tokens."""
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path))
    few = [case for case in CASES if case.few]
    assert [case.kernel for case in few] == [
        "paged_attention", "gemm_rows_8", "gemm_rows_16", "gemm_rows_32"
    ]  # fmt: skip
    try:
        limits = [limit(case, arch) for case in few]
    except (CompilerUnavailableError, ToolUnavailableError) as error:
        pytest.skip(str(error))
    for found in limits:
        assert found.bound == "memory", found
        assert found.issue_share is not None and 0.01 < found.issue_share < 0.7, found
    assert len(verdicts(limits)) == 4 and all("not issue-bound" in v for v in verdicts(limits))
