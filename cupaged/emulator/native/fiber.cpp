#include "fiber.h"

#include <sys/mman.h>

namespace emulator {

#ifdef EMULATOR_PORTABLE_SWITCH

void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.portable);
  context.portable.uc_stack.ss_sp = stack;
  context.portable.uc_stack.ss_size = kStackBytes;
  context.portable.uc_link = nullptr;
  makecontext(&context.portable, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from.portable, &to.portable); }

#else

extern "C" void emulator_switch_stack(void** save, void* load);

asm(R"(
.text
.hidden emulator_switch_stack
.globl emulator_switch_stack
.type emulator_switch_stack, @function
emulator_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch_stack, .-emulator_switch_stack
)");

void prepare(Context& context, char* stack, void (*entry)()) {
  // Tops at different distances from a page, or the threads would share a few cache sets.
  static unsigned color = 0;
  color = (color + 1) % 64;
  auto** top = reinterpret_cast<void**>(stack + kStackBytes - color * 320);
  *--top = nullptr;  // the return address of entry: where a backtrace ends
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.stack_pointer = top;
}

void switch_context(Context& from, Context& to) {
  emulator_switch_stack(&from.stack_pointer, to.stack_pointer);
}

#endif

void Stacks::use(StackRegion* region) {
  if (region->begin == 0) {
    void* memory = mmap(nullptr, kSlotBytes * kMaxThreads, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) no_memory("stacks");
    region->begin = reinterpret_cast<std::uintptr_t>(memory);
  }
  region_ = region;
  begin_ = region->begin;
  num_free_ = 0;
  for (std::size_t number = region->num_made; number-- > 0;) give_back(slot(number));
}

char* Stacks::take() {
  if (num_free_ > 0) return free_[--num_free_];
  if (region_->num_made == kMaxThreads) no_memory("more stacks than a block has threads");
  char* stack = slot(region_->num_made);
  if (mprotect(stack, kStackBytes, PROT_READ | PROT_WRITE) != 0) no_memory("stacks");
  ++region_->num_made;
  return stack;
}

bool Stacks::is_guard(const void* address) const {
  if (begin_ == 0 || !contains(address)) return false;
  return (reinterpret_cast<std::uintptr_t>(address) - begin_) % kSlotBytes < kGuardBytes;
}

}  // namespace emulator
