"""What the rewriter makes of kernel files: shared variables, kernels, and the lines they lie on."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cupaged.emulator import CompileError, EmulatedModule, LaunchError, OutOfBoundsError
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
        ("__global__ void f() {\n\n  f<<<1, 1>>>();\n}\n", r"kernel.cu:3: .*launch a kernel from"),
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
