"""What the rewriter makes of kernel files: shared variables, kernels, and the lines they lie on."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cupaged.emulator import (
    CompileError,
    EmulatedModule,
    LaunchError,
    OutOfBoundsError,
    SharedMemoryError,
)
from cupaged.errors import NotSupportedError


def compiled(tmp_path: Path, source: str, **options: object) -> EmulatedModule:
    path = tmp_path / "kernel.cu"
    path.write_text(source)
    return EmulatedModule(path, **options)  # type: ignore[arg-type]


DECLARATIONS = [
    ("__shared__ float s[4];", "s[3]", 16),
    ("__shared__ float s[4], t;", "t", 4),
    ("__shared__ float t, s[2][3];", "s[1][2]", 24),
    ("static __shared__ int s[7];", "s[6]", 28),
    ("__shared__ __align__(16) unsigned char s[48];", "s[47]", 48),
    ("__shared__ alignas(128) float s[1];", "s[0]", 4),
    ("__shared__ float s[4] __attribute__((aligned(32)));", "s[0]", 16),
    ("volatile __shared__ int s[3];", "s[2]", 12),
    ("__shared__ Pair<float, 3> s[2];", "s[1].second[2]", 32),
    ("__shared__ unsigned long long s;", "s", 8),
    ("__shared__ struct { int a; float b; } s;", "s.b", 8),
    ("SHARED(float, s, 5);", "s[4]", 20),
    ("__shared__ struct { float a[32]; alignas(16) float b[32]; } s;", "s.b[31]", 256),
    ("__shared__ union Bits { float f[8]; int i[8]; } s;", "s.f[7]", 32),
    ("__shared__ struct S { int a; } t, s[3];", "s[2].a", 12),
    ("__shared__ float s[32], *q;", "s[31]", 128),
    ("__shared__ float *q, s;", "s", 4),
    ("__shared__ float (*q)[4], s[2];", "s[1]", 8),
    ("__shared__ float s[64 >> 1], t;", "s[31]", 128),
    ("__shared__ float s[1 < 2 ? 3 : 4], t[2];", "t[1]", 8),
]


@pytest.fixture(scope="module")
def declarations(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    """One kernel a declaration: thread 0 writes the element, all read it."""
    kernels = [
        f'extern "C" __global__ void use_{number}(float* out, int* bytes) {{\n'
        f"  {declaration}\n"
        f"  if (threadIdx.x == 0) {element} = 7;\n  __syncthreads();\n"
        f"  out[threadIdx.x] = {element};\n"
        f"  bytes[0] = sizeof({re.split(r'[.[]', element)[0]});\n}}\n"
        for number, (declaration, element, _) in enumerate(DECLARATIONS)
    ]
    return compiled(
        tmp_path_factory.mktemp("declarations"),
        "#define SHARED(type, name, size) __shared__ type name[size]\n"
        "template <class T, int N> struct Pair { T first; T second[N]; };\n" + "".join(kernels),
    )


@pytest.mark.parametrize("number", range(len(DECLARATIONS)))
def test_shared_declarations(declarations: EmulatedModule, number: int) -> None:
    out, size = np.zeros(33, np.float32), np.zeros(1, np.int32)
    declarations.get_function(f"use_{number}")((1,), (33,), (out, size))
    assert (out == 7).all()
    assert size[0] == DECLARATIONS[number][2]


@pytest.mark.parametrize("alignment", [1, 16, 128, 1024])
def test_a_shared_variable_has_its_alignment(tmp_path: Path, alignment: int) -> None:
    module = compiled(
        tmp_path,
        'extern "C" __global__ void use(unsigned long long* out) {\n'
        "  __shared__ char before[3];\n"
        f"  __shared__ alignas({alignment}) char s[5];\n"
        "  out[0] = reinterpret_cast<unsigned long long>(s) + (before == nullptr);\n}\n",
    )
    out = np.ones(1, np.uint64)
    module.get_function("use")((1,), (1,), (out,))
    assert out[0] % alignment == 0


def test_static_shared_memory_ends_at_48_kib(tmp_path: Path) -> None:
    module = compiled(
        tmp_path,
        'extern "C" __global__ void fits(int* out) {\n'
        "  __shared__ char a[49000], b[152]; out[0] = a != b;\n}\n"
        'extern "C" __global__ void large(int* out) {\n'
        "  __shared__ char a[49000], b[153]; out[0] = a != b;\n}\n",
    )
    module.get_function("fits")((1,), (1,), (np.zeros(1, np.int32),))
    with pytest.raises(SharedMemoryError, match="49153 bytes of static shared memory"):
        module.get_function("large")((1,), (1,), (np.zeros(1, np.int32),))


def test_dynamic_shared_memory_in_and_outside_of_functions(tmp_path: Path) -> None:
    module = compiled(
        tmp_path,
        "extern __shared__ float outside[];\n"
        'extern "C" __global__ void use(float* out) {\n'
        "  extern __shared__ __align__(16) float inside[];\n"
        "  outside[threadIdx.x] = threadIdx.x; __syncthreads();\n"
        "  out[threadIdx.x] = inside[31 - threadIdx.x];\n}\n",
    )
    out = np.zeros(32, np.float32)
    module.get_function("use")((1,), (32,), (out,), shared_mem=128)
    assert out.tolist() == list(range(31, -1, -1))
    with pytest.raises(OutOfBoundsError, match="bytes 124 to 127 of shared 'dynamic', which has"):
        module.get_function("use")((1,), (32,), (out,), shared_mem=124)


def test_kernels_of_every_form_are_found(tmp_path: Path) -> None:
    module = compiled(
        tmp_path,
        "#define KERNEL(name, type) \\\n"
        '  extern "C" __global__ void name(type* out) { *out = sizeof(type); }\n'
        "KERNEL(made_float, float)\nKERNEL(made_double, double)\n"
        "constexpr int THREADS = 64;\n"
        'extern "C" __global__ void __launch_bounds__(THREADS) bounded_after(int* out) {}\n'
        'extern "C" __launch_bounds__(2 * THREADS, 2) __global__ void bounded_first(\n'
        "#if 1\n    int* out,\n#else\n    float* out,\n#endif\n"
        "    const float* __restrict__ in,  // a comment\n    float factor) { *out = 2; }\n"
        'extern "C" {\n__global__ void in_block(void) {}\n}\n'
        'extern "C" __global__ void declared(int);\n'
        'extern "C" __global__ void declared(int number) {}\n'
        'namespace outer { namespace inner {\nextern "C" __global__ void nested(int* out) {}\n}}\n'
        "__global__ void mangled(int* out) {}\n"
        "template <class T, int N> __global__ void generic(T* out, T value) { out[N] = value; }\n"
        'const char* not_code = "__global__ void quoted() {";\n',
        name_expressions=("generic<float, 2>", "generic<double,1>"),
    )
    found = {k.name: [p.name for p in k.parameters] for k in module.kernels}
    assert found == {
        "made_float": ["out"],
        "made_double": ["out"],
        "bounded_after": ["out"],
        "bounded_first": ["out", "in", "factor"],
        "in_block": [],
        "declared": ["number"],
        "nested": ["out"],
        "mangled": ["out"],
        "generic<float, 2>": ["out", "value"],
        "generic<double,1>": ["out", "value"],
    }
    assert module.get_function("bounded_after").max_threads_per_block == 64
    assert module.get_function("bounded_first").max_threads_per_block == 128
    out = np.zeros(3, np.float32)
    module.get_function("generic<float, 2>")((1,), (1,), (out, np.float32(5)))
    assert out.tolist() == [0, 0, 5]
    with pytest.raises(LaunchError, match=r"'mangled'.*mangled name on a GPU.*extern \"C\""):
        module.get_function("mangled")
    with pytest.raises(LaunchError, match=r"no kernel 'quoted'; it has: .*bounded_after"):
        module.get_function("quoted")


def test_an_unknown_name_expression_is_refused(tmp_path: Path) -> None:
    source = 'extern "C" __global__ void known() {}\n'
    with pytest.raises(CompileError, match=r"'other<int>' names no kernel; the file has: known"):
        compiled(tmp_path, source, name_expressions=("other<int>",))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (4, "  out[threadIdx.x] = 1;"),
        (7, "\n\n  /* a\n  */ out[threadIdx.x] = 1;"),
        (5, "  __shared__ float\n    s[4]; s[threadIdx.x] = 1; out[threadIdx.x] = 1;"),
        (6, "  __shared__ float\n    s[4];\n  s[threadIdx.x] = NULL == 0; out[threadIdx.x] = 1;"),
        (4, "  STORE(\n    out[threadIdx.x]);"),
    ],
)
def test_a_finding_names_the_line_of_the_file(tmp_path: Path, line: int, text: str) -> None:
    module = compiled(
        tmp_path,
        "#define STORE(place) \\\n  place = 1\n"
        'extern "C" __global__ void wild(float* __restrict__ out) {\n' + text + "\n}\n",
    )
    with pytest.raises(OutOfBoundsError) as found:
        module.get_function("wild")((1,), (4,), (np.zeros(3, np.float32),))
    assert found.value.file == str(tmp_path / "kernel.cu")
    assert found.value.line == line
    assert (found.value.argument, found.value.element, found.value.thread) == ("out", 3, (3, 0, 0))


def test_a_finding_in_a_header_names_the_header(tmp_path: Path) -> None:
    (tmp_path / "part.cuh").write_text(
        "#pragma once\n__device__ __forceinline__ void put(float* p, int i) {\n  p[i] = 1;\n}\n"
    )
    module = compiled(
        tmp_path,
        '#include "part.cuh"\nextern "C" __global__ void wild(float* out) { put(out, 5); }\n',
    )
    with pytest.raises(OutOfBoundsError, match=r"part\.cuh:3: .*element 5 of 'out'") as found:
        module.get_function("wild")((1,), (1,), (np.zeros(3, np.float32),))
    assert (found.value.file, found.value.line) == (str(tmp_path / "part.cuh"), 3)


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("\n\nint x = nothing;\n", 3, "'nothing' was not declared"),
        ('#include "missing.cuh"\n', 1, "missing.cuh: No such file"),
        ("#ifndef WIDTH\n#error define WIDTH\n#endif\n", 2, "define WIDTH"),
        (
            'extern "C" __global__ void f() {\n  __shared__ float s[2];\n  s.x = 1;\n}\n',
            3,
            "request for member 'x'",
        ),
    ],
)
def test_a_file_that_does_not_compile(tmp_path: Path, source: str, line: int, message: str) -> None:
    with pytest.raises(CompileError) as found:
        compiled(tmp_path, source)
    assert found.value.line == line
    assert message in str(found.value).replace("\u2018", "'").replace("\u2019", "'")
    assert found.value.file == str(tmp_path / "kernel.cu")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('__global__ void f() {\n  asm volatile("nop;");\n}\n', r"kernel.cu:2: .*inline assembly"),
        ("__global__ void f() {\n\n  f<<<1, 1>>>();\n}\n", r"kernel.cu:3: .*from Python only"),
        ("#include <mma.h>\n", "the emulator has no .*ptx"),
        ("#include <curand_kernel.h>\n", "the emulator has no .*"),
    ],
)
def test_what_is_not_emulated_is_named(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        compiled(tmp_path, source)


def test_assembly_behind_the_macro_is_fine(tmp_path: Path) -> None:
    module = compiled(
        tmp_path,
        'extern "C" __global__ void f(int* out) {\n#ifdef CUPAGED_EMULATED\n  *out = 3;\n#else\n'
        '  asm volatile("mov.u32 %0, 3;" : "=r"(*out));\n#endif\n}\n',
    )
    out = np.zeros(1, np.int32)
    module.get_function("f")((1,), (1,), (out,))
    assert out[0] == 3


REVERSE = (
    "  s[threadIdx.x] = threadIdx.x; __syncthreads();\n  out[threadIdx.x] = s[31 - threadIdx.x];\n"
)
GAP = "// a comment\n" * 80


@pytest.mark.parametrize(
    "source",
    [
        'extern "C" __global__ void f(float* out) {\n#pragma nv_diag_suppress 177\n'
        "  __shared__ float s[32];\n" + REVERSE + "}\n",
        '#define QUIET _Pragma("nv_diag_suppress 177")\n'
        'extern "C" __global__ void f(float* out) {\n'
        "  int i = threadIdx.x; QUIET __shared__ float s[32]; i = 0;\n" + REVERSE + "}\n",
        '#pragma nv_exec_check_disable\nextern "C" __global__ void f(float* out) {\n'
        '  __shared__ float s[32]; int n = 0;\n  _Pragma("unroll") for (int i = 0; i < 4; ++i) {\n'
        "    n += i; }\n" + REVERSE + "}\n",
        'extern "C"\n' + GAP + "__global__ void f(float* out) {\n  __shared__ float\n" + GAP
        + "s[32];\n" + REVERSE + "}\n",
        'extern "C" __global__ void f(float* out) {\n  extern __shared__ char dynamic[];\n'
        "  float* s = reinterpret_cast<float*>(&dynamic);\n" + REVERSE + "}\n",
        "extern __shared__ float s[];\nextern __shared__ float s[];\n"
        'extern "C" __global__ void f(float* out) {\n' + REVERSE + "}\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("fault", [False, True])
def test_a_shared_array_wherever_it_is_declared(tmp_path: Path, source: str, fault: bool) -> None:
    source = source.replace("31 -", "32 -") if fault else source
    kernel = compiled(tmp_path, source, global_races=True).get_function("f")
    out = np.zeros(32, np.float32)
    if not fault:
        kernel((1,), (32,), (out,), shared_mem=128)
        assert out.tolist() == list(range(31, -1, -1))
        return
    message = "index 32 of an|bytes 128 to 131 of shared|element 32"
    with pytest.raises(OutOfBoundsError, match=message) as found:
        kernel((1,), (32,), (out,), shared_mem=128)
    assert found.value.line == 1 + source[: source.index("out[threadIdx.x] = ")].count("\n")


def test_a_shared_variable_outside_of_functions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match=r"kernel\.cu:2: .*inside the kernel, passed on"):
        compiled(tmp_path, "\n__shared__ float s[64];\n__global__ void f() { s[0] = 1; }\n")


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ("__shared__ float s = 1;", "kernel.cu:2: .*cannot have an initialiser"),
        ("__shared__ [4];", "kernel.cu:2: .*cannot read"),
        ("__shared__ s;", "kernel.cu:2: .*without a type"),
    ],
)
def test_a_wrong_shared_declaration(tmp_path: Path, declaration: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        compiled(tmp_path, f"__global__ void f() {{\n  {declaration}\n}}\n")


def test_launch_bounds_of_templates(tmp_path: Path) -> None:
    names = ("fixed<int>", "n::each<float, 32>", "n::each<float,(1 > 0 ? 96 : 1)>", "n::each<int>")
    module = compiled(
        tmp_path,
        "template <class T> __global__ void __launch_bounds__(128) fixed(T* out) {}\n"
        "namespace n {\ntemplate <class T, int N = 16>\n__global__ void each(T* out);\n"
        "constexpr int WARP = 2;\ntemplate <class T, int N>\n"
        "__launch_bounds__(N < 4 ? 1 : N * WARP, 2) __global__ void each(T* out) {\n"
        "  out[threadIdx.x] = 1;\n}\n}\n"
        "template __global__ void fixed<int>(int*);\n",
        name_expressions=names,
    )
    bounds = [module.get_function(name).max_threads_per_block for name in names]
    assert bounds == [128, 64, 192, 32]
    with pytest.raises(OutOfBoundsError) as found:
        module.get_function(names[1])((1,), (64,), (np.zeros(63, np.float32),))
    assert found.value.line == 8


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("__cluster_dims__(2, 1, 1) __global__ void f() {}", "blocks that stand alone"),
        ("__managed__ int counter;", "a __device__ variable"),
        ("__device__ int* f() { return (int*)malloc(4); }", "an array passed as an argument"),
        ("__device__ int* f() { return new int[2]; }", "an array passed as an argument"),
        ("__device__ void f(int* p) { free(p); }", "an array passed as an argument"),
        ("__device__ void f(int* p) { delete[] p; }", "an array passed as an argument"),
        ("texture<float> table;", "__ldg"),
        ("__global__ void f(cudaTextureObject_t t) {}", "__ldg"),
        ("__device__ float f(int t) { return tex1Dfetch<float>(t, 0); }", "__ldg"),
        ("#include <thrust/device_vector.h>", "CuPy"),
    ],
)
def test_the_nearest_thing_is_named(tmp_path: Path, line: str, nearest: str) -> None:
    where = "" if "#" in line else r"kernel\.cu:2: "
    with pytest.raises(NotSupportedError, match=f"{where}the emulator has no .*{nearest}"):
        compiled(tmp_path, f"#include <cuda_runtime.h>\n{line}\n")


def test_names_of_the_file_are_no_cuda_functions(tmp_path: Path) -> None:
    module = compiled(
        tmp_path,
        "#include <new>\nstruct Pool {\n  int size;\n  Pool() = default;\n"
        "  Pool(Pool&&) = delete;\n"
        "  __device__ void free(int n) { size -= n; }\n};\n"
        "__device__ int tex2D(int a) { return a + 1; }\n"
        'extern "C" __global__ void f(int* out) {\n  alignas(Pool) char bytes[sizeof(Pool)];\n'
        "  Pool* pool = new (bytes) Pool;\n  pool->size = tex2D(8);\n  pool->free(2);\n"
        "  int malloc = 1, texture = 2;\n  *out = pool->size + malloc + texture;\n}\n",
    )
    out = np.zeros(1, np.int32)
    module.get_function("f")((1,), (1,), (out,))
    assert out[0] == 10
