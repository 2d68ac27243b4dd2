// Engine memory: tensors allocated here are reduced in place, because every process of the host maps the
// same pages.
//
// Memory is allocated from SEGMENTS of at least kSegmentBytes; an empty segment is freed, unless it is the only
// one. A peer finds a tensor by (segment id, offset).
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "paceline/transport/segment.h"

namespace paceline {

// The location of a tensor in engine memory; segment 0 means none.
struct Location {
  uint64_t segment = 0;
  uint64_t offset = 0;
};

class Arena {
 public:
  // Called when a segment is created (fd >= 0) or freed (fd < 0), under the arena's lock.
  using Announce = std::function<void(uint64_t id, size_t bytes, int fd)>;

  explicit Arena(Announce announce) : announce_(std::move(announce)) {}
  ~Arena() { await_unmapped(); }

  void* allocate(size_t bytes);
  // In a separate segment, whose pages are never reused: peers may keep using them after this process has freed
  // the block.
  void* allocate_apart(size_t bytes);
  void free(void* p);
  // The caller is about to use these bytes of a block again and again. Asks for large pages once for each large block,
  // and not when it is allocated: large pages are filled at once, and memory that is never touched should stay empty.
  void use_large_pages(const void* p, size_t bytes);
  std::optional<Location> locate(const void* p, size_t bytes) const;
  void for_each_segment(const std::function<void(uint64_t id, size_t bytes, int fd)>& visit) const;
  size_t allocated_bytes() const;
  // The threads that unmap do not exist in a forked child.
  void close_after_fork();

  static constexpr size_t kSegmentBytes = 64u << 20;
  static constexpr size_t kAlignment = 4096;  // pages: streaming stores and slices start aligned

 private:
  struct Block {
    size_t bytes = 0;
    bool has_large_pages = false;
  };
  struct Pool {
    bool apart = false;
    Segment segment;
    std::map<size_t, size_t> free_ranges;  // offset -> bytes, neighbours always merged
    std::map<size_t, Block> used;          // by offset
  };
  Pool& add_pool(size_t bytes, bool apart);  // under mu_
  static void* take(Pool& pool, size_t bytes);
  static void give_back(Pool& pool, size_t offset, size_t bytes);
  // A server that frees 1 GB must not stop for the quarter of a second that the kernel takes: a thread unmaps.
  void unmap_aside(Segment segment);  // under mu_
  void await_unmapped();              // under mu_: a new segment may need that memory

  mutable std::mutex mu_;
  std::map<uint64_t, Pool> pools_;      // guarded by mu_
  uint64_t next_id_ = 1;                // guarded by mu_
  std::vector<std::thread> unmapping_;  // guarded by mu_
  Announce announce_;
};

}  // namespace paceline
