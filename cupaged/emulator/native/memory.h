// Which addresses a kernel may touch, and the history of those whose order is checked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulator/core.h"

namespace emulator {

// Volatile accesses of global memory count as relaxed atomics, as PTX defines them; those of shared
// memory do not, because they are what races in warp-synchronous code look like.
enum class Access { read, write, atomic, relaxed_read, relaxed_write };

// Shared memory: one arena, static variables first, the dynamic part at a fixed place.
constexpr std::size_t kSharedPartBytes = 512 << 10;
constexpr std::size_t kRedzoneBytes = 128;
constexpr std::size_t kStaticSharedBytes = 48 << 10;  // that the compiler for GPUs allows

// At load and at the start of a launch.
void prepare_memory();
void begin_launch_memory();

// The check behind every instrumented access. pc: for the place in the source.
void check_access(const void* address, std::size_t bytes, Access access, const void* pc);

// What a history keeps of a place in the source: the address of the code, or a number of a place.
std::uint32_t code_of(const void* pc);
std::uint32_t code_of(Place place);
constexpr std::uint32_t kPlaceCode = 0x40000000u;

// The same for an access whose place is known.
void check_access_at(Place place, const void* address, std::size_t bytes, Access access);

// shadow.cpp: order and initialisation.
enum class Space { shared, global };

struct Record {
  std::uint32_t stamp;   // the segment of the thread at its access; 0: none
  std::uint32_t thread;  // Machine::thread_id
  std::uint32_t code : 31;  // see code_of
  std::uint32_t relaxed : 1;  // atomic or as good: two of them are no race
};

struct Cell {
  Record write;
  Record reads[2];
  std::uint32_t block;  // shared memory: the block that wrote it
  std::uint32_t copied_block;  // that for which an asynchronous copy is under way
  bool split;           // a word whose bytes have cells of their own
};

void prepare_shadow(std::uintptr_t shared_begin);
void begin_launch_shadow();
void shadow_access(Space space, std::uintptr_t address, std::size_t bytes, Access access,
                   std::uint32_t code);
void shadow_begin_copy(std::uintptr_t address, std::size_t bytes, std::uint32_t code);
void shadow_end_copy(std::uintptr_t address, std::size_t bytes, std::uint32_t code);

// Names the argument or the variable of shared memory at an address in the finding.
void describe(std::uintptr_t address);

}  // namespace emulator
