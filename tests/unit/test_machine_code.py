"""Occupancy against hand calculations, and counts of instructions in listings and in real code."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupaged.errors import BadValueError, NotSupportedError
from cupaged.runtime.errors import ToolUnavailableError
from cupaged.runtime.kernels import ARCHITECTURES, compile_kernel
from cupaged.runtime.machine_code import (
    LIMITS,
    InstructionCounts,
    Occupancy,
    count_instructions,
    disassemble,
    disassembler,
    instruction_counts,
    occupancy,
)
from cupaged.runtime.program_log import KernelResources, first_error, parse_resources
from tests.gpu_tools import needs_machine_code

LOG = """\
ptxas info    : 4 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
ptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for helper
ptxas         .     24 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 128 registers, used 2 barriers, 24 bytes cumulative stack size, \
4224 bytes smem, 396 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 1.883 ms
ptxas info    : Compiling entry function 'second' for 'sm_80'
ptxas info    : Function properties for second
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""

LISTING = """\
\t.headerflags\t@"EF_CUDA_SM80"
//--------------------- .text.second          --------------------------
\t.section\t.text.second,"ax",@progbits
second:
        /*0000*/                   LDG.E R5, [R2.64] ;
        /*0010*/                   EXIT ;
//--------------------- .text.first           --------------------------
first:
.text.first:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
        /*0010*/               @P0 LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0020*/              @!P1 LDG.E.128 R8, [R2.64] ;
        /*0030*/                   LDG.E.64 R8, [R2.64] ;
        /*0040*/             @!UP1 LDGSTS.E.BYPASS.128 [R7], [R2.64] ;
        /*0050*/                   LDSM.16.M88.4 R8, [R7] ;
        /*0060*/                   LDSM.16.MT88.4 R8, [R7] ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0080*/                   IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, R4 ;
.L_x_1:
        /*0090*/                   STL.64 [R1], R12                          (*"SpillRefill"*);
        /*00a0*/                   LDL R8, [R1] ;
        /*00b0*/                   STS.128 [R7], R8 ;
        /*10c0*/                   STG.E.128 [R2.64], R8 ;
        /*10d0*/                   BRA `(.L_x_1) ;
"""


def test_resources_in_a_log() -> None:
    assert parse_resources(LOG) == {
        "first": KernelResources(128, 4224, 24, 16, 12, 404, 2),
        "second": KernelResources(8),
    }
    assert parse_resources("small.cu(1): warning #1-D\n") == {}


def test_the_first_error_in_a_log() -> None:
    log = (
        "In file\nk.cu(3): warning #177-D: unused\n/a b/k.cuh(14): error: no\nk.cu(1): error: no\n"
    )
    assert first_error(log) == ("/a b/k.cuh", 14)
    assert first_error("nvrtc: error: invalid value for --gpu-architecture (-arch)") is None


def test_counts_in_a_listing() -> None:
    assert count_instructions(LISTING) == {
        "second": InstructionCounts(2, 0, 0, 0, 0, 0, 0),
        "first": InstructionCounts(
            total=14,
            wide_loads=2,
            wide_stores=1,
            matrix=2,
            ldmatrix=2,
            async_copies=1,
            spills=2,
        ),
    }


def test_limits_cover_the_architectures_that_are_built_for() -> None:
    assert tuple(LIMITS) == ARCHITECTURES


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "dynamic", "threads", "expected"),
    [
        # 8 warps a block; 64 / 8 = 8 blocks, and 32 registers just allow it.
        ("sm_90", 32, 0, 0, 256, Occupancy(8, 64, 1.0, "warps")),
        # 40 * 32 = 1,280 registers a warp; 16,384 // 1,280 = 12 a partition, 48 in all.
        ("sm_80", 40, 0, 0, 256, Occupancy(6, 48, 0.75, "registers")),
        # 33 registers count as 40.
        ("sm_80", 33, 0, 0, 256, Occupancy(6, 48, 0.75, "registers")),
        ("sm_80", 255, 0, 0, 256, Occupancy(1, 8, 0.125, "registers")),
        # One warp a block: 32 or 16 or 24 blocks, whatever else there is.
        ("sm_80", 16, 0, 0, 32, Occupancy(32, 32, 0.5, "blocks")),
        ("sm_86", 16, 0, 0, 32, Occupancy(16, 16, 1 / 3, "blocks")),
        ("sm_89", 16, 0, 0, 32, Occupancy(24, 24, 0.5, "blocks")),
        # 48 warps: one block of 1,024 threads, and half of it idle room.
        ("sm_89", 32, 0, 0, 1024, Occupancy(1, 32, 2 / 3, "warps")),
        # 48 KiB and 1 KiB reserved: 164 // 49 = 3, 228 // 49 = 4, 100 // 49 = 2.
        ("sm_80", 32, 0, 49152, 128, Occupancy(3, 12, 12 / 64, "shared memory")),
        ("sm_90", 32, 16384, 32768, 128, Occupancy(4, 16, 0.25, "shared memory")),
        ("sm_120", 32, 0, 49152, 128, Occupancy(2, 8, 8 / 48, "shared memory")),
        # All that a block may have.
        ("sm_100", 32, 0, 227 << 10, 128, Occupancy(1, 4, 1 / 16, "shared memory")),
        # 33 threads are two warps.
        ("sm_90", 32, 0, 0, 33, Occupancy(32, 64, 1.0, "warps")),
    ],
)
def test_occupancy(
    arch: str, registers: int, shared: int, dynamic: int, threads: int, expected: Occupancy
) -> None:
    assert occupancy(arch, KernelResources(registers, shared), threads, dynamic) == expected


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "name"),
    [
        (32, 0, 0, "threads"),
        (32, 0, 1025, "threads"),
        (65, 0, 1024, "threads"),  # 72 * 1,024 registers are more than there are
        (0, 0, 32, "registers"),
        (256, 0, 32, "registers"),
        (32, (99 << 10) + 1, 32, "shared memory"),
    ],
)
def test_blocks_that_cannot_run(registers: int, shared: int, threads: int, name: str) -> None:
    with pytest.raises(BadValueError) as caught:
        occupancy("sm_120", KernelResources(registers, shared), threads)
    assert caught.value.name.startswith(name)


def test_occupancy_of_an_unknown_architecture() -> None:
    with pytest.raises(NotSupportedError, match=r"'sm_75'.*sm_80"):
        occupancy("sm_75", KernelResources(32), 32)


def test_without_the_disassembler_the_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("cupaged.runtime.machine_code.__file__", str(tmp_path / "a" / "b" / "c.py"))
    monkeypatch.delenv("CUPAGED_NVDISASM", raising=False)
    with pytest.raises(ToolUnavailableError, match="pip install nvidia-cuda-nvdisasm"):
        disassembler()
    wheel = tmp_path / ".nvdisasm/lib/python3.11/site-packages/nvidia/cu13/bin/nvdisasm"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    assert disassembler() == wheel
    on_path = tmp_path / "nvdisasm"
    on_path.touch(0o755)
    assert disassembler() == on_path
    monkeypatch.setenv("CUPAGED_NVDISASM", str(tmp_path / "missing"))
    with pytest.raises(ToolUnavailableError, match="missing is not a file"):
        disassembler()
    monkeypatch.setenv("CUPAGED_NVDISASM", str(wheel))
    assert disassembler() == wheel


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))


@needs_machine_code
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize(
    ("file", "defines"),
    [
        ("activation.cu", {}),
        ("gather_rows.cu", {}),
        ("kv_cache.cu", {}),
        ("norm.cu", {}),
        ("rope.cu", {"HEAD_DIM": 128, "BLOCK_SIZE": 16}),
    ],
)
def test_kernels_move_16_bytes_at_a_time(
    file: str, defines: dict[str, str | int], arch: str, dtype: str
) -> None:
    compiled = compile_kernel(file, {"DTYPE": dtype, **defines}, arch)
    for name, counts in instruction_counts(compiled.path).items():
        assert counts.wide_loads >= 1 and counts.wide_stores >= 1, name
        assert counts.spills == 0, name


PTX = """\
#include "ptx.cuh"
extern "C" __global__ void copies(float* out, const float* in, int count) {
  __shared__ float4 tile[160];
  const int i = threadIdx.x;
  copy_async<16>(&tile[i], in + 4 * i);
  copy_async<8>(&tile[32 + i], in + 4 * i);
  copy_async<4>(&tile[64 + i], in + 4 * i);
  copy_async_commit();
  copy_async_or_zero<16>(&tile[96 + i], in + 4 * i, count);
  copy_async_or_zero<4>(&tile[128 + i], in + 4 * i, count);
  copy_async_wait<0>();
  copy_async_wait_all();
  __syncthreads();
  out[i] = tile[5 * i].x;
}
extern "C" __global__ void products(float* out, int* sums, const unsigned* in) {
  __shared__ uint4 tile[32];
  const int i = threadIdx.x;
  tile[i] = reinterpret_cast<const uint4*>(in)[i];
  __syncthreads();
  unsigned a[4], b[2], single[1];
  float c[4] = {}, d[4] = {};
  int e[4] = {};
  ldmatrix_x4(a, &tile[i]);
  ldmatrix_x2(b, &tile[i]);
  ldmatrix_x1(single, &tile[i]);
  mma_f16(c, a, b);
  ldmatrix_x4_trans(a, &tile[i]);
  ldmatrix_x2_trans(b, &tile[i]);
  mma_bf16(d, a, b);
  mma_s8(e, a, b);
  out[i] = c[0] + d[0] + single[0];
  ldmatrix_x1_trans(single, &tile[i]);
  sums[i] = e[0] + single[0];
}
"""


@needs_machine_code
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", pytest.param("sm_120", marks=pytest.mark.slow)])
def test_every_wrapper_is_one_instruction(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "wrappers.cu"
    path.write_text(PTX)
    counts = instruction_counts(compile_kernel(path, {}, arch).path)
    assert (counts["copies"].async_copies, counts["copies"].matrix) == (5, 0)
    assert (counts["products"].ldmatrix, counts["products"].matrix) == (6, 3)
    assert counts["copies"].spills == counts["products"].spills == 0


@needs_machine_code
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_float_arithmetic_is_as_written(tmp_path: Path, arch: str) -> None:
    """No product and sum made one, no subnormals lost: results are those of the host."""
    found = []
    for expression in ("x[0] * x[1] + x[2]", "__fmaf_rn(x[0], x[1], x[2])"):
        path = tmp_path / "arithmetic.cu"
        path.write_text(f'extern "C" __global__ void f(float* x) {{ *x = {expression}; }}\n')
        listing = disassemble(compile_kernel(path, {}, arch).path)
        assert ".FTZ" not in listing
        found.append({name for name in ("FADD", "FFMA", "FMUL") if f" {name} " in listing})
    assert found == [{"FADD", "FMUL"}, {"FFMA"}]


@needs_machine_code
def test_spills_are_counted_as_the_assembler_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "spilling.cu"
    path.write_text(
        'extern "C" __global__ __launch_bounds__(1024, 2) void spilling(float* x) {\n'
        "  float kept[64];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) kept[i] = x[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 64; ++i) x[threadIdx.x * 64 + i] = kept[i] * kept[63 - i];\n"
        "}\n"
    )
    compiled = compile_kernel(path, {}, "sm_80")
    used = compiled.resources["spilling"]
    assert used.registers <= 32 and used.spill_store_bytes > 0 and used.spill_load_bytes > 0
    assert instruction_counts(compiled.path)["spilling"].spills > 0


@needs_machine_code
def test_a_file_that_is_no_cubin(tmp_path: Path) -> None:
    path = tmp_path / "no.cubin"
    path.write_bytes(b"nothing")
    with pytest.raises(ToolUnavailableError, match="cannot read"):
        instruction_counts(path)
