#include "paceline/transport/arena.h"

#include <algorithm>
#include <iterator>

#include "paceline/base/error.h"

namespace paceline {
namespace {

size_t whole_pages(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

constexpr size_t kLargeSegment = 128 << 20;  // the kernel takes about 30 ms to unmap it
constexpr size_t kLargeTensor = 8 << 20;     // below, asking for large pages takes longer than they save in a short job

}  // namespace

void* Arena::take(Pool& pool, size_t bytes) {
  for (auto it = pool.free_ranges.begin(); it != pool.free_ranges.end(); ++it) {
    auto [offset, room] = *it;
    if (room < bytes) continue;
    pool.free_ranges.erase(it);
    if (room > bytes) pool.free_ranges.emplace(offset + bytes, room - bytes);
    pool.used.emplace(offset, Block{bytes});
    return pool.segment.data() + offset;
  }
  return nullptr;
}

void* Arena::allocate(size_t bytes) {
  bytes = whole_pages(bytes);
  std::lock_guard lock(mu_);
  for (auto& [id, pool] : pools_)
    if (void* p = take(pool, bytes)) return p;
  return take(add_pool(std::max(bytes, kSegmentBytes), false), bytes);
}

void* Arena::allocate_apart(size_t bytes) {
  bytes = whole_pages(bytes);
  std::lock_guard lock(mu_);
  return take(add_pool(bytes, true), bytes);
}

Arena::Pool& Arena::add_pool(size_t bytes, bool apart) {
  await_unmapped();
  Pool pool{apart, Segment::create("paceline-arena", bytes), {{0, bytes}}, {}};
  uint64_t id = next_id_++;
  announce_(id, bytes, pool.segment.fd());
  return pools_.emplace(id, std::move(pool)).first->second;
}

void Arena::free(void* p) {
  std::lock_guard lock(mu_);
  for (auto it = pools_.begin(); it != pools_.end(); ++it) {
    Pool& pool = it->second;
    auto* base = pool.segment.data();
    auto* at = static_cast<std::byte*>(p);
    if (at < base || at >= base + pool.segment.bytes()) continue;
    auto used = pool.used.find(size_t(at - base));
    if (used == pool.used.end()) break;
    give_back(pool, used->first, used->second.bytes);
    pool.used.erase(used);
    // The last ordinary segment stays: a loop that allocates and frees one tensor must not pay for 64 MB of
    // fresh pages every time.
    bool spare = !pool.apart && pool.segment.bytes() == kSegmentBytes && pools_.size() == 1;
    if (pool.used.empty() && !spare) {
      announce_(it->first, pool.segment.bytes(), -1);
      if (pool.segment.bytes() >= kLargeSegment) unmap_aside(std::move(pool.segment));
      pools_.erase(it);
    }
    return;
  }
  throw Error(ErrorKind::usage, "engine memory: freed a block that was not allocated");
}

void Arena::unmap_aside(Segment segment) {
  unmapping_.emplace_back([freed = std::move(segment)]() mutable { Segment last = std::move(freed); });
}

void Arena::await_unmapped() {
  for (auto& thread : unmapping_) thread.join();
  unmapping_.clear();
}

void Arena::close_after_fork() {
  for (auto& thread : unmapping_) new std::thread(std::move(thread));  // leaked on purpose
  unmapping_.clear();
}

// Inserts a free range and merges it with its neighbours.
void Arena::give_back(Pool& pool, size_t offset, size_t bytes) {
  auto next = pool.free_ranges.lower_bound(offset);
  if (next != pool.free_ranges.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = pool.free_ranges.erase(next);
  }
  if (next != pool.free_ranges.begin())
    if (auto before = std::prev(next); before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  pool.free_ranges.emplace(offset, bytes);
}

void Arena::use_large_pages(const void* p, size_t bytes) {
  if (bytes < kLargeTensor) return;
  Segment* segment = nullptr;
  size_t start = 0, length = 0;
  {
    std::lock_guard lock(mu_);
    for (auto& [id, pool] : pools_) {
      auto* at = static_cast<const std::byte*>(p);
      if (at < pool.segment.data() || at >= pool.segment.data() + pool.segment.bytes()) continue;
      auto after = pool.used.upper_bound(size_t(at - pool.segment.data()));
      if (after == pool.used.begin()) return;
      auto& [offset, block] = *std::prev(after);
      if (block.has_large_pages) return;
      block.has_large_pages = true;
      segment = &pool.segment, start = offset, length = block.bytes;
      break;
    }
  }
  // Not under the lock: it takes about a millisecond for each MB, and the block cannot be freed while it is in use.
  if (segment) segment->ask_for_large_pages(start, length);
}

std::optional<Location> Arena::locate(const void* p, size_t bytes) const {
  std::lock_guard lock(mu_);
  for (auto& [id, pool] : pools_) {
    auto* base = pool.segment.data();
    auto* at = static_cast<const std::byte*>(p);
    if (at >= base && at < base + pool.segment.bytes() && bytes <= size_t(base + pool.segment.bytes() - at))
      return Location{id, uint64_t(at - base)};
  }
  return std::nullopt;
}

void Arena::for_each_segment(const std::function<void(uint64_t, size_t, int)>& visit) const {
  std::lock_guard lock(mu_);
  for (auto& [id, pool] : pools_) visit(id, pool.segment.bytes(), pool.segment.fd());
}

size_t Arena::allocated_bytes() const {
  std::lock_guard lock(mu_);
  size_t sum = 0;
  for (auto& [id, pool] : pools_)
    for (auto& [offset, block] : pool.used) sum += block.bytes;
  return sum;
}

}  // namespace paceline
