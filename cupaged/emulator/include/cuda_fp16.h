// __half and __half2 on the host: see emulator/float16_type.h and emulator/float16_functions.h.
#pragma once

#include "emulator/atomics.h"
#include "emulator/conversions.h"
#include "emulator/fp16_convert.h"
#include "emulator/math.h"
#include "emulator/vector_types.h"
#include "emulator/warp.h"

#define FLOAT16 __half
#define FLOAT16_RAW __half_raw
#define FLOAT16X2 __half2
#define FLOAT16X2_RAW __half2_raw
#define FLOAT16_FORMAT emulator::Fp16Format
#define FLOAT16_NAMED(a, b) a##half##b
#include "emulator/float16_type.h"
#include "emulator/float16_functions.h"
#undef FLOAT16_NAMED
#undef FLOAT16_FORMAT
#undef FLOAT16X2_RAW
#undef FLOAT16X2
#undef FLOAT16_RAW
#undef FLOAT16

using half = __half;
using half2 = __half2;
using __nv_half = __half;
using __nv_half2 = __half2;
using nv_half = __half;
using nv_half2 = __half2;

__forceinline__ __half2 __half2half2(__half a) { return {a, a}; }

#define CUDART_ZERO_FP16 __ushort_as_half(0x0000)
#define CUDART_NEG_ZERO_FP16 __ushort_as_half(0x8000)
#define CUDART_ONE_FP16 __ushort_as_half(0x3c00)
#define CUDART_INF_FP16 __ushort_as_half(0x7c00)
#define CUDART_NAN_FP16 __ushort_as_half(0x7fff)
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half(0x7bff)
#define CUDART_MIN_DENORM_FP16 __ushort_as_half(0x0001)
