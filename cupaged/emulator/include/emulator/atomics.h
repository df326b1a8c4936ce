// Atomic functions: one read-modify-write that other threads of the emulator never see half done.
//
// An operation that leaves memory as it was lets other threads run: a kernel that waits for another
// thread does so by a failing compare-and-swap, an exchange that finds the lock taken, or an
// addition of zero, and would wait for ever otherwise.
#pragma once

#include "emulator/bits.h"
#include "emulator/core.h"

namespace emulator {

template <int BYTES>
struct WordOf;
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned int;
};
template <>
struct WordOf<8> {
  using type = unsigned long long;
};

// Stores update(old, value) and returns old.
template <class T, class Update>
EMULATOR_UNCHECKED T update_unchecked(T* address, T value, Update update) {
  using Word = typename WordOf<sizeof(T)>::type;
  Word* word = reinterpret_cast<Word*>(address);
  Word before = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    const Word after = bits_as<Word>(update(bits_as<T>(before), value));
    if (__atomic_compare_exchange_n(word, &before, after, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_RELAXED)) {
      if (before == after) yield();
      return bits_as<T>(before);
    }
  }
}

template <class T, class Update>
__forceinline__ T atomic_update(T* address, Same<T> value, Update update) {
  check_atomic(address, sizeof(T));
  return update_unchecked<T>(address, value, update);
}

template <class T>
struct SwapIf {
  T expected;
  EMULATOR_UNCHECKED T operator()(T before, T value) const {
    return bits_as<typename WordOf<sizeof(T)>::type>(before) ==
                   bits_as<typename WordOf<sizeof(T)>::type>(expected)
               ? value
               : before;
  }
};

#define EMULATOR_UPDATE(NAME, EXPRESSION)                                                       \
  struct NAME {                                                                                 \
    template <class T>                                                                          \
    EMULATOR_UNCHECKED T operator()(T before, T value) const {                                  \
      return EXPRESSION;                                                                        \
    }                                                                                           \
  };
EMULATOR_UPDATE(Add, before + value)
EMULATOR_UPDATE(Subtract, before - value)
EMULATOR_UPDATE(Exchange, (void(before), value))
EMULATOR_UPDATE(Smaller, value < before ? value : before)
EMULATOR_UPDATE(Larger, before < value ? value : before)
EMULATOR_UPDATE(And, before & value)
EMULATOR_UPDATE(Or, before | value)
EMULATOR_UPDATE(Xor, before ^ value)
EMULATOR_UPDATE(Increment, before >= value ? T(0) : T(before + 1))
EMULATOR_UPDATE(Decrement, before == 0 || before > value ? value : T(before - 1))
#undef EMULATOR_UPDATE

}  // namespace emulator

// Each with its _block and _system form, which differ only in who must see the operation whole.
#define EMULATOR_ATOMIC_IN_SCOPE(NAME, T, UPDATE)                                               \
  __forceinline__ T NAME(T* address, T value) {                                                 \
    return emulator::atomic_update(address, value, emulator::UPDATE{});                         \
  }
#define EMULATOR_ATOMIC(NAME, T, UPDATE)                                                        \
  EMULATOR_ATOMIC_IN_SCOPE(NAME, T, UPDATE)                                                     \
  EMULATOR_ATOMIC_IN_SCOPE(NAME##_block, T, UPDATE)                                             \
  EMULATOR_ATOMIC_IN_SCOPE(NAME##_system, T, UPDATE)
EMULATOR_ATOMIC(atomicAdd, int, Add)
EMULATOR_ATOMIC(atomicAdd, unsigned int, Add)
EMULATOR_ATOMIC(atomicAdd, unsigned long long, Add)
EMULATOR_ATOMIC(atomicAdd, float, Add)
EMULATOR_ATOMIC(atomicAdd, double, Add)
EMULATOR_ATOMIC(atomicSub, int, Subtract)
EMULATOR_ATOMIC(atomicSub, unsigned int, Subtract)
EMULATOR_ATOMIC(atomicExch, int, Exchange)
EMULATOR_ATOMIC(atomicExch, unsigned int, Exchange)
EMULATOR_ATOMIC(atomicExch, unsigned long long, Exchange)
EMULATOR_ATOMIC(atomicExch, float, Exchange)
EMULATOR_ATOMIC(atomicMin, int, Smaller)
EMULATOR_ATOMIC(atomicMin, unsigned int, Smaller)
EMULATOR_ATOMIC(atomicMin, long long, Smaller)
EMULATOR_ATOMIC(atomicMin, unsigned long long, Smaller)
EMULATOR_ATOMIC(atomicMax, int, Larger)
EMULATOR_ATOMIC(atomicMax, unsigned int, Larger)
EMULATOR_ATOMIC(atomicMax, long long, Larger)
EMULATOR_ATOMIC(atomicMax, unsigned long long, Larger)
EMULATOR_ATOMIC(atomicInc, unsigned int, Increment)
EMULATOR_ATOMIC(atomicDec, unsigned int, Decrement)
EMULATOR_ATOMIC(atomicAnd, int, And)
EMULATOR_ATOMIC(atomicAnd, unsigned int, And)
EMULATOR_ATOMIC(atomicAnd, unsigned long long, And)
EMULATOR_ATOMIC(atomicOr, int, Or)
EMULATOR_ATOMIC(atomicOr, unsigned int, Or)
EMULATOR_ATOMIC(atomicOr, unsigned long long, Or)
EMULATOR_ATOMIC(atomicXor, int, Xor)
EMULATOR_ATOMIC(atomicXor, unsigned int, Xor)
EMULATOR_ATOMIC(atomicXor, unsigned long long, Xor)
#undef EMULATOR_ATOMIC
#undef EMULATOR_ATOMIC_IN_SCOPE

#define EMULATOR_CAS_IN_SCOPE(NAME, T)                                                          \
  __forceinline__ T NAME(T* address, T expected, T value) {                                     \
    return emulator::atomic_update(address, value, emulator::SwapIf<T>{expected});              \
  }
#define EMULATOR_CAS(T)                                                                         \
  EMULATOR_CAS_IN_SCOPE(atomicCAS, T)                                                           \
  EMULATOR_CAS_IN_SCOPE(atomicCAS_block, T)                                                     \
  EMULATOR_CAS_IN_SCOPE(atomicCAS_system, T)
EMULATOR_CAS(int)
EMULATOR_CAS(unsigned int)
EMULATOR_CAS(unsigned long long)
EMULATOR_CAS(unsigned short)
#undef EMULATOR_CAS
#undef EMULATOR_CAS_IN_SCOPE
