// Stacks and the switch between them.
//
// x86-64 uses a short assembly switch, which keeps what the calling convention asks for and nothing
// else; everything else, and -DEMULATOR_PORTABLE_SWITCH, uses ucontext.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(EMULATOR_PORTABLE_SWITCH)
#define EMULATOR_PORTABLE_SWITCH 1
#endif

#ifdef EMULATOR_PORTABLE_SWITCH
#include <ucontext.h>
#endif

namespace emulator {

constexpr std::size_t kStackBytes = 256 << 10;  // what a thread may use
constexpr std::size_t kGuardBytes = 64 << 10;   // below it; touching it is a stack overflow
constexpr std::size_t kMaxThreads = 1024;       // in a block

struct Context {
#ifdef EMULATOR_PORTABLE_SWITCH
  ucontext_t portable;
#else
  void* stack_pointer;
#endif
};

// Runs entry on the stack when first switched to. entry must not return.
void prepare(Context& context, char* stack, void (*entry)());

// Leaves the running code in `from` and goes on with `to`.
void switch_context(Context& from, Context& to);

// Stacks of all threads of a block, in one region that all modules of a process share: each stack and
// its guard are two mappings, of which a process may have a few ten thousand.
struct StackRegion {
  std::uintptr_t begin;
  std::size_t num_made;  // slots whose stack may be touched
};

class Stacks {
 public:
  // Every stack of the region is free again.
  void use(StackRegion* region);
  char* take();
  void give_back(char* stack) { free_[num_free_++] = stack; }
  // Whether an address lies on any of them: quickly, for every access.
  bool contains(const void* address) const {
    return reinterpret_cast<std::uintptr_t>(address) - begin_ < kSlotBytes * kMaxThreads;
  }
  // Whether an address lies in the part of a slot that no thread may touch.
  bool is_guard(const void* address) const;

 private:
  static constexpr std::size_t kSlotBytes = kStackBytes + kGuardBytes;
  char* slot(std::size_t number) const {
    return reinterpret_cast<char*>(begin_) + number * kSlotBytes + kGuardBytes;
  }

  StackRegion* region_ = nullptr;
  std::uintptr_t begin_ = 0;
  std::size_t num_free_ = 0;
  char* free_[kMaxThreads];
};

// Leaves the launch because the system gives no memory.
[[noreturn]] void no_memory(const char* what);

}  // namespace emulator
