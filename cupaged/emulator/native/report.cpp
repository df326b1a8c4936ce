// Writes the first fault of a launch and leaves the kernel for good.
#include <dlfcn.h>
#include <unwind.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "machine.h"
#include "memory.h"

namespace emulator {

namespace {

_Unwind_Reason_Code add_frame(_Unwind_Context* context, void*) {
  Finding& finding = *machine.finding;
  int is_exact = 0;  // else a return address, which lies behind its call
  auto pc = static_cast<std::uintptr_t>(_Unwind_GetIPInfo(context, &is_exact));
  if (!is_exact) --pc;
  if (pc + 1 <= 1 || finding.num_pcs == 24) return _URC_END_OF_STACK;
  finding.pcs[finding.num_pcs++] = module_offset(reinterpret_cast<void*>(pc));
  return _URC_NO_REASON;
}

}  // namespace

std::uint64_t module_offset(const void* pc) {
  static const char* base = nullptr;
  if (base == nullptr) {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&module_offset), &info);
    base = static_cast<const char*>(info.dli_fbase);
  }
  return static_cast<std::uint64_t>(static_cast<const char*>(pc) - base);
}

std::uint32_t code_of(const void* pc) { return static_cast<std::uint32_t>(module_offset(pc) - 1); }

std::uint32_t code_of(Place place) {
  std::vector<Place>& places = machine.places;
  std::size_t i = places.size();
  while (i > 0 && (places[i - 1].line != place.line || places[i - 1].file != place.file)) --i;
  if (i == 0) {
    places.push_back(place);
    i = places.size();
  }
  return kPlaceCode | static_cast<std::uint32_t>(i - 1);
}

void name_other(std::uint32_t code) {
  Finding& finding = *machine.finding;
  if (!(code & kPlaceCode)) {
    finding.other_pc = code;
    return;
  }
  const Place place = machine.places[code & ~kPlaceCode];
  finding.other_line = place.line;
  if (place.file != nullptr) {
    std::snprintf(finding.other_file, sizeof finding.other_file, "%s", place.file);
  }
}

void name_here(std::uint32_t code) {
  const Place place = machine.places[code & ~kPlaceCode];
  machine.finding->line = place.line;
  if (place.file != nullptr) {
    std::snprintf(machine.finding->file, sizeof machine.finding->file, "%s", place.file);
  }
}

ThreadPlace place_of(std::uint32_t thread_id) {
  const unsigned* size = machine.spec->block;
  const unsigned number = thread_id & (kMaxThreads - 1);
  constexpr std::uint32_t mask = ~kWholeBlock >> 10;  // ids keep the low bits of block numbers
  const std::uint32_t ago = (machine.block_number - (thread_id >> 10)) & mask;
  const Index3 block = nth_block(machine.block_number - machine.first_block_number - ago);
  return {{block.x, block.y, block.z},
          {number % size[0], number / size[0] % size[1], number / (size[0] * size[1])}};
}

Finding& begin_finding(Kind kind, Place place) {
  Finding& finding = *machine.finding;
  finding = {};
  finding.kind = static_cast<int>(kind);
  finding.argument = -1;
  if (place.file == nullptr) place = machine.place;
  finding.line = place.line;
  if (place.file != nullptr) std::snprintf(finding.file, sizeof finding.file, "%s", place.file);
  const Index3 thread = current == nullptr ? Index3{0, 0, 0} : current->index;
  finding.here = {{machine.block.x, machine.block.y, machine.block.z}, {thread.x, thread.y, thread.z}};
  return finding;
}

void say(const char* format, ...) {
  char* text = machine.finding->message;
  const std::size_t used = std::strlen(text);
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text + used, sizeof machine.finding->message - used, format, arguments);
  va_end(arguments);
}

void trace() {
  machine.tracing = true;
  _Unwind_Backtrace(add_frame, nullptr);
  machine.tracing = false;
}

void finish_finding() {
  trace();
  abandon();
}

void no_memory(const char* what) {
  begin_finding(Kind::crash, {nullptr, 0});
  say("the system gives no memory for %s", what);
  siglongjmp(machine.crashed, 1);
}

void abandon() {
  Context here;
  current = nullptr;
  switch_context(here, machine.main);
  __builtin_unreachable();
}

void fail(Kind kind, Place place, const char* format, ...) {
  begin_finding(kind, place);
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(machine.finding->message, sizeof machine.finding->message, format, arguments);
  va_end(arguments);
  finish_finding();
}

}  // namespace emulator
