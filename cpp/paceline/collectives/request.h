// The arguments of one rank's collective call, and the DESCRIPTOR of it that its peers read and compare.
//
// A request has input PARTS and output parts. A collective on one tensor has one part; if each peer has its own
// piece (scatter, gather, all-to-all), there is one part per member, in rank order:
//
//                    inputs                 outputs
//   all_reduce       1                      1
//   reduce           1                      1 at the root
//   broadcast        1 at the root          1 elsewhere
//   all_gather       1                      n
//   gather           1                      n at the root
//   scatter          n at the root          1
//   all_to_all       n                      n
//   reduce_scatter   n                      1
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "paceline/reduce/dtype.h"
#include "paceline/transport/arena.h"

namespace paceline {

enum class Kind : uint32_t {
  barrier,
  all_reduce,
  reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  scatter,
  gather,
  all_to_all,
  join,  // of named operations only: contributes zeros until all members have joined
  count_
};

const char* name_of(Kind kind);
bool is_reducing(Kind kind);
bool is_rooted(Kind kind);
bool has_pieces(Kind kind);  // sizes may differ from pair to pair

struct Part {
  void* data = nullptr;
  uint64_t count = 0;  // elements
};

struct Request {
  Kind kind = Kind::barrier;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  int root = 0;  // group rank
  std::vector<Part> inputs, outputs;
  std::vector<int64_t> shape;  // for messages, and for comparison if all tensors must be alike

  size_t element_bytes() const { return size_of(dtype); }
};

// How the other ranks can read a rank's inputs.
enum class Placement : uint8_t {
  in_slot,  // small: copied into the slot itself
  exposed,  // in engine memory: read in place
  staged,   // ordinary memory: streamed through staging buffers
};

constexpr int kMaxShownDims = 6;

// Plain data, in shared memory and on the wire.
struct Descriptor {
  uint64_t number = 0;  // of the operation in its group
  Kind kind = Kind::barrier;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  Placement placement = Placement::staged;
  uint8_t ndim = 0;
  int32_t root = 0;
  uint32_t detail = 0;  // of a named operation: a hash of what else must be alike
  uint64_t name = 0;    // its hash; 0: the operation has no name
  uint64_t count = 0;   // elements of all inputs, or of the output where there are none
  int64_t shape[kMaxShownDims] = {};
  Location output;  // engine memory for the result (all_reduce, reduce at the root)
};
static_assert(sizeof(Descriptor) == 104);

Descriptor describe(const Request& request, uint64_t number);
// "all_reduce #412 sum float32[1024,512]"
std::string to_text(const Descriptor& descriptor);

// Throws collective_mismatch, with the same message on every rank, if the two calls do not match.
void require_match(const Descriptor& a, int rank_a, const Descriptor& b, int rank_b);
[[noreturn]] void raise_piece_mismatch(const Descriptor& d, int from, uint64_t sent, int to, uint64_t expected);

}  // namespace paceline
