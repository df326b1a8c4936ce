// The primitives of cuda_pipeline.h: copies from global to shared memory that finish at a wait.
//
// A thread waits for its own copies; other threads see them after a barrier. The class
// nvcuda::experimental::pipeline is not there.
#pragma once

#include "emulator/core.h"

// Copies `bytes` (4, 8 or 16), of which the last `zero_fill` are not read but set to zero.
__forceinline__ void __pipeline_memcpy_async(void* shared, const void* source, size_t bytes,
                                             size_t zero_fill = 0,
                                             emulator::Place place = EMULATOR_HERE) {
  if ((bytes != 4 && bytes != 8 && bytes != 16) || zero_fill > bytes) {
    emulator::fail(emulator::Kind::undefined, place,
                   "__pipeline_memcpy_async copies 4, 8 or 16 bytes and fills at most those with "
                   "zeros; asked for %zu and %zu", bytes, zero_fill);
  }
  emulator::async_copy(shared, source, unsigned(bytes), unsigned(bytes - zero_fill), place);
}
__forceinline__ void __pipeline_commit() { emulator::async_commit(); }
// Waits for all groups of copies but the last `prior`.
__forceinline__ void __pipeline_wait_prior(size_t prior) {
  emulator::async_wait(unsigned(prior));
}
