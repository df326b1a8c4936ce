"""Kernel files compile for every GPU that is served, without spills, and are found again."""

from __future__ import annotations

import itertools
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupaged.errors import BadValueError, NotSupportedError
from cupaged.ops.attention_plan import choose_variant
from cupaged.runtime import kernels
from cupaged.runtime.errors import (
    CompilerUnavailableError,
    KernelCompileError,
    KernelNotFoundError,
)
from cupaged.runtime.kernels import (
    ARCHITECTURES,
    compile_kernel,
    kernel_file,
    kernel_files,
    kernel_folder,
    kernel_names,
    toolkit_headers,
)
from cupaged.runtime.machine_code import LIMITS
from tests.gpu_tools import needs_nvrtc

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("f32", "f16", "bf16")
KERNELS = {
    "activation.cu": ["silu_mul", "gelu_mul", "gelu", "relu"],
    "embedding_packed.cu": ["embedding_packed"],
    "gather_rows.cu": ["gather_rows"],
    "gemm_f32.cu": ["gemm_f32_rows", "gemm_f32_tiles"],
    "gemm_pack.cu": ["pack_weight"],
    "gemm_rows.cu": ["gemm_rows_8", "gemm_rows_16", "gemm_rows_32"],
    "gemm_tiles.cu": ["gemm_tiles_64", "gemm_tiles_128", "gemm_tiles_256"],
    "kv_cache.cu": ["copy_blocks", "gather_blocks", "scatter_blocks"],
    "logits_edits.cu": [
        "add_bias", "penalize", "subtract", "save_allowed", "forbid_rows", "restore_allowed", "ban"
    ],
    "logits_logprobs.cu": ["logprobs"],
    "norm.cu": ["rms_norm", "add_rms_norm", "layer_norm"],
    "paged_attention.cu": ["paged_attention", "merge_attention_splits"],
    "rope.cu": ["rope_and_cache"],
    "sampling.cu": ["sample"],
}  # fmt: skip
ROPE = {"HEAD_DIM": 64, "BLOCK_SIZE": 16}
# With the checks of the KV sanitizer.
CHECKED: list[tuple[str, dict[str, str | int]]] = [
    ("rope.cu", {"DTYPE": "bf16", **ROPE, "KV_SANITIZER": 1}),
    ("kv_cache.cu", {"DTYPE": "bf16", "KV_SANITIZER": 1}),
    (
        "paged_attention.cu",
        {"DTYPE": "bf16", **ROPE, "ROW_TILES": 4, "SLOTS": 4, "KV_SANITIZER": 1},
    ),
]
# A block of each file's largest size has to fit: 65,536 registers in pieces of 8 a thread.
MOST_REGISTERS = {"norm.cu": 64, "sampling.cu": 80, "logits_logprobs.cu": 80}
# Static shared memory of a block: a sum a warp, a ticket, tiles of numbers, histograms.
SHARED_BYTES = {
    "rms_norm": 128, "add_rms_norm": 128, "layer_norm": 256,
    "gemm_rows_8": 4, "gemm_rows_16": 4, "gemm_rows_32": 4,
    "gemm_f32_rows": 11280, "gemm_f32_tiles": 17408, "sample": 35752, "logprobs": 35220,
}  # fmt: skip
# The compiler leaves less room between the same variables there.
OTHER_SHARED_BYTES = {("sample", "sm_100"): 35740, ("sample", "sm_120"): 35740}
VARIANTS = [
    (variant["file"], variant["defines"])
    for variant in tomllib.loads((ROOT / "cuda" / "variants.toml").read_text())["variant"]
]

# What the normal run compiles; all of it for all GPUs takes minutes.
USUAL_ARCHITECTURE = "sm_90"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing comes out of the user's own cache."""
    monkeypatch.setenv("CUPAGED_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A small kernel with a header of its own."""
    path = tmp_path / "source" / "small.cu"
    path.parent.mkdir()
    (path.parent / "factor.cuh").write_text("constexpr float FACTOR = 2.0f;\n")
    path.write_text(
        '#include "factor.cuh"\n'
        'extern "C" __global__ void small(float* x) { x[threadIdx.x] *= FACTOR; }\n'
    )
    yield path


def no_compiler(*_: Any) -> tuple[bytes, str]:
    raise AssertionError("it was compiled again")


# What there is.


def test_files_and_their_kernels() -> None:
    assert kernel_folder() == ROOT / "cuda"
    assert {file: kernel_names(file) for file in kernel_files()} == KERNELS


def test_every_kernel_has_c_linkage_and_launch_bounds() -> None:
    for file in kernel_files():
        source = kernel_file(file).read_text()
        assert source.count("__global__") == len(kernel_names(file)), file
        assert source.count("__launch_bounds__") == len(kernel_names(file)), file


def test_kernels_in_comments_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "commented.cu"
    path.write_text(
        '// extern "C" __global__ void one() {}\n/* extern "C" __global__\nvoid two() {} */\n'
        'extern "C" __global__\n__launch_bounds__(128) void three(int n) {}\n'
    )
    assert kernel_names(path) == ["three"]


def test_variants_are_few_and_cover_every_file_and_storage_type() -> None:
    assert len(VARIANTS) <= 30
    assert len({(file, *sorted(defines.items())) for file, defines in VARIANTS}) == len(VARIANTS)
    covered: dict[str, set[str | None]] = {file: set() for file in KERNELS}
    for file, defines in VARIANTS:
        covered[file].add(defines.get("DTYPE"))
    for file, dtypes in covered.items():
        if file.startswith(("logits", "sampling")):  # logits are float32, whatever is stored
            assert dtypes == {None}, file
        else:
            assert ("f32" if file == "gemm_f32.cu" else "bf16") in dtypes <= set(DTYPES), file


def test_variants_of_attention_are_those_that_are_launched() -> None:
    """For a head_dim of 64 and of 128, at the shared memory of the GPUs in data centres."""
    listed = [defines for file, defines in VARIANTS if file == "paged_attention.cu"]
    for head_dim, arch in itertools.product((64, 128), ("sm_80", "sm_90", "sm_100")):
        variant = choose_variant(head_dim, 2, LIMITS[arch].block_shared_bytes)
        sizes = {"HEAD_DIM": head_dim, "ROW_TILES": variant.row_tiles, "SLOTS": variant.slots}
        assert {"DTYPE": "bf16", "BLOCK_SIZE": 16, **sizes} in listed, arch


# What is refused before a compiler is looked for.


def test_unknown_architectures_are_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match=r"'sm_75' is not supported.*sm_80, sm_86"):
        compile_kernel("norm.cu", {"DTYPE": "f32"}, "sm_75")


def test_unknown_files_are_refused() -> None:
    with pytest.raises(KernelNotFoundError, match=r"no kernel file morn\.cu; known: activation"):
        compile_kernel("morn.cu", {}, "sm_90")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("A B", 1),
        ("", 1),
        ("1A", 1),
        ("A", "x y"),
        ("A", ""),
        ("A", True),
        ("A", 1.5),
        ("A", "1\n"),
    ],
)
def test_odd_defines_are_refused(name: str, value: Any) -> None:
    with pytest.raises(BadValueError, match="define"):
        compile_kernel("norm.cu", {name: value}, "sm_90")


def test_without_cupy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None)
    with pytest.raises(CompilerUnavailableError, match=r"pip install 'cupaged\[cuda12-jit\]'"):
        compile_kernel("norm.cu", {"DTYPE": "f32"}, "sm_90")


def test_without_headers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia" / "cu13" / "include").mkdir(parents=True)
    (tmp_path / "nvidia" / "cu13" / "include" / "cuda_fp16.h").touch()
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert toolkit_headers(13) == tmp_path / "nvidia" / "cu13" / "include"
    with pytest.raises(CompilerUnavailableError, match=r"CUDA 12 headers.*cupaged\[cuda12-jit\]"):
        toolkit_headers(12)  # those of CUDA 13 do not do


def test_importing_the_module_imports_no_cupy() -> None:
    code = "import sys, cupaged.runtime.kernels; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"cupy", "cupy_backends", "numpy"} & set(run.stdout.split())


# What compiles.


def check_compiles(file: str, defines: dict[str, str | int], arch: str) -> None:
    """Each kernel of the file is there, fits, and keeps its values in registers."""
    compiled = compile_kernel(file, defines, arch)
    assert set(compiled.resources) == set(KERNELS[file])
    for name, used in compiled.resources.items():
        assert used.spill_store_bytes == used.spill_load_bytes == used.stack_bytes == 0, name
        assert used.registers <= MOST_REGISTERS.get(file, 255), name
        assert used.shared_bytes == OTHER_SHARED_BYTES.get((name, arch), SHARED_BYTES.get(name, 0))


@needs_nvrtc
@pytest.mark.parametrize(("file", "defines"), VARIANTS)
def test_variants_compile_without_spills(file: str, defines: dict[str, Any]) -> None:
    check_compiles(file, defines, USUAL_ARCHITECTURE)


@needs_nvrtc
@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=[pytest.mark.slow] * (arch != USUAL_ARCHITECTURE))
        for arch in ARCHITECTURES
    ],
)
@pytest.mark.parametrize(("file", "defines"), CHECKED)
def test_checks_of_the_kv_pool_compile_for_all(
    file: str, defines: dict[str, str | int], arch: str
) -> None:
    check_compiles(file, defines, arch)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("file", "defines"), VARIANTS)
def test_variants_compile_for_all(file: str, defines: dict[str, Any], arch: str) -> None:
    check_compiles(file, defines, arch)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 32, 66, 80, 96, 120, 256, 512])
def test_every_head_compiles(head_dim: int, dtype: str, arch: str) -> None:
    defines: dict[str, str | int] = {"DTYPE": dtype, "HEAD_DIM": head_dim}
    check_compiles("rope.cu", {**defines, "BLOCK_SIZE": 8}, arch)
    if head_dim >= 32:
        partly = {**defines, "BLOCK_SIZE": 128, "ROTARY_DIM": head_dim // 4 * 2}
        check_compiles("rope.cu", partly, arch)


@needs_nvrtc
def test_a_cubin_is_a_whole_elf_file(source: Path) -> None:
    cubin = compile_kernel(source, {}, "sm_90").path.read_bytes()
    assert cubin[:4] == b"\x7fELF"
    program_headers, section_headers = struct.unpack_from("<QQ", cubin, 0x20)
    sizes = struct.unpack_from("<HHHH", cubin, 0x36)
    ends = (program_headers + sizes[0] * sizes[1], section_headers + sizes[2] * sizes[3])
    assert max(ends) == len(cubin)


@needs_nvrtc
def test_headers_of_the_working_directory_are_not_taken(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "factor.cuh").write_text("#error the wrong header\n")
    (tmp_path / "other.cuh").write_text("constexpr float OTHER = 2.0f;\n")
    monkeypatch.chdir(tmp_path)
    assert compile_kernel(source, {}, "sm_90").resources["small"].registers > 0
    source.write_text('#include "other.cuh"\n')
    with pytest.raises(KernelCompileError, match=r'cannot open source file "other\.cuh"'):
        compile_kernel(source, {}, "sm_90")


# What does not.


@needs_nvrtc
def test_an_error_names_file_and_line(source: Path) -> None:
    source.write_text(
        '#include "factor.cuh"\n\nextern "C" __global__ void f() {\n  nothing();\n}\n'
    )
    with pytest.raises(KernelCompileError, match=r'identifier "nothing" is undefined') as caught:
        compile_kernel(source, {}, "sm_90")
    assert (caught.value.file, caught.value.line) == (source, 4)
    assert str(caught.value).startswith(f"{source}:4: ")


@needs_nvrtc
def test_an_error_in_a_header_names_the_header(source: Path) -> None:
    header = source.parent / "factor.cuh"
    header.write_text("\nconstexpr float FACTOR = ;\n")
    with pytest.raises(KernelCompileError, match="expected an expression") as caught:
        compile_kernel(source, {}, "sm_90")
    assert (caught.value.file, caught.value.line) == (header, 2)


@needs_nvrtc
@pytest.mark.parametrize(
    ("file", "defines", "message"),
    [
        ("norm.cu", {}, "define DTYPE as f32, f16 or bf16"),
        ("norm.cu", {"DTYPE": "f64"}, '"f64" is undefined'),
        ("norm.cu", {"DTYPE": "int"}, "DTYPE is f32, f16 or bf16"),
        ("norm.cu", {"DTYPE": "f32", "BIAS": 2}, "BIAS is 0 or 1"),
        ("activation.cu", {"DTYPE": "f32", "GELU_ERF": 2}, "GELU_ERF is 0 or 1"),
        ("rope.cu", {"DTYPE": "f32", "BLOCK_SIZE": 16}, "define HEAD_DIM"),
        ("rope.cu", {"DTYPE": "f32", "HEAD_DIM": 64}, "define BLOCK_SIZE"),
        ("rope.cu", {"DTYPE": "f32", **ROPE, "HEAD_DIM": 65}, "HEAD_DIM: even"),
        ("rope.cu", {"DTYPE": "f32", **ROPE, "BLOCK_SIZE": 24}, "BLOCK_SIZE: a power of two"),
        ("rope.cu", {"DTYPE": "f32", **ROPE, "ROTARY_DIM": 66}, "ROTARY_DIM: even, 2 to HEAD_DIM"),
    ],
)
def test_wrong_defines_are_told(file: str, defines: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelCompileError, match=message):
        compile_kernel(file, defines, "sm_90")


@needs_nvrtc
def test_a_helper_without_device_is_an_error(source: Path) -> None:
    source.write_text(
        'int two() { return 2; }\nextern "C" __global__ void f(int* x) { *x = two(); }'
    )
    with pytest.raises(KernelCompileError, match="execution space") as caught:
        compile_kernel(source, {}, "sm_90")
    assert caught.value.line == 1


# The cache.


@needs_nvrtc
def test_what_was_compiled_comes_back(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_kernel(source, {"A": 1}, "sm_90")
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "_compile", no_compiler)
        assert compile_kernel(source, {"A": 1}, "sm_90") == first
    assert compile_kernel(source, {"A": 2}, "sm_90").path != first.path
    assert compile_kernel(source, {"A": 1}, "sm_80").path != first.path


@needs_nvrtc
@pytest.mark.parametrize("changed", ["small.cu", "factor.cuh"])
def test_a_changed_source_is_compiled_again(source: Path, changed: str) -> None:
    first = compile_kernel(source, {}, "sm_90").path
    with (source.parent / changed).open("a") as file:
        file.write("// changed\n")
    assert compile_kernel(source, {}, "sm_90").path != first


@needs_nvrtc
@pytest.mark.parametrize("damage", ["cut", "not JSON", "other JSON", "gone"])
def test_a_damaged_cache_is_mended(source: Path, damage: str) -> None:
    first = compile_kernel(source, {}, "sm_90")
    cubin = first.path.read_bytes()
    description = first.path.with_suffix(".json")
    if damage == "cut":
        first.path.write_bytes(cubin[:-1])
    elif damage == "gone":
        first.path.unlink()
    else:
        description.write_text("{" if damage == "not JSON" else '{"cubin_bytes": 1}')
    again = compile_kernel(source, {}, "sm_90")
    assert again == first and again.path.read_bytes() == cubin


@needs_nvrtc
def test_without_a_usable_cache_it_still_compiles(source: Path, cache: Path) -> None:
    cache.write_text("a file is in the way")
    compiled = compile_kernel(source, {}, "sm_90")
    assert compiled.path.is_file() and cache not in compiled.path.parents
    assert compiled.resources["small"].registers > 0
