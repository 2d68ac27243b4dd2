// Engine memory: allocation, merging of free ranges, location, and running out of it.
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "paceline/transport/arena.h"

using namespace paceline;

namespace {

struct Log {
  std::map<uint64_t, size_t> alive;
  Arena arena{[this](uint64_t id, size_t bytes, int fd) {
    if (fd >= 0) alive[id] = bytes;
    else alive.erase(id);
  }};
};

}  // namespace

TEST(blocks_do_not_overlap_and_are_aligned) {
  Log log;
  std::mt19937 rng(3);
  std::map<char*, size_t> blocks;
  for (int i = 0; i < 500; ++i) {
    if (blocks.size() > 20 || (!blocks.empty() && rng() % 3 == 0)) {
      auto it = std::next(blocks.begin(), rng() % blocks.size());
      log.arena.free(it->first);
      blocks.erase(it);
      continue;
    }
    size_t bytes = 1 + rng() % (2 << 20);
    auto* p = static_cast<char*>(log.arena.allocate(bytes));
    CHECK(reinterpret_cast<uintptr_t>(p) % Arena::kAlignment == 0);
    auto next = blocks.lower_bound(p);
    CHECK(next == blocks.end() || p + bytes <= next->first);
    CHECK(next == blocks.begin() || std::prev(next)->first + std::prev(next)->second <= p);
    blocks[p] = bytes;
    p[0] = p[bytes - 1] = 1;
  }
  for (auto& [p, bytes] : blocks) log.arena.free(p);
  CHECK(log.arena.allocated_bytes() == 0);
}

TEST(freed_neighbours_become_one_range) {
  Log log;
  size_t third = Arena::kSegmentBytes / 4;
  void* a = log.arena.allocate(third);
  void* b = log.arena.allocate(third);
  void* c = log.arena.allocate(third);
  void* keep = log.arena.allocate(4096);
  log.arena.free(a);
  log.arena.free(c);
  log.arena.free(b);
  CHECK(log.arena.allocate(3 * third) == a);
  CHECK(log.alive.size() == 1);
  log.arena.free(a);
  log.arena.free(keep);
}

TEST(large_blocks_get_a_segment_and_give_it_back) {
  Log log;
  void* small = log.arena.allocate(10);
  void* large = log.arena.allocate(Arena::kSegmentBytes + 1);
  CHECK(log.alive.size() == 2);
  log.arena.free(large);
  CHECK(log.alive.size() == 1);
  log.arena.free(small);
}

TEST(large_pages_are_asked_for_on_use_and_keep_the_values) {
  Log log;
  constexpr size_t kBytes = 16 << 20;
  auto* p = static_cast<unsigned char*>(log.arena.allocate(kBytes));
  std::vector<unsigned char> resident(kBytes / Arena::kAlignment);
  CHECK(mincore(p, kBytes, resident.data()) == 0);
  CHECK(std::none_of(resident.begin(), resident.end(), [](auto page) { return page & 1; }));
  for (size_t i = 0; i < kBytes; i += 4096) p[i] = static_cast<unsigned char>(i >> 12);
  log.arena.use_large_pages(p + 4096, kBytes - 4096);
  for (size_t i = 0; i < kBytes; i += 4096) CHECK(p[i] == static_cast<unsigned char>(i >> 12));
  char outside;
  log.arena.use_large_pages(&outside, kBytes);  // not engine memory: nothing happens
  log.arena.free(p);
}

TEST(location_names_segment_and_offset) {
  Log log;
  auto* p = static_cast<char*>(log.arena.allocate(10000));
  auto at = log.arena.locate(p + 100, 200);
  CHECK(at && log.alive.contains(at->segment));
  CHECK(log.arena.locate(p + 100, Arena::kSegmentBytes) == std::nullopt);
  char outside;
  CHECK(!log.arena.locate(&outside, 1));
  log.arena.free(p);
  CHECK(test::error_of([&] { log.arena.free(&outside); }).kind == ErrorKind::usage);
}

TEST(blocks_apart_have_pages_of_their_own) {
  Log log;
  auto* ordinary = static_cast<char*>(log.arena.allocate(4096));
  auto* apart = static_cast<char*>(log.arena.allocate_apart(Arena::kSegmentBytes));
  CHECK(log.alive.size() == 2);
  auto first = log.arena.locate(apart, Arena::kSegmentBytes);
  CHECK(first.has_value() && first->offset == 0);
  log.arena.free(ordinary);  // the ordinary segment is kept as a spare only when it is the last one
  log.arena.free(apart);
  CHECK(log.alive.empty());
  auto second = log.arena.locate(log.arena.allocate_apart(4096), 4096);
  CHECK(second.has_value() && second->segment != first->segment);
}

TEST(exhausted_memory_is_an_error_not_a_signal) {
  Log log;
  CHECK(test::error_of([&] { log.arena.allocate(size_t(1) << 50); }).kind == ErrorKind::shared_memory);
  signal(SIGXFSZ, SIG_IGN);
  rlimit before, small;
  getrlimit(RLIMIT_FSIZE, &before);
  small = before;
  small.rlim_cur = 1 << 20;
  setrlimit(RLIMIT_FSIZE, &small);
  auto error = test::error_of([&] { log.arena.allocate(1 << 22); });
  setrlimit(RLIMIT_FSIZE, &before);
  CHECK(error.kind == ErrorKind::shared_memory);
  CHECK(std::string(error.what()).find("MB") != std::string::npos);
  CHECK(log.arena.allocated_bytes() == 0);
}

// Large segments are unmapped by a thread, which a new segment waits for: their memory is free then.
TEST(large_segments_are_freed) {
  Log log;
  auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("memfd:paceline-arena") != std::string::npos;
    return count;
  };
  int before = mappings();
  void* large = log.arena.allocate(160 << 20);
  CHECK(mappings() == before + 1);
  log.arena.free(large);
  CHECK(log.alive.empty() && log.arena.allocated_bytes() == 0);
  void* next = log.arena.allocate_apart(4096);
  CHECK(mappings() == before + 1);
  log.arena.free(next);
}

int main() { return test::run_all(); }
