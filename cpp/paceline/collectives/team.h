// The members of a group that share a host, and the segment through which they work together.
//
// Each member has a BLOCK in the segment that only it writes: counters, the descriptor and pieces of its
// current operation (two copies, used in turn), a slot for small data, and staging buffers. Members wait by
// polling the counters of other members.
//
// Why two copies suffice: a member reuses the copy of operation k in operation k+2, which it starts only
// after all members have arrived at k+1, and they arrive at k+1 only after they finished k.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "paceline/base/error.h"
#include "paceline/collectives/request.h"
#include "paceline/engine/engine.h"
#include "paceline/loop/task.h"

namespace paceline {

struct alignas(64) Counter {
  std::atomic<uint64_t> value;
};

// First element of a member's slice of a tensor; slices start on cache lines.
uint64_t slice_start(uint64_t count, size_t element_bytes, int member, int members);

// What one member gives to, and expects from, one other member.
struct Piece {
  uint64_t gives = 0;    // elements
  uint64_t expects = 0;  // elements
  Location where;        // of what it gives, when exposed
};

constexpr size_t kSlotBytes = 16 << 10;
constexpr int kStages = 4;  // staging buffers used in turn
// Size of one staging buffer. Large teams have smaller ones: together they would fill the memory of the host, and no
// cache holds the chunks of so many members. Each member's slice of a chunk has at least two cache lines.
constexpr size_t stage_bytes_of(size_t members) {
  size_t share = (size_t(4) << 20) / members, least = members * 128;
  return std::clamp(std::max(share, least) / 4096 * 4096, size_t(32) << 10, size_t(256) << 10);
}

struct Block {
  Counter arrived;    // operations whose descriptor is posted
  Counter finished;   // operations after which this member no longer reads other members' memory
  Counter filled;     // staged chunks published (inputs)
  Counter drained;    // staged chunks consumed
  Counter reduced;    // staged chunks whose own slice is published (all_reduce, reduce)
  Counter copied;     // staged chunks whose slices have been copied out
  Counter submitted;  // named operations that this member has submitted (named.h)
  alignas(64) Descriptor descriptors[2];
  alignas(64) std::byte slots[2][kSlotBytes];
  // After it: the staging buffers for inputs and for results, and the pieces.
};

// How far an operation has come before there is a coroutine for it.
struct Started {
  uint64_t op = 0;  // its number, if the request has been posted
  bool is_reduced = false;
};

class Team {
 public:
  // Collective among the members (global ranks, in group order). The first one creates the segment and sends its
  // descriptor over the links without waiting; the other members wait for it, at most this long, and may try again
  // after peer_timeout: the descriptor is not lost.
  Team(Engine& engine, uint64_t group_id, uint32_t generation, std::vector<int> members, double timeout_s);

  int size() const { return int(members_.size()); }
  int me() const { return me_; }
  int rank_of(int member) const { return members_[size_t(member)]; }
  Block& block(int member) const { return *blocks_[size_t(member)]; }
  // Staging buffers of a member for chunk k: of its inputs, and of its results.
  std::byte* input(int member, uint64_t k) const { return stages(member) + k % kStages * stage_bytes_; }
  std::byte* result(int member, uint64_t k) const { return stages(member) + (kStages + k % kStages) * stage_bytes_; }
  size_t stage_bytes() const { return stage_bytes_; }
  Piece* pieces(int member, uint64_t op) const { return pieces_[size_t(member)] + (op & 1) * members_.size(); }
  Engine& engine() const { return engine_; }
  LocalLink* link(int member) const { return links_[size_t(member)].get(); }

  // Runs one operation among the members. `request.root` is a team index; parts are per team member.
  // `shown` is what the user called (compared and named in errors), `divisor` divides a reduction's result.
  // `started`: how far try_reduce() has come with it.
  Task run(const Request& request, const Descriptor& shown, size_t divisor, Started started = {});

  struct Context;  // one operation in flight
  // Starts an all-reduce, and finishes it if its inputs can be read in place and the other members are there, or come
  // within so many looks. False if it has not ended: run() goes on with it.
  bool try_reduce(Context& c, int num_looks, Started& started);
  // The two ends of an operation whose middle the caller does: begin() returns when all members have arrived and their
  // requests match, end() when no member uses the memory of another one any more.
  Task begin(Context& c);
  // The parts of begin() and run() for a caller that compares the requests itself: meet() returns when all members have
  // arrived, with their requests; resolve() and run_resolved() follow if these match.
  Task meet(Context& c, std::vector<Descriptor>& calls);
  void resolve(Context& c);
  Task run_resolved(Context& c);
  // Elements that a member gives to this one.
  uint64_t given_by(const Context& c, int member) const;
  Task end(Context& c);
  // Where piece `piece` of that member's inputs can be read, and where the result of a reduction goes.
  const std::byte* source(const Context& c, int member, int piece) const;
  std::byte* output_of(const Context& c, int member) const;

  // Advances one of this member's counters and wakes members that sleep.
  void post(Counter Block::* counter, uint64_t value);

  // A failure for all members, also those that cannot detect it themselves.
  void publish_failure(ErrorKind kind, int rank, const std::string& text);
  std::exception_ptr published_failure() const;
  bool has_failure() const;

 private:
  std::byte* stages(int member) const { return reinterpret_cast<std::byte*>(&block(member)) + sizeof(Block); }
  Task run_whole(Context& c);  // inputs readable in place: slots or engine memory
  Task run_staged(Context& c);
  Task stage_pieces(Context& c);
  Task stage_reduction(Context& c);
  Task stage_pair(Context& c);
  void post_request(Context& c);
  Task arrive(Context& c);
  void compare(Context& c);
  uint64_t handed_over(const Context& c) const;
  void take_whole(const Context& c);
  void reduce_slice(const Context& c);

  struct Header {
    uint64_t magic;
    uint32_t generation;
    uint32_t num_members;
    std::atomic<uint32_t> failed;  // 0, then 1 while the failure is being written, then 2
    int32_t error_kind;
    int32_t error_rank;
    char error_text[2048];
  };
  Engine& engine_;
  std::vector<int> members_;
  int me_ = 0;
  size_t stage_bytes_;
  Segment segment_;
  Header* header_ = nullptr;
  std::vector<Block*> blocks_;
  std::vector<Piece*> pieces_;
  std::vector<std::shared_ptr<LocalLink>> links_;  // null for this member
  uint64_t op_ = 0;                                // operations started
  uint64_t chunks_ = 0;                            // staged chunks so far: equal on all members between operations
};

// One operation in flight: the members' requests, resolved to pointers.
struct Team::Context {
  const Request& request;
  const Descriptor& shown;
  size_t divisor;
  uint64_t op = 0;
  Placement placement = Placement::staged;  // the one that all members can use
  bool outputs_exposed = false;
  bool takes_any_size = false;  // the outputs are allocated when the sizes of the inputs are known
  const Descriptor& descriptor_of(const Team& t, int member) const { return t.block(member).descriptors[op & 1]; }
  // Whether other members read this member's inputs at all.
  bool is_source(int member) const {
    return !(request.kind == Kind::broadcast || request.kind == Kind::scatter) || member == request.root;
  }
  bool is_destination(int member) const {
    return !(request.kind == Kind::reduce || request.kind == Kind::gather) || member == request.root;
  }
  bool personal() const {  // each member gets its own piece
    return request.kind == Kind::scatter || request.kind == Kind::all_to_all || request.kind == Kind::reduce_scatter;
  }
};

// Waits until a counter of all members (or one) has reached a value.
class Reached final : public Wait {
 public:
  Reached(const Team& team, Counter Block::* counter, uint64_t value, int only = -1)
      : team_(team),
        counter_(counter),
        value_(value),
        at_(only < 0 ? 0 : only),
        end_(only < 0 ? team.size() : only + 1) {}
  bool ready() override {
    while (at_ < end_ && has(at_)) ++at_;
    return at_ == end_;
  }
  void blockers(std::vector<int>& ranks) const override {
    for (int m = at_; m < end_; ++m)
      if (!has(m)) ranks.push_back(team_.rank_of(m));
  }

 private:
  bool has(int member) const { return (team_.block(member).*counter_).value.load(std::memory_order_acquire) >= value_; }
  const Team& team_;
  Counter Block::* counter_;
  uint64_t value_;
  int at_, end_;
};

}  // namespace paceline
