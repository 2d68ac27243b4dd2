// Reductions and broadcasts of groups that span hosts: shared memory inside each host, the network between
// one LEADER per host.
//
// Between the leaders, large tensors go around a ring and small ones by recursive doubling.
//
// Ring all-reduce of h leaders. The tensor is cut into one CHUNK per leader; a chunk into SEGMENTS, so that
// one segment is on the wire while the previous one is being added. Round t of the first h-1 rounds sends
// chunk (i - t) to the next leader and adds what arrives into chunk (i - t - 1): afterwards leader i owns the
// whole sum of chunk i+1. The other h-1 rounds pass the finished chunks around. Each leader sends
// 2(h-1)/h of the tensor, and every link is busy all the time. The order of summation depends on ranks only.
#include <algorithm>
#include <cstring>

#include "paceline/base/error.h"
#include "paceline/collectives/exchange.h"
#include "paceline/reduce/kernels.h"

namespace paceline {
namespace {
constexpr uint64_t kDoublingBytes = 32 << 10;  // up to this size latency matters, not bandwidth
constexpr uint64_t kSegmentBytes = 256 << 10;
constexpr size_t kWindow = 8;  // segments that may be in flight to this rank
constexpr uint64_t kLag = 8;   // segments between two rounds of a ring
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

// Adds this host's `input` and those of the other hosts into `data`, which may be the same memory.
Task Group::reduce_between_hosts(const Request& r, const Descriptor& shown, const void* input, void* data,
                                 uint64_t count) {
  if (count * r.element_bytes() > kDoublingBytes) co_return co_await ring_all_reduce(r, shown, input, data, count);
  if (data != input) copy(data, input, count * r.element_bytes(), false);
  co_await doubling_all_reduce(r, shown, data, count);
}

Task Group::reduce_spanning(const Request& request, const Descriptor& shown) {
  size_t es = request.element_bytes();
  uint64_t count = request.inputs[0].count;
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
  const void* input = team_ ? result.data : request.inputs[0].data;
  if (leader) co_await reduce_between_hosts(request, shown, input, result.data, count);
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

Task Group::ring_all_reduce(const Request& r, const Descriptor& shown, const void* input, void* output,
                            uint64_t count) {
  size_t es = r.element_bytes();
  auto* mine = static_cast<const std::byte*>(input);
  auto* data = static_cast<std::byte*>(output);
  int hosts = int(leaders_.size()), me = my_host_;
  int next = leaders_[size_t((me + 1) % hosts)], previous = leaders_[size_t((me + hosts - 1) % hosts)];
  size_t divisor = r.op == ReduceOp::mean ? size_t(size()) : 1;
  Exchange exchange(*this, shown);
  std::vector<int> to(1, next), from(1, previous);
  co_await exchange.agree(to, from);

  struct Span {
    uint64_t start, count;
  };
  uint64_t longest = (count + uint64_t(hosts) - 1) / uint64_t(hosts), segment = kSegmentBytes / es;
  uint64_t per_chunk = (longest + segment - 1) / segment;
  int rounds = 2 * (hosts - 1);
  // Rounds overlap: round t lags kLag segments behind round t-1, so a segment that was just added is sent on while it
  // is in the cache. Both sides use the same list, for what they send and for what they receive.
  struct Step {
    int round;
    uint64_t segment;
  };
  uint64_t steps = uint64_t(rounds) * per_chunk;
  std::vector<Step> order;
  order.reserve(steps);
  for (uint64_t time = 0; order.size() < steps; ++time)
    for (int round = 0; round < rounds; ++round) {
      uint64_t behind = uint64_t(round) * kLag;
      if (time >= behind && time - behind < per_chunk) order.push_back({round, time - behind});
    }
  auto span = [&](int chunk, uint64_t s) -> Span {
    uint64_t c = uint64_t(((chunk % hosts) + hosts) % hosts);
    uint64_t start = count * c / uint64_t(hosts) + s * segment, end = count * (c + 1) / uint64_t(hosts);
    return {std::min(start, end), std::min(start + segment, end) - std::min(start, end)};
  };
  auto sent_chunk = [&](int round) { return me - round; };
  auto received_chunk = [&](int round) { return me - round - 1; };
  auto adds = [&](int round) { return round < hosts - 1; };

  std::vector<std::byte> scratch(kWindow * kSegmentBytes);
  std::deque<Message*> arriving;
  uint64_t posted = 0;
  auto post_receives = [&](uint64_t consumed) {
    for (; posted < std::min(steps, consumed + kWindow); ++posted) {
      auto [round, number] = order[posted];
      Span part = span(received_chunk(round), number);
      void* target = adds(round) ? scratch.data() + posted % kWindow * kSegmentBytes : data + part.start * es;
      arriving.push_back(&exchange.receive(previous, target, part.count * es));
    }
  };
  uint64_t sent = 0;
  std::vector<uint64_t> taken(size_t(rounds), 0);  // segments of each round that have arrived
  auto send_ready = [&] {
    for (; sent < steps; ++sent) {
      auto [round, number] = order[sent];
      if (round > 0 && taken[size_t(round - 1)] <= number) return;  // not received yet
      Span part = span(sent_chunk(round), number);
      exchange.send(next, (round == 0 ? mine : data) + part.start * es, part.count * es);
    }
  };

  send_ready();
  for (uint64_t q = 0; q < steps; ++q) {
    post_receives(q);
    MessageMoved moved(*arriving[q]);
    co_await park(moved);
    auto [round, number] = order[q];
    Span span_in = span(received_chunk(round), number);
    if (adds(round)) {
      const void* sources[2] = {scratch.data() + q % kWindow * kSegmentBytes, mine + span_in.start * es};
      void* destination = data + span_in.start * es;
      reduce({r.dtype, r.op, round == hosts - 2 ? divisor : 1}, sources, 2, &destination, 1, span_in.count, false);
    }
    ++taken[size_t(round)];
    send_ready();
  }
  co_await exchange.finish();
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
