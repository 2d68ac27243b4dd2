// Reductions and broadcasts of groups that span hosts: shared memory inside each host, the network between hosts.
//
// A large all-reduce is cut into one SLICE per local index: the members with that index on all hosts form a ring
// (ring.h), so all members of a host share the work. Hosts with fewer members set the number of rings. Everything else
// goes through one LEADER per host; between the leaders, small tensors go by recursive doubling.
#include <algorithm>
#include <cstring>

#include "paceline/base/error.h"
#include "paceline/collectives/exchange.h"
#include "paceline/collectives/ring.h"
#include "paceline/reduce/kernels.h"

namespace paceline {
namespace {
constexpr uint64_t kDoublingBytes = 32 << 10;  // up to this size latency matters, not bandwidth
constexpr uint64_t kSegmentBytes = 256 << 10;  // of a broadcast
}  // namespace

Task Group::run_spanning(const Request& request, const Descriptor& shown) {
  switch (request.kind) {
    case Kind::barrier: {
      // All members of this host arrive; then all leaders; then the members of this host continue.
      uint8_t token = 0;
      Request r;
      r.dtype = DType::uint8;
      r.op = ReduceOp::max;
      Request local;
      if (team_) co_await team_->run(local, shown, 1);
      if (me_ == local_[0]) co_await doubling_all_reduce(r, shown, &token, 1);
      if (team_) co_await team_->run(local, shown, 1);
      co_return;
    }
    case Kind::all_reduce:
    case Kind::reduce: co_return co_await reduce_spanning(request, shown);
    case Kind::broadcast: co_return co_await broadcast_spanning(request, shown);
    default: co_return co_await exchange_pieces(request, shown);
  }
}

// This member's part of an all-reduce between hosts; its sources and destinations are slices of this host's tensors.
Task Group::run_ring(const Request& r, const Descriptor& shown, RingPart part) {
  part.position = my_host_;
  part.dtype = r.dtype;
  part.op = r.op;
  part.divisor = r.op == ReduceOp::mean ? size_t(size()) : 1;
  part.streaming = r.inputs[0].count * r.element_bytes() >= kStreamingBytes;
  Exchange exchange(*this, shown);
  Ring ring(exchange, std::move(part));
  co_await ring.run();
}

Task Group::all_reduce_in_rings(const Request& r, const Descriptor& shown) {
  const size_t es = r.element_bytes();
  const uint64_t count = r.inputs[0].count;
  const int rings = int(num_rings_), index = team_ ? team_->me() : 0;
  auto slice = [&](int i) { return i < rings ? slice_start(count, es, i, rings) : count; };
  const uint64_t start = slice(index), size = slice(index + 1) - start;
  auto part_of = [&](const Part& whole, int i) {
    return Part{static_cast<std::byte*>(whole.data) + slice(i) * es, slice(i + 1) - slice(i)};
  };
  const Part in = part_of(r.inputs[0], index), out = part_of(r.outputs[0], index);
  RingPart mine;
  if (index < rings) mine.members = ring(size_t(index));
  mine.count = size;
  mine.destinations.push_back(static_cast<std::byte*>(out.data));
  if (!team_) {
    mine.sources.push_back(static_cast<const std::byte*>(in.data));
    co_return co_await run_ring(r, shown, std::move(mine));
  }

  Team::Context c{r, shown, 1};
  co_await team_->begin(c);
  if (c.placement == Placement::exposed) {  // read and write the memory of all members of this host in place
    for (int m = 0; m < team_->size(); ++m) {
      mine.sources.push_back(team_->source(c, m, 0) + start * es);
      if (m != index) mine.destinations.push_back(team_->output_of(c, m) + start * es);
    }
    if (index < rings) co_await run_ring(r, shown, std::move(mine));
    co_return co_await team_->end(c);
  }
  // Ordinary memory: first this host's sums, to the members of the rings; last their results, to all members.
  Request inside = r;
  inside.kind = Kind::reduce_scatter;
  inside.inputs.clear();
  for (int m = 0; m < team_->size(); ++m) inside.inputs.push_back(part_of(r.inputs[0], m));
  inside.outputs.assign(1, out);
  co_await team_->run(inside, shown, 1);
  if (index < rings) {
    mine.sources.push_back(static_cast<const std::byte*>(out.data));
    co_await run_ring(r, shown, std::move(mine));
  }
  inside.kind = Kind::all_gather;
  inside.inputs.assign(1, out);
  inside.outputs.clear();
  for (int m = 0; m < team_->size(); ++m) inside.outputs.push_back(part_of(r.outputs[0], m));
  co_await team_->run(inside, shown, 1);
}

Task Group::reduce_spanning(const Request& request, const Descriptor& shown) {
  size_t es = request.element_bytes();
  uint64_t count = request.inputs[0].count;
  if (request.kind == Kind::all_reduce && count * es > kDoublingBytes)
    co_return co_await all_reduce_in_rings(request, shown);
  bool leader = me_ == local_[0], wanted = request.kind == Kind::all_reduce || me_ == request.root;
  // The leader works in its output, or in separate memory if it has none.
  std::vector<std::byte> scratch;
  Part result = wanted ? request.outputs[0] : Part{};
  if (leader && !wanted) {
    scratch.resize(count * es);
    result = {scratch.data(), count};
  }

  // 1. Inside each host, to the leader.
  if (team_) {
    Request inside = request;
    inside.kind = Kind::reduce;
    inside.root = 0;
    inside.outputs.clear();
    if (leader) inside.outputs.push_back(result);
    co_await team_->run(inside, shown, 1);
  }
  // 2. Between the leaders.
  if (leader && !team_ && result.data != request.inputs[0].data)
    copy(result.data, request.inputs[0].data, count * es, false);
  if (leader && count * es <= kDoublingBytes) {
    co_await doubling_all_reduce(request, shown, result.data, count);
  } else if (leader) {
    RingPart part;
    part.members = leaders_;
    part.count = count;
    part.sources.push_back(static_cast<const std::byte*>(result.data));
    part.destinations.push_back(static_cast<std::byte*>(result.data));
    co_await run_ring(request, shown, std::move(part));
  }
  // 3. From the leader to the members of this host that get the result.
  if (!team_) co_return;
  Request back = request;
  back.inputs.clear();
  back.outputs.clear();
  back.root = 0;
  if (request.kind == Kind::all_reduce) {
    back.kind = Kind::broadcast;
    if (leader) back.inputs.push_back(result);
    else back.outputs.push_back(result);
  } else {
    back.kind = Kind::scatter;  // everything to the root (if it is on this host), nothing to the other members
    if (leader)
      for (int m : local_) back.inputs.push_back(m == request.root ? result : Part{});
    back.outputs.push_back(me_ == request.root ? result : Part{});
  }
  co_await team_->run(back, shown, 1);
}

Task Group::broadcast_spanning(const Request& request, const Descriptor& shown) {
  // A chain of one representative per host, starting at the root: each passes segments on as they arrive.
  size_t es = request.element_bytes();
  int hosts = int(leaders_.size()), root_host = 0;
  for (int h = 0; h < hosts; ++h)
    if (config_.hosts[size_t(leaders_[size_t(h)])] == config_.hosts[size_t(request.root)]) root_host = h;
  auto representative = [&](int h) { return h == root_host ? request.root : leaders_[size_t(h)]; };
  int position = (my_host_ - root_host + hosts) % hosts;
  Part whole = me_ == request.root ? request.inputs[0] : request.outputs[0];

  if (me_ == representative(my_host_)) {
    int next = position + 1 < hosts ? representative((my_host_ + 1) % hosts) : -1;
    int previous = position > 0 ? representative((my_host_ + hosts - 1) % hosts) : -1;
    Exchange exchange(*this, shown);
    std::vector<int> to, from;
    if (next >= 0) to.push_back(next);
    if (previous >= 0) from.push_back(previous);
    co_await exchange.agree(to, from);
    auto* data = static_cast<std::byte*>(whole.data);
    uint64_t bytes = whole.count * es;
    std::deque<Message*> arriving;
    if (previous >= 0)
      for (uint64_t at = 0; at < bytes; at += kSegmentBytes)
        arriving.push_back(&exchange.receive(previous, data + at, std::min(kSegmentBytes, bytes - at)));
    for (uint64_t at = 0, i = 0; at < bytes; at += kSegmentBytes, ++i) {
      if (previous >= 0) {
        MessageMoved moved(*arriving[i]);
        co_await park(moved);
      }
      if (next >= 0) exchange.send(next, data + at, std::min(kSegmentBytes, bytes - at));
    }
    co_await exchange.finish();
  }
  if (!team_) co_return;
  Request inside = request;
  inside.root = team_index(representative(my_host_));
  inside.inputs.clear();
  inside.outputs.clear();
  if (team_->me() == inside.root) inside.inputs.push_back(whole);
  else inside.outputs.push_back(whole);
  co_await team_->run(inside, shown, 1);
}

Task Group::doubling_all_reduce(const Request& r, const Descriptor& shown, void* buffer, uint64_t count) {
  size_t es = r.element_bytes();
  uint64_t bytes = count * es;
  int hosts = int(leaders_.size()), me = my_host_;
  size_t divisor = r.op == ReduceOp::mean ? size_t(size()) : 1;
  int even = 1;
  while (even * 2 <= hosts) even *= 2;
  // Leaders beyond the largest power of two send their data to a partner and get the result back.
  Exchange exchange(*this, shown);
  std::vector<std::byte> theirs(bytes);
  auto fold = [&](const void* first, const void* second, size_t by) {
    const void* sources[2] = {first, second};
    reduce({r.dtype, r.op, by}, sources, 2, &buffer, 1, count, false);
  };
  if (me >= even) {
    int partner = leaders_[size_t(me - even)];
    std::vector<int> with(1, partner);
    co_await exchange.agree(with, with);
    exchange.send(partner, buffer, bytes);
    Message& result = exchange.receive(partner, theirs.data(), bytes);
    MessageMoved moved(result);
    co_await park(moved);
    co_await exchange.finish();
    copy(buffer, theirs.data(), bytes, false);
    co_return;
  }
  if (me + even < hosts) {
    int partner = leaders_[size_t(me + even)];
    std::vector<int> with(1, partner);
    co_await exchange.agree(with, with);
    MessageMoved moved(exchange.receive(partner, theirs.data(), bytes));
    co_await park(moved);
    fold(buffer, theirs.data(), 1);
  }
  for (int distance = 1; distance < even; distance *= 2) {
    int partner_host = me ^ distance, partner = leaders_[size_t(partner_host)];
    std::vector<int> with(1, partner);
    co_await exchange.agree(with, with);
    std::vector<std::byte> mine(static_cast<std::byte*>(buffer), static_cast<std::byte*>(buffer) + bytes);
    Message& sent = exchange.send(partner, mine.data(), bytes);
    MessageMoved moved(exchange.receive(partner, theirs.data(), bytes));
    co_await park(moved);
    // The lower host's part comes first on both sides: the same bits everywhere.
    if (partner_host < me) fold(theirs.data(), mine.data(), 1);
    else fold(mine.data(), theirs.data(), 1);
    MessageMoved left(sent);
    co_await park(left);
  }
  if (divisor > 1) {
    const void* only = buffer;
    reduce({r.dtype, r.op, divisor}, &only, 1, &buffer, 1, count, false);
  }
  if (me + even < hosts) exchange.send(leaders_[size_t(me + even)], buffer, bytes);
  co_await exchange.finish();
}

}  // namespace paceline
