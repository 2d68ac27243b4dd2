// Collectives on one host for ordinary memory: data goes through staging buffers, cut into CHUNKS that stay
// in the cache, several of them in flight at once.
//
// `chunks_` numbers chunks over the life of the team; chunk k is in buffer k mod kStages. A buffer may be filled
// again when all members have drained its previous chunk. A large reduction splits each chunk into one slice per
// member: each member publishes the other members' slices, folds its own, publishes the result, and copies the
// other members' results out. A member's own slice never goes through a buffer.
#include <algorithm>
#include <cstring>

#include "paceline/collectives/team.h"
#include "paceline/reduce/kernels.h"

namespace paceline {
namespace {

uint64_t per_chunk(size_t stage_bytes, size_t element_bytes) {
  return std::max<uint64_t>(1, stage_bytes / 64 * 64 / element_bytes);
}

// Elements [start, start + chunk) of a part of `count`, cut off at its end.
uint64_t clamp(uint64_t start, uint64_t chunk, uint64_t count) {
  return start >= count ? 0 : std::min(chunk, count - start);
}

std::byte* at(const Part& part, uint64_t element, size_t element_bytes) {
  return static_cast<std::byte*>(part.data) + element * element_bytes;
}

}  // namespace

Task Team::run_staged(Context& c) {
  if (c.request.kind == Kind::all_reduce && size() == 2) co_await stage_pair(c);
  else if (c.request.kind == Kind::all_reduce || c.request.kind == Kind::reduce) co_await stage_reduction(c);
  else co_await stage_pieces(c);
}

Task Team::stage_pieces(Context& c) {
  const Request& r = c.request;
  size_t es = r.element_bytes();
  int n = size();
  size_t room = c.personal() ? stage_bytes_ / size_t(n) / 64 * 64 : stage_bytes_;
  uint64_t chunk = per_chunk(room, es), num_chunks = 0;
  for (int m = 0; m < n; ++m)
    if (c.is_source(m))
      for (int i = 0; i < (c.personal() ? n : 1); ++i)
        num_chunks = std::max(num_chunks, (pieces(m, c.op)[i].gives + chunk - 1) / chunk);
  uint64_t base = chunks_;
  chunks_ += num_chunks;
  bool source = c.is_source(me_), destination = c.is_destination(me_) && !(r.kind == Kind::broadcast && source);
  if (!destination) post(&Block::drained, base + num_chunks);

  if (source && destination && !is_reducing(r.kind)) {  // my own piece
    const Part& in = r.inputs[c.personal() ? size_t(me_) : 0];
    const Part& out = r.outputs[r.outputs.size() == 1 ? 0 : size_t(me_)];
    if (in.count && in.data != out.data) copy(out.data, in.data, in.count * es, false);
  }

  for (uint64_t k = 0; k <= num_chunks; ++k) {
    if (source && k < num_chunks) {  // publish chunk k, one ahead of what is being consumed
      Reached room_again(*this, &Block::drained, k >= kStages ? base + k + 1 - kStages : 0);
      co_await park(room_again);
      std::byte* stage = input(me_, base + k);
      for (int to = 0; to < int(r.inputs.size()); ++to) {
        if (c.personal() && to == me_) continue;
        const Part& in = r.inputs[size_t(to)];
        uint64_t count = clamp(k * chunk, chunk, in.count);
        if (count) std::memcpy(stage + size_t(c.personal() ? to : 0) * room, at(in, k * chunk, es), count * es);
      }
      post(&Block::filled, base + k + 1);
    }
    if (!destination || k == 0) continue;
    uint64_t j = k - 1;  // consume chunk j
    if (is_reducing(r.kind)) {
      Reached all(*this, &Block::filled, base + j + 1);
      co_await park(all);
      std::vector<const void*> sources;
      for (int m = 0; m < n; ++m)
        sources.push_back(m == me_ ? at(r.inputs[size_t(me_)], j * chunk, es)
                                   : input(m, base + j) + size_t(me_) * room);
      void* to = at(r.outputs[0], j * chunk, es);
      reduce({r.dtype, r.op, c.divisor}, sources.data(), sources.size(), &to, 1,
             clamp(j * chunk, chunk, r.outputs[0].count), false);
    } else {
      for (int i = 1; i < n; ++i) {
        int m = (me_ + i) % n;
        if (!c.is_source(m)) continue;
        const Part& out = r.outputs[r.outputs.size() == 1 ? 0 : size_t(m)];
        uint64_t count = clamp(j * chunk, chunk, out.count);
        Reached one(*this, &Block::filled, base + j + 1, m);
        co_await park(one);
        if (count)
          std::memcpy(at(out, j * chunk, es), input(m, base + j) + size_t(c.personal() ? me_ : 0) * room, count * es);
      }
    }
    post(&Block::drained, base + j + 1);
  }
}

// Two members: each publishes everything and folds everything. That moves as many cache lines between the cores
// as slices do, with one synchronisation a chunk instead of two. The buffers are cut into smaller ones: what is
// published is folded while it is in the L2 cache. No member has chunks of an earlier operation left to drain.
Task Team::stage_pair(Context& c) {
  constexpr size_t kBytes = 64 << 10;
  constexpr uint64_t kBuffers = kStages * stage_bytes_of(2) / kBytes;
  const Request& r = c.request;
  size_t es = r.element_bytes();
  auto buffer = [&](int member, uint64_t number) { return input(member, 0) + number % kBuffers * kBytes; };
  uint64_t chunk = per_chunk(kBytes, es), count = r.inputs[0].count;
  uint64_t num_chunks = (count + chunk - 1) / chunk, base = chunks_;
  chunks_ += num_chunks;
  const Part& in = r.inputs[0];
  for (uint64_t k = 0; k <= num_chunks; ++k) {
    if (k < num_chunks) {  // publish chunk k, one ahead of what is being folded
      Reached room_again(*this, &Block::drained, k >= kBuffers ? base + k + 1 - kBuffers : 0);
      co_await park(room_again);
      std::memcpy(buffer(me_, base + k), at(in, k * chunk, es), clamp(k * chunk, chunk, count) * es);
      post(&Block::filled, base + k + 1);
    }
    if (k == 0) continue;
    uint64_t j = k - 1;
    Reached all(*this, &Block::filled, base + j + 1);
    co_await park(all);
    const void* sources[2];
    sources[me_] = at(in, j * chunk, es);
    sources[1 - me_] = buffer(1 - me_, base + j);
    void* to = at(r.outputs[0], j * chunk, es);
    reduce({r.dtype, r.op, c.divisor}, sources, 2, &to, 1, clamp(j * chunk, chunk, count), false);
    post(&Block::drained, base + j + 1);
  }
}

Task Team::stage_reduction(Context& c) {
  const Request& r = c.request;
  size_t es = r.element_bytes();
  int n = size();
  size_t room = stage_bytes_ / size_t(n) / 64 * 64;
  uint64_t slice = per_chunk(room, es), chunk = slice * uint64_t(n);
  uint64_t count = r.inputs[0].count, num_chunks = (count + chunk - 1) / chunk, base = chunks_;
  chunks_ += num_chunks;
  bool destination = c.is_destination(me_);
  if (!destination) post(&Block::copied, base + num_chunks);
  const Part& in = r.inputs[0];
  auto slice_at = [&](uint64_t k, int m) { return k * chunk + uint64_t(m) * slice; };
  auto slice_count = [&](uint64_t k, int m) { return clamp(slice_at(k, m), slice, count); };

  // Round k publishes chunk k, folds my slice of chunk k-1 and copies out the results of chunk k-2.
  for (uint64_t k = 0; k < num_chunks + 2; ++k) {
    if (k < num_chunks) {
      Reached room_again(*this, &Block::drained, k >= kStages ? base + k + 1 - kStages : 0);
      co_await park(room_again);
      std::byte* stage = input(me_, base + k);
      for (int m = 0; m < n; ++m)
        if (m != me_ && slice_count(k, m))
          std::memcpy(stage + size_t(m) * room, at(in, slice_at(k, m), es), slice_count(k, m) * es);
      post(&Block::filled, base + k + 1);
    }
    if (k >= 1 && k - 1 < num_chunks) {
      uint64_t j = k - 1;
      Reached all(*this, &Block::filled, base + j + 1);
      co_await park(all);
      Reached room_again(*this, &Block::copied, j >= kStages ? base + j + 1 - kStages : 0);
      co_await park(room_again);
      std::vector<const void*> sources;
      for (int m = 0; m < n; ++m)
        sources.push_back(m == me_ ? at(in, slice_at(j, me_), es) : input(m, base + j) + size_t(me_) * room);
      void* to[2] = {result(me_, base + j), nullptr};
      if (destination) to[1] = at(r.outputs[0], slice_at(j, me_), es);
      reduce({r.dtype, r.op, c.divisor}, sources.data(), sources.size(), to, destination ? 2 : 1, slice_count(j, me_),
             false);
      block(me_).drained.value.store(base + j + 1, std::memory_order_release);
      post(&Block::reduced, base + j + 1);
    }
    if (k >= 2 && destination) {
      uint64_t j = k - 2;
      for (int i = 1; i < n; ++i) {
        int m = (me_ + i) % n;
        if (!slice_count(j, m)) continue;
        Reached one(*this, &Block::reduced, base + j + 1, m);
        co_await park(one);
        std::memcpy(at(r.outputs[0], slice_at(j, m), es), result(m, base + j), slice_count(j, m) * es);
      }
      post(&Block::copied, base + j + 1);
    }
  }
}

}  // namespace paceline
