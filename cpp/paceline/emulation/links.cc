#include "paceline/emulation/links.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "paceline/base/error.h"
#include "paceline/transport/segment.h"

namespace paceline {
namespace {
constexpr uint64_t kMagic = 0x31736b6e696c6c70;  // "pllinks1"
constexpr uint32_t kMaxHosts = 4096;
// Ethernet, IP and TCP add 66 bytes to each packet of 1448: a link of 100 Mbit/s carries 95.6 Mbit/s.
constexpr size_t kPacket = 1448, kPacketHeaders = 66;
constexpr double kChunk_s = 250e-6;
constexpr size_t kLeastChunk = 4 << 10, kMostChunk = 256 << 10;
// How far ahead a host may send. On a busy machine a process runs late by some milliseconds; the link must not stand
// idle for that, as it would not with a kernel that sends from its buffers.
constexpr double kWindow_s = 16e-3;
constexpr size_t kLeastWindow = 16 << 10;
constexpr uint64_t kTurn_ns = 2'000'000;  // the most that a small message waits for others

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorKind::usage, "emulated links " + path + ": " + why +
                                    "; unset PACELINE_EMULATE_LINKS: `paceline compare` sets it for its own jobs");
}
}  // namespace

void EmulatedLinks::create(const std::string& path, const LinkFacts& facts) {
  if (facts.num_hosts == 0 || facts.num_hosts > kMaxHosts || !(facts.bytes_per_s > 0) || !(facts.latency_s >= 0))
    throw Error(ErrorKind::usage, "emulated links: expected 1 to " + std::to_string(kMaxHosts) +
                                      " hosts, a rate above 0 and a latency of 0 or more");
  Fd file(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  Header header{kMagic, facts};
  if (!file || ftruncate(file.get(), off_t(file_bytes(facts.num_hosts))) != 0 ||
      pwrite(file.get(), &header, sizeof header, 0) != ssize_t(sizeof header))
    throw Error(ErrorKind::shared_memory, "emulated links: cannot write " + path + ": " + strerror(errno));
}

EmulatedLinks::EmulatedLinks(const std::string& path) {
  Fd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) refuse(path, strerror(errno));
  struct stat found{};
  Header header{};
  if (fstat(file.get(), &found) != 0 || pread(file.get(), &header, sizeof header, 0) != ssize_t(sizeof header) ||
      header.magic != kMagic || header.facts.num_hosts == 0 || header.facts.num_hosts > kMaxHosts ||
      size_t(found.st_size) != file_bytes(header.facts.num_hosts) || !(header.facts.bytes_per_s > 0) ||
      !(header.facts.latency_s >= 0))
    refuse(path, "is no file of emulated links");
  facts_ = header.facts;
  bytes_ = size_t(found.st_size);
  memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (memory_ == MAP_FAILED) refuse(path, strerror(errno));
  hosts_ = reinterpret_cast<Directions*>(memory_) + 1;  // after the header
  chunk_bytes_ = std::clamp(size_t(facts_.bytes_per_s * kChunk_s), kLeastChunk, kMostChunk);
  window_ns_ = std::max(uint64_t(kWindow_s * 1e9), duration_ns(kLeastWindow));
  latency_ns_ = uint64_t(facts_.latency_s * 1e9);
}

EmulatedLinks::~EmulatedLinks() { munmap(memory_, bytes_); }

uint64_t EmulatedLinks::now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

uint64_t EmulatedLinks::duration_ns(size_t bytes) const {
  size_t on_wire = bytes + (bytes + kPacket - 1) / kPacket * kPacketHeaders;
  return uint64_t(std::llround(double(on_wire) / facts_.bytes_per_s * 1e9));
}

uint64_t EmulatedLinks::busy_until(uint32_t from, uint32_t to, uint64_t now_ns) const {
  uint64_t until =
      std::max(hosts_[from].out_ns.load(std::memory_order_relaxed), hosts_[to].in_ns.load(std::memory_order_relaxed));
  // Ask again when half of what may wait has left: a process then wakes for several chunks.
  return until > now_ns + window_ns_ ? until - window_ns_ / 2 : 0;
}

uint64_t EmulatedLinks::send(uint32_t from, uint32_t to, size_t bytes, uint64_t now_ns, bool is_small) {
  uint64_t duration = duration_ns(bytes);
  auto occupy = [&](std::atomic<uint64_t>& direction, uint64_t not_before) {
    uint64_t until = direction.load(std::memory_order_relaxed), end;
    do {
      end = std::max(until, not_before) + duration;
    } while (!direction.compare_exchange_weak(until, end, std::memory_order_relaxed));
    return end;
  };
  uint64_t left = occupy(hosts_[from].out_ns, now_ns);
  // The first bit enters the second link when it has left the first one, if that link is free.
  uint64_t arrives = occupy(hosts_[to].in_ns, left - duration);
  return (is_small ? std::min(arrives, now_ns + kTurn_ns + duration) : arrives) + latency_ns_;
}

}  // namespace paceline
