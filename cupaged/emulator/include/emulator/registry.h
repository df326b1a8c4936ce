// How a compiled module tells which kernels it has and what arguments they take.
//
// The source rewriter ends every module with one EMULATOR_KERNEL a kernel.
#pragma once

#include <tuple>
#include <utility>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emulator/core.h"
#include "emulator/registry_types.h"

namespace emulator {

// CUDA's own vector types. A user's class is none, whatever its members are.
template <class T>
inline constexpr bool is_vector = false;

#define EMULATOR_VECTOR(NAME)                       \
  template <>                                       \
  inline constexpr bool is_vector<NAME##1> = true;  \
  template <>                                       \
  inline constexpr bool is_vector<NAME##2> = true;  \
  template <>                                       \
  inline constexpr bool is_vector<NAME##3> = true;  \
  template <>                                       \
  inline constexpr bool is_vector<NAME##4> = true;

EMULATOR_VECTOR(char)
EMULATOR_VECTOR(uchar)
EMULATOR_VECTOR(short)
EMULATOR_VECTOR(ushort)
EMULATOR_VECTOR(int)
EMULATOR_VECTOR(uint)
EMULATOR_VECTOR(long)
EMULATOR_VECTOR(ulong)
EMULATOR_VECTOR(longlong)
EMULATOR_VECTOR(ulonglong)
EMULATOR_VECTOR(float)
EMULATOR_VECTOR(double)

#undef EMULATOR_VECTOR

template <>
inline constexpr bool is_vector<__half2> = true;
template <>
inline constexpr bool is_vector<__nv_bfloat162> = true;

// The scalar behind a type: that of its components for vectors, none for other classes.
template <class T>
constexpr Scalar scalar_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, float>) return Scalar::float32;
  else if constexpr (std::is_same_v<U, double>) return Scalar::float64;
  else if constexpr (std::is_same_v<U, __half>) return Scalar::float16;
  else if constexpr (std::is_same_v<U, __nv_bfloat16>) return Scalar::bfloat16;
  else if constexpr (std::is_same_v<U, bool>) return Scalar::boolean;
  else if constexpr (std::is_integral_v<U> || std::is_enum_v<U>)
    return std::is_signed_v<U> ? Scalar::signed_integer : Scalar::unsigned_integer;
  else if constexpr (is_vector<U>) return scalar_of<decltype(U::x)>();
  else return Scalar::opaque;
}

template <class T>
constexpr int scalar_bytes() {
  using U = std::remove_cv_t<T>;
  if constexpr (scalar_of<U>() == Scalar::opaque) return sizeof(U);
  else if constexpr (is_vector<U>) return scalar_bytes<decltype(U::x)>();
  else return sizeof(U);
}

template <class T>
constexpr ParameterInfo parameter() {
  if constexpr (std::is_pointer_v<T>) {
    using E = std::remove_pointer_t<T>;
    if constexpr (std::is_void_v<E>) {
      return {true, std::is_const_v<E>, Scalar::opaque, 8, 8, 1, 1};
    } else {
      return {true,           std::is_const_v<E>,    scalar_of<E>(), 8, 8,
              int(sizeof(E)), scalar_bytes<E>()};
    }
  } else {
    return {false,          false,          scalar_of<T>(), int(sizeof(T)), int(alignof(T)),
            int(sizeof(T)), scalar_bytes<T>()};
  }
}

template <class... Args>
struct Signature {
  static constexpr ParameterInfo parameters[sizeof...(Args) + 1] = {
      parameter<std::decay_t<Args>>()..., {}};
};

template <class... Args, std::size_t... I>
EMULATOR_UNCHECKED void call_with(void (*kernel)(Args...), void* const* arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<Args>*>(arguments[I])...);
}

template <auto kernel>
struct Thunk;

template <class... Args, void (*kernel)(Args...)>
struct Thunk<kernel> {
  EMULATOR_UNCHECKED static void call(void* const* arguments) {
    call_with<Args...>(kernel, arguments, std::index_sequence_for<Args...>{});
  }
  static KernelInfo info(const char* name, const char* parameter_names, int max_threads,
                         bool c_linkage) {
    return {name,        parameter_names, Signature<Args...>::parameters, int(sizeof...(Args)),
            max_threads, c_linkage,       &call,                          nullptr};
  }
};

struct Registration {
  KernelInfo info;
  explicit Registration(KernelInfo kernel) : info(kernel) { register_kernel(&info); }
};

}  // namespace emulator
