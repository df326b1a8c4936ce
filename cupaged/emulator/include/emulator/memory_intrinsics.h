// Loads and stores with a cache hint, fences, clocks, and questions about an address.
//
// A hint changes nothing here: these are plain accesses, checked as such.
#pragma once

#include <time.h>

#include "emulator/bits.h"
#include "emulator/core.h"

#define EMULATOR_LOAD(NAME)                                                                     \
  template <class T>                                                                            \
  __forceinline__ T NAME(const T* address) {                                                    \
    return *address;                                                                            \
  }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldca)
EMULATOR_LOAD(__ldcs)
EMULATOR_LOAD(__ldlu)
EMULATOR_LOAD(__ldcv)
#undef EMULATOR_LOAD

#define EMULATOR_STORE(NAME)                                                                    \
  template <class T>                                                                            \
  __forceinline__ void NAME(T* address, emulator::Same<T> value) {                              \
    *address = value;                                                                           \
  }
EMULATOR_STORE(__stwb)
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwt)
#undef EMULATOR_STORE

__forceinline__ void __threadfence() { emulator::fence(); }
__forceinline__ void __threadfence_block() { emulator::fence(); }
__forceinline__ void __threadfence_system() { emulator::fence(); }

// clock() is the host's, from <time.h>; both only ever grow.
__forceinline__ long long clock64() { return static_cast<long long>(emulator::clock_ticks()); }

// The sleeping thread lets others run; how long it sleeps does not matter.
__forceinline__ void __nanosleep(unsigned int) { emulator::yield(); }

__forceinline__ unsigned int __isShared(const void* address) {
  return emulator::is_shared(address);
}
__forceinline__ unsigned int __isGlobal(const void* address) {
  return !emulator::is_shared(address);
}

// The "shared address" is the pointer itself: wrappers around PTX hand it back unchanged.
__forceinline__ size_t __cvta_generic_to_shared(const void* address) {
  return reinterpret_cast<size_t>(address);
}
__forceinline__ void* __cvta_shared_to_generic(size_t address) {
  return reinterpret_cast<void*>(address);
}
__forceinline__ size_t __cvta_generic_to_global(const void* address) {
  return reinterpret_cast<size_t>(address);
}
__forceinline__ void* __cvta_global_to_generic(size_t address) {
  return reinterpret_cast<void*>(address);
}
