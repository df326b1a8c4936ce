// Cooperative groups: the block, tiles of a warp, and the lanes that happen to be together.
//
// grid_group tells ranks and sizes, but cannot wait: the emulator runs one block after another.
// Groups over several warps (tiles above 32 lanes) and clusters are not there.
#pragma once

#include "emulator/core.h"
#include "emulator/vector_types.h"
#include "emulator/warp.h"

namespace cooperative_groups {

namespace details {

inline unsigned long long linear(uint3 index, dim3 extent) {
  return index.x + extent.x * (index.y + static_cast<unsigned long long>(extent.y) * index.z);
}
inline unsigned long long volume(dim3 extent) {
  return static_cast<unsigned long long>(extent.x) * extent.y * extent.z;
}
inline unsigned lanes_below(unsigned lane) { return (1u << lane) - 1; }

}  // namespace details

// All threads of a block.
class thread_block {
 public:
  static void sync(emulator::Place place = EMULATOR_HERE) {
    emulator::block_barrier("thread_block::sync", 0, place, emulator::BarrierOp::none);
  }
  static unsigned int thread_rank() {
    return static_cast<unsigned>(details::linear(threadIdx, blockDim));
  }
  static unsigned int num_threads() { return static_cast<unsigned>(details::volume(blockDim)); }
  static unsigned int size() { return num_threads(); }
  static dim3 group_index() { return dim3(blockIdx); }
  static dim3 thread_index() { return dim3(threadIdx); }
  static dim3 dim_threads() { return blockDim; }
  static dim3 group_dim() { return blockDim; }
};

inline thread_block this_thread_block() { return thread_block(); }

// All threads of a launch.
class grid_group {
 public:
  static void sync(emulator::Place place = EMULATOR_HERE) {
    emulator::fail(emulator::Kind::unsupported, place,
                   "grid_group::sync waits for other blocks, but the emulator runs one block after "
                   "another; split the kernel in two at this line");
  }
  static bool is_valid() { return false; }
  static unsigned long long block_rank() { return details::linear(blockIdx, gridDim); }
  static unsigned long long num_blocks() { return details::volume(gridDim); }
  static unsigned long long thread_rank() {
    return block_rank() * thread_block::num_threads() + thread_block::thread_rank();
  }
  static unsigned long long num_threads() { return num_blocks() * thread_block::num_threads(); }
  static unsigned long long size() { return num_threads(); }
  static dim3 group_dim() { return gridDim; }
  static dim3 dim_blocks() { return gridDim; }
  static dim3 block_index() { return dim3(blockIdx); }
};

inline grid_group this_grid() { return grid_group(); }

// `Size` neighbouring lanes of a warp, beginning at a multiple of Size.
template <unsigned int Size, class Parent = void>
class thread_block_tile {
  static_assert(Size >= 1 && Size <= 32 && (Size & (Size - 1)) == 0,
                "the emulator has tiles of 1, 2, 4, 8, 16 or 32 lanes; larger ones span warps");

  unsigned group_rank_, num_groups_;  // among the tiles of the parent

  static unsigned first() { return emulator::lane_id() & ~(Size - 1); }
  static unsigned in_tile(unsigned lanes) { return (lanes & lane_mask()) >> first(); }

  // The lane to read, or the own one where it lies outside the tile.
  template <class T>
  static T read(const char* name, const T& value, unsigned rank, emulator::Place place) {
    const unsigned source = first() + (rank < Size ? rank : thread_rank());
    return emulator::shuffle<T>(name, lane_mask(), value, source, place);
  }

 public:
  thread_block_tile(unsigned group_rank, unsigned num_groups)
      : group_rank_(group_rank), num_groups_(num_groups) {}
  template <class Other>
  thread_block_tile(const thread_block_tile<Size, Other>& other)
      : group_rank_(other.meta_group_rank()), num_groups_(other.meta_group_size()) {}

  static void sync(emulator::Place place = EMULATOR_HERE) {
    emulator::warp_barrier(lane_mask(), place);
  }
  static unsigned int thread_rank() { return emulator::lane_id() & (Size - 1); }
  static unsigned int lane_mask() {
    return (Size == 32 ? 0xffffffffu : (1u << (Size % 32)) - 1) << first();
  }
  static constexpr unsigned int num_threads() { return Size; }
  static constexpr unsigned int size() { return Size; }
  unsigned int meta_group_rank() const { return group_rank_; }
  unsigned int meta_group_size() const { return num_groups_; }

  template <class T>
  T shfl(const T& value, int rank, emulator::Place place = EMULATOR_HERE) const {
    return read("thread_block_tile::shfl", value, unsigned(rank) & (Size - 1), place);
  }
  template <class T>
  T shfl_up(const T& value, unsigned distance, emulator::Place place = EMULATOR_HERE) const {
    return read("thread_block_tile::shfl_up", value, thread_rank() - distance, place);
  }
  template <class T>
  T shfl_down(const T& value, unsigned distance, emulator::Place place = EMULATOR_HERE) const {
    return read("thread_block_tile::shfl_down", value, thread_rank() + distance, place);
  }
  template <class T>
  T shfl_xor(const T& value, unsigned lane_mask, emulator::Place place = EMULATOR_HERE) const {
    return read("thread_block_tile::shfl_xor", value, thread_rank() ^ lane_mask, place);
  }
  int any(int predicate, emulator::Place place = EMULATOR_HERE) const {
    return __any_sync(lane_mask(), predicate, place);
  }
  int all(int predicate, emulator::Place place = EMULATOR_HERE) const {
    return __all_sync(lane_mask(), predicate, place);
  }
  unsigned int ballot(int predicate, emulator::Place place = EMULATOR_HERE) const {
    return in_tile(__ballot_sync(lane_mask(), predicate, place));
  }
  template <class T>
  unsigned int match_any(T value, emulator::Place place = EMULATOR_HERE) const {
    return in_tile(__match_any_sync(lane_mask(), value, place));
  }
  template <class T>
  unsigned int match_all(T value, int& all, emulator::Place place = EMULATOR_HERE) const {
    return in_tile(__match_all_sync(lane_mask(), value, &all, place));
  }
};

template <unsigned int Size, class Parent>
thread_block_tile<Size, Parent> tiled_partition(const Parent& parent) {
  return {parent.thread_rank() / Size, (parent.num_threads() + Size - 1) / Size};
}

// The lanes of one mask, ranked from the lowest.
class coalesced_group {
  unsigned lanes_;

  // The lane of a rank.
  unsigned lane_of(unsigned rank) const {
    unsigned rest = lanes_;
    for (; rank > 0; --rank) rest &= rest - 1;
    return unsigned(__builtin_ctz(rest));
  }
  // Lanes of the group packed to ranks.
  unsigned ranks_of(unsigned lanes) const {
    unsigned packed = 0;
    for (unsigned rank = 0; rank < num_threads(); ++rank) {
      if ((lanes >> lane_of(rank) & 1) != 0) packed |= 1u << rank;
    }
    return packed;
  }
  template <class T>
  T read(const char* name, const T& value, unsigned rank, emulator::Place place) const {
    const unsigned source = lane_of(rank < num_threads() ? rank : thread_rank());
    return emulator::shuffle<T>(name, lanes_, value, source, place);
  }

 public:
  explicit coalesced_group(unsigned lanes) : lanes_(lanes) {}
  void sync(emulator::Place place = EMULATOR_HERE) const { emulator::warp_barrier(lanes_, place); }
  unsigned int thread_rank() const {
    return unsigned(__builtin_popcount(lanes_ & details::lanes_below(emulator::lane_id())));
  }
  unsigned int num_threads() const { return unsigned(__builtin_popcount(lanes_)); }
  unsigned int size() const { return num_threads(); }
  unsigned int lane_mask() const { return lanes_; }

  template <class T>
  T shfl(const T& value, int rank, emulator::Place place = EMULATOR_HERE) const {
    return read("coalesced_group::shfl", value, unsigned(rank), place);
  }
  template <class T>
  T shfl_up(const T& value, unsigned distance, emulator::Place place = EMULATOR_HERE) const {
    return read("coalesced_group::shfl_up", value, thread_rank() - distance, place);
  }
  template <class T>
  T shfl_down(const T& value, unsigned distance, emulator::Place place = EMULATOR_HERE) const {
    return read("coalesced_group::shfl_down", value, thread_rank() + distance, place);
  }
  int any(int predicate, emulator::Place place = EMULATOR_HERE) const {
    return __any_sync(lanes_, predicate, place);
  }
  int all(int predicate, emulator::Place place = EMULATOR_HERE) const {
    return __all_sync(lanes_, predicate, place);
  }
  unsigned int ballot(int predicate, emulator::Place place = EMULATOR_HERE) const {
    return ranks_of(__ballot_sync(lanes_, predicate, place));
  }
  template <class T>
  unsigned int match_any(T value, emulator::Place place = EMULATOR_HERE) const {
    return ranks_of(__match_any_sync(lanes_, value, place));
  }
};

// The lanes that come to the same call, as __activemask has them.
inline coalesced_group coalesced_threads(emulator::Place place = EMULATOR_HERE) {
  return coalesced_group(__activemask(place));
}

// The lanes of the group with the caller's label, or with its truth value.
template <class Group, class Label>
coalesced_group labeled_partition(const Group& group, Label label,
                                  emulator::Place place = EMULATOR_HERE) {
  return coalesced_group(__match_any_sync(group.lane_mask(), label, place));
}
template <class Group>
coalesced_group binary_partition(const Group& group, bool predicate,
                                 emulator::Place place = EMULATOR_HERE) {
  return labeled_partition(group, static_cast<int>(predicate), place);
}

template <class Group>
void sync(const Group& group, emulator::Place place = EMULATOR_HERE) {
  group.sync(place);
}
template <class Group>
auto thread_rank(const Group& group) {
  return group.thread_rank();
}
template <class Group>
auto group_size(const Group& group) {
  return group.size();
}

}  // namespace cooperative_groups
