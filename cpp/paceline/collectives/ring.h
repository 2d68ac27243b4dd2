// All-reduce between hosts around a ring of one member per host.
//
// The tensor is cut into one CHUNK per host; a chunk into SEGMENTS, so that one segment is on the wire while the
// previous one is being added. Round t of the first h-1 rounds sends chunk (i - t) to the next member and adds what
// arrives to chunk (i - t - 1): afterwards member i has the whole sum of chunk i+1. The other h-1 rounds pass the
// finished chunks around. Each member sends 2(h-1)/h of the tensor, and every link is busy all the time. The order of
// summation depends on ranks only.
//
// A member adds up the inputs of all members on its host, segment by segment, just before they are sent or added, and
// writes each finished segment into all of their outputs: no separate pass over memory, before or after.
#pragma once
#include <memory>
#include <vector>

#include "paceline/collectives/exchange.h"

namespace paceline {

struct RingPart {
  std::vector<int> members;               // one of each host, in the order of the ring
  int position = 0;                       // of this member
  std::vector<const std::byte*> sources;  // this host's inputs, in rank order
  std::vector<std::byte*> destinations;   // this host's outputs; the first is this member's own
  uint64_t count = 0;                     // elements
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;
  size_t divisor = 1;
  bool streaming = false;  // the tensor is larger than the cache: write the copies of finished segments past it
};

class Ring {
 public:
  Ring(Exchange& exchange, RingPart part);
  ~Ring();
  Task run();

 private:
  class Progress;
  Exchange& exchange_;
  std::unique_ptr<Progress> progress_;
};

}  // namespace paceline
