// Emulated links: hosts that are pretended on one machine, each with a link of the same rate and latency to a switch.
//
// A HOST is some processes of a job: those whose ranks are equal modulo the number of hosts, so a worker and the
// server beside it. What a host sends occupies its link for as long as its bytes take at that rate; what arrives at a
// host occupies its link in the other direction. These two times of each host, UNTIL WHEN its directions are occupied,
// are all that the processes share. They are in a file that each process maps.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace paceline {

struct LinkFacts {
  uint32_t num_hosts = 0;
  double bytes_per_s = 0;
  double latency_s = 0;  // one way
};

class EmulatedLinks {
 public:
  static void create(const std::string& path, const LinkFacts& facts);
  // Throws usage if there is no such file, or it is not one that create() has written.
  explicit EmulatedLinks(const std::string& path);
  ~EmulatedLinks();
  EmulatedLinks(const EmulatedLinks&) = delete;

  const LinkFacts& facts() const { return facts_; }
  uint32_t host_of(int rank) const { return uint32_t(rank) % facts_.num_hosts; }
  // As many bytes as pass the link in a moment: a larger piece would delay other connections.
  size_t chunk_bytes() const { return chunk_bytes_; }
  // 0 if `from` may send to `to` now, else the time (ns) at which it should ask again. What it sends waits at the
  // receiver, so this is only about the order in which connections use a link.
  uint64_t busy_until(uint32_t from, uint32_t to, uint64_t now_ns) const;
  // Sends bytes: returns the time (ns) at which the last of them has arrived. A small message waits only for a little
  // of what is on its way, as it does where connections take turns; it occupies the link like any other.
  uint64_t send(uint32_t from, uint32_t to, size_t bytes, uint64_t now_ns, bool is_small = false);
  uint64_t duration_ns(size_t bytes) const;  // on a link

  static uint64_t now_ns();  // the same clock in all processes of the machine

 private:
  struct Header {
    uint64_t magic;
    LinkFacts facts;
  };
  struct Directions {
    alignas(64) std::atomic<uint64_t> out_ns, in_ns;  // occupied until then
  };
  static size_t file_bytes(uint32_t num_hosts) { return sizeof(Directions) * (size_t(num_hosts) + 1); }

  void* memory_ = nullptr;
  size_t bytes_ = 0;
  Directions* hosts_ = nullptr;
  LinkFacts facts_;
  size_t chunk_bytes_ = 0;
  uint64_t window_ns_ = 0, latency_ns_ = 0;
};

}  // namespace paceline
