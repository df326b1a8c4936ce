// Which addresses a kernel may touch, and the history of those whose order is checked.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

enum class Access { read, write, atomic };

// Shared memory: one arena, static variables first, the dynamic part at a fixed place.
constexpr std::size_t kSharedPartBytes = 512 << 10;
constexpr std::size_t kRedzoneBytes = 128;

// At load and at the start of a launch.
void prepare_memory();
void begin_launch_memory();

// The check behind every instrumented access. pc: for the place in the source.
void check_access(const void* address, std::size_t bytes, Access access, const void* pc);

// shadow.cpp: order and initialisation.
enum class Space { shared, global };

struct Record {
  std::uint32_t stamp;   // the segment of the thread at its access; 0: none
  std::uint32_t thread;  // Machine::thread_id
  std::uint32_t pc;      // relative to the module
};

struct Cell {
  Record write;
  Record reads[2];
  std::uint32_t block;  // shared memory: the block that wrote it
  std::uint32_t copied_block;  // that for which an asynchronous copy is under way
  bool split;           // a word whose bytes have cells of their own
  bool atomic;          // the last write was atomic
};

void prepare_shadow(std::uintptr_t shared_begin);
void begin_launch_shadow();
void shadow_access(Space space, std::uintptr_t address, std::size_t bytes, Access access,
                   std::uint32_t pc);
void shadow_begin_copy(std::uintptr_t address, std::size_t bytes, std::uint32_t pc);
void shadow_end_copy(std::uintptr_t address, std::size_t bytes, std::uint32_t pc);

// Names the variable of shared memory at an address, for messages.
void describe_shared(std::uintptr_t address);

}  // namespace emulator
