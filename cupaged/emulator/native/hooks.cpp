// The functions that instrumented code calls: our own form of the sanitizers' run-time interface.
//
// The compiler inserts the calls (-fsanitize=thread,alignment,bounds,... and
// -fsanitize-coverage=trace-pc); the sanitizers' own libraries are never linked.
#include <cstdint>
#include <cstring>

#include "machine.h"
#include "memory.h"

using emulator::Access;
using emulator::check_access;
using emulator::Kind;

#define CALLER __builtin_return_address(0)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define EMULATOR_ACCESS(size)                                                                \
  void __tsan_read##size(void* p) { check_access(p, size, Access::read, CALLER); }           \
  void __tsan_write##size(void* p) { check_access(p, size, Access::write, CALLER); }         \
  void __tsan_volatile_read##size(void* p) {                                                 \
    check_access(p, size, Access::relaxed_read, CALLER);                                     \
  }                                                                                          \
  void __tsan_volatile_write##size(void* p) {                                                \
    check_access(p, size, Access::relaxed_write, CALLER);                                    \
  }                                                                                          \
  void __tsan_unaligned_read##size(void* p) { check_access(p, size, Access::read, CALLER); } \
  void __tsan_unaligned_write##size(void* p) { check_access(p, size, Access::write, CALLER); }
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4)
EMULATOR_ACCESS(8)
EMULATOR_ACCESS(16)
#undef EMULATOR_ACCESS

void __tsan_read_range(void* p, std::size_t bytes) { check_access(p, bytes, Access::read, CALLER); }
void __tsan_write_range(void* p, std::size_t bytes) {
  check_access(p, bytes, Access::write, CALLER);
}

// Compilers turn copies of structures into these calls; prelude.h gives them these names.
void* emulator_memcpy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) {
    check_access(from, bytes, Access::read, CALLER);
    check_access(to, bytes, Access::write, CALLER);
  }
  return std::memcpy(to, from, bytes);
}

void* emulator_memmove(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) {
    check_access(from, bytes, Access::read, CALLER);
    check_access(to, bytes, Access::write, CALLER);
  }
  return std::memmove(to, from, bytes);
}

void* emulator_memset(void* to, int value, std::size_t bytes) {
  if (bytes > 0) check_access(to, bytes, Access::write, CALLER);
  return std::memset(to, value, bytes);
}

// One call a basic block: what ends an endless loop, and lets others run while one waits for them.
void __sanitizer_cov_trace_pc() {
  constexpr std::uint64_t quantum = 20000;
  if (emulator::current == nullptr || ++emulator::machine.num_steps % quantum != 0) return;
  if (emulator::machine.num_steps >= emulator::machine.spec->max_steps) {
    emulator::fail(Kind::endless_loop, {nullptr, 0},
                   "no end after %llu basic blocks of this block of threads",
                   static_cast<unsigned long long>(emulator::machine.num_steps));
  }
  if (emulator::machine.interrupted) emulator::abandon();
  emulator::machine.wants_yield = true;
}

// -fstack-protector-strong: a function found its frame overwritten, by its end.
[[noreturn]] void __stack_chk_fail() {
  emulator::fail(Kind::out_of_bounds, {nullptr, 0}, "a local array was written beyond its end");
}

// What the compiler tells about undefined behaviour: see the sanitizers' ubsan_handlers.h.
struct SourceLocation {
  const char* file;
  std::uint32_t line;
  std::uint32_t column;
};

struct TypeDescriptor {
  std::uint16_t kind;  // 0: integer, its bits and sign in info
  std::uint16_t info;
  char name[1];
};

struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  unsigned char log_alignment;
  unsigned char check_kind;
};

struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};

struct ShiftOrDivision {
  SourceLocation location;
  const TypeDescriptor* left;
  const TypeDescriptor* right;
};

static emulator::Place place(const SourceLocation& location) {
  return {location.file, static_cast<int>(location.line)};
}

// An operand of up to 64 bits travels in the handle itself, sign-extended by its own width.
static long long operand(const TypeDescriptor* type, std::uintptr_t handle) {
  const unsigned bits = 1u << (type->info >> 1);
  if (bits > 64) return 0;
  const bool is_signed = type->info & 1;
  const unsigned unused = 64 - bits;
  const auto shifted = static_cast<std::uint64_t>(handle) << unused;
  return is_signed ? static_cast<std::int64_t>(shifted) >> unused
                   : static_cast<long long>(shifted >> unused);
}

void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, void* pointer) {
  if (emulator::current == nullptr) return;
  static const char* const kinds[] = {"load of", "store to", "reference to", "member of",
                                      "call on", "constructor of", "cast to", "cast to"};
  const char* kind = data->check_kind < 8 ? kinds[data->check_kind] : "use of";
  char what[256];
  std::snprintf(what, sizeof what, "%s %s", kind, data->type->name);
  emulator::check_alignment(what, pointer, std::size_t{1} << data->log_alignment,
                            place(data->location));
}

void __ubsan_handle_out_of_bounds(OutOfBounds* data, std::uintptr_t index) {
  if (emulator::current == nullptr) return;
  emulator::fail(Kind::out_of_bounds, place(data->location), "index %lld of an array of type %s",
                 operand(data->index, index), data->array->name);
}

void __ubsan_handle_shift_out_of_bounds(ShiftOrDivision* data, std::uintptr_t,
                                        std::uintptr_t right) {
  if (emulator::current == nullptr) return;
  emulator::fail(Kind::undefined, place(data->location), "a shift of type %s by %lld",
                 data->left->name, operand(data->right, right));
}

void __ubsan_handle_divrem_overflow(ShiftOrDivision* data, std::uintptr_t, std::uintptr_t) {
  if (emulator::current == nullptr) return;
  emulator::fail(Kind::undefined, place(data->location), "an integer division by zero of type %s",
                 data->left->name);
}

}  // extern "C"

namespace emulator {

void check_read(const void* address, std::size_t bytes, Place place) {
  if (machine.checked) check_access_at(place, address, bytes, Access::read);
}

void check_write(void* address, std::size_t bytes, Place place) {
  if (machine.checked) check_access_at(place, address, bytes, Access::write);
}

void check_atomic(void* address, std::size_t bytes) {
  if (!machine.checked) return;
  check_alignment("an atomic operation", address, bytes, {nullptr, 0});
  if (machine.stacks.contains(address)) {
    fail(Kind::undefined, {nullptr, 0}, "an atomic operation on a thread's local variable");
  }
  check_access(address, bytes, Access::atomic, CALLER);
}

void check_alignment(const char* what, const void* address, std::size_t alignment, Place place) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignment == 0) return;
  begin_finding(Kind::misaligned, place);
  describe(reinterpret_cast<std::uintptr_t>(address));
  say("%s needs a multiple of %zu bytes as its address, not %p", what, alignment, address);
  finish_finding();
}

}  // namespace emulator
