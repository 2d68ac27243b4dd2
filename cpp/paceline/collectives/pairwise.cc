// Exchanges between hosts, and the collectives in which every pair of members has its own piece.
//
// Gather, scatter, all-gather, all-to-all and reduce-scatter are one operation here: member i gives a piece to
// member j. Pieces for neighbours go through the team, pieces for other hosts through the ports, concurrently.
// A reduce-scatter collects all pieces and folds them in rank order, so it gives the same bits wherever the
// members run.
#include <algorithm>
#include <cstring>

#include "paceline/base/error.h"
#include "paceline/collectives/exchange.h"
#include "paceline/reduce/kernels.h"

namespace paceline {

Message& Exchange::post(std::deque<Message>& list, int member, const void* data, uint64_t bytes) {
  Message& m = list.emplace_back();
  m.data = static_cast<std::byte*>(const_cast<void*>(data));
  m.bytes = bytes;
  m.tag = shown_.number;
  m.peer = group_.global_rank(member);
  if (!group_.port(member, Lane::collective))
    throw Error(ErrorKind::peer_lost, "there is no connection to rank " + std::to_string(m.peer), m.peer);
  return m;
}

Message& Exchange::send(int member, const void* data, uint64_t bytes) {
  Message& m = post(sends_, member, data, bytes);
  group_.port(member, Lane::collective)->send(&m);
  return m;
}

Message& Exchange::receive(int member, void* data, uint64_t bytes) {
  Message& m = post(receives_, member, data, bytes);
  group_.port(member, Lane::collective)->receive(&m);
  return m;
}

Task Exchange::agree(const std::vector<int>& to, const std::vector<int>& from) {
  for (int member : to) send(member, &shown_, sizeof shown_);
  size_t first = theirs_.size();
  std::deque<Message*> awaited;
  for (int member : from) {
    Message& message = receive(member, &theirs_.emplace_back(), sizeof(Descriptor));
    message.any_tag = true;  // also of another operation: the error then compares both calls
    awaited.push_back(&message);
  }
  for (size_t i = 0; i < from.size(); ++i) {
    MessageMoved moved(*awaited[i]);
    co_await park(moved);
    int mine = group_.global_rank(group_.rank()), other = group_.global_rank(from[i]);
    const Descriptor& d = theirs_[first + i];
    // Lower rank first, so that both sides raise the same message.
    if (mine < other) require_match(shown_, mine, d, other);
    else require_match(d, other, shown_, mine);
  }
}

Task Exchange::finish() {
  Moved sent(sends_), received(receives_);
  co_await park(sent);
  co_await park(received);
}

namespace {

// Does member `from` give anything to member `to` in this kind of collective?
bool gives(const Request& r, int from, int to) {
  switch (r.kind) {
    case Kind::scatter: return from == r.root;
    case Kind::gather: return to == r.root;
    default: return true;
  }
}

// The part of `parts` that belongs to a member: the only one, or its own.
Part part_for(const std::vector<Part>& parts, int member) {
  if (parts.empty()) return {};
  return parts.size() == 1 ? parts[0] : parts[size_t(member)];
}

}  // namespace

Task Group::exchange_pieces(const Request& request, const Descriptor& shown) {
  size_t es = request.element_bytes();
  int n = size();
  bool folds = request.kind == Kind::reduce_scatter;
  auto input_for = [&](int to) { return gives(request, me_, to) ? part_for(request.inputs, to) : Part{}; };
  std::vector<std::vector<std::byte>> scratch(folds ? size_t(n) : 0);
  auto output_from = [&](int from) -> Part {
    if (!gives(request, from, me_)) return {};
    if (!folds) return part_for(request.outputs, from);
    if (scratch[size_t(from)].empty()) scratch[size_t(from)].resize(request.outputs[0].count * es);
    return {scratch[size_t(from)].data(), request.outputs[0].count};
  };

  std::vector<int> remote;
  for (int m = 0; m < n; ++m)
    if (!is_local(m)) remote.push_back(m);
  Exchange exchange(*this, shown);
  // Remote data first: it is sent while the neighbours copy. Descriptors precede each piece on its channel and are
  // compared; so are the sizes of pieces.
  std::vector<uint64_t> given(static_cast<size_t>(n)), announced(static_cast<size_t>(n));
  std::vector<Message*> sizes(static_cast<size_t>(n));
  co_await exchange.agree(remote, remote);
  for (int m : remote) {
    given[size_t(m)] = input_for(m).count;
    exchange.send(m, &given[size_t(m)], sizeof(uint64_t));
    exchange.send(m, input_for(m).data, input_for(m).count * es);
    sizes[size_t(m)] = &exchange.receive(m, &announced[size_t(m)], sizeof(uint64_t));
  }

  if (team_) {
    Request local = request;
    local.kind = Kind::all_to_all;
    local.inputs.clear();
    local.outputs.clear();
    for (int m : local_) {
      local.inputs.push_back(input_for(m));
      local.outputs.push_back(output_from(m));
    }
    co_await team_->run(local, shown, 1);
  } else if (Part in = input_for(me_), out = output_from(me_); in.count && in.data != out.data) {
    copy(out.data, in.data, in.count * es, false);
  }

  for (int m : remote) {
    MessageMoved size_known(*sizes[size_t(m)]);
    co_await park(size_known);
    uint64_t expected = output_from(m).count;
    if (announced[size_t(m)] != expected)
      raise_piece_mismatch(shown, global_rank(m), announced[size_t(m)], global_rank(me_), expected);
    exchange.receive(m, output_from(m).data, expected * es);
  }
  co_await exchange.finish();

  if (folds) {
    std::vector<const void*> sources;
    for (int m = 0; m < n; ++m) sources.push_back(output_from(m).data);
    void* to = request.outputs[0].data;
    reduce({request.dtype, request.op, request.op == ReduceOp::mean ? size_t(n) : 1}, sources.data(), sources.size(),
           &to, 1, request.outputs[0].count, false);
  }
}

}  // namespace paceline
