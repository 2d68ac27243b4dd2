// Creation of the segment that the members of a group on one host share.
#include <algorithm>

#include "paceline/base/error.h"
#include "paceline/collectives/team.h"

namespace paceline {
namespace {
constexpr uint64_t kMagic = 0x314d4145544c4350;  // "PCLTEAM1"

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
size_t piece_bytes(size_t members) { return round_up(2 * members * sizeof(Piece), 64); }
}  // namespace

Team::Team(Engine& engine, uint64_t group_id, uint32_t generation, std::vector<int> members, double timeout_s)
    : engine_(engine), members_(std::move(members)), stage_bytes_(stage_bytes_of(members_.size())) {
  int my_rank = engine.config().rank;
  me_ = int(std::find(members_.begin(), members_.end(), my_rank) - members_.begin());
  size_t head = round_up(sizeof(Header), 4096), stages = 2 * kStages * stage_bytes_;
  size_t each = round_up(sizeof(Block) + stages + piece_bytes(members_.size()), 4096);
  uint64_t bytes = head + each * members_.size();
  for (int rank : members_) {
    links_.push_back(rank == my_rank ? nullptr : engine.link(rank));
    if (rank != my_rank && !links_.back())
      throw Error(ErrorKind::peer_lost,
                  "rank " + std::to_string(my_rank) + ": rank " + std::to_string(rank) +
                      " is gone; a group with it cannot be formed",
                  rank);
  }
  if (me_ == 0) {
    try {
      segment_ = Segment::create("paceline-team", bytes);
    } catch (const Error&) {
      for (auto& link : links_)  // without a descriptor, so that the other members do not wait for it
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
      throw Error(ErrorKind::shared_memory,
                  "rank " + std::to_string(members_[0]) +
                      " could not allocate the shared memory of a group; see the error of that rank.",
                  members_[0]);
    if (found != bytes)
      throw Error(ErrorKind::bad_frame,
                  "rank " + std::to_string(members_[0]) + " created a group segment of " + std::to_string(found) +
                      " bytes, expected " + std::to_string(bytes) + ": do the members agree about the group?",
                  members_[0]);
    segment_ = Segment::map(std::move(fd), bytes);
    header_ = reinterpret_cast<Header*>(segment_.data());
    if (header_->magic != kMagic || header_->generation != generation)
      throw Error(ErrorKind::bad_frame, "the group's segment is of another generation or version", members_[0]);
  }
  for (size_t m = 0; m < members_.size(); ++m) {
    std::byte* base = segment_.data() + head + m * each;
    blocks_.push_back(reinterpret_cast<Block*>(base));
    pieces_.push_back(reinterpret_cast<Piece*>(base + sizeof(Block) + stages));
  }
}

}  // namespace paceline
