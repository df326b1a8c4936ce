"""__half and __nv_bfloat16 on the host: every code, every rounding edge, and what the arithmetic
rounds to, against NumPy, ml_dtypes and exact fractions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupaged.emulator.errors import CompileError
from cupaged.emulator.module import EmulatedModule

SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define EACH(i) for (int i = threadIdx.x; i < n; i += blockDim.x)

#ifdef BF16
typedef __nv_bfloat16 T;
typedef __nv_bfloat162 T2;
#define NAMED(a, b) a##bfloat16##b
#else
typedef __half T;
typedef __half2 T2;
#define NAMED(a, b) a##half##b
#endif

extern "C" __global__ void decode(float* out, const T* in, int n) {
  EACH(i) out[i] = NAMED(__, 2float)(in[i]);
}
extern "C" __global__ void encode(T* out, const float* in, int n) {
  EACH(i) out[i] = in[i];
}
extern "C" __global__ void encode_double(T* out, const double* in, int n) {
  EACH(i) out[i] = NAMED(__double2, )(in[i]);
}
extern "C" __global__ void encode_in_mode(T* out, const float* in, int n) {
  EACH(i) {
    out[3 * i] = NAMED(__float2, _rz)(in[i]);
    out[3 * i + 1] = NAMED(__float2, _ru)(in[i]);
    out[3 * i + 2] = NAMED(__float2, _rd)(in[i]);
  }
}
extern "C" __global__ void arithmetic(T* out, const T* a, const T* b, const T* c, int n) {
  EACH(i) {
    T* row = out + 10 * i;
    row[0] = a[i] + b[i];
    row[1] = a[i] - b[i];
    row[2] = a[i] * b[i];
    row[3] = a[i] / b[i];
    row[4] = __hfma(a[i], b[i], c[i]);
    row[5] = hsqrt(a[i]);
    const T2 pair = __hfma2(T2(a[i], b[i]), T2(b[i], a[i]), NAMED(__, _twice)(c[i]));
    row[6] = pair.x;
    row[7] = pair.y;
    T sum = a[i];
    sum += b[i];
    row[8] = sum;
    row[9] = -a[i];
  }
}
extern "C" __global__ void compare(int* out, const T* a, const T* b, int n) {
  EACH(i) {
    int* row = out + 20 * i;
    const T x = a[i], y = b[i];
    const T2 xy(x, y), yx(y, x);
    row[0] = __heq(x, y);   row[1] = __hne(x, y);   row[2] = __hlt(x, y);
    row[3] = __hle(x, y);   row[4] = __hgt(x, y);   row[5] = __hge(x, y);
    row[6] = __hequ(x, y);  row[7] = __hneu(x, y);  row[8] = __hltu(x, y);
    row[9] = __hleu(x, y);  row[10] = __hgtu(x, y); row[11] = __hgeu(x, y);
    row[12] = x == y;       row[13] = x != y;       row[14] = x < y;
    row[15] = __hlt2_mask(xy, yx);
    row[16] = __hbeq2(xy, yx);
    row[17] = __hblt2(xy, T2(y, x));
    row[18] = NAMED(__, _as_ushort)(__hmax(x, y)) << 16 | NAMED(__, _as_ushort)(__hmin(x, y));
    row[19] = NAMED(__, _as_ushort)(__hmax_nan(x, y)) << 16
              | NAMED(__, _as_ushort)(__hmin_nan(x, y));
  }
}
extern "C" __global__ void to_integers(long long* out, const T* in, int n) {
  EACH(i) {
    long long* row = out + 10 * i;
    row[0] = NAMED(__, 2int_rn)(in[i]);
    row[1] = NAMED(__, 2int_rz)(in[i]);
    row[2] = NAMED(__, 2int_ru)(in[i]);
    row[3] = NAMED(__, 2int_rd)(in[i]);
    row[4] = NAMED(__, 2uint_rn)(in[i]);
    row[5] = NAMED(__, 2short_rn)(in[i]);
    row[6] = NAMED(__, 2ushort_rz)(in[i]);
    row[7] = NAMED(__, 2ll_rd)(in[i]);
    row[8] = (int)in[i];
    row[9] = (signed char)in[i];
  }
}
extern "C" __global__ void from_integers(T* out, const long long* in, int n) {
  EACH(i) {
    T* row = out + 6 * i;
    row[0] = NAMED(__ll2, _rn)(in[i]);
    row[1] = NAMED(__ll2, _rz)(in[i]);
    row[2] = NAMED(__ll2, _ru)(in[i]);
    row[3] = NAMED(__ll2, _rd)(in[i]);
    row[4] = T((int)in[i]);
    row[5] = NAMED(__ull2, _rn)((unsigned long long)in[i]);
  }
}
extern "C" __global__ void pairs(T2* out, const T2* in, const float2* floats) {
  out[0] = __ldg(in);
  out[1] = NAMED(__lows2, 2)(in[0], in[1]);
  out[2] = NAMED(__highs2, 2)(in[0], in[1]);
  out[3] = NAMED(__low2, 2)(in[0]);
  out[4] = NAMED(__high2, 2)(in[0]);
  out[5] = __lowhigh2highlow(in[0]);
  out[6] = NAMED(__halves2, 2)(in[0].y, in[1].x);
  out[7] = NAMED(__float22, 2_rn)(floats[0]);
  out[8] = NAMED(__floats2, 2_rn)(floats[0].y, __low2float(in[1]));
  out[9] = NAMED(__float2, 2_rn)(floats[0].x);
  out[10] = __hadd2(in[0], in[1]);
  out[11] = __hneg2(in[0]);
  out[12] = __heq2(in[0], T2(in[0].x, in[1].x));
  const float2 back = NAMED(__, 22float2)(in[1]);
  out[13] = NAMED(make_, 2)(back.y, back.x);
  out[14] = in[0] * in[1] - __hmin2(in[0], in[1]);
  __stcg(out + 15, __hcmadd(in[0], in[1], in[0]));
}
extern "C" __global__ void functions(float* out, const T* in) {
  out[0] = hexp(in[0]);
  out[1] = hlog(in[1]);
  out[2] = hrsqrt(in[2]);
  out[3] = hrcp(in[2]);
  out[4] = hexp2(in[2]);
  out[5] = hfloor(in[3]);
  out[6] = hceil(in[3]);
  out[7] = htrunc(in[3]);
  out[8] = hrint(in[3]);
  out[9] = htanh(in[0]);
  out[10] = hlog2(in[2]);
  out[11] = __hadd_sat(in[1], in[2]);
  out[12] = __hfma_relu(in[3], in[2], in[0]);
  out[13] = __habs(in[3]);
  out[14] = __hisinf(-in[4]);
  out[15] = __hisnan(in[4] - in[4]);
  out[16] = __half2float(h2exp10(__half2(2, 1)).x);
}
"""

TWICE = """
__device__ inline __half2 __half_twice(__half a) { return __half2half2(a); }
__device__ inline __nv_bfloat162 __bfloat16_twice(__nv_bfloat16 a) {
  return __bfloat162bfloat162(a);
}
"""


@dataclass(frozen=True)
class Format:
    """A 16-bit type: its NumPy dtype, bits of its exponent and fraction, and the kernels on it."""

    dtype: Any
    exponent_bits: int
    fraction_bits: int
    module: EmulatedModule

    def call(self, name: str, out: np.ndarray, *arguments: Any) -> np.ndarray:
        # One thread is enough for long arrays: what is tested is not the threads.
        self.module.get_function(name)((1,), (32,), (out, *arguments))
        return out

    def array(self, codes: Any) -> np.ndarray:
        return np.asarray(codes, np.uint16).view(self.dtype)

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    def fraction(self, code: int) -> Fraction:
        """The exact value of a finite code."""
        exponent = (code & 0x7FFF) >> self.fraction_bits
        significand = code & ((1 << self.fraction_bits) - 1)
        if exponent > 0:
            significand += 1 << self.fraction_bits
        scale = max(exponent, 1) - ((1 << (self.exponent_bits - 1)) - 1) - self.fraction_bits
        return (-1 if code & 0x8000 else 1) * Fraction(significand) * Fraction(2) ** scale

    def nearest(self, value: Fraction) -> int:
        """The code of a non-zero value, ties to even, found by bisection among all codes."""
        low, high = 0, self.infinity  # codes of positive numbers are in the order of their values
        size = abs(value)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fraction(middle) <= size else (low, middle)
        below, above = self.fraction(low), self.fraction(high)  # infinity counts as the next step
        up = size - below > above - size or (size - below == above - size and low % 2 == 1)
        return (high if up else low) | (0x8000 if value < 0 else 0)


@pytest.fixture(scope="module", params=["half", "half in software", "bfloat16"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Format:
    path = tmp_path_factory.mktemp("half") / "half.cu"
    path.write_text(SOURCE.replace("extern", TWICE + "extern", 1))
    if request.param == "bfloat16":
        module = EmulatedModule(path, {"BF16": 1}, mode="plain")
        return Format(np.dtype(ml_dtypes.bfloat16), 8, 7, module)
    defines = {"EMULATOR_SOFTWARE_FP16": 1} if "software" in request.param else {}
    return Format(np.dtype(np.float16), 5, 10, EmulatedModule(path, defines, mode="plain"))


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    """Equal bits, except that any NaN is as good as another."""
    unsigned = f"u{got.dtype.itemsize}"
    both_nan = np.isnan(got.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    return bool(np.all((got.view(unsigned) == expected.view(unsigned)) | both_nan))


ALL_CODES = np.arange(65536, dtype=np.uint16)


def test_every_code_decodes(kind: Format) -> None:
    codes = kind.array(ALL_CODES)
    got = kind.call("decode", np.zeros(65536, np.float32), codes, np.int32(65536))
    assert same(got, codes.astype(np.float32))


def edges(kind: Format) -> np.ndarray:
    """All values of the format, all midpoints between neighbours, and the floats beside both."""
    positive = kind.array(np.arange(kind.infinity)).astype(np.float64)  # ascending
    above_largest = positive[-1] + (positive[-1] - positive[-2])  # where infinity would lie
    steps = np.append(positive, above_largest)
    with np.errstate(over="ignore"):
        points = np.concatenate([steps, (steps[1:] + steps[:-1]) / 2]).astype(np.float32)
    around = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-1))]
    )
    noise = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    special = np.array([np.inf, np.nan, 1e38, 3.4e38, 1e-45, 0.0], np.float32)
    return np.concatenate([around, -around, noise, special, -special])


def test_floats_encode_to_the_nearest_ties_to_even(kind: Format) -> None:
    values = edges(kind)
    got = kind.call("encode", np.zeros(len(values), kind.dtype), values, np.int32(len(values)))
    with np.errstate(over="ignore", invalid="ignore"):
        assert same(got, values.astype(kind.dtype))
    assert set(got.view(np.uint16)[np.isnan(values)].tolist()) == {0x7FFF}


def test_floats_encode_in_the_rounding_mode_of_the_name(kind: Format) -> None:
    values = edges(kind)
    values = values[~np.isnan(values)]
    out = np.zeros((len(values), 3), kind.dtype)
    kind.call("encode_in_mode", out, values, np.int32(len(values)))
    with np.errstate(over="ignore"):
        nearest = values.astype(kind.dtype)
    back = nearest.astype(np.float32)
    codes = nearest.view(np.uint16).astype(np.int32)
    negative = np.signbit(values)
    inward, outward = codes - 1, codes + 1  # one step towards and away from zero
    too_large, too_small = np.abs(back) > np.abs(values), np.abs(back) < np.abs(values)
    truncated = np.where(too_large, inward, codes)
    away = np.where(too_small, outward, codes)
    assert np.array_equal(out[:, 0].view(np.uint16), truncated)
    assert np.array_equal(out[:, 1].view(np.uint16), np.where(negative, truncated, away))
    assert np.array_equal(out[:, 2].view(np.uint16), np.where(negative, away, truncated))


def test_doubles_encode_with_one_rounding(kind: Format) -> None:
    # One plus half a step plus a bit that a float does not hold: rounding twice would give one.
    half_step = 2.0 ** -(kind.fraction_bits + 1)
    values = np.array([1 + half_step + 2.0**-40, 1 + half_step, 1 + half_step - 2.0**-40, 1e300])
    got = kind.call("encode_double", np.zeros(4, kind.dtype), values, np.int32(4))
    one = int(np.ones(1, kind.dtype).view(np.uint16)[0])
    assert got.view(np.uint16).tolist() == [one + 1, one, one, kind.infinity]


def operands(kind: Format) -> list[np.ndarray]:
    """Codes of finite numbers: of all sizes, and such that results meet every edge."""
    draw = random.Random(7)
    finite = [code for code in range(65536) if code & 0x7FFF < kind.infinity]
    one = ((1 << (kind.exponent_bits - 1)) - 1) << kind.fraction_bits
    around = range(one - 300, one + 300)
    near_one = [draw.choice(around) | draw.choice([0, 0x8000]) for _ in range(1500)]
    columns = []
    for column in range(3):
        codes = [draw.choice(finite) for _ in range(500)]
        codes += near_one[500 * column : 500 * (column + 1)]
        codes += [draw.choice(range(1, 64)) for _ in range(100)]  # subnormals
        columns.append(np.array(codes, np.uint16))
    # Products that are midpoints, with a summand far below: an inexact double would lose it.
    half = one - (1 << kind.fraction_bits)
    odd = [
        [one + 1, one + 1, one + 3, one + 1],
        [one + 2, one + 1, half + 1, one + 1],
        [1, 0x8001, 1, 0x0101],
    ]
    return [
        np.append(column, more).astype(np.uint16) for column, more in zip(columns, odd, strict=True)
    ]


def test_arithmetic_is_rounded_once(kind: Format) -> None:
    a, b, c = operands(kind)
    out = np.zeros((len(a), 10), kind.dtype)
    kind.call("arithmetic", out, *map(kind.array, (a, b, c)), np.int32(len(a)))
    got = out.view(np.uint16).tolist()
    wrong = []
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        p, q, r = kind.fraction(x), kind.fraction(y), kind.fraction(z)
        exact = [p + q, p - q, p * q, p / q if q else None, p * q + r, None, p * q + r, p * q + r]
        for column, value in enumerate(exact):
            if value is None or value == 0:  # the sign of zero: below
                continue
            if got[i][column] != kind.nearest(value):
                wrong.append((column, hex(x), hex(y), hex(z), hex(got[i][column])))
        if got[i][8] != got[i][0] or got[i][9] != x ^ 0x8000:
            wrong.append((8, hex(x), hex(y), hex(z), hex(got[i][8])))
        if p > 0:  # the root lies between the squares of the midpoints around it
            root = got[i][5]
            step = [kind.fraction(code) for code in (root - 1, root, root + 1)]
            if not (((step[0] + step[1]) / 2) ** 2 <= p <= ((step[1] + step[2]) / 2) ** 2):
                wrong.append((5, hex(x), "", "", hex(root)))
    assert wrong == []


def test_zeros_infinities_and_nan(kind: Format) -> None:
    one = int(np.ones(1, kind.dtype).view(np.uint16)[0])
    inf, minus = kind.infinity, 0x8000
    a = [one, minus, minus, inf, inf, one, inf | minus]
    b = [one | minus, minus, 0, inf | minus, 0, 0, one]
    c = [0, 0, minus, one, one, one, inf]
    out = np.zeros((7, 10), kind.dtype)
    kind.call("arithmetic", out, *map(kind.array, (a, b, c)), np.int32(7))
    got = out.view(np.uint16)
    nan = 0x7FFF
    assert got[:, 0].tolist() == [0, minus, 0, nan, inf, one, inf | minus]
    assert got[:, 2].tolist() == [one | minus, 0, minus, inf | minus, nan, 0, inf | minus]
    assert got[:, 3].tolist() == [one | minus, nan, nan, nan, inf, inf, inf | minus]
    assert got[:, 4].tolist() == [one | minus, 0, minus, inf | minus, nan, one, nan]


def test_comparisons_know_nan_and_signed_zero(kind: Format) -> None:
    one = int(np.ones(1, kind.dtype).view(np.uint16)[0])
    nan, minus = 0x7FFF, 0x8000
    a = [0, one, one, one, nan, minus, nan]
    b = [minus, one | minus, one, nan, nan, 0, one]
    out = np.zeros((7, 20), np.int32)
    kind.call("compare", out, kind.array(a), kind.array(b), np.int32(7))
    # eq ne lt le gt ge, then the same for NaN counting as true, then == != <
    assert out[:, :15].tolist() == [
        [1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0],
        [0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0],
        [1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0],
        [1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0],
    ]
    assert out[:, 15].view(np.uint32).tolist() == [0, 0xFFFF0000, 0, 0, 0, 0, 0]
    assert out[:, 16].tolist() == [1, 0, 1, 0, 0, 1, 0]
    assert out[:, 17].tolist() == [0] * 7
    extremes = out[:, 18:].view(np.uint32)
    both, ones = one << 16 | one | minus, one << 16 | one
    assert extremes[:, 0].tolist() == [minus, both, ones, ones, nan << 16 | nan, minus, ones]
    assert extremes[:, 1].tolist() == [
        minus, both, ones, nan << 16 | nan, nan << 16 | nan, minus, nan << 16 | nan
    ]  # fmt: skip


def test_conversion_to_integers_rounds_and_saturates(kind: Format) -> None:
    values = np.array([2.5, -2.5, 300.0, 60000.0, -1.0, np.inf, np.nan], kind.dtype)
    out = np.zeros((7, 10), np.int64)
    kind.call("to_integers", out, values, np.int32(7))
    large = int(values[3])
    top, bottom = 2**31 - 1, -(2**63)
    assert out.tolist() == [
        [2, 2, 3, 2, 2, 2, 2, 2, 2, 2],
        [-2, -2, -2, -3, 0, -2, 0, -3, -2, -2],
        [300, 300, 300, 300, 300, 300, 300, 300, 300, 127],
        [large, large, large, large, large, 32767, large, large, large, 127],
        [-1, -1, -1, -1, 0, -1, 0, -1, -1, -1],
        [top, top, top, top, 2**32 - 1, 32767, 65535, 2**63 - 1, top, 127],
        [0, 0, 0, 0, 0, 0, 0, bottom, 0, 0],
    ]


def test_conversion_from_integers_rounds_once(kind: Format) -> None:
    # The last: a midpoint of bfloat16 and one more, which a double does not hold.
    middle = (1 << 62) + (1 << 54)
    values = [0, 1, -3, 2049, 4097, -(10**6), 65519, 65520, middle, middle + 1, -middle - 1]
    out = np.zeros((len(values), 6), kind.dtype)
    kind.call("from_integers", out, np.array(values, np.int64), np.int32(len(values)))
    codes = out.view(np.uint16)
    nearest = [kind.nearest(Fraction(value)) if value else 0 for value in values]
    assert codes[:, 0].tolist() == nearest
    assert codes[:8, 4].tolist() == nearest[:8]
    for value, row in zip(values[1:], codes[1:].tolist(), strict=True):
        exact = kind.fraction(row[0])  # infinity as the next step
        inward = row[0] - 1 if abs(exact) > abs(value) else row[0]
        outward = row[0] + 1 if abs(exact) < abs(value) else row[0]
        if row[0] & 0x7FFF == kind.infinity:
            inward, outward = row[0] - 1, row[0]
        assert row[1] == inward
        assert row[2:4] == ([outward, inward] if value > 0 else [inward, outward])
        if value > 0:
            assert row[5] == row[0]


def test_pairs_take_the_halves_they_name(kind: Format) -> None:
    out = np.zeros((16, 2), kind.dtype)
    kind.call("pairs", out, np.array([[1, 2], [3, 4]], kind.dtype), np.array([[5, 6]], np.float32))
    assert out.astype(np.float32).tolist() == [
        [1, 2], [1, 3], [2, 4], [1, 1], [2, 2], [2, 1], [2, 3], [5, 6], [6, 3], [5, 5], [4, 6],
        [-1, -2], [1, 0], [4, 3], [2, 6], [1 * 3 - 2 * 4 + 1, 1 * 4 + 2 * 3 + 2],
    ]  # fmt: skip


def test_functions_compute_in_float_and_round(kind: Format) -> None:
    given = np.array([0.0, 1.0, 4.0, -2.5, np.inf], kind.dtype)
    got = kind.call("functions", np.zeros(17, np.float32), given)
    assert got.tolist() == [
        1, 0, 0.5, 0.25, 16, -3, -2, -2, -2, 0, 2, 1, 0, 2.5, -1, 1, 100,
    ]  # fmt: skip


@pytest.mark.parametrize("expression", ["h + 1.0f", "h * 2", "h.__x", "h + b"])
def test_what_the_device_compiler_refuses_is_refused(expression: str, tmp_path: Path) -> None:
    path = tmp_path / "ambiguous.cu"
    path.write_text(
        "#include <cuda_bf16.h>\n"
        'extern "C" __global__ void kernel(float* out, __half h, __nv_bfloat16 b) {\n'
        f"  out[0] = {expression};\n"
        "}\n"
    )
    with pytest.raises(CompileError) as error:
        EmulatedModule(path)
    assert error.value.line == 3
