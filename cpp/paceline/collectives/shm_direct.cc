// Collectives on one host whose inputs can be read where they are: small ones in the slots, and tensors in
// engine memory.
//
// The reader does the work: after all members have arrived, each copies or folds what it needs straight from
// the others' memory. A large all-reduce is cut into one SLICE per member; its owner folds that slice of all
// inputs and writes the result into all outputs, so every byte is read once and written once, and one
// barrier at the end is enough. Nobody else reads or writes that slice, so it also works in place.
#include <algorithm>
#include <cstring>

#include "paceline/base/error.h"
#include "paceline/collectives/team.h"
#include "paceline/reduce/kernels.h"

namespace paceline {
namespace {

uint64_t slice_start(uint64_t count, size_t element_bytes, int member, int members) {
  uint64_t line = std::max<uint64_t>(1, 64 / element_bytes);  // slices start on cache lines
  uint64_t lines = (count + line - 1) / line;
  return std::min(count, lines * uint64_t(member) / uint64_t(members) * line);
}

}  // namespace

// Where piece `piece` of that member's inputs can be read.
const std::byte* Team::source(const Context& c, int member, int piece) const {
  const Piece* pieces = this->pieces(member, c.op);
  size_t es = c.request.element_bytes();
  if (c.descriptor_of(*this, member).placement == Placement::in_slot) {
    uint64_t before = 0;
    for (int i = 0; i < piece; ++i) before += pieces[i].gives;
    return block(member).slots[c.op & 1] + before * es;
  }
  if (member == me_) return static_cast<const std::byte*>(c.request.inputs[size_t(piece)].data);
  if (pieces[piece].gives == 0) return nullptr;
  std::byte* p = link(member)->resolve(pieces[piece].where, pieces[piece].gives * es);
  if (!p) throw Error(ErrorKind::bad_frame, "rank " + std::to_string(rank_of(member)) +
                                                " named engine memory that does not exist", rank_of(member));
  return p;
}

std::byte* Team::output_of(const Context& c, int member) const {
  if (member == me_) return static_cast<std::byte*>(c.request.outputs[0].data);
  const Descriptor& d = c.descriptor_of(*this, member);
  std::byte* p = link(member)->resolve(d.output, d.count * c.request.element_bytes());
  if (!p) throw Error(ErrorKind::bad_frame, "rank " + std::to_string(rank_of(member)) +
                                                " named engine memory that does not exist", rank_of(member));
  return p;
}

// My slice of all inputs into the outputs of all members that want it.
void Team::reduce_slice(const Context& c) {
  const Request& r = c.request;
  size_t es = r.element_bytes();
  uint64_t count = r.inputs[0].count;
  uint64_t lo = slice_start(count, es, me_, size()), hi = slice_start(count, es, me_ + 1, size());
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  bool in_place = true;  // then the lines to write have just been read, and streaming would only lose them
  for (int m = 0; m < size(); ++m) {
    sources.push_back(source(c, m, 0) + lo * es);
    if (!c.is_destination(m)) continue;
    destinations.push_back(output_of(c, m) + lo * es);
    in_place &= destinations.back() == sources.back();
  }
  reduce({r.dtype, r.op, c.divisor}, sources.data(), sources.size(), destinations.data(), destinations.size(),
         hi - lo, count * es >= kStreamingBytes && !in_place);
}

// Everything that I need, from everybody's inputs into my outputs.
void Team::take_whole(const Context& c) {
  const Request& r = c.request;
  if (!c.is_destination(me_)) return;
  size_t es = r.element_bytes();
  int piece = c.personal() ? me_ : 0;
  if (is_reducing(r.kind)) {
    std::vector<const void*> sources;
    for (int m = 0; m < size(); ++m) sources.push_back(source(c, m, piece));
    void* to = r.outputs[0].data;
    reduce({r.dtype, r.op, c.divisor}, sources.data(), sources.size(), &to, 1, r.outputs[0].count,
           r.outputs[0].count * es >= kStreamingBytes);
    return;
  }
  for (int i = 0; i < size(); ++i) {
    int m = (me_ + i) % size();  // start at different members: not all pull at one memory at once
    if (!c.is_source(m) || (r.kind == Kind::broadcast && m == me_)) continue;
    const Part& out = r.outputs[r.outputs.size() == 1 ? 0 : size_t(m)];
    size_t bytes = out.count * es;
    const std::byte* from = source(c, m, piece);
    if (bytes && out.data != from) copy(out.data, from, bytes, bytes >= kStreamingBytes);
  }
}

Task Team::run_whole(Context& c) {
  bool in_place = c.placement == Placement::exposed;
  if (in_place && (c.request.kind == Kind::all_reduce || c.request.kind == Kind::reduce)) reduce_slice(c);
  else take_whole(c);
  if (!in_place) co_return;  // slots are reused only after the next arrival of everybody
  post(&Block::finished, c.op);
  Reached finished(*this, &Block::finished, c.op);
  co_await park(finished);
}

}  // namespace paceline
