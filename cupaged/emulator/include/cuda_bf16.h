// __nv_bfloat16 and __nv_bfloat162 on the host: see emulator/float16_type.h and
// emulator/float16_functions.h.
#pragma once

#include "cuda_fp16.h"

#define FLOAT16 __nv_bfloat16
#define FLOAT16_RAW __nv_bfloat16_raw
#define FLOAT16X2 __nv_bfloat162
#define FLOAT16X2_RAW __nv_bfloat162_raw
#define FLOAT16_FORMAT emulator::Bf16Format
#define FLOAT16_NAMED(a, b) a##bfloat16##b
#include "emulator/float16_type.h"
#include "emulator/float16_functions.h"
#undef FLOAT16_NAMED
#undef FLOAT16_FORMAT
#undef FLOAT16X2_RAW
#undef FLOAT16X2
#undef FLOAT16_RAW
#undef FLOAT16

using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

__forceinline__ __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }

#define CUDART_ZERO_BF16 __ushort_as_bfloat16(0x0000)
#define CUDART_NEG_ZERO_BF16 __ushort_as_bfloat16(0x8000)
#define CUDART_ONE_BF16 __ushort_as_bfloat16(0x3f80)
#define CUDART_INF_BF16 __ushort_as_bfloat16(0x7f80)
#define CUDART_NAN_BF16 __ushort_as_bfloat16(0x7fff)
#define CUDART_MAX_NORMAL_BF16 __ushort_as_bfloat16(0x7f7f)
#define CUDART_MIN_DENORM_BF16 __ushort_as_bfloat16(0x0001)
