// The device intrinsics that need no #include, by family.
#pragma once

#include "emulator/conversions.h"
#include "emulator/integer_intrinsics.h"
#include "emulator/memory_intrinsics.h"
#include "emulator/simd_intrinsics.h"
