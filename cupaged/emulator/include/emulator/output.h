// What a kernel says: printf, assert, traps, and assumptions that are checked instead of trusted.
#pragma once

#include <assert.h>
#include <stdio.h>

#include "emulator/core.h"

namespace emulator {

__forceinline__ void check_assumption(bool holds, const char* text, Place place) {
  if (!holds) fail(Kind::undefined, place, "__builtin_assume(%s) does not hold", text);
}

}  // namespace emulator

inline void __trap(emulator::Place place = EMULATOR_HERE) {
  emulator::fail(emulator::Kind::device_assert, place, "__trap() was reached");
}
inline void __brkpt(emulator::Place place = EMULATOR_HERE) {
  emulator::fail(emulator::Kind::device_assert, place, "__brkpt() was reached");
}

#define __builtin_assume(condition) \
  ::emulator::check_assumption(static_cast<bool>(condition), #condition, EMULATOR_HERE)
#define __assume(condition) __builtin_assume(condition)
