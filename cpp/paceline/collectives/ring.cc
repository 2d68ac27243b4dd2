#include "paceline/collectives/ring.h"

#include <algorithm>
#include <memory>

#include "paceline/reduce/kernels.h"

namespace paceline {
namespace {
// What has arrived and what is about to be sent stays in a core's second cache, with two processes on that core:
// segments of 256 KB, eight of them in flight, took a quarter longer (docs/log.md).
constexpr uint64_t kSegmentBytes = 128 << 10;
constexpr uint64_t kWindow = 6;  // segments that may be in flight to this rank
constexpr uint64_t kStaged = 2;  // sums of this host that wait to be sent
constexpr uint64_t kLag = 4;     // segments between two rounds

// Waits until a segment has arrived, or until one has been sent whose memory the next one needs.
class EitherMoved final : public Wait {
 public:
  EitherMoved(const Message& incoming, const Message* outgoing) : incoming_(incoming), outgoing_(outgoing) {}
  bool ready() override { return incoming_.done || (outgoing_ && outgoing_->done); }
  void blockers(std::vector<int>& ranks) const override {
    ranks.push_back(incoming_.peer);
    if (outgoing_) ranks.push_back(outgoing_->peer);
  }

 private:
  const Message& incoming_;
  const Message* outgoing_;
};

// Which segment is sent and received when. Rounds overlap: round t lags kLag segments behind round t-1, so a segment
// that was just added is sent on while it is in the cache. Both sides use the same list.
class Schedule {
 public:
  struct Step {
    int round;
    uint64_t segment;
  };
  struct Span {
    uint64_t start, count;  // elements
  };

  Schedule(uint64_t count, uint64_t hosts, uint64_t segment) : count_(count), hosts_(hosts), segment_(segment) {
    uint64_t longest = (count + hosts - 1) / hosts, per_chunk = (longest + segment - 1) / segment;
    uint64_t rounds = 2 * (hosts - 1), num_steps = rounds * per_chunk;
    steps_.reserve(num_steps);
    for (uint64_t time = 0; steps_.size() < num_steps; ++time)
      for (uint64_t round = 0; round < rounds; ++round) {
        uint64_t behind = round * kLag;
        if (time >= behind && time - behind < per_chunk) steps_.push_back({int(round), time - behind});
      }
  }
  uint64_t size() const { return steps_.size(); }
  Step operator[](uint64_t i) const { return steps_[i]; }
  Span span(int chunk, uint64_t segment) const {
    int hosts = int(hosts_);
    uint64_t c = uint64_t(((chunk % hosts) + hosts) % hosts), end = count_ * (c + 1) / hosts_;
    uint64_t start = std::min(count_ * c / hosts_ + segment * segment_, end);
    return {start, std::min(start + segment_, end) - start};
  }

 private:
  uint64_t count_, hosts_, segment_;
  std::vector<Step> steps_;
};

std::unique_ptr<std::byte[]> memory_for(uint64_t segments) {
  return std::make_unique_for_overwrite<std::byte[]>(segments * kSegmentBytes);
}

}  // namespace

// What this member has sent, received and added.
class Ring::Progress {
 public:
  Progress(Exchange& exchange, RingPart part)
      : exchange_(exchange),
        part_(std::move(part)),
        hosts_(int(part_.members.size())),
        me_(part_.position),
        es_(size_of(part_.dtype)),
        inputs_(part_.sources.size()),
        schedule_(part_.count, uint64_t(hosts_), kSegmentBytes / es_),
        sources_(inputs_ + 1),
        destinations_(part_.destinations.size()),
        in_stage_(kStaged),
        taken_(size_t(2 * (hosts_ - 1)), 0) {}

  int next() const { return part_.members[size_t((me_ + 1) % hosts_)]; }
  int previous() const { return part_.members[size_t((me_ + hosts_ - 1) % hosts_)]; }
  uint64_t num_steps() const { return schedule_.size(); }
  const Message& arriving(uint64_t step) const { return *arriving_[step]; }

  void post_receives(uint64_t consumed) {
    for (uint64_t i = arriving_.size(); i < std::min(schedule_.size(), consumed + kWindow); ++i) {
      auto [round, segment] = schedule_[i];
      auto [start, count] = schedule_.span(me_ - round - 1, segment);
      std::byte* target = adds(round) ? arrived(i) : part_.destinations[0] + start * es_;
      arriving_.push_back(&exchange_.receive(previous(), target, count * es_));
    }
  }

  // Sends what can be sent. Returns the message whose memory is needed first, if there is one.
  const Message* send_ready() {
    for (; sent_ < schedule_.size(); ++sent_) {
      auto [round, segment] = schedule_[sent_];
      if (round > 0 && taken_[size_t(round - 1)] <= segment) return nullptr;  // not received yet
      auto [start, count] = schedule_.span(me_ - round, segment);
      if (round > 0 || inputs_ == 1) {
        exchange_.send(next(), (round > 0 ? part_.destinations[0] : part_.sources[0]) + start * es_, count * es_);
        continue;
      }
      size_t stage = staged_ % kStaged;
      if (in_stage_[stage] && !in_stage_[stage]->done) return in_stage_[stage];
      void* sum = outgoing_.get() + stage * kSegmentBytes;
      fold_inputs(start, count, sum);
      in_stage_[stage] = &exchange_.send(next(), sum, count * es_);
      ++staged_;
    }
    return nullptr;
  }

  // Adds what has arrived, or copies a finished segment to all outputs of this host.
  void take(uint64_t step) {
    auto [round, segment] = schedule_[step];
    auto [start, count] = schedule_.span(me_ - round - 1, segment);
    for (size_t i = 0; i < destinations_.size(); ++i) destinations_[i] = part_.destinations[i] + start * es_;
    if (adds(round)) {
      add(start, count, arrived(step), round == hosts_ - 2);
    } else {
      for (size_t i = 1; i < destinations_.size(); ++i)
        copy(destinations_[i], destinations_[0], count * es_, part_.streaming);
    }
    ++taken_[size_t(round)];
  }

 private:
  bool adds(int round) const { return round < hosts_ - 1; }
  std::byte* arrived(uint64_t step) const { return incoming_.get() + step % kWindow * kSegmentBytes; }
  void sources_at(uint64_t start) {
    for (size_t i = 0; i < inputs_; ++i) sources_[i] = part_.sources[i] + start * es_;
  }
  void fold_inputs(uint64_t start, uint64_t count, void* sum) {
    sources_at(start);
    reduce({part_.dtype, part_.op, 1}, sources_.data(), inputs_, &sum, 1, count, false);
  }

  // (This host's sum) + (what arrived), in one pass. 16-bit floats need two: the sum of a host is rounded, whether it is
  // sent or not, so that the same memory or other memory gives the same bits.
  void add(uint64_t start, uint64_t count, const std::byte* what, bool is_last) {
    size_t num_sources = inputs_;
    sources_at(start);
    if (inputs_ > 1 && is_floating(part_.dtype) && es_ == 2) {
      fold_inputs(start, count, host_sum_.get());
      sources_[0] = host_sum_.get();
      num_sources = 1;
    }
    sources_[num_sources++] = what;
    reduce({part_.dtype, part_.op, is_last ? part_.divisor : 1}, sources_.data(), num_sources, destinations_.data(),
           is_last ? destinations_.size() : 1, count, false);
  }

  Exchange& exchange_;
  const RingPart part_;
  const int hosts_, me_;
  const size_t es_, inputs_;
  const Schedule schedule_;
  const std::unique_ptr<std::byte[]> incoming_ = memory_for(kWindow), outgoing_ = memory_for(kStaged),
                                     host_sum_ = memory_for(1);
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
  std::deque<Message*> arriving_;
  std::vector<const Message*> in_stage_;
  std::vector<uint64_t> taken_;  // segments of each round that have arrived
  uint64_t sent_ = 0, staged_ = 0;
};

Ring::Ring(Exchange& exchange, RingPart part)
    : exchange_(exchange), progress_(std::make_unique<Progress>(exchange, std::move(part))) {}

Ring::~Ring() = default;

Task Ring::run() {
  Progress& progress = *progress_;
  std::vector<int> to(1, progress.next()), from(1, progress.previous());
  co_await exchange_.agree(to, from);
  for (uint64_t step = 0; step < progress.num_steps(); ++step) {
    progress.post_receives(step);
    for (;;) {
      EitherMoved moved(progress.arriving(step), progress.send_ready());
      co_await park(moved);
      if (progress.arriving(step).done) break;
    }
    progress.take(step);
  }
  while (const Message* busy = progress.send_ready()) {
    MessageMoved left(*busy);
    co_await park(left);
  }
  co_await exchange_.finish();
}

}  // namespace paceline
