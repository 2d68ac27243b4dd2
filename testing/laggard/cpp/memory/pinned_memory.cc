#include "memory/pinned_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "order/launch.h"

namespace laggard {

struct PinnedBlock {
  char* host = nullptr;  // what tensors see
  char* copies = nullptr;
  size_t bytes = 0, mapped = 0;
  bool guarded = true;
  std::vector<int> writers, readers;  // per page: copies in flight. guarded by: device lock
  AccessLog log;                      // guarded by: device lock
};

namespace {

struct InFlight {
  PinnedBlock* block;
  size_t first_page, last_page;  // last_page is not included
  bool writes;
  int stream;
  uint64_t launch;
};

std::mutex blocks_mutex;                     // after the device lock, if both
std::map<const char*, PinnedBlock*> blocks;  // guarded by: blocks_mutex
std::vector<InFlight> in_flight;             // guarded by: device lock
thread_local bool guard_new_blocks = true;

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void apply_rights(const PinnedBlock* block, size_t page) {
  const int rights = block->writers[page] ? PROT_NONE : block->readers[page] ? PROT_READ : PROT_READ | PROT_WRITE;
  mprotect(block->host + page * page_bytes(), page_bytes(), rights);
}

void count_pages(const InFlight& copy, int by) {
  auto& counts = copy.writes ? copy.block->writers : copy.block->readers;
  for (size_t page = copy.first_page; page < copy.last_page; ++page) {
    counts[page] += by;
    apply_rights(copy.block, page);
  }
}

PinnedBlock* map_block(size_t bytes) {
  auto* block = new PinnedBlock;
  block->bytes = bytes;
  block->mapped = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  block->guarded = guard_new_blocks;
  const int file = memfd_create("laggard-pinned", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(block->mapped)) == 0,
              "laggard: cannot make a memory file");
  auto map = [&] {
    void* at = mmap(nullptr, block->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "laggard: cannot map ", block->mapped, " bytes of pinned memory");
    return static_cast<char*>(at);
  };
  block->host = map();
  block->copies = map();
  close(file);
  block->writers.resize(block->mapped / page_bytes());
  block->readers.resize(block->mapped / page_bytes());
  memset(block->host, kPoison, bytes);
  return block;
}

// Copies hold the storage, so none is running; but the host may not have waited for the last one.
void free_block(void* context) {
  auto* block = static_cast<PinnedBlock*>(context);
  {
    std::lock_guard lock(device_lock());
    std::erase_if(in_flight, [&](const InFlight& copy) { return copy.block == block; });
    std::lock_guard inner(blocks_mutex);
    blocks.erase(block->host);
  }
  munmap(block->host, block->mapped);
  munmap(block->copies, block->mapped);
  delete block;
}

struct Allocator final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, c10::Device(at::kCPU)};
    auto* block = map_block(bytes);
    std::lock_guard lock(blocks_mutex);
    blocks[block->host] = block;
    return {block->host, block, &free_block, c10::Device(at::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies hold the storage instead
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
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
  return block->copies + (static_cast<const char*>(host) - block->host);
}

AccessLog* pinned_log_of(const void* address) {
  PinnedBlock* block = pinned_block_of(address);
  return block ? &block->log : nullptr;
}

void close_pinned_memory(PinnedBlock* block, const Region& region, bool writes, int stream) {
  if (!block->guarded || region.empty() || !region.dense) return;
  const size_t page = page_bytes();
  const size_t begin = region.begin - block->host, end = region.end - block->host;
  const size_t first = (begin + page - 1) / page;
  const size_t last = end == block->bytes ? block->mapped / page : end / page;
  if (first >= last) return;
  in_flight.push_back({block, first, last, writes, stream, clock_of(stream)});
  count_pages(in_flight.back(), +1);
}

void unlock_pinned_memory() {
  std::erase_if(in_flight, [](const InFlight& copy) {
    if (!host_has_seen(copy.stream, copy.launch)) return false;
    count_pages(copy, -1);
    return true;
  });
}

bool is_closed(const PinnedBlock* block) {
  return std::any_of(in_flight.begin(), in_flight.end(), [&](const InFlight& copy) { return copy.block == block; });
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
