// The bits of one type as another type of the same size (std::bit_cast, which g++ 10 lacks).
#pragma once

namespace emulator {

template <class To, class From>
__forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(static_cast<void*>(&to), &from, sizeof(To));
  return to;
}

// The type itself, in a place where no template argument is deduced from it.
template <class T>
struct SameType {
  using type = T;
};
template <class T>
using Same = typename SameType<T>::type;

}  // namespace emulator
