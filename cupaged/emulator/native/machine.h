// The state of a launch: one block of threads at a time, run as fibers on one thread of the host.
#pragma once

#include <csetjmp>
#include <cstdio>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "emulator/core.h"
#include "emulator/registry_types.h"
#include "fiber.h"

namespace emulator {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxWarps = kMaxThreads / kWarpSize;

// What a thread knows of others through fences and atomics: accesses stamped earlier than the value
// happened before. Keys are thread ids (see Machine::thread_id), or block ids with the top bit set.
using Knowledge = std::unordered_map<std::uint32_t, std::uint32_t>;
constexpr std::uint32_t kWholeBlock = 0x80000000u;
constexpr std::uint32_t kBlockMask = ~kWholeBlock >> 10;  // of a block number, what ids keep of it

struct AsyncCopy {
  char* destination;
  const char* source;
  unsigned bytes;
  unsigned source_bytes;
  std::uint32_t code;  // of its place
};

// A plain read that no order separates from an atomic write: a race, unless the thread's next access
// to the word is atomic, as in a loop around atomicCAS.
struct Suspect {
  std::uintptr_t address;  // 0: none
  std::size_t bytes;
  std::uint32_t code;
  std::uint32_t other_thread;
  std::uint32_t other_code;
};

enum class Waiting { no, for_block, for_warp, for_active };

struct Thread {
  Context context;
  char* stack;
  unsigned number;  // x fastest
  unsigned lane;
  unsigned warp;
  Index3 index;
  bool started;
  bool exited;
  bool fenced;
  Waiting waiting;
  const char* wait_name;
  Place wait_place;
  unsigned wait_mask;
  int predicate;
  std::uint32_t segment;           // Machine::clock at the thread's last synchronisation
  std::uint32_t known[kWarpSize];  // lane l's accesses stamped earlier happened before
  Knowledge acquired;
  Suspect suspect;
  unsigned active;                     // the answer to __activemask
  std::vector<AsyncCopy> copies;       // not yet waited for, in order
  std::vector<std::size_t> committed;  // ends of groups in `copies`
};

// A warp collective or barrier that some lanes have reached.
struct WarpGroup {
  const char* name;
  unsigned mask;
  unsigned arrived;
  CollectiveFunction function;  // null for __syncwarp
  void* op;
  const void* in[kWarpSize];
  void* out[kWarpSize];
};

struct Warp {
  unsigned live;         // lanes that have not exited
  unsigned num_running;  // of them, those that wait for nobody
  std::vector<WarpGroup> groups;
};

struct SharedVariable {
  const char* name;
  std::uintptr_t begin;
  std::uintptr_t end;
  std::size_t element_bytes;  // 1 for the dynamic part, whose types are not known
};

struct Machine {
  const LaunchSpec* spec;
  Finding* finding;
  bool checked;
  Index3 block;
  std::uint32_t block_number;  // counts blocks in the order they run, from 1
  std::uint32_t first_block_number;  // of this launch
  std::uint64_t grid_start;          // the i-th block to run is (start + i * step) % their number
  std::uint64_t grid_step;
  unsigned num_threads;
  unsigned num_live;
  unsigned num_in_barrier;
  BarrierOp barrier_op;
  int barrier_result;
  std::uint32_t clock;         // counts synchronisations
  std::uint32_t last_barrier;  // clock at the last barrier of the block
  std::uint64_t launch;        // number of this launch
  std::uint64_t random;
  std::uint64_t num_steps;  // basic blocks that this block of threads ran
  bool wants_yield;
  volatile bool interrupted;  // by Ctrl-C
  Context main;
  sigjmp_buf crashed;
  volatile bool tracing;  // a fault now comes of a damaged stack
  Stacks stacks;
  Thread threads[kMaxThreads];
  Warp warps[kMaxWarps];
  Thread* ready[kMaxThreads];  // a ring
  unsigned ready_begin;
  unsigned num_ready;
  Knowledge block_acquired;  // what every thread of the block knows
  std::unordered_map<std::uintptr_t, Knowledge> released;  // by the address of an atomic
  bool any_fence;
  std::vector<Place> places;  // those that code_of has numbered
  Place place;                // of the access being checked, if it is known
  std::vector<SharedVariable> shared_variables;
  std::size_t static_shared_bytes;

  std::uint32_t thread_id(const Thread& thread) const {
    return (block_number << 10 | thread.number) & ~kWholeBlock;
  }
};

extern Machine& machine;  // on the heap, far from the variables of kernel files
extern Thread* current;  // null outside of a kernel

// scheduler.cpp
void run_block();
void make_ready(Thread* thread);
void wait_for_others();  // the caller is in no queue; another thread makes it ready
std::uint64_t draw();    // the next number of the launch's own random sequence

// sync.cpp
void leave_groups(Thread& thread);  // what the exit of a thread means for those who wait
void check_suspect(Thread& thread);  // shadow.cpp: before anything that ends the thread's chance
void advance(Thread& thread);       // start a new segment
[[noreturn]] void report_deadlock();
void acquire_and_release(std::uintptr_t atomic);

// report.cpp
Finding& begin_finding(Kind kind, Place place);
void trace();  // adds the calls that led here
[[noreturn]] void finish_finding();
[[noreturn]] void abandon();  // leave the kernel for good
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::uint64_t module_offset(const void* pc);
ThreadPlace place_of(std::uint32_t thread_id);
void name_other(std::uint32_t code);  // where the earlier access was, from code_of
void name_here(std::uint32_t code);   // where the access to blame was

// launch.cpp
Index3 nth_block(std::uint64_t i);

// async.cpp
void finish_async_copies(Thread& thread, std::size_t count);

}  // namespace emulator
