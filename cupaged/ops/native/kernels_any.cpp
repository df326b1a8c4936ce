// The kernels for whatever processor the rest of the module was compiled for.
#include "kernels.h"

#define KERNELS any
#define LANES 4
namespace any {
#if defined(__aarch64__)
constexpr int kRegisters = 32, kMostRows = 4;
#else
constexpr int kRegisters = 16, kMostRows = 3;
#endif
}  // namespace any

#include "kernels.inc"

const Kernels kernels_of_any = KERNEL_TABLE("any", [] { return true; });
