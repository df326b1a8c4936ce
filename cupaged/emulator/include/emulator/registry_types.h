// The plain structures that cross from C++ to Python; launch_abi.py mirrors them.
#pragma once

#include <cstdint>

namespace emulator {

enum class Scalar : int {
  opaque,
  boolean,
  signed_integer,
  unsigned_integer,
  float16,
  bfloat16,
  float32,
  float64,
};

struct ParameterInfo {
  bool is_pointer;
  bool is_const;  // points to constant elements
  Scalar scalar;
  int bytes;
  int alignment;
  int element_bytes;  // of what a pointer points to
  int scalar_bytes;   // of one component of it
};

struct KernelInfo {
  const char* name;
  const char* parameter_names;  // separated by commas
  const ParameterInfo* parameters;
  int num_parameters;
  int max_threads;  // from __launch_bounds__, 0 if none
  bool c_linkage;
  void (*call)(void* const* arguments);
  KernelInfo* next;
};

void register_kernel(KernelInfo* kernel);

// The bytes of one argument; kernels may access nothing else of global memory.
struct ArgumentRange {
  std::uint64_t begin;
  std::uint64_t end;
  int index;
  int read_only;
};

struct StackRegion;

struct LaunchSpec {
  const KernelInfo* kernel;
  StackRegion* stacks;  // of the process; all zeros before its first use
  void* const* arguments;
  const ArgumentRange* ranges;
  int num_ranges;
  unsigned grid[3];
  unsigned block[3];
  unsigned dynamic_shared_bytes;
  unsigned max_shared_bytes;
  int shuffle;        // run blocks and threads in an order drawn from seed
  int global_races;   // look for races on global memory too
  int isolated;       // run in a child process
  std::uint64_t seed;
  std::uint64_t max_steps;  // basic blocks that one block of threads may run
};

struct ThreadPlace {
  unsigned block[3];
  unsigned thread[3];
};

// In place of an argument's index: byte_offset is the address of a variable within the module.
constexpr int kModuleVariable = -2;

// The first fault of a launch. Addresses are relative to the module, for symbolisation.
struct Finding {
  int kind;
  int argument;           // index, -1 if none, kModuleVariable
  long long byte_offset;  // within the argument or the shared variable
  int access_bytes;
  int element_bytes;      // of the shared variable
  int is_write;
  int line;         // when the place is known without symbolisation, else 0
  int has_other;    // a race: the earlier access follows
  int other_is_write;
  int signal;
  ThreadPlace here;
  ThreadPlace other;
  std::uint64_t other_pc;  // 0: other_file and other_line say where
  int other_line;
  char other_file[512];
  std::uint64_t here_code;  // the place, if it is not where the launch stopped; 0: it is
  std::uint64_t pcs[24];  // innermost first
  int num_pcs;
  char file[512];
  char object[128];  // name of a shared variable
  char message[3072];
};

}  // namespace emulator
