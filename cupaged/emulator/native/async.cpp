// cp.async: what a thread asked for is done at the wait that covers it.
#include <cstring>

#include "machine.h"
#include "memory.h"

namespace emulator {

void async_copy(void* shared, const void* source, unsigned bytes, unsigned source_bytes,
                Place place) {
  if (bytes != 4 && bytes != 8 && bytes != 16) {
    fail(Kind::async_copy, place, "cp.async copies 4, 8 or 16 bytes, not %u", bytes);
  }
  if (source_bytes > bytes) {
    fail(Kind::async_copy, place, "cp.async: %u source bytes for a copy of %u", source_bytes, bytes);
  }
  if (!is_shared(shared)) {
    fail(Kind::async_copy, place, "the destination of cp.async must be shared memory");
  }
  const auto destination = reinterpret_cast<std::uintptr_t>(shared);
  check_alignment("the destination of cp.async", shared, bytes, place);
  check_alignment("the source of cp.async", source, bytes, place);  // though nothing may be read
  const AsyncCopy copy = {static_cast<char*>(shared), static_cast<const char*>(source), bytes,
                          source_bytes, code_of(place)};
  if (!machine.checked) {
    current->copies.push_back(copy);
    finish_async_copies(*current, current->copies.size());
    return;
  }
  if (source_bytes > 0) check_access_at(place, source, source_bytes, Access::read);
  check_access_at(place, shared, bytes, Access::write);
  shadow_begin_copy(destination, bytes, copy.code);
  current->copies.push_back(copy);
}

void async_commit() { current->committed.push_back(current->copies.size()); }

void async_wait(unsigned groups_left) {
  std::vector<std::size_t>& committed = current->committed;
  if (committed.size() <= groups_left) return;
  const std::size_t num_groups = committed.size() - groups_left;
  const std::size_t num_copies = committed[num_groups - 1];
  finish_async_copies(*current, num_copies);
  committed.erase(committed.begin(), committed.begin() + static_cast<std::ptrdiff_t>(num_groups));
  for (std::size_t& end : committed) end -= num_copies;
}

void finish_async_copies(Thread& thread, std::size_t count) {
  if (count == 0) return;
  for (std::size_t i = 0; i < count; ++i) {
    const AsyncCopy& copy = thread.copies[i];
    std::memcpy(copy.destination, copy.source, copy.source_bytes);
    std::memset(copy.destination + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
    if (machine.checked) {
      shadow_end_copy(reinterpret_cast<std::uintptr_t>(copy.destination), copy.bytes, copy.code);
    }
  }
  thread.copies.erase(thread.copies.begin(),
                      thread.copies.begin() + static_cast<std::ptrdiff_t>(count));
}

}  // namespace emulator
