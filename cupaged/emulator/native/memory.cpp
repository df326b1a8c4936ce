// Tells the memory a kernel was given from all other memory.
#include "memory.h"

#include <link.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "machine.h"

namespace emulator {

namespace {

struct Segment {
  std::uintptr_t begin;
  std::uintptr_t end;
  bool writable;
};

std::uintptr_t shared_begin = 0;
const ArgumentRange* last_range = nullptr;
std::size_t last_variable = 0;
Segment segments[16];  // of this module: constants and variables of the kernel file
int num_segments = 0;

int add_segments(dl_phdr_info* info, std::size_t, void*) {
  const auto self = reinterpret_cast<std::uintptr_t>(&segments);
  Segment found[16];
  int count = 0;
  bool mine = false;
  for (int i = 0; i < info->dlpi_phnum && count < 16; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    const std::uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    const std::uintptr_t end = begin + header.p_memsz;
    mine |= begin <= self && self < end;
    found[count++] = {begin, end, (header.p_flags & PF_W) != 0};
  }
  if (!mine) return 0;
  std::memcpy(segments, found, sizeof found);
  num_segments = count;
  return 1;
}

long long distance(const ArgumentRange& range, std::uintptr_t address) {
  if (address < range.begin) return static_cast<long long>(range.begin - address);
  return static_cast<long long>(address - range.end) + 1;
}

[[noreturn]] void report_global(std::uintptr_t address, std::size_t bytes, bool is_write) {
  const LaunchSpec& spec = *machine.spec;
  const ArgumentRange* nearest = nullptr;
  for (int i = 0; i < spec.num_ranges; ++i) {
    const ArgumentRange& range = spec.ranges[i];
    if (range.begin <= address && address + bytes <= range.end) {
      Finding& finding = begin_finding(Kind::read_only, {nullptr, 0});
      finding.argument = range.index;
      finding.byte_offset = static_cast<long long>(address - range.begin);
      finding.access_bytes = static_cast<int>(bytes);
      finding.is_write = 1;
      finish_finding();
    }
    if (nearest == nullptr || distance(range, address) < distance(*nearest, address)) {
      nearest = &range;
    }
  }
  Finding& finding = begin_finding(Kind::out_of_bounds, {nullptr, 0});
  finding.access_bytes = static_cast<int>(bytes);
  finding.is_write = is_write;
  if (address < 4096) {
    say("the null pointer");
  } else if (nearest != nullptr && distance(*nearest, address) < (1ll << 40)) {
    finding.argument = nearest->index;
    finding.byte_offset = static_cast<long long>(address - nearest->begin);
  } else {
    say("address 0x%llx, which belongs to no argument", static_cast<unsigned long long>(address));
  }
  finish_finding();
}

void check_global(std::uintptr_t address, std::size_t bytes, bool is_write) {
  const LaunchSpec& spec = *machine.spec;
  for (int i = 0; i < spec.num_ranges; ++i) {
    const ArgumentRange& range = spec.ranges[i];
    if (range.begin <= address && address + bytes <= range.end && !(is_write && range.read_only)) {
      last_range = &range;
      return;
    }
  }
  for (int i = 0; i < num_segments; ++i) {
    if (segments[i].begin <= address && address + bytes <= segments[i].end &&
        !(is_write && !segments[i].writable)) {
      return;
    }
  }
  report_global(address, bytes, is_write);
}

void name_variable(const SharedVariable& variable, std::uintptr_t address) {
  Finding& finding = *machine.finding;
  std::snprintf(finding.object, sizeof finding.object, "%s", variable.name);
  finding.byte_offset = static_cast<long long>(address - variable.begin);
  finding.element_bytes = static_cast<int>(variable.element_bytes);
}

void check_shared(std::uintptr_t address, std::size_t bytes, bool is_write) {
  const std::vector<SharedVariable>& variables = machine.shared_variables;
  for (std::size_t i = 0; i < variables.size(); ++i) {
    if (variables[i].begin <= address && address + bytes <= variables[i].end) {
      last_variable = i;
      return;
    }
  }
  Finding& finding = begin_finding(Kind::out_of_bounds, {nullptr, 0});
  finding.access_bytes = static_cast<int>(bytes);
  finding.is_write = is_write;
  const SharedVariable* nearest = nullptr;
  for (const SharedVariable& variable : variables) {
    if (nearest == nullptr || distance({variable.begin, variable.end, 0, 0}, address) <
                                  distance({nearest->begin, nearest->end, 0, 0}, address)) {
      nearest = &variable;
    }
  }
  if (nearest == nullptr) {
    say("shared memory, of which the launch asks for none");
  } else {
    name_variable(*nearest, address);
    const std::size_t size = nearest->end - nearest->begin;
    say("%zu", size / nearest->element_bytes);
  }
  finish_finding();
}

bool in_shared(std::uintptr_t address) { return address - shared_begin < 2 * kSharedPartBytes; }

}  // namespace

void prepare_memory() {
  if (shared_begin != 0) return;
  void* region = mmap(nullptr, 2 * kSharedPartBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) no_memory("shared memory");
  shared_begin = reinterpret_cast<std::uintptr_t>(region);
  dl_iterate_phdr(add_segments, nullptr);
  prepare_shadow(shared_begin);
}

void begin_launch_memory() {
  last_range = nullptr;
  last_variable = 0;
  machine.shared_variables.clear();
  machine.static_shared_bytes = 0;
  const unsigned dynamic_bytes = machine.spec->dynamic_shared_bytes;
  if (dynamic_bytes > 0) {
    const std::uintptr_t begin = shared_begin + kSharedPartBytes;
    machine.shared_variables.push_back({"dynamic", begin, begin + dynamic_bytes, 1});
    std::memset(dynamic_shared(), 0xff, dynamic_bytes);  // what is not written reads as NaN
  }
  if (machine.checked) begin_launch_shadow();
}

void* dynamic_shared() {
  prepare_memory();  // a kernel file may ask for the address while it is loaded
  return reinterpret_cast<void*>(shared_begin + kSharedPartBytes);
}

void* shared_variable(SharedSite& site) {
  if (site.launch == machine.launch) {
    return reinterpret_cast<void*>(shared_begin + site.offset);
  }
  const std::size_t alignment = site.alignment < 16 ? 16 : site.alignment;
  std::size_t offset = 0;
  for (const SharedVariable& variable : machine.shared_variables) {
    const std::size_t end = variable.end - shared_begin;
    if (end <= kSharedPartBytes && end + kRedzoneBytes > offset) offset = end + kRedzoneBytes;
  }
  offset = (offset + alignment - 1) / alignment * alignment;
  const std::size_t unaligned = machine.static_shared_bytes + site.alignment - 1;
  machine.static_shared_bytes = unaligned / site.alignment * site.alignment + site.bytes;
  if (machine.static_shared_bytes > kStaticSharedBytes) {
    fail(Kind::shared_memory, {nullptr, 0},
         "%zu bytes of static shared memory are more than %zu; declare it extern, and ask for it at "
         "the launch",
         machine.static_shared_bytes, kStaticSharedBytes);
  }
  const std::size_t total = machine.static_shared_bytes + machine.spec->dynamic_shared_bytes;
  if (total > machine.spec->max_shared_bytes) {
    fail(Kind::shared_memory, {nullptr, 0},
         "%zu bytes of static and %u of dynamic shared memory are more than the %u bytes that a "
         "block may have",
         machine.static_shared_bytes, machine.spec->dynamic_shared_bytes,
         machine.spec->max_shared_bytes);
  }
  site.launch = machine.launch;
  site.offset = offset;
  const std::uintptr_t begin = shared_begin + offset;
  machine.shared_variables.push_back({site.name, begin, begin + site.bytes, site.element_bytes});
  std::memset(reinterpret_cast<void*>(begin), 0xff, site.bytes);
  return reinterpret_cast<void*>(begin);
}

bool is_shared(const void* address) { return in_shared(reinterpret_cast<std::uintptr_t>(address)); }

void describe(std::uintptr_t address) {
  for (const SharedVariable& variable : machine.shared_variables) {
    if (variable.begin <= address && address < variable.end) name_variable(variable, address);
  }
  for (int i = 0; i < machine.spec->num_ranges; ++i) {
    const ArgumentRange& range = machine.spec->ranges[i];
    if (range.begin <= address && address < range.end) {
      machine.finding->argument = range.index;
      machine.finding->byte_offset = static_cast<long long>(address - range.begin);
      return;
    }
  }
  for (int i = 0; i < num_segments; ++i) {
    if (segments[i].begin <= address && address < segments[i].end) {
      machine.finding->argument = kModuleVariable;
      machine.finding->byte_offset =
          static_cast<long long>(module_offset(reinterpret_cast<void*>(address)));
    }
  }
}

namespace {

// The access itself; `code` is worked out only where a history keeps it.
template <class Code>
void check(const void* pointer, std::size_t bytes, Access access, Code code) {
  if (current == nullptr || machine.stacks.contains(pointer)) return;
  if (machine.wants_yield) {
    machine.wants_yield = false;
    yield();
  }
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const bool is_write = access != Access::read && access != Access::relaxed_read;
  if (in_shared(address)) {
    if (access == Access::relaxed_read) access = Access::read;
    if (access == Access::relaxed_write) access = Access::write;
    if (access == Access::atomic && machine.any_fence) acquire_and_release(address);
    const std::vector<SharedVariable>& variables = machine.shared_variables;
    if (last_variable >= variables.size() || address < variables[last_variable].begin ||
        address + bytes > variables[last_variable].end) {
      check_shared(address, bytes, is_write);
    }
    shadow_access(Space::shared, address, bytes, access, code());
    return;
  }
  if (last_range == nullptr || address < last_range->begin || address + bytes > last_range->end ||
      (is_write && last_range->read_only)) {
    check_global(address, bytes, is_write);
  }
  if (machine.any_fence && access != Access::read && access != Access::write) {
    acquire_and_release(address);
  }
  if (machine.spec->global_races) shadow_access(Space::global, address, bytes, access, code());
}

}  // namespace

void check_access(const void* pointer, std::size_t bytes, Access access, const void* pc) {
  check(pointer, bytes, access, [pc] { return code_of(pc); });
}

void check_access_at(Place place, const void* pointer, std::size_t bytes, Access access) {
  machine.place = place;
  check(pointer, bytes, access, [place] { return code_of(place); });
  machine.place = {nullptr, 0};
}

}  // namespace emulator
