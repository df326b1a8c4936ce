// Barriers, warp collectives, and what they say about the order of memory accesses.
#include <algorithm>
#include <cstring>
#include <string>

#include "machine.h"

namespace emulator {

void advance(Thread& thread) { thread.segment = ++machine.clock; }

static void start_waiting(Waiting kind, const char* name, unsigned mask, Place place) {
  check_suspect(*current);
  --machine.warps[current->warp].num_running;
  current->waiting = kind;
  current->wait_name = name;
  current->wait_mask = mask;
  current->wait_place = place;
}

static void stop_waiting(Thread& thread) {
  thread.waiting = Waiting::no;
  ++machine.warps[thread.warp].num_running;
}

static void release(Thread& thread) {
  stop_waiting(thread);
  make_ready(&thread);
}

// ---- __activemask ----

// When no lane of a warp runs any more, those that wait at one place for the mask have it.
static void answer_active(unsigned warp_number) {
  if (machine.warps[warp_number].num_running > 0) return;
  Thread* threads = &machine.threads[warp_number * kWarpSize];
  const unsigned live = machine.warps[warp_number].live;
  Place place = {nullptr, 0};
  unsigned active = 0;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const Thread& thread = threads[lane];
    if (!(live >> lane & 1) || thread.waiting != Waiting::for_active) continue;
    if (active == 0) place = thread.wait_place;
    if (thread.wait_place.line == place.line && thread.wait_place.file == place.file) {
      active |= 1u << lane;
    }
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (!(active >> lane & 1)) continue;
    threads[lane].active = active;
    release(threads[lane]);
  }
}

// Waits until others answer: the end of every wait of a fiber.
static void wait_here() {
  answer_active(current->warp);
  wait_for_others();
}

unsigned active_lanes(Place place) {
  start_waiting(Waiting::for_active, "__activemask", 0, place);
  wait_here();
  return current->active;
}

// ---- Barriers of the block ----

static bool same_place(Place a, Place b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

[[noreturn]] static void report_divergent_barrier(const Thread& first, const Thread& other) {
  current = const_cast<Thread*>(&other);
  begin_finding(Kind::divergent_barrier, other.wait_place);
  say("the threads of a block must reach the same barrier: thread (%u,%u,%u) waits in %s at %s:%d, "
      "thread (%u,%u,%u) in %s at %s:%d",
      first.index.x, first.index.y, first.index.z, first.wait_name, first.wait_place.file,
      first.wait_place.line, other.index.x, other.index.y, other.index.z, other.wait_name,
      other.wait_place.file, other.wait_place.line);
  finish_finding();
}

// Everyone is there: check that it is one barrier, reduce, and let all but the caller go on.
static void complete_barrier(Thread* last) {
  const Thread* first = nullptr;
  int true_count = 0;
  for (unsigned i = 0; i < machine.num_threads; ++i) {
    const Thread& thread = machine.threads[i];
    if (thread.waiting != Waiting::for_block) continue;
    if (first == nullptr) first = &thread;
    if (!same_place(first->wait_place, thread.wait_place)) {
      report_divergent_barrier(*first, thread);
    }
    true_count += thread.predicate != 0;
  }
  const unsigned arrived = machine.num_in_barrier;
  switch (machine.barrier_op) {
    case BarrierOp::none: machine.barrier_result = 0; break;
    case BarrierOp::count: machine.barrier_result = true_count; break;
    case BarrierOp::all: machine.barrier_result = true_count == static_cast<int>(arrived); break;
    case BarrierOp::any: machine.barrier_result = true_count > 0; break;
  }
  machine.num_in_barrier = 0;
  machine.last_barrier = ++machine.clock;
  for (unsigned i = 0; i < machine.num_threads; ++i) {
    Thread& thread = machine.threads[i];
    if (thread.waiting != Waiting::for_block) continue;
    thread.segment = machine.clock;
    if (!thread.acquired.empty()) {
      for (auto [key, stamp] : thread.acquired) {
        std::uint32_t& known = machine.block_acquired[key];
        known = std::max(known, stamp);
      }
      thread.acquired.clear();
    }
    if (&thread == last) {
      stop_waiting(thread);
    } else {
      release(thread);
    }
  }
}

int block_barrier(const char* name, int predicate, Place place, BarrierOp op) {
  start_waiting(Waiting::for_block, name, 0, place);
  current->predicate = predicate;
  machine.barrier_op = op;
  if (++machine.num_in_barrier == machine.num_live) {
    complete_barrier(current);
  } else {
    wait_here();
  }
  return machine.barrier_result;
}

// ---- Warps ----

static void order_lanes(unsigned warp_number, unsigned lanes) {
  Thread* threads = &machine.threads[warp_number * kWarpSize];
  std::uint32_t joined[kWarpSize] = {};
  Knowledge acquired;
  ++machine.clock;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const Thread& thread = threads[lane];
    for (unsigned i = 0; i < kWarpSize; ++i) joined[i] = std::max(joined[i], thread.known[i]);
    for (auto [key, stamp] : thread.acquired) acquired[key] = std::max(acquired[key], stamp);
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (lanes >> lane & 1) joined[lane] = machine.clock;
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    std::copy(joined, joined + kWarpSize, threads[lane].known);
    threads[lane].segment = machine.clock;
    if (!acquired.empty()) threads[lane].acquired = acquired;
  }
}

static void complete_group(unsigned warp_number, std::size_t position, Thread* last) {
  Warp& warp = machine.warps[warp_number];
  const WarpGroup group = warp.groups[position];
  warp.groups.erase(warp.groups.begin() + static_cast<std::ptrdiff_t>(position));
  if (group.function == nullptr) {
    order_lanes(warp_number, group.arrived);
  } else {
    group.function(group.op, group.in, group.out, group.arrived);
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (!(group.arrived >> lane & 1)) continue;
    Thread& thread = machine.threads[warp_number * kWarpSize + lane];
    if (&thread == last) {
      stop_waiting(thread);
    } else {
      release(thread);
    }
  }
}

void warp_collective_erased(const char* name, unsigned mask, const void* in, void* out,
                            CollectiveFunction function, void* op, Place place) {
  Thread& self = *current;
  Warp& warp = machine.warps[self.warp];
  if (!(mask >> self.lane & 1)) {
    fail(Kind::warp_mask, place, "%s: lane %u is not in its own mask 0x%08x", name, self.lane, mask);
  }
  start_waiting(Waiting::for_warp, name, mask, place);
  std::size_t position = 0;
  while (position < warp.groups.size() &&
         (warp.groups[position].mask != mask || std::strcmp(warp.groups[position].name, name) != 0)) {
    ++position;
  }
  if (position == warp.groups.size()) warp.groups.push_back({name, mask, 0, nullptr, {}, {}, {}});
  WarpGroup& group = warp.groups[position];
  group.arrived |= 1u << self.lane;
  group.function = function;
  group.op = op;
  group.in[self.lane] = in;
  group.out[self.lane] = out;
  if ((mask & warp.live & ~group.arrived) == 0) {
    complete_group(self.warp, position, &self);
  } else {
    wait_here();
  }
}

void warp_barrier(unsigned mask, Place place) {
  warp_collective_erased("__syncwarp", mask, nullptr, nullptr, nullptr, nullptr, place);
}

void leave_groups(Thread& thread) {
  Warp& warp = machine.warps[thread.warp];
  warp.live &= ~(1u << thread.lane);
  --warp.num_running;
  for (std::size_t position = 0; position < warp.groups.size();) {
    const WarpGroup& group = warp.groups[position];
    if ((group.mask & warp.live & ~group.arrived) == 0) {
      complete_group(thread.warp, position, nullptr);
      position = 0;
    } else {
      ++position;
    }
  }
  if (machine.num_in_barrier > 0 && machine.num_in_barrier == machine.num_live) {
    complete_barrier(nullptr);
  }
  answer_active(thread.warp);
}

// ---- Fences and atomics ----

void fence() {
  check_suspect(*current);
  current->fenced = true;
  machine.any_fence = true;
  advance(*current);
}

static void merge(Knowledge& into, const Knowledge& from) {
  for (auto [key, stamp] : from) {
    std::uint32_t& known = into[key];
    known = std::max(known, stamp);
  }
}

// CUDA's atomics order nothing by themselves: a release needs a fence before it. An acquire counts
// from the atomic on, although the fence that makes it one follows.
void acquire_and_release(std::uintptr_t atomic) {
  Thread& self = *current;
  const auto found = machine.released.find(atomic);
  if (found != machine.released.end()) merge(self.acquired, found->second);
  if (!self.fenced) return;
  Knowledge& published = machine.released[atomic];
  merge(published, self.acquired);
  merge(published, machine.block_acquired);
  const std::uint32_t id = machine.thread_id(self);
  published[id] = std::max(published[id], self.segment);
  std::uint32_t& block = published[kWholeBlock | (machine.block_number & kBlockMask)];
  block = std::max(block, machine.last_barrier);
  const std::uint32_t first_lane = id - self.lane;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    if (lane == self.lane || self.known[lane] <= machine.last_barrier) continue;
    std::uint32_t& known = published[first_lane + lane];
    known = std::max(known, self.known[lane]);
  }
}

// ---- Nobody can go on ----

static std::string describe(const Thread& thread) {
  char text[256];
  const char* file = std::strrchr(thread.wait_place.file, '/');
  file = file == nullptr ? thread.wait_place.file : file + 1;
  if (thread.waiting == Waiting::for_block) {
    std::snprintf(text, sizeof text, "%s at %s:%d", thread.wait_name, file, thread.wait_place.line);
  } else {
    std::snprintf(text, sizeof text, "%s with mask 0x%08x at %s:%d", thread.wait_name,
                  thread.wait_mask, file, thread.wait_place.line);
  }
  return text;
}

void report_deadlock() {
  Thread* first = nullptr;
  for (unsigned i = 0; i < machine.num_threads && first == nullptr; ++i) {
    if (machine.threads[i].waiting != Waiting::no) first = &machine.threads[i];
  }
  current = first;
  begin_finding(Kind::deadlock, first->wait_place);
  say("no thread of the block can go on:");
  int lines = 0;
  for (unsigned begin = 0; begin < machine.num_threads;) {
    const Thread& thread = machine.threads[begin];
    const std::string what = thread.exited ? "" : describe(thread);
    unsigned end = begin + 1;
    while (end < machine.num_threads) {
      const Thread& next = machine.threads[end];
      if (next.exited != thread.exited || (!next.exited && describe(next) != what)) break;
      ++end;
    }
    if (++lines > 12) {
      say("\n    ... and so on");
      break;
    }
    const char* state = thread.exited ? "have ended" : "wait in ";
    if (end - begin == 1) {
      say("\n    thread %u %s%s", begin, thread.exited ? "has ended" : "waits in ", what.c_str());
    } else {
      say("\n    threads %u to %u %s%s", begin, end - 1, state, what.c_str());
    }
    begin = end;
  }
  finish_finding();
}

}  // namespace emulator
