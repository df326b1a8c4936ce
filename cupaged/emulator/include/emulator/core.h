// What emulated device code calls: who am I, warp collectives, barriers, checks, asynchronous copies.
//
// The functions are defined in the native runtime, which is compiled without instrumentation.
// Headers of this folder build the CUDA language on them; kernels never call them directly.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulator/kinds.h"

// A function whose memory accesses are not checked. It is never inlined into checked code.
#ifdef __clang__
#define EMULATOR_UNCHECKED \
  __attribute__((disable_sanitizer_instrumentation, no_sanitize("thread", "alignment", "bounds")))
#else
#define EMULATOR_UNCHECKED __attribute__((no_sanitize("thread", "alignment", "bounds")))
#endif

// As a default argument it names the place of the call.
#define EMULATOR_HERE ::emulator::Place::here()

namespace emulator {

struct Place {
  const char* file;
  int line;

  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

struct Index3 {
  unsigned x, y, z;
};

// Constant for a thread's whole life, so calls may be merged.
Index3 thread_index() __attribute__((const));
Index3 block_index() __attribute__((const));
Index3 block_size() __attribute__((const));
Index3 grid_size() __attribute__((const));
unsigned lane_id() __attribute__((const));

enum class BarrierOp : int { none, count, all, any };

// Every thread of the block that has not exited arrives. Returns the reduced predicate.
int block_barrier(const char* name, int predicate, Place place, BarrierOp op);

// Every lane in mask that has not exited arrives; orders their memory accesses.
void warp_barrier(unsigned mask, Place place);

using CollectiveFunction = void (*)(void* op, const void* const* in, void* const* out,
                                    unsigned arrived);

void warp_collective_erased(const char* name, unsigned mask, const void* in, void* out,
                            CollectiveFunction function, void* op, Place place);

// Every lane in mask that has not exited arrives; the last one runs op once for all:
// op(const In* const* in, Out* const* out, unsigned arrived), with 32 pointers each, of which those
// of the lanes in `arrived` are set. Orders no memory accesses, as the hardware's shuffles do not.
template <class Out, class In, class Op>
Out warp_collective(const char* name, unsigned mask, const In& in, Op op, Place place) {
  Out out{};
  const CollectiveFunction function = [](void* erased, const void* const* ins, void* const* outs,
                                         unsigned arrived) {
    (*static_cast<Op*>(erased))(reinterpret_cast<const In* const*>(ins),
                                reinterpret_cast<Out* const*>(outs), arrived);
  };
  warp_collective_erased(name, mask, &in, &out, function, &op, place);
  return out;
}

// Lanes of the caller's warp that come to the same place: the caller waits until every other lane
// has come there, waits elsewhere, or has exited. Any subset with the caller would be as right.
unsigned active_lanes(Place place);

// Checks of accesses that the compiler does not instrument. Nothing in plain mode.
// place: of the call to blame; without it the innermost line outside of the emulator's headers.
void check_read(const void* address, std::size_t bytes, Place place = {nullptr, 0});
void check_write(void* address, std::size_t bytes, Place place = {nullptr, 0});
void check_atomic(void* address, std::size_t bytes);

// Fails where address is no multiple of alignment, which `what` needs.
void check_alignment(const char* what, const void* address, std::size_t alignment, Place place);

// Orders the accesses before it with those after an atomic operation of a thread that sees it.
void fence();

// Lets other threads run first: for loops that wait for another thread.
void yield();

// Basic blocks run so far in this launch in checked mode, else a cycle counter of the host.
std::uint64_t clock_ticks();

[[noreturn]] void fail(Kind kind, Place place, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

// cp.async: the copy happens at the wait that covers it; until then the destination must not be
// read. Bytes of the destination beyond source_bytes become zero.
void async_copy(void* shared, const void* source, unsigned bytes, unsigned source_bytes,
                Place place);
void async_commit();
void async_wait(unsigned groups_left);

// One __shared__ variable: where it lies is settled when the first thread of a launch gets there.
struct SharedSite {
  const char* name;
  std::size_t bytes;
  std::size_t alignment;
  std::size_t element_bytes;
  std::uint64_t launch;  // the launch for which `offset` holds
  std::size_t offset;
};

void* shared_variable(SharedSite& site);
void* dynamic_shared();
bool is_shared(const void* address);

}  // namespace emulator
