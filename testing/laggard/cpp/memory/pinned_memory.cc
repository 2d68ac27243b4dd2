#include "memory/pinned_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "order/launch.h"

namespace laggard {

// Pages are counted from `pages`, which is `host` rounded down: registered memory may begin inside one.
struct PinnedBlock {
  char* host = nullptr;  // what tensors see
  size_t bytes = 0;
  char* pages = nullptr;
  char* copies = nullptr;  // where copies see `pages`; the same address if there is no second mapping
  size_t mapped = 0;
  bool guarded = true;
  bool registered = false;            // it belongs to another owner, and so does the rest of its last page
  std::vector<int> writers, readers;  // per page: copies in flight. guarded by: device lock
  AccessLog log;                      // guarded by: device lock

  void count_from(char* begin, size_t size) {
    host = begin;
    bytes = size;
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    pages = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(begin) / page * page);
    mapped = (begin + size - pages + page - 1) / page * page;
    writers.resize(mapped / page);
    readers.resize(mapped / page);
  }
};

namespace {

struct InFlight {
  PinnedBlock* block;
  const char *begin, *end;
  size_t first_page, last_page;  // last_page is not included
  bool writes;
  int stream;
  uint64_t launch;
};

std::mutex blocks_mutex;                                  // after the device lock, if both
auto& blocks = *new std::map<const char*, PinnedBlock*>;  // guarded by: blocks_mutex
auto& in_flight = *new std::vector<InFlight>;             // guarded by: device lock
thread_local bool guard_new_blocks = true;

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

int rights_of(const PinnedBlock* block, size_t page) {
  return block->writers[page] ? PROT_NONE : block->readers[page] ? PROT_READ : PROT_READ | PROT_WRITE;
}

// One call for each run of pages with the same rights.
void apply_rights(const PinnedBlock* block, size_t first, size_t last) {
  for (size_t begin = first, page = first; page < last; ++page) {
    const int rights = rights_of(block, page);
    if (page + 1 < last && rights_of(block, page + 1) == rights) continue;
    mprotect(block->pages + begin * page_bytes(), (page + 1 - begin) * page_bytes(), rights);
    begin = page + 1;
  }
}

void count_pages(const InFlight& copy, int by) {
  auto& counts = copy.writes ? copy.block->writers : copy.block->readers;
  for (size_t page = copy.first_page; page < copy.last_page; ++page) counts[page] += by;
  apply_rights(copy.block, copy.first_page, copy.last_page);
}

PinnedBlock* map_block(size_t bytes) {
  const int file = memfd_create("laggard-pinned", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0, "laggard: cannot make a memory file");
  auto map = [&] {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "laggard: cannot map ", bytes, " bytes of pinned memory");
    return static_cast<char*>(at);
  };
  auto* block = new PinnedBlock;
  block->count_from(map(), bytes);
  block->copies = map();
  block->guarded = guard_new_blocks;
  close(file);
  memset(block->host, kPoison, bytes);
  return block;
}

int64_t pinned_bytes = 0;  // of our own allocator. guarded by: blocks_mutex
int64_t pinned_peak = 0;

// Copies hold the storage, so none is running; but the host may not have waited for the last one.
void free_block(void* context) {
  auto* block = static_cast<PinnedBlock*>(context);
  {
    std::lock_guard lock(device_lock());
    std::erase_if(in_flight, [&](const InFlight& copy) { return copy.block == block; });
    std::lock_guard inner(blocks_mutex);
    blocks.erase(block->host);
    pinned_bytes -= static_cast<int64_t>(block->bytes);
  }
  munmap(block->pages, block->mapped);
  munmap(block->copies, block->mapped);
  delete block;
}

struct Allocator final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, c10::Device(at::kCPU)};
    auto* block = map_block(bytes);
    std::lock_guard lock(blocks_mutex);
    blocks[block->host] = block;
    pinned_bytes += static_cast<int64_t>(bytes);
    pinned_peak = std::max(pinned_peak, pinned_bytes);
    return {block->host, block, &free_block, c10::Device(at::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies hold the storage instead
  void empty_cache() override {}
  at::HostStats get_stats() override {
    std::lock_guard lock(blocks_mutex);
    at::HostStats stats;
    stats.allocated_bytes.current = pinned_bytes;
    stats.allocated_bytes.peak = pinned_peak;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    std::lock_guard lock(blocks_mutex);
    pinned_peak = pinned_bytes;
  }
};

Allocator* the_allocator = new Allocator;  // never destroyed: tensors may live longer than static objects
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, the_allocator)

}  // namespace

c10::Allocator& pinned_allocator() { return *the_allocator; }

PinnedBlock* pinned_block_of(const void* address) {
  std::lock_guard lock(blocks_mutex);
  auto after = blocks.upper_bound(static_cast<const char*>(address));
  if (after == blocks.begin()) return nullptr;
  PinnedBlock* block = std::prev(after)->second;
  return address < block->host + block->bytes ? block : nullptr;
}

char* copy_address(const PinnedBlock* block, const void* host) {
  return block->copies + (static_cast<const char*>(host) - block->pages);
}

AccessLog* pinned_log_of(const void* address) {
  PinnedBlock* block = pinned_block_of(address);
  return block ? &block->log : nullptr;
}

void close_pinned_memory(PinnedBlock* block, const Region& region, bool writes, int stream) {
  if ((!block->guarded && !block->registered) || region.empty()) return;
  InFlight copy{block, region.begin, region.end, 0, 0, writes, stream, clock_of(stream)};
  if (block->guarded && region.dense) {
    const size_t page = page_bytes();
    const size_t begin = region.begin - block->pages, end = region.end - block->pages;
    const bool to_the_end = region.end == block->host + block->bytes && !block->registered;
    copy.first_page = (begin + page - 1) / page;
    copy.last_page = std::max(copy.first_page, to_the_end ? block->mapped / page : end / page);
  }
  in_flight.push_back(copy);
  count_pages(copy, +1);
}

void unlock_pinned_memory() {
  std::erase_if(in_flight, [](const InFlight& copy) {
    if (!host_has_seen(copy.stream, copy.launch)) return false;
    count_pages(copy, -1);
    return true;
  });
}

bool is_in_flight(const PinnedBlock* block, const Region& region) {
  return std::any_of(in_flight.begin(), in_flight.end(), [&](const InFlight& copy) {
    return copy.block == block && copy.begin < region.end && region.begin < copy.end;
  });
}

namespace {

constexpr int kInvalidValue = 1, kAlreadyRegistered = 712, kNotRegistered = 713;  // cudaError

// A second mapping of shared memory, without its file: mremap with an old size of 0 makes one. It is
// refused for private memory.
char* map_again(char* pages, size_t mapped) {
  void* at = mremap(pages, 0, mapped, MREMAP_MAYMOVE);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

// True if another block has some of these pages: a page can be registered once. Call with blocks_mutex held.
bool shares_a_page(const PinnedBlock* made) {
  return std::any_of(blocks.begin(), blocks.end(), [&](const auto& entry) {
    const PinnedBlock* block = entry.second;
    return block->pages < made->pages + made->mapped && made->pages < block->pages + block->mapped;
  });
}

}  // namespace

int register_host_memory(uintptr_t address, size_t bytes) {
  auto* begin = reinterpret_cast<char*>(address);
  if (!begin || bytes == 0) return kInvalidValue;
  std::lock_guard lock(device_lock());
  std::lock_guard inner(blocks_mutex);
  auto* block = new PinnedBlock;
  block->registered = true;
  block->count_from(begin, bytes);
  if (shares_a_page(block)) {
    delete block;
    return kAlreadyRegistered;
  }
  char* again = map_again(block->pages, block->mapped);
  block->guarded = again != nullptr;
  block->copies = again ? again : block->pages;
  blocks[begin] = block;
  return 0;
}

int unregister_host_memory(uintptr_t address) {
  auto* begin = reinterpret_cast<char*>(address);
  std::lock_guard lock(device_lock());
  PinnedBlock* block = nullptr;
  {
    std::lock_guard inner(blocks_mutex);
    auto found = blocks.find(begin);
    if (found == blocks.end() || !found->second->registered) return kNotRegistered;
    block = found->second;
    TORCH_CHECK(!is_in_flight(block, {block->host, block->host + block->bytes}),
                "laggard: host memory is unregistered while a copy of it is in flight; wait for its event first");
    blocks.erase(found);
  }
  if (block->guarded) munmap(block->copies, block->mapped);
  delete block;
  return 0;
}

bool is_closable(uintptr_t address) {
  const auto* block = pinned_block_of(reinterpret_cast<const void*>(address));
  return block && block->guarded;
}

at::Tensor staging_memory(int64_t bytes) {
  guard_new_blocks = false;
  auto data = the_allocator->allocate(static_cast<size_t>(bytes));
  guard_new_blocks = true;
  void* host = data.get();
  auto keep = std::make_shared<at::DataPtr>(std::move(data));
  auto options = at::TensorOptions().dtype(at::kByte);
  return at::from_blob(host, {bytes}, [keep](void*) mutable { keep.reset(); }, options);
}

}  // namespace laggard
