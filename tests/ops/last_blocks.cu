// Another kernel file, whose launches begin at block `first_block` of x: the last blocks of a grid
// that is too large to be run whole. For the emulator; the host sets the variable.
//
// Define: KERNEL_FILE, the file in quotes, and its own.
#ifndef KERNEL_FILE
#error "define KERNEL_FILE, the file's name in quotes"
#endif

extern "C" __attribute__((visibility("default"))) unsigned first_block;
unsigned first_block = 0;

inline uint3 late_block() { return {blockIdx.x + first_block, blockIdx.y, blockIdx.z}; }

#undef blockIdx
#define blockIdx late_block()
#include KERNEL_FILE
