// Collectives on one host: members post their requests, compare them, and run them.
//
// This file has those whose inputs can be read in place: small ones in the slots, and tensors in engine memory.
// The reader does the work: after all members have arrived, each copies or folds what it needs directly from the
// other members' memory. A large all-reduce is split into one SLICE per member; its owner folds that slice of all
// inputs and writes the result into all outputs, so every byte is read once and written once, and one barrier at
// the end is enough. No other member reads or writes that slice, so it also works in place.
#include "paceline/collectives/team.h"

#include <algorithm>
#include <cstring>

#include "paceline/base/error.h"
#include "paceline/base/fence.h"
#include "paceline/reduce/kernels.h"

namespace paceline {

uint64_t slice_start(uint64_t count, size_t element_bytes, int member, int members) {
  uint64_t line = std::max<uint64_t>(1, 64 / element_bytes);
  uint64_t lines = (count + line - 1) / line;
  return std::min(count, lines * uint64_t(member) / uint64_t(members) * line);
}

void Team::post(Counter Block::* counter, uint64_t value) {
  (block(me_).*counter).value.store(value, std::memory_order_release);
  full_fence();
  for (auto& link : links_)
    if (link) link->ring_if_sleeping();
}

// Writes the request and small inputs into this member's block, then publishes them to the other members.
void Team::post_request(Context& c) {
  const Request& r = c.request;
  Descriptor& d = block(me_).descriptors[c.op & 1];
  d = c.shown;
  size_t bytes = 0;
  for (auto& part : r.inputs) bytes += part.count * r.element_bytes();
  Piece* pieces = this->pieces(me_, c.op);
  bool all_located = true;
  for (int m = 0; m < size(); ++m) pieces[m] = {};
  if (bytes <= kSlotBytes) {
    d.placement = Placement::in_slot;
    std::byte* to = block(me_).slots[c.op & 1];
    for (auto& part : r.inputs) {
      if (part.count) std::memcpy(to, part.data, part.count * r.element_bytes());
      to += part.count * r.element_bytes();
    }
  } else {
    for (size_t i = 0; i < r.inputs.size(); ++i) {
      auto at = engine_.arena().locate(r.inputs[i].data, r.inputs[i].count * r.element_bytes());
      if (at) pieces[i].where = *at;
      else if (r.inputs[i].count) all_located = false;
    }
    for (auto& link : links_)  // a neighbour must know a segment before it is named
      if (link && all_located) all_located = link->flushed();
    d.placement = all_located ? Placement::exposed : Placement::staged;
  }
  for (size_t i = 0; i < r.inputs.size(); ++i) pieces[i].gives = r.inputs[i].count;
  for (size_t i = 0; i < r.outputs.size(); ++i) pieces[i].expects = r.outputs[i].count;
  if ((r.kind == Kind::all_reduce || r.kind == Kind::reduce) && !r.outputs.empty() && bytes > kSlotBytes)
    if (auto at = engine_.arena().locate(r.outputs[0].data, r.outputs[0].count * r.element_bytes())) d.output = *at;
  post(&Block::arrived, c.op);
}

// Chooses a placement that all members can use, and compares the sizes of pieces.
void Team::resolve(Context& c) {
  const Descriptor& first = c.descriptor_of(*this, 0);
  bool all_in_slot = true, all_readable = true;
  c.outputs_exposed = true;
  for (int m = 0; m < size(); ++m) {
    const Descriptor& d = c.descriptor_of(*this, m);
    if (c.is_source(m)) {
      all_in_slot &= d.placement == Placement::in_slot;
      all_readable &= d.placement != Placement::staged;
    }
    if (c.is_destination(m)) c.outputs_exposed &= d.output.segment != 0;
  }
  bool needs_outputs = c.request.kind == Kind::all_reduce || c.request.kind == Kind::reduce;
  if (all_in_slot) c.placement = Placement::in_slot;
  else if (all_readable && (!needs_outputs || c.outputs_exposed)) c.placement = Placement::exposed;
  else c.placement = Placement::staged;
  if (c.request.kind != Kind::barrier) engine_.traffic().on_host.fetch_add(handed_over(c), std::memory_order_relaxed);
  if (!has_pieces(c.request.kind) || c.takes_any_size) return;
  for (int from = 0; from < size(); ++from)
    for (int to = 0; to < size(); ++to) {
      if (!c.is_source(from) || !c.is_destination(to)) continue;
      uint64_t gives = pieces(from, c.op)[c.personal() ? to : 0].gives;
      bool many_outputs = c.request.kind != Kind::scatter;
      uint64_t expects = pieces(to, c.op)[many_outputs ? from : 0].expects;
      if (gives != expects) raise_piece_mismatch(first, rank_of(from), gives, rank_of(to), expects);
    }
}

// Bytes that the other members read from this one. A large reduction is split into slices: each member sends all
// slices but its own, and then the result of its own.
uint64_t Team::handed_over(const Context& c) const {
  const Request& r = c.request;
  bool in_slices = (r.kind == Kind::all_reduce || r.kind == Kind::reduce) && c.placement != Placement::in_slot;
  uint64_t bytes = 0;
  for (int m = 0; m < size(); ++m) {
    if (m == me_) continue;
    if (in_slices) bytes += r.inputs[0].count * r.element_bytes() / uint64_t(size()) * (c.is_destination(m) ? 2 : 1);
    else if (c.is_source(me_) && c.is_destination(m))
      bytes += r.inputs[c.personal() ? size_t(m) : 0].count * r.element_bytes();
  }
  return bytes;
}

Task Team::run(const Request& request, const Descriptor& shown, size_t divisor, Started started) {
  Context c{request, shown, divisor, started.op};
  if (started.is_reduced) {
    co_await end(c);
    co_return;
  }
  co_await begin(c);
  co_await run_resolved(c);
}

Task Team::run_resolved(Context& c) {
  if (c.request.kind == Kind::barrier) co_return;
  if (c.placement == Placement::staged) co_await run_staged(c);
  else co_await run_whole(c);
}

Task Team::arrive(Context& c) {
  if (!c.op) {
    c.op = ++op_;
    post_request(c);
  }
  Reached arrived(*this, &Block::arrived, c.op);
  co_await park(arrived);
  // A member may have arrived and failed: its request is no longer valid.
  if (has_failure()) std::rethrow_exception(published_failure());
}

void Team::compare(Context& c) {
  const Descriptor& first = c.descriptor_of(*this, 0);
  for (int m = 1; m < size(); ++m) require_match(first, rank_of(0), c.descriptor_of(*this, m), rank_of(m));
  resolve(c);
}

Task Team::begin(Context& c) {
  co_await arrive(c);
  compare(c);
}

bool Team::try_reduce(Context& c, int num_looks, Started& started) {
  auto comes = [&](Counter Block::* counter) {
    Reached reached(*this, counter, c.op);
    for (int looks = 0; !reached.ready(); cpu_pause())
      if (++looks >= num_looks) return false;
    return true;
  };
  started.op = c.op = ++op_;
  post_request(c);
  if (!comes(&Block::arrived)) return false;
  if (has_failure()) std::rethrow_exception(published_failure());
  for (int m = 0; m < size(); ++m) {
    const Descriptor& d = c.descriptor_of(*this, m);
    if (d.placement == Placement::staged || (d.placement == Placement::exposed && !d.output.segment)) return false;
  }
  compare(c);
  if (c.placement == Placement::in_slot) {
    take_whole(c);
    return true;
  }
  reduce_slice(c);
  started.is_reduced = true;
  post(&Block::finished, c.op);
  return comes(&Block::finished);
}

Task Team::meet(Context& c, std::vector<Descriptor>& calls) {
  co_await arrive(c);
  for (int m = 0; m < size(); ++m) calls.push_back(c.descriptor_of(*this, m));
}

uint64_t Team::given_by(const Context& c, int member) const {
  return pieces(member, c.op)[c.personal() ? me_ : 0].gives;
}

Task Team::end(Context& c) {
  post(&Block::finished, c.op);
  Reached finished(*this, &Block::finished, c.op);
  co_await park(finished);
}

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
  if (!p)
    throw Error(ErrorKind::bad_frame,
                "rank " + std::to_string(rank_of(member)) + " named engine memory that does not exist",
                rank_of(member));
  return p;
}

std::byte* Team::output_of(const Context& c, int member) const {
  if (member == me_) return static_cast<std::byte*>(c.request.outputs[0].data);
  const Descriptor& d = c.descriptor_of(*this, member);
  std::byte* p = link(member)->resolve(d.output, d.count * c.request.element_bytes());
  if (!p)
    throw Error(ErrorKind::bad_frame,
                "rank " + std::to_string(rank_of(member)) + " named engine memory that does not exist",
                rank_of(member));
  return p;
}

// Folds this member's slice of all inputs into the outputs of all members that get it.
void Team::reduce_slice(const Context& c) {
  const Request& r = c.request;
  size_t es = r.element_bytes();
  uint64_t count = r.inputs[0].count;
  uint64_t lo = slice_start(count, es, me_, size()), hi = slice_start(count, es, me_ + 1, size());
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  bool in_place = true;  // then the cache lines to write have just been read, and streaming would evict them
  for (int m = 0; m < size(); ++m) {
    sources.push_back(source(c, m, 0) + lo * es);
    if (!c.is_destination(m)) continue;
    destinations.push_back(output_of(c, m) + lo * es);
    in_place &= destinations.back() == sources.back();
  }
  reduce({r.dtype, r.op, c.divisor}, sources.data(), sources.size(), destinations.data(), destinations.size(), hi - lo,
         count * es >= kStreamingBytes && !in_place);
}

// Copies or folds what this member needs, from all members' inputs into its outputs.
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
    int m = (me_ + i) % size();  // start at different members, so that not all read the same memory at once
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
  if (in_place) co_await end(c);  // slots are reused only after all members have arrived at the next operation
}

void Team::publish_failure(ErrorKind kind, int rank, const std::string& text) {
  uint32_t none = 0;
  if (!header_->failed.compare_exchange_strong(none, 1)) return;
  header_->error_kind = int32_t(kind);
  header_->error_rank = rank;
  std::strncpy(header_->error_text, text.c_str(), sizeof header_->error_text - 1);
  header_->failed.store(2, std::memory_order_release);
  full_fence();
  for (auto& link : links_)
    if (link) link->ring_if_sleeping();
}

bool Team::has_failure() const { return header_->failed.load(std::memory_order_acquire) == 2; }

std::exception_ptr Team::published_failure() const {
  if (!has_failure()) return nullptr;
  char text[sizeof header_->error_text];
  std::memcpy(text, header_->error_text, sizeof text);
  text[sizeof text - 1] = 0;
  return std::make_exception_ptr(Error(ErrorKind(header_->error_kind), text, header_->error_rank));
}

}  // namespace paceline
