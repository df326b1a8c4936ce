// What can be found in a running kernel. The order is that of KINDS in findings.py.
#pragma once

namespace emulator {

enum class Kind : int {
  none,
  out_of_bounds,
  read_only,
  race,
  uninitialized,
  misaligned,
  divergent_barrier,
  warp_mask,
  deadlock,
  endless_loop,
  stack_overflow,
  async_copy,
  undefined,
  device_assert,
  crash,
  unsupported,
  shared_memory,
};

}  // namespace emulator
