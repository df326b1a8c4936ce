"""Intrinsics and math functions. Each line of the tables is one expression and its value, known
from the CUDA documentation, from the PTX manual or by hand; one kernel evaluates all of them.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from cupaged.emulator.errors import DeviceAssertError, UndefinedBehaviourError
from cupaged.emulator.module import EmulatedModule
from cupaged.errors import NotSupportedError

INT_MIN = -(2**31)
# What the compiler must not know beforehand comes from `in`.
GIVEN = np.array([1, 2, 4, 8, 3e9, -3e9, 1e30, np.nan], np.float32)
NAN = "in[7]"
DNAN = "(double)in[7]"

INTEGERS: list[tuple[str, int]] = [
    ("__popc(0xf0f0u)", 8),
    ("__popcll(~0ull)", 64),
    ("__clz(0)", 32),
    ("__clz(1)", 31),
    ("__clz(-1)", 0),
    ("__clzll(0)", 64),
    ("__clzll(1ll << 40)", 23),
    ("__ffs(0)", 0),
    ("__ffs(0x50)", 5),
    ("__ffsll(1ll << 40)", 41),
    ("__brev(1u)", 0x80000000),
    ("__brev(0x12345678u)", 0x1E6A2C48),
    ("__brevll(6ull) == 0x6000000000000000ull", 1),
    ("__fns(0x00000092u, 0, 2)", 4),  # bits 1, 4, 7: the second from 0 upwards
    ("__fns(0x00000092u, 7, -2)", 4),
    ("__fns(0x00000092u, 4, 0)", 4),
    ("__fns(0x00000092u, 0, 4)", 0xFFFFFFFF),
    ("__byte_perm(0x33221100u, 0x77665544u, 0x3210)", 0x33221100),
    ("__byte_perm(0x33221100u, 0x77665544u, 0x7531)", 0x77553311),
    ("__byte_perm(0x33221100u, 0x77665544u, 0xcdef)", 0x44556677),  # the highest bit is ignored
    ("__funnelshift_l(0x89abcdefu, 0x01234567u, 8)", 0x23456789),
    ("__funnelshift_l(0x89abcdefu, 0x01234567u, 32)", 0x01234567),  # by 32 & 31 = 0
    ("__funnelshift_lc(0x89abcdefu, 0x01234567u, 40)", 0x89ABCDEF),  # by at most 32
    ("__funnelshift_r(0x89abcdefu, 0x01234567u, 8)", 0x6789ABCD),
    ("__funnelshift_r(0x89abcdefu, 0x01234567u, 33)", 0xC4D5E6F7),  # by 1
    ("__funnelshift_rc(0x89abcdefu, 0x01234567u, 99)", 0x01234567),
    ("__mulhi(INT_MIN, 2)", -1),
    ("__umulhi(0x80000000u, 6u)", 3),
    ("__mul64hi(-(1ll << 62), 8)", -2),
    ("__umul64hi(1ull << 63, 6)", 3),
    ("__mul24(0x7fffff, 2)", 0xFFFFFE),
    ("__mul24(0xffffff, 5)", -5),  # 24 bits, all set, are -1
    ("__umul24(0xff000003u, 5u)", 15),
    ("__hadd(-3, 2)", -1),  # rounds down
    ("__hadd(2147483647, 2147483645)", 2147483646),
    ("__rhadd(-3, 2)", 0),
    ("__uhadd(0xffffffffu, 1u)", 0x80000000),
    ("__urhadd(0xffffffffu, 0u)", 0x80000000),
    ("__sad(-5, 7, 100u)", 112),
    ("__sad(INT_MIN, 2147483647, 0u)", 0xFFFFFFFF),
    ("__usad(1u, 4294967295u, 1u)", 0xFFFFFFFF),
    ("__dp4a(0x01020304, 0x05060708, 1000)", 1000 + 5 + 12 + 21 + 32),
    ("__dp4a(-1, 0x02020202, 0)", -8),  # four bytes of -1
    ("__dp4a(0xffffffffu, 0x02020202u, 0u)", 255 * 8),
    ("__dp4a(make_char4(1, -2, 3, -4), make_char4(1, 1, 1, 1), 5)", 3),
    ("__dp2a_lo(0x00030002, 0x07050b0d, 1)", 1 + 2 * 13 + 3 * 11),
    ("__dp2a_hi(0x00030002, 0x07050b0d, 1)", 1 + 2 * 5 + 3 * 7),
    ("__dp2a_lo(make_short2(-1, 300), make_char4(2, -1, 9, 9), 0)", -302),
    # SIMD within a word
    ("__vadd4(0x01ff7f80u, 0x01010101u)", 0x02008081),
    ("__vadd2(0x0001ffffu, 0x00010001u)", 0x00020000),
    ("__vsub4(0x00010203u, 0x01010101u)", 0xFF000102),
    ("__vaddss4(0x7f80017fu, 0x01ff0101u)", 0x7F80027F),
    ("__vaddus4(0xff01fe00u, 0x01010101u)", 0xFF02FF01),
    ("__vsubss2(0x80000001u, 0x00010002u)", 0x8000FFFF),
    ("__vsubus4(0x00050001u, 0x01010101u)", 0x00040000),
    ("__vavgu4(0x01020304u, 0x02020203u)", 0x02020304),
    ("__vmaxs4(0x80017f00u, 0x00000001u)", 0x00017F01),
    ("__vmaxu4(0x80017f00u, 0x00000001u)", 0x80017F01),
    ("__vmins2(0xffff0005u, 0x00000006u)", 0xFFFF0005),
    ("__vminu2(0xffff0005u, 0x00000006u)", 0x00000005),
    ("__vabsdiffu4(0x00ff0502u, 0x01000304u)", 0x01FF0202),
    ("__vabsdiffs4(0x807f0000u, 0x7f800000u)", 0xFFFF0000),
    ("__vsadu4(0x00ff0502u, 0x01000304u)", 1 + 255 + 2 + 2),
    ("__vabs4(0xff80017fu)", 0x0180017F),
    ("__vabsss4(0xff80017fu)", 0x017F017F),
    ("__vneg4(0x01ff8000u)", 0xFF018000),
    ("__vcmpeq4(0x01020304u, 0x01000300u)", 0xFF00FF00),
    ("__vsetne4(0x01020304u, 0x01000300u)", 0x00010001),
    ("__vcmpgts4(0x80017f00u, 0x00000001u)", 0x00FFFF00),
    ("__vcmpgtu4(0x80017f00u, 0x00000001u)", 0xFFFFFF00),
    ("__vcmples2(0xffff0001u, 0x00000001u)", 0xFFFFFFFF),
    # float to integer: rounding, saturation, NaN
    ("__float2int_rn(2.5f)", 2),
    ("__float2int_rn(-3.5f)", -4),
    ("__float2int_rz(-2.9f)", -2),
    ("__float2int_ru(2.1f)", 3),
    ("__float2int_rd(-2.1f)", -3),
    ("__float2int_rn(in[4])", 2**31 - 1),
    ("__float2int_rn(in[5])", INT_MIN),
    (f"__float2int_rn({NAN})", 0),
    ("__float2uint_rn(-in[0])", 0),
    ("__float2uint_rz(in[4])", 3000000000),
    ("__float2uint_rn(2 * in[4])", 2**32 - 1),
    (f"__float2uint_rz({NAN})", 0),
    ("__float2ll_rn(in[6])", 2**63 - 1),
    ("__float2ll_rn(-in[6])", -(2**63)),
    ("__double2int_rz(in[6])", 2**31 - 1),
    ("__double2ull_rz(in[6]) == ~0ull", 1),
    (f"__float2ll_rn({NAN})", -(2**63)),
    ("__float2ull_rz(9e18f) == 9000000202358128640ull", 1),
    ("__double2int_rn(2147483647.4)", 2**31 - 1),
    ("__double2int_rd(-0.5)", -1),
    (f"__double2int_rn({DNAN})", INT_MIN),
    (f"__double2uint_rn({DNAN})", 2**31),
    ("__double2ll_rz(-1e15 - 0.5)", -(10**15)),
    ("__double2hiint(1.0)", 0x3FF00000),
    ("__double2loint(__longlong_as_double(0x123456789abcdefll))", 0x89ABCDEF - 2**32),
    ("__float_as_int(-0.0f)", INT_MIN),
    ("__float_as_uint(1.0f)", 0x3F800000),
    ("__double_as_longlong(2.0)", 1 << 62),
    # minima and maxima in the common type
    ("min(-1, 1)", -1),
    ("min(-1, 1u)", 1),  # -1 as unsigned is large
    ("max(3u, 5u)", 5),
    ("max(-1ll, 1ll)", 1),
    ("max(-1l, 1ul) == ~0ul", 1),
    ("sizeof(max(1, 2u)) == 4 && sizeof(min(1.0f, 2.0)) == 8", 1),
    # sizes and alignments of vector types
    ("sizeof(float3) * 100 + alignof(float3)", 1204),
    ("sizeof(float4) * 100 + alignof(float4)", 1616),
    ("sizeof(double2) * 100 + alignof(double2)", 1616),
    ("sizeof(longlong4) * 100 + alignof(longlong4)", 3216),
    ("sizeof(char4) * 100 + alignof(char4)", 404),
    ("sizeof(ushort3) * 100 + alignof(ushort3)", 602),
    ("sizeof(short4) * 100 + alignof(short4)", 808),
    ("dim3(7).y + 10 * dim3(1, 2).y", 21),
    ("__cvta_shared_to_generic(__cvta_generic_to_shared(out)) == (void*)out", 1),
    ("clock64() <= clock64()", 1),
    ("fabs(erfinv(0.999999) - 3.4589107372795) < 1e-10", 1),
    ("fabs(normcdfinv(0.975) - 1.959963984540054) < 1e-12", 1),
]

# Compared bit for bit.
FLOATS: list[tuple[str, float]] = [
    ("rsqrtf(4.0f)", 0.5),
    ("rsqrt(0.25)", 2.0),
    ("rcbrtf(8.0f)", 0.5),
    ("__frsqrt_rn(16.0f)", 0.25),
    ("fdividef(1.0f, 4.0f)", 0.25),
    ("__fdividef(3.0f, 2.0f)", 1.5),
    ("__fdividef(1.0f, 1.5e38f)", 0.0),  # the device gives 0 for 2^126 < y < 2^128
    ("__fdividef(__int_as_float(0x7f800000), 1.5e38f)", math.nan),
    ("sinpif(0.5f)", 1.0),
    ("sinpif(1e6f)", 0.0),
    ("cospif(1.0f)", -1.0),
    ("cospi(0.5)", 0.0),
    ("exp10f(2.0f)", 100.0),
    ("normcdff(0.0f)", 0.5),
    ("erfinvf(0.5f)", float(np.float32(0.4769362762044699))),
    ("erfinv(-1.0)", -math.inf),
    ("norm3df(2.0f, 3.0f, 6.0f)", 7.0),
    ("rhypotf(3.0f, 4.0f)", float(np.float32(0.2))),
    ("__powf(2.0f, 10.0f)", 1024.0),
    ("__powf(-2.0f, 2.0f)", math.nan),
    ("__expf(0.0f)", 1.0),
    ("__logf(1.0f)", 0.0),
    ("__log2f(8.0f)", 3.0),
    ("__cosf(0.0f)", 1.0),
    ("__saturatef(1.5f)", 1.0),
    ("__saturatef(-0.5f)", 0.0),
    ("__saturatef(0.25f)", 0.25),
    (f"__saturatef({NAN})", 0.0),
    (f"max({NAN}, 1.0f)", 1.0),
    (f"fminf(2.0f, {NAN})", 2.0),
    ("min(1.0f, 2.0)", 1.0),
    # 1/3 = 0.333..., nearest below; 2/3 nearest above
    ("__fdiv_rn(1.0f, 3.0f)", float(np.float32(1) / np.float32(3))),
    ("__fdiv_rz(1.0f, 3.0f)", float(np.nextafter(np.float32(1 / 3), np.float32(0)))),
    ("__fdiv_ru(1.0f, 3.0f)", float(np.float32(1 / 3))),
    ("__frcp_rd(3.0f)", float(np.nextafter(np.float32(1 / 3), np.float32(0)))),
    ("__fadd_ru(1.0f, 1e-20f)", 1 + 2**-23),
    ("__fadd_rn(1.0f, 1e-20f)", 1.0),
    ("__fadd_rd(-1.0f, -1e-20f)", -1 - 2**-23),
    ("__fadd_rz(-1.0f, -1e-20f)", -1.0),
    ("__fsub_rz(1.0f, 1e-20f)", 1 - 2**-24),
    ("__fmul_ru(1.0000001f, 1.0000001f)", 1 + 3 * 2**-23),
    ("__fmul_rd(1.0000001f, 1.0000001f)", 1 + 2 * 2**-23),
    ("__fsqrt_rd(2.0f)", float(np.float32(1.41421354))),
    ("__fsqrt_ru(2.0f)", float(np.float32(1.41421366))),
    ("__fmaf_rn(0x1.001p0f, 0x1.001p0f, -1.0f)", 2**-11 + 2**-24),  # one rounding
    ("__fadd_rn(__fmul_rn(0x1.001p0f, 0x1.001p0f), -1.0f)", 2**-11),  # two
    ("0x1.001p0f * 0x1.001p0f + -1.0f", 2**-11),  # never contracted
    ("__fmaf_ru(1.0f, 1.0f, 1e-20f)", 1 + 2**-23),
    ("__fmaf_rd(1.0f, -1.0f, -1e-20f)", -1 - 2**-23),
    ("__dadd_ru(1.0, 1e-40)", 1 + 2**-52),
    ("__dmul_rn(3.0, 7.0)", 21.0),
    ("__ddiv_rz(2.0, 3.0)", 2 / 3),  # the nearest is below
    ("__ddiv_ru(2.0, 3.0)", math.nextafter(2 / 3, 1)),
    ("__dsqrt_rn(9.0)", 3.0),
    ("__drcp_rn(4.0)", 0.25),
    ("__fma_rn(1.0 + 0x1p-52, 1.0 + 0x1p-52, -1.0)", 2**-51 + 2**-104),
    ("1e-45f * 0.9f", 2.0**-149),  # no flush to zero
    ("__int2float_rn(16777217)", 16777216.0),
    ("__int2float_ru(16777217)", 16777218.0),
    ("__int2float_rz(-16777217)", -16777216.0),
    ("__uint2float_rd(4294967295u)", 4294967040.0),
    ("__ull2float_rn(~0ull)", 2.0**64),
    ("__ull2float_rz(~0ull)", 2.0**64 - 2.0**40),
    ("__ll2double_rd((1ll << 53) + 1)", 2.0**53),
    ("__ll2double_ru((1ll << 53) + 1)", 2.0**53 + 2),
    ("__double2float_rz(0.1)", float(np.nextafter(np.float32(0.1), np.float32(0)))),
    ("__double2float_ru(0.1)", float(np.float32(0.1))),
    ("__hiloint2double(0x3ff00000, 1)", 1 + 2**-52),
    ("__int_as_float(0x3f800000)", 1.0),
    ("__uint_as_float(0xbf800000u)", -1.0),
    ("__ldg(in) + __ldcg(in + 1) + __ldcs(in + 2)", 7.0),
    ("__ldg(reinterpret_cast<const float2*>(in)).y", 2.0),
]


@pytest.fixture(scope="module", params=["checked", "plain"])
def values(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[np.ndarray, np.ndarray]:
    lines = [
        "#include <limits.h>",
        'extern "C" __global__ void evaluate(long long* out, double* results, const float* in) {',
        *(f"  out[{i}] = (long long)({text});" for i, (text, _) in enumerate(INTEGERS)),
        *(f"  results[{i}] = (double)({text});" for i, (text, _) in enumerate(FLOATS)),
        "}",
    ]
    path = tmp_path_factory.mktemp("intrinsics") / "evaluate.cu"
    path.write_text("\n".join(lines))
    module = EmulatedModule(path, mode=request.param)
    integers = np.zeros(len(INTEGERS), np.int64)
    floats = np.zeros(len(FLOATS), np.float64)
    module.get_function("evaluate")((1,), (1,), (integers, floats, GIVEN))
    return integers, floats


def test_integer_expressions_have_the_documented_values(
    values: tuple[np.ndarray, np.ndarray],
) -> None:
    got = {text: int(value) for (text, _), value in zip(INTEGERS, values[0], strict=True)}
    assert got == dict(INTEGERS)


def test_float_expressions_have_the_documented_values(
    values: tuple[np.ndarray, np.ndarray],
) -> None:
    wrong = {
        text: (float(value), expected)
        for (text, expected), value in zip(FLOATS, values[1], strict=True)
        if not (value == expected or (math.isnan(value) and math.isnan(expected)))
    }
    assert wrong == {}


VOICES = """
extern "C" __global__ void traps() {
  __trap();
}
extern "C" __global__ void asserts(int n) {
  if (threadIdx.x == 3)
    assert(n > 5 && "n is small");
}
extern "C" __global__ void assumes(int n) {
  __builtin_assume(n % 4 == 0);
}
extern "C" __global__ void stores(float* out, const float* in) {
  __stcg(out, in[0]);
  __stcs(out + 1, 2);
  __stwt(reinterpret_cast<float2*>(out) + 1, make_float2(3, 4));
  __threadfence();
  float sine, cosine;
  sincosf(0.0f, &sine, &cosine);
  out[4] = sine + cosine;
  sincospif(0.5f, &sine, &cosine);
  out[5] = sine + cosine;
}
"""


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> EmulatedModule:
    path = tmp_path_factory.mktemp("voices") / "voices.cu"
    path.write_text(VOICES)
    return EmulatedModule(path)


def test_a_trap_and_a_failed_assert_name_their_place(voices: EmulatedModule) -> None:
    with pytest.raises(DeviceAssertError, match="__trap") as trap:
        voices.get_function("traps")((1,), (1,), ())
    assert trap.value.line == 3
    with pytest.raises(DeviceAssertError, match=r"assert\(n > 5 && .* failed") as failed:
        voices.get_function("asserts")((2,), (32,), (np.int32(5),))
    assert failed.value.line == 7
    assert failed.value.thread == (3, 0, 0)
    voices.get_function("asserts")((2,), (32,), (np.int32(6),))


def test_an_assumption_that_does_not_hold_is_found(voices: EmulatedModule) -> None:
    voices.get_function("assumes")((1,), (1,), (np.int32(8),))
    with pytest.raises(UndefinedBehaviourError, match="n % 4 == 0") as found:
        voices.get_function("assumes")((1,), (1,), (np.int32(9),))
    assert found.value.line == 10


def test_stores_with_a_hint_store(voices: EmulatedModule) -> None:
    out = np.zeros(6, np.float32)
    voices.get_function("stores")((1,), (1,), (out, np.array([1], np.float32)))
    assert out.tolist() == [1, 2, 3, 4, 1, 1]


def test_asserts_are_off_under_ndebug(tmp_path: Path) -> None:
    path = tmp_path / "voices.cu"
    path.write_text(VOICES)
    module = EmulatedModule(path, {"NDEBUG": 1}, mode="plain")
    module.get_function("asserts")((1,), (32,), (np.int32(0),))


def test_headers_that_a_kernel_file_may_include(tmp_path: Path) -> None:
    headers = [
        "cuda_runtime.h", "vector_types.h", "math_constants.h", "cuda_pipeline_primitives.h",
        "cuda/std/array", "cuda/std/bit", "cuda/std/cmath", "cuda/std/cstddef", "cuda/std/cstdint",
        "cuda/std/limits", "cuda/std/type_traits", "cuda/std/utility", "assert.h",
    ]  # fmt: skip
    path = tmp_path / "headers.cu"
    lines = [f"#include <{header}>" for header in headers]
    kernel = """
extern "C" __global__ void uses(double* out) {
  out[0] = cuda::std::numeric_limits<cuda::std::int8_t>::max();
  out[1] = CUDART_INF_F;
  out[2] = CUDART_PI;
  out[3] = cuda::std::is_same<float, decltype(CUDART_PI_F)>::value;
}
"""
    path.write_text("\n".join(lines) + kernel)
    out = np.zeros(4)
    EmulatedModule(path).get_function("uses")((1,), (1,), (out,))
    assert out.tolist() == [127, math.inf, math.pi, 1]


@pytest.mark.parametrize(
    ("header", "nearest"),
    [
        ("mma.h", "ptx.cuh"),
        ("cub/cub.cuh", "cooperative_groups/reduce.h"),
        ("cub/block/block_reduce.cuh", "cooperative_groups/reduce.h"),
        ("cuda/barrier", "__syncthreads"),
        ("cuda/pipeline", "cuda_pipeline.h"),
        ("cuda_fp8.h", "unsigned char"),
        ("curand_kernel.h", "Philox"),
    ],
)
def test_a_header_that_is_not_emulated_names_the_nearest(
    header: str, nearest: str, tmp_path: Path
) -> None:
    path = tmp_path / "asks.cu"
    path.write_text(f'#include <{header}>\nextern "C" __global__ void nothing() {{}}\n')
    with pytest.raises(NotSupportedError, match=f"the emulator has no .*nearest: .*{nearest}"):
        EmulatedModule(path)
