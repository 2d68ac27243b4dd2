#include "memory/device_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <utility>

#include "order/launch.h"

namespace laggard {
namespace {

constexpr size_t kDeviceBytes = size_t{1} << 33;  // virtual; pages exist once they are written
constexpr size_t kUnit = 512;                     // sizes are rounded up, as CUDA's allocator does

struct Arena {
  char* device = nullptr;  // what tensors see: no access
  char* kernel = nullptr;
  size_t used = 0;
};

struct Block {
  char* address;
  size_t bytes;
  int device, stream;
  std::vector<int> other_streams;  // from record_stream
  AccessLog log;
};

// A freed block that other streams still use.
struct Waiting {
  Block* block;
  std::vector<CompletionPtr> uses;
};

struct Freed {
  Block* block;
  PythonStack stack;
};

// All of this is guarded by the device lock.
Arena arenas[kDevices];
auto& blocks = *new std::map<const char*, Block*>;  // live and free ones, by address
auto& free_blocks =
    *new std::map<std::pair<int, size_t>, std::vector<Block*>>;  // by stream and size; the last is reused first
auto& waiting = *new std::vector<Waiting>;
auto& freed = *new std::map<int, std::vector<Freed>>;  // by stream; not yet poisoned
std::array<int64_t, kDevices> allocated{}, peak{};

void map_arena(Arena& arena) {
  const int file = memfd_create("laggard", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, kDeviceBytes) == 0, "laggard: cannot make a memory file");
  auto map = [&](int rights) {
    void* at = mmap(nullptr, kDeviceBytes, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "laggard: cannot map ", kDeviceBytes, " bytes of address space");
    return static_cast<char*>(at);
  };
  arena.kernel = map(PROT_READ | PROT_WRITE);
  arena.device = map(PROT_NONE);
  close(file);
}

// The fill is a launch like any other, so that it is ordered and checked like one.
void poison(Block* block, const char* why, PythonStack stack) {
  char* memory = kernel_address(block->address);
  auto fill = [memory, bytes = block->bytes] { memset(memory, kPoison, bytes); };
  Region all{block->address, block->address + block->bytes};
  launch_locked({block->stream, why, {{all, true}}, fill, {}, /*delayed=*/false, {}, nullptr, std::move(stack)});
}

// The block may be used again by what its stream is given next, and no earlier: a stream that waits for
// others before its next allocation is right, as it is with CUDA's allocator (FSDP relies on it).
void make_free(Block* block, PythonStack stack) {
  block->other_streams.clear();
  freed[block->stream].push_back({block, std::move(stack)});
}

// Called before an allocation, of any size: an allocator may cut freed blocks and join them.
void reuse_freed(int stream) {
  for (auto& [block, stack] : std::exchange(freed[stream], {})) {
    poison(block, "free", std::move(stack));
    free_blocks[{block->stream, block->bytes}].push_back(block);
  }
}

void free_block(void* context) {
  if (is_stopped() || is_in_bad_fork()) return;
  const HostSection section;
  auto* block = static_cast<Block*>(context);
  auto stack = take_stack_if_cheap();
  std::lock_guard lock(device_lock());
  allocated[block->device] -= static_cast<int64_t>(block->bytes);
  if (block->other_streams.empty()) return make_free(block, std::move(stack));
  Waiting entry{block, {}};
  for (int stream : block->other_streams) entry.uses.push_back(record(stream));
  waiting.push_back(std::move(entry));
}

// Free the blocks whose other streams are done. The owner stream has then seen them.
void collect_waiting() {
  std::erase_if(waiting, [](Waiting& entry) {
    for (auto& use : entry.uses)
      if (!use->is_set()) return false;
    for (auto& use : entry.uses) join_stream(entry.block->stream, use->clock);
    make_free(entry.block, nullptr);
    return true;
  });
}

Block* new_block(int device, int stream, size_t bytes) {
  Arena& arena = arenas[device];
  if (!arena.device) map_arena(arena);
  TORCH_CHECK_WITH(OutOfMemoryError, arena.used + bytes <= kDeviceBytes, "laggard:", device,
                   " is out of memory: ", bytes, " bytes wanted, ", kDeviceBytes - arena.used, " of ", kDeviceBytes,
                   " left");
  auto* block = new Block{arena.device + arena.used, bytes, device, stream, {}, {}};
  arena.used += bytes;
  blocks[block->address] = block;
  poison(block, "allocation", nullptr);
  return block;
}

struct Allocator final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t bytes) override {
    refuse_after_fork();
    const int device = current_device;
    const c10::Device where(kDeviceType, current_device);
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, where};
    const HostSection section;
    drop_finished();
    std::lock_guard lock(device_lock());
    collect_waiting();
    bytes = (bytes + kUnit - 1) / kUnit * kUnit;
    const int stream = current_stream(device);
    reuse_freed(stream);
    auto& reusable = free_blocks[{stream, bytes}];
    Block* block = nullptr;
    if (reusable.empty()) {
      block = new_block(device, stream, bytes);
    } else {
      block = reusable.back();
      reusable.pop_back();
    }
    allocated[device] += static_cast<int64_t>(bytes);
    peak[device] = std::max(peak[device], allocated[device]);
    return {block->address, block, &free_block, where};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    char *target = kernel_address(to), *source = kernel_address(from);
    const auto *in = static_cast<const char*>(from), *out = static_cast<const char*>(to);
    launch({current_stream(current_device), "copy_data", {{{in, in + bytes}, false}, {{out, out + bytes}, true}}, [=] {
              memcpy(target, source, bytes);
            }});
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // memory is reused, never given back
  void recordStream(const at::DataPtr& data, c10::Stream stream) override { record_stream(data, stream_of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(device_lock());
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = allocated[device];
    stats.allocated_bytes[0].peak = peak[device];
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = static_cast<int64_t>(arenas[device].used);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(device_lock());
    peak[device] = allocated[device];
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(device_lock());
    return {kDeviceBytes - allocated[device], kDeviceBytes};
  }
};

Allocator* the_allocator = new Allocator;  // never destroyed: tensors may live longer than static objects
REGISTER_ALLOCATOR(kDeviceType, the_allocator);

}  // namespace

c10::DeviceAllocator& device_allocator() { return *the_allocator; }

int device_of(const void* address) {
  const auto* at = static_cast<const char*>(address);
  for (int i = 0; i < kDevices; ++i)
    if (arenas[i].device && at >= arenas[i].device && at < arenas[i].device + kDeviceBytes) return i;
  return -1;
}

char* kernel_address(const void* device_address) {
  const int device = device_of(device_address);
  TORCH_CHECK(device >= 0, "laggard: ", device_address, " is no device memory");
  return arenas[device].kernel + (static_cast<const char*>(device_address) - arenas[device].device);
}

AccessLog* device_log_of(const void* address) {
  auto after = blocks.upper_bound(static_cast<const char*>(address));
  if (after == blocks.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return address < block->address + block->bytes ? &block->log : nullptr;
}

void record_stream(const at::DataPtr& data, int stream) {
  auto* block = static_cast<Block*>(data.get_context());
  if (!block) return;  // an empty tensor
  std::lock_guard lock(device_lock());
  auto& others = block->other_streams;
  if (stream != block->stream && std::find(others.begin(), others.end(), stream) == others.end())
    others.push_back(stream);
}

}  // namespace laggard
