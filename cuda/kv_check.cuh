// What kernels check of the KV pool where KV_SANITIZER is 1; without it nothing of this is compiled.
//
// A tag is a number for one slot of a block in one of its generations (how often the block was
// handed out). `slot_tags`, of one layer, holds what was left by the last kernel that wrote to each
// slot. Who reads a position knows by the sequence's own row of `read_tags` which tag must be there:
// another one says that the slot was not written since, or that it is not the position's slot.
#pragma once

#include "common.cuh"

#if KV_SANITIZER
struct KVReads {
  const int* slot_tags;      // [num_slots], of the layer
  const int* tags;           // [max_blocks], of slot 0 of each of the sequence's blocks
  int* report;               // [8], of the layer: the first error, see check_read
  long long num_slots;       // of the pool
  long long block_elements;  // Hkv BLOCK_SIZE HEAD_DIM
  int max_blocks;
  int sequence;
  int step;  // negative: nothing is checked
};

// A thread is about to read a row that begins `element` elements behind the KV head's place in block
// 0, for a position of the sequence.
// report: 1 (it is taken), step, sequence, position, block, slot, the tag found, the tag expected.
__device__ __forceinline__ void check_read(const KVReads& reads, long long element, int position) {
  if (reads.step < 0) return;
  const long long block = element / reads.block_elements;
  const long long slot = element % reads.block_elements / HEAD_DIM;
  const long long index = block * BLOCK_SIZE + slot;
  const bool is_inside = element >= 0 && slot < BLOCK_SIZE && index < reads.num_slots;
  const int column = position / BLOCK_SIZE;
  const int found = is_inside ? reads.slot_tags[index] : -1;
  const int expected = column < reads.max_blocks ? reads.tags[column] + position % BLOCK_SIZE : -2;
  if (found == expected || atomicCAS(reads.report, 0, 1) != 0) return;
  reads.report[1] = reads.step;
  reads.report[2] = reads.sequence;
  reads.report[3] = position;
  reads.report[4] = int(block);
  reads.report[5] = int(slot);
  reads.report[6] = found;
  reads.report[7] = expected;
}
#endif
