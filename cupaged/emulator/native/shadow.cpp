// Finds accesses that nothing orders: a happens-before check with a short history per word.
//
// A word of four bytes has one cell; when an access touches only part of it, the word is split and
// each byte gets its own. A cell keeps the last write and two reads by different threads (the
// epochs of FastTrack, Flanagan and Freund 2009, cut to what barriers and warps need).
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <unordered_map>

#include "machine.h"
#include "memory.h"

namespace emulator {

namespace {

constexpr std::size_t kWordBytes = 4;
constexpr std::size_t kPageBytes = 4096;

struct Page {
  Cell words[kPageBytes / kWordBytes];
  Cell* bytes[kPageBytes / kWordBytes];  // four cells for a split word, else null
};

std::uintptr_t shared_base = 0;
Cell* shared_words = nullptr;
Cell* shared_bytes = nullptr;
std::unordered_map<std::uintptr_t, Page*> global_pages;
std::uintptr_t last_page_number = 0;
Page* last_page = nullptr;

template <class T>
T* reserve(std::size_t count) {
  void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) no_memory("the history of shared memory");
  return static_cast<T*>(memory);
}

bool knows(const Knowledge& knowledge, std::uint32_t key, std::uint32_t stamp) {
  const auto found = knowledge.find(key);
  return found != knowledge.end() && found->second > stamp;
}

bool acquired(const Record& record) {
  if (!machine.any_fence) return false;
  const std::uint32_t block = kWholeBlock | (record.thread >> 10 & kBlockMask);
  for (const Knowledge* knowledge : {&current->acquired, &machine.block_acquired}) {
    if (knows(*knowledge, record.thread, record.stamp) || knows(*knowledge, block, record.stamp)) {
      return true;
    }
  }
  return false;
}

// Whether the recorded access happened before what the current thread does now.
template <Space space>
bool ordered(const Record& record, std::uint32_t self) {
  if (record.stamp == 0 || record.thread == self) return true;
  if (space == Space::shared || record.thread >> 10 == self >> 10) {
    if (record.stamp < machine.last_barrier) return true;
    const unsigned lane = record.thread % kWarpSize;
    if (record.thread / kWarpSize == self / kWarpSize && current->known[lane] > record.stamp) {
      return true;
    }
  }
  return acquired(record);
}

[[noreturn]] void report_race(std::uintptr_t address, std::size_t bytes, Access access,
                              const Record& earlier, bool earlier_is_write) {
  Finding& finding = begin_finding(Kind::race, {nullptr, 0});
  describe(address);
  finding.access_bytes = static_cast<int>(bytes);
  finding.is_write = access != Access::read && access != Access::relaxed_read;
  finding.has_other = 1;
  finding.other = place_of(earlier.thread);
  name_other(earlier.code);
  finding.other_is_write = earlier_is_write;
  finish_finding();
}

// Writes of others that are atomic may be read plainly by a loop around atomicCAS, see Suspect.
void suspect(std::uintptr_t address, std::size_t bytes, const Record& mine, const Record& earlier) {
  const Suspect& known = current->suspect;
  if (known.code == mine.code && known.address <= address && address < known.address + known.bytes) {
    return;  // another word of one access
  }
  check_suspect(*current);
  current->suspect = {address, bytes, mine.code, earlier.thread, earlier.code};
}

[[noreturn]] void report_content(Kind kind, std::uintptr_t address, std::size_t bytes,
                                 Access access, const Record* other) {
  Finding& finding = begin_finding(kind, {nullptr, 0});
  describe(address);
  finding.access_bytes = static_cast<int>(bytes);
  finding.is_write = access == Access::write;
  if (other != nullptr) {
    finding.has_other = 1;
    finding.other = place_of(other->thread);
    name_other(other->code);
    finding.other_is_write = 1;
  }
  finish_finding();
}

// A read that happened before this one needs no remembering: who comes after this one comes after it.
// Of the others two are kept, by different threads and if possible of different warps, so that a
// writer always meets one that is not its own.
template <Space space>
void remember_read(Cell& cell, const Record& mine) {
  Record& first = cell.reads[0];
  Record& second = cell.reads[1];
  if (ordered<space>(first, mine.thread)) {
    first = mine;
  } else if (ordered<space>(second, mine.thread) ||
             (first.thread / kWarpSize == second.thread / kWarpSize &&
              mine.thread / kWarpSize != first.thread / kWarpSize)) {
    second = mine;
  }
}

// partly_written: the access covers a word of which some bytes are written: what is not may be the
// padding of a structure that is copied whole.
template <Space space>
void touch(Cell& cell, std::uintptr_t address, std::size_t bytes, Access access, Record mine,
           bool partly_written) {
  const bool is_read = access == Access::read || access == Access::relaxed_read;
  if (space == Space::shared && access != Access::write) {
    if (cell.copied_block == machine.block_number) report_content(Kind::async_copy, address, bytes, access, &cell.write);
    if (cell.block != machine.block_number && !partly_written) {
      report_content(Kind::uninitialized, address, bytes, access, nullptr);
    }
  }
  if (!(mine.relaxed && cell.write.relaxed) && !ordered<space>(cell.write, mine.thread)) {
    if (access != Access::read || !cell.write.relaxed) {
      report_race(address, bytes, access, cell.write, true);
    }
    suspect(address, bytes, mine, cell.write);
  }
  if (is_read) {
    remember_read<space>(cell, mine);
    return;
  }
  for (Record& read : cell.reads) {
    if (access == Access::atomic && read.thread == mine.thread) read.relaxed = 1;
    if (!(mine.relaxed && read.relaxed) && !ordered<space>(read, mine.thread)) {
      report_race(address, bytes, access, read, false);
    }
  }
  if (space == Space::shared && cell.copied_block == machine.block_number) {
    report_content(Kind::async_copy, address, bytes, access, &cell.write);
  }
  if (mine.relaxed && cell.write.thread == mine.thread && cell.write.stamp == mine.stamp &&
      !cell.write.relaxed) {
    mine = cell.write;  // its own plain write is still what others must be ordered with
  }
  cell.write = mine;
  if (space == Space::shared) cell.block = machine.block_number;
}

// The cell of a word, and those of its bytes once it is split.
struct Word {
  Cell* word;
  Cell* bytes;
};

Word find_word(Space space, std::uintptr_t address, bool part) {
  if (space == Space::shared) {
    const std::size_t number = (address - shared_base) / kWordBytes;
    return {&shared_words[number], &shared_bytes[number * kWordBytes]};
  }
  const std::uintptr_t page_number = address / kPageBytes;
  if (last_page == nullptr || page_number != last_page_number) {
    Page*& page = global_pages[page_number];
    if (page == nullptr) page = static_cast<Page*>(std::calloc(1, sizeof(Page)));
    if (page == nullptr) no_memory("the history of global memory");
    last_page = page;
    last_page_number = page_number;
  }
  const std::size_t number = address % kPageBytes / kWordBytes;
  Cell*& bytes = last_page->bytes[number];
  if (part && bytes == nullptr) {
    bytes = static_cast<Cell*>(std::calloc(kWordBytes, sizeof(Cell)));
    if (bytes == nullptr) no_memory("the history of global memory");
  }
  return {&last_page->words[number], bytes};
}

// Calls visit(cell, address, partly_written) for every cell that an access touches.
template <class Visit>
void for_cells(Space space, std::uintptr_t address, std::size_t bytes, Visit visit) {
  const std::uintptr_t end = address + bytes;
  while (address < end) {
    const std::uintptr_t word_begin = address / kWordBytes * kWordBytes;
    const std::uintptr_t stop = end < word_begin + kWordBytes ? end : word_begin + kWordBytes;
    const bool part = stop - address != kWordBytes;
    const Word found = find_word(space, address, part);
    if (part && !found.word->split) {
      for (std::size_t i = 0; i < kWordBytes; ++i) found.bytes[i] = *found.word;
      found.word->split = true;
    }
    if (found.word->split) {
      bool partly = false;
      for (std::size_t i = 0; i < kWordBytes && !part; ++i) {
        partly |= found.bytes[i].block == machine.block_number;
      }
      for (; address < stop; ++address) visit(found.bytes[address - word_begin], address, partly);
    } else {
      visit(*found.word, address, false);
      address = stop;
    }
  }
}

}  // namespace

void prepare_shadow(std::uintptr_t shared_begin) {
  shared_base = shared_begin;
  shared_words = reserve<Cell>(2 * kSharedPartBytes / kWordBytes);
  shared_bytes = reserve<Cell>(2 * kSharedPartBytes);
}

void begin_launch_shadow() {
  // Stamps and block numbers go on from launch to launch, so old cells of shared memory say nothing
  // about new blocks; global memory forgets. Long before a counter could wrap, all start again.
  if (machine.clock > 1u << 31 || machine.block_number > 1u << 31) {
    madvise(shared_words, 2 * kSharedPartBytes / kWordBytes * sizeof(Cell), MADV_DONTNEED);
    madvise(shared_bytes, 2 * kSharedPartBytes * sizeof(Cell), MADV_DONTNEED);
    for (Thread& thread : machine.threads) {
      std::fill(thread.known, thread.known + kWarpSize, 0u);
    }
    machine.clock = machine.block_number = 0;
  }
  for (auto& [number, page] : global_pages) {
    for (Cell* bytes : page->bytes) std::free(bytes);
    std::free(page);
  }
  global_pages.clear();
  last_page = nullptr;
  machine.released.clear();
  machine.any_fence = false;
}

void shadow_access(Space space, std::uintptr_t address, std::size_t bytes, Access access,
                   std::uint32_t code) {
  const bool relaxed = access != Access::read && access != Access::write;
  const Record mine = {current->segment, machine.thread_id(*current), code, relaxed};
  const Suspect& earlier = current->suspect;
  if (earlier.address != 0 && address < earlier.address + earlier.bytes &&
      earlier.address < address + bytes) {
    if (access != Access::atomic) check_suspect(*current);
    current->suspect.address = 0;
  }
  for_cells(space, address, bytes, [&](Cell& cell, std::uintptr_t at, bool partly_written) {
    if (space == Space::shared) {
      touch<Space::shared>(cell, at, bytes, access, mine, partly_written);
    } else {
      touch<Space::global>(cell, at, bytes, access, mine, partly_written);
    }
  });
}

void check_suspect(Thread& thread) {
  const Suspect found = thread.suspect;
  if (found.address == 0) return;
  thread.suspect.address = 0;
  current = &thread;
  Finding& finding = begin_finding(Kind::race, {nullptr, 0});
  describe(found.address);
  finding.access_bytes = static_cast<int>(found.bytes);
  finding.has_other = 1;
  finding.other = place_of(found.other_thread);
  finding.other_is_write = 1;
  name_other(found.other_code);
  finding.here_code = found.code & kPlaceCode ? 0 : found.code;
  if (found.code & kPlaceCode) name_here(found.code);
  finish_finding();
}

void shadow_begin_copy(std::uintptr_t address, std::size_t bytes, std::uint32_t code) {
  shadow_access(Space::shared, address, bytes, Access::write, code);
  for_cells(Space::shared, address, bytes,
            [](Cell& cell, std::uintptr_t, bool) { cell.copied_block = machine.block_number; });
}

void shadow_end_copy(std::uintptr_t address, std::size_t bytes, std::uint32_t code) {
  for_cells(Space::shared, address, bytes,
            [](Cell& cell, std::uintptr_t, bool) { cell.copied_block = 0; });
  shadow_access(Space::shared, address, bytes, Access::write, code);
}

}  // namespace emulator
