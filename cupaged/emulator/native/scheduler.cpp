// Runs the threads of one block: each is a fiber that goes on until it waits for others.
#include <algorithm>

#include "machine.h"
#include "memory.h"

namespace emulator {

Machine& machine = *new Machine();
Thread* current = nullptr;

std::uint64_t draw() {  // xorshift64*
  std::uint64_t& state = machine.random;
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 0x2545f4914f6cdd1dull;
}

void make_ready(Thread* thread) {
  const unsigned slot = (machine.ready_begin + machine.num_ready++) % kMaxThreads;
  machine.ready[slot] = thread;
  if (machine.spec->shuffle) {
    const unsigned other = (machine.ready_begin + draw() % machine.num_ready) % kMaxThreads;
    std::swap(machine.ready[slot], machine.ready[other]);
  }
}

static Thread* next_ready() {
  if (machine.num_ready == 0) return nullptr;
  Thread* thread = machine.ready[machine.ready_begin];
  machine.ready_begin = (machine.ready_begin + 1) % kMaxThreads;
  --machine.num_ready;
  return thread;
}

static void exit_thread(Thread& thread) {
  finish_async_copies(thread, thread.copies.size());
  check_suspect(thread);
  thread.exited = true;
  --machine.num_live;
  leave_groups(thread);
}

// A thread that ends hands its stack to the next one that has not started.
static void fiber_main() {
  for (;;) {
    machine.spec->kernel->call(machine.spec->arguments);
    exit_thread(*current);
    Thread* next = next_ready();
    if (next != nullptr && !next->started) {
      next->started = true;
      next->stack = current->stack;
      current = next;
      continue;
    }
    Thread* ended = current;
    machine.stacks.give_back(ended->stack);
    if (next == nullptr) {
      if (machine.num_live > 0) report_deadlock();
      current = nullptr;
      switch_context(ended->context, machine.main);
    } else {
      current = next;
      switch_context(ended->context, next->context);
    }
  }
}

static void start(Thread& thread) {
  thread.started = true;
  thread.stack = machine.stacks.take();
  prepare(thread.context, thread.stack, fiber_main);
}

void wait_for_others() {
  Thread* self = current;
  Thread* next = next_ready();
  if (next == nullptr) report_deadlock();
  if (next == self) return;
  if (!next->started) start(*next);
  current = next;
  switch_context(self->context, next->context);
}

void yield() {
  if (current == nullptr || machine.num_ready == 0) return;
  make_ready(current);
  wait_for_others();
}

void run_block() {
  const unsigned* size = machine.spec->block;
  machine.num_threads = machine.num_live = size[0] * size[1] * size[2];
  machine.num_in_barrier = 0;
  machine.num_steps = 0;
  machine.last_barrier = ++machine.clock;
  machine.block_acquired.clear();
  machine.ready_begin = machine.num_ready = 0;
  for (unsigned warp = 0; warp * kWarpSize < machine.num_threads; ++warp) {
    const unsigned lanes = std::min(kWarpSize, machine.num_threads - warp * kWarpSize);
    machine.warps[warp].live = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
    machine.warps[warp].num_running = lanes;
    machine.warps[warp].groups.clear();
  }
  for (unsigned number = 0; number < machine.num_threads; ++number) {
    Thread& thread = machine.threads[number];
    thread.number = number;
    thread.lane = number % kWarpSize;
    thread.warp = number / kWarpSize;
    thread.index = {number % size[0], number / size[0] % size[1], number / (size[0] * size[1])};
    thread.started = thread.exited = thread.fenced = false;
    thread.waiting = Waiting::no;
    thread.segment = machine.clock;
    thread.acquired.clear();
    thread.suspect.address = 0;
    thread.copies.clear();
    thread.committed.clear();
    make_ready(&thread);
  }
  current = next_ready();
  start(*current);
  switch_context(machine.main, current->context);
}

Index3 thread_index() { return current->index; }
Index3 block_index() { return machine.block; }
Index3 block_size() {
  return {machine.spec->block[0], machine.spec->block[1], machine.spec->block[2]};
}
Index3 grid_size() {
  return {machine.spec->grid[0], machine.spec->grid[1], machine.spec->grid[2]};
}
unsigned lane_id() { return current->lane; }

}  // namespace emulator
