"""`cupaged kernel list` and `cupaged kernel resources`: what their tables say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupaged.cli import kernel_resources
from cupaged.cli.kernel_signatures import defines, signatures
from cupaged.runtime import kernels
from cupaged.runtime.errors import CompilerUnavailableError, ToolUnavailableError
from cupaged.runtime.kernels import CompiledKernels
from cupaged.runtime.machine_code import InstructionCounts
from cupaged.runtime.program_log import KernelResources
from tests.e2e.cli import Inline


def test_list_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, cupaged: Inline) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("COLUMNS", "100")
    done = cupaged("kernel", "list")
    assert done.code == 0 and not done.err
    lines = done.out.splitlines()
    column = lines[0].index("DEFINES, PARAMETERS")
    rows: dict[str, list[str]] = {}
    for line in lines[1:]:
        assert line[column - 2 : column] == "  " and line[column] != " "
        name = line[:column].strip()
        rows.setdefault(name or list(rows)[-1], []).append(line[column:])
    for file in kernels.kernel_files():
        assert {file, *kernels.kernel_names(file)} <= set(rows)
    assert rows["silu_mul"] == ["T* out, const T* gate_up, int n"]
    assert " ".join(rows["rms_norm"]) == (
        "T* out, const T* x, const T* weight, int hidden, float eps"
    )
    assert re.fullmatch(r"DTYPE \[GELU_ERF=0\]; \d+ common variants", rows["activation.cu"][0])
    assert max(map(len, lines)) <= 100
    assert "HEAD_DIM=80" not in done.out
    shown = cupaged("kernel", "list", "--all").out
    assert f"\n{' ' * column}DTYPE=bf16 HEAD_DIM=80 BLOCK_SIZE=16\n" in shown


def test_signatures_and_defines_are_read_from_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.cu"
    path.write_text(
        '#include "a.cuh"\n#define MOST 96\n'
        '// extern "C" __global__ void not_this(int a) {}\n'
        'extern "C" __global__ void __launch_bounds__(MOST, 2) one(\n'
        "    float* __restrict__ out,  // [n, m]\n#if B\n    int b,\n#endif\n    int n) {}\n"
        "__launch_bounds__(32) __global__ void two(const unsigned char *x) {}\n"
        "template <int N> __global__ void three() {}\n"
    )
    (tmp_path / "a.cuh").write_text(
        '#ifndef A\n#error "define A"\n#endif\n#ifndef B\n#define B (1 + 2)  // three\n#endif\n'
        "#ifndef GUARD\n#define GUARD\n#endif\n"
    )
    found = [(s.name, s.parameters, s.threads) for s in signatures(path)]
    assert found == [
        ("one", ("float* out", "int b", "int n"), 96),
        ("two", ("const unsigned char *x",), 32),
        ("three", (), None),
    ]
    assert (defines(path).required, defines(path).optional) == (("A",), {"B": "(1 + 2)"})


def canned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, str], str]]:
    """Resources as if NVRTC were there; what was asked of it."""
    asked: list[tuple[dict[str, str], str]] = []

    def compile_kernel(
        path: Path, macros: dict[str, str], arch: str, *, include_dirs: tuple[Path, ...]
    ) -> CompiledKernels:
        asked.append((macros, arch))
        used = KernelResources(registers=40, shared_bytes=512, spill_store_bytes=4)
        return CompiledKernels(path, arch, {"layer_norm": used, "rms_norm": used})

    monkeypatch.setattr(kernel_resources, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(kernel_resources, "compile_kernel", compile_kernel)
    return asked


def test_resources(monkeypatch: pytest.MonkeyPatch, cupaged: Inline) -> None:
    asked = canned(monkeypatch)
    counts = InstructionCounts(900, 11, 12, 13, 14, 15, 16)
    monkeypatch.setattr(kernel_resources, "disassembler", lambda: Path("nvdisasm"))
    monkeypatch.setattr(kernel_resources, "instruction_counts", lambda path: {"rms_norm": counts})
    done = cupaged(
        "kernel", "resources", "rms_norm", "--arch", "sm_80", "sm_86", "--dtype", "bf16",
        "-DBIAS=0",
    )  # fmt: skip
    assert done.code == 0
    assert asked == [({"DTYPE": "bf16", "BIAS": "0"}, arch) for arch in ("sm_80", "sm_86")]
    head, names, first, second, *_ = done.out.splitlines()
    assert head == "norm.cu  DTYPE=bf16 BIAS=0  NVRTC 12.9"
    assert names.split()[-7:] == ["CODE", "LD128", "ST128", "MMA", "LDSM", "CP.ASYNC", "LDL+STL"]
    # 1,024 threads at 40 registers are 40,960 of 65,536: one block, 32 warps of 64 or of 48.
    assert first.split() == [
        "rms_norm", "sm_80", "40", "512", "B", "4", "B", "50%", "(1", "x", "1024,", "registers)",
        "900", "11", "12", "13", "14", "15", "16",
    ]  # fmt: skip
    assert second.split()[:2] == ["sm_86", "40"] and " 67% (1 x 1024, warps) " in second


def test_resources_of_a_smaller_block(monkeypatch: pytest.MonkeyPatch, cupaged: Inline) -> None:
    asked = canned(monkeypatch)

    def missing() -> Path:
        raise ToolUnavailableError("nvdisasm is not installed; `pip install it`")

    monkeypatch.setattr(kernel_resources, "disassembler", missing)
    done = cupaged("kernel", "resources", "norm", "--threads", "128", "--arch", "sm_90")
    assert done.code == 0 and asked == [({"DTYPE": "f32"}, "sm_90")]
    assert "CODE" not in done.out
    # 40 registers of 32 threads are 1,280: 12 warps of each quarter, 48 in all.
    assert done.out.count("75% (12 x 128, registers)\n") == 2
    assert done.out.splitlines()[-1].endswith("nvdisasm is not installed; `pip install it`")


def test_resources_without_nvrtc(monkeypatch: pytest.MonkeyPatch, cupaged: Inline) -> None:
    def missing() -> tuple[int, int]:
        raise CompilerUnavailableError("NVRTC is not installed; install cupaged[cuda12-jit]")

    monkeypatch.setattr(kernel_resources, "nvrtc_version", missing)
    done = cupaged("kernel", "resources", "norm")
    assert done.code == 1 and not done.out
    assert done.err == "cupaged: NVRTC is not installed; install cupaged[cuda12-jit]\n"
