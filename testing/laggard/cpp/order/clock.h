// Vector clocks, one component for each stream.
//
// A stream counts its launches in its own component. Clock a "has seen" launch n of stream s if
// a[s] >= n. An event carries the clock of its stream; a wait joins it into the clock of the waiting
// stream. Two accesses to the same bytes, one of them a write, race if the later one was launched
// while its stream had not seen the earlier one. This needs no delay and no luck: it is decided at
// the launch.
//
// All host threads share one clock. Threads order each other with locks and queues that the device
// cannot see, so a clock for each would report races in correct programs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "device.h"

namespace laggard {

struct VectorClock {
  std::array<uint64_t, kStreams> seen{};

  void join(const VectorClock& other) {
    for (int i = 0; i < kStreams; ++i) seen[i] = std::max(seen[i], other.seen[i]);
  }
};

}  // namespace laggard
