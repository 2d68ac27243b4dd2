#include "paceline/collectives/team.h"

#include <algorithm>
#include <cstring>

#include "paceline/base/error.h"
#include "paceline/base/fence.h"

namespace paceline {

struct Team::Header {
  uint64_t magic;
  uint32_t generation;
  uint32_t num_members;
  std::atomic<uint32_t> failed;  // 0, then 1 while the failure is being written, then 2
  int32_t error_kind;
  int32_t error_rank;
  char error_text[2048];
};

namespace {
constexpr uint64_t kMagic = 0x314d4145544c4350;  // "PCLTEAM1"

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
size_t piece_bytes(size_t members) { return round_up(2 * members * sizeof(Piece), 64); }
}  // namespace

Team::Team(Engine& engine, uint64_t group_id, uint32_t generation, std::vector<int> members, double timeout_s)
    : engine_(engine), members_(std::move(members)) {
  int my_rank = engine.config().rank;
  me_ = int(std::find(members_.begin(), members_.end(), my_rank) - members_.begin());
  size_t head = round_up(sizeof(Header), 4096), each = round_up(sizeof(Block) + piece_bytes(members_.size()), 4096);
  uint64_t bytes = head + each * members_.size();
  for (int rank : members_) {
    links_.push_back(rank == my_rank ? nullptr : engine.link(rank));
    if (rank != my_rank && !links_.back())
      throw Error(ErrorKind::peer_lost, "rank " + std::to_string(my_rank) + ": rank " + std::to_string(rank) +
                                            " is gone; a group with it cannot be formed", rank);
  }
  if (me_ == 0) {
    try {
      segment_ = Segment::create("paceline-team", bytes);
    } catch (const Error&) {
      for (auto& link : links_)  // without a descriptor: the others must not wait for it
        if (link) link->send({0, LinkKind::group, group_id, 0, generation});
      throw;
    }
    header_ = reinterpret_cast<Header*>(segment_.data());
    header_->generation = generation;
    header_->num_members = uint32_t(members_.size());
    header_->magic = kMagic;
    for (auto& link : links_)
      if (link) link->send({0, LinkKind::group, group_id, bytes, generation}, {segment_.fd()});
  } else {
    uint64_t found = 0;
    Fd fd = engine.expect(members_[0], LinkKind::group, group_id, generation, found, timeout_s);
    if (!fd)
      throw Error(ErrorKind::shared_memory, "rank " + std::to_string(members_[0]) +
                                                " could not get the shared memory for a group; see its error.",
                  members_[0]);
    if (found != bytes)
      throw Error(ErrorKind::bad_frame, "rank " + std::to_string(members_[0]) + " made a group segment of " +
                                            std::to_string(found) + " bytes, expected " + std::to_string(bytes) +
                                            ": do the members agree about the group?", members_[0]);
    segment_ = Segment::map(std::move(fd), bytes);
    header_ = reinterpret_cast<Header*>(segment_.data());
    if (header_->magic != kMagic || header_->generation != generation)
      throw Error(ErrorKind::bad_frame, "the group's segment is of another generation or version", members_[0]);
  }
  for (size_t m = 0; m < members_.size(); ++m) {
    std::byte* base = segment_.data() + head + m * each;
    blocks_.push_back(reinterpret_cast<Block*>(base));
    pieces_.push_back(reinterpret_cast<Piece*>(base + sizeof(Block)));
  }
}

void Team::post(Counter Block::*counter, uint64_t value) {
  (block(me_).*counter).value.store(value, std::memory_order_release);
  full_fence();
  for (auto& link : links_)
    if (link) link->ring_if_sleeping();
}

// Writes what I ask for into my block, and small inputs with it, then shows it to the others.
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
    for (auto& link : links_)  // a segment that a neighbour has not heard of cannot be named
      if (link && all_located) all_located = link->flushed();
    d.placement = all_located ? Placement::exposed : Placement::staged;
  }
  for (size_t i = 0; i < r.inputs.size(); ++i) pieces[i].gives = r.inputs[i].count;
  for (size_t i = 0; i < r.outputs.size(); ++i) pieces[i].expects = r.outputs[i].count;
  if ((r.kind == Kind::all_reduce || r.kind == Kind::reduce) && !r.outputs.empty() && bytes > kSlotBytes)
    if (auto at = engine_.arena().locate(r.outputs[0].data, r.outputs[0].count * r.element_bytes()))
      d.output = *at;
  post(&Block::arrived, c.op);
}

// Compares what all members posted and settles on a placement that all can use.
void Team::check_requests(Context& c) {
  const Descriptor& first = c.descriptor_of(*this, 0);
  for (int m = 1; m < size(); ++m) require_match(first, rank_of(0), c.descriptor_of(*this, m), rank_of(m));
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
  if (!has_pieces(c.request.kind)) return;
  for (int from = 0; from < size(); ++from)
    for (int to = 0; to < size(); ++to) {
      if (!c.is_source(from) || !c.is_destination(to)) continue;
      uint64_t gives = pieces(from, c.op)[c.personal() ? to : 0].gives;
      bool many_outputs = c.request.kind != Kind::scatter;
      uint64_t expects = pieces(to, c.op)[many_outputs ? from : 0].expects;
      if (gives != expects) raise_piece_mismatch(first, rank_of(from), gives, rank_of(to), expects);
    }
}

// Payload that the others take from me. A large reduction is shared out in slices: each member hands over all but
// its own, and then the result of that.
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

Task Team::run(const Request& request, const Descriptor& shown, size_t divisor) {
  Context c{request, shown, divisor};
  c.op = ++op_;
  post_request(c);
  Reached arrived(*this, &Block::arrived, c.op);
  co_await park(arrived);
  // Somebody may have arrived and given up: what it posted stands for nothing any more.
  if (auto failure = published_failure()) std::rethrow_exception(failure);
  check_requests(c);
  if (request.kind == Kind::barrier) co_return;
  engine_.traffic().on_host.fetch_add(handed_over(c), std::memory_order_relaxed);
  if (c.placement == Placement::staged) co_await run_staged(c);
  else co_await run_whole(c);
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
