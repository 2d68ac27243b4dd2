// Sends and receives: matched by sender and tag, in the order of their announcement.
#include <algorithm>

#include "paceline/base/error.h"
#include "paceline/collectives/exchange.h"

namespace paceline {

// Waits until the channel to a neighbour exists: the lower rank creates it when it first needs it.
class Group::LocalPortOpen final : public Wait {
 public:
  LocalPortOpen(Group& group, int member) : group_(group), member_(member) {}
  bool ready() override { return group_.open_local_port(member_); }
  void blockers(std::vector<int>& ranks) const override { ranks.push_back(group_.global_rank(member_)); }

 private:
  Group& group_;
  int member_;
};

class Group::Matched final : public Wait {
 public:
  Matched(Group& group, const Posted& posted) : group_(group), posted_(posted) {}
  bool ready() override {
    if (posted_->port) return true;
    // A neighbour's channel may appear at any time while this rank waits for its announcement.
    if (!is_open_) is_open_ = open_ports();
    return group_.try_match(posted_);
  }
  void blockers(std::vector<int>& ranks) const override {
    // A receive from any source has no sender that could be missing.
    if (posted_->member != kAnySource) ranks.push_back(group_.global_rank(posted_->member));
  }

 private:
  bool open_ports() {
    bool all = true;
    auto open = [&](int member) {
      if (member != group_.me_ && !group_.open_local_port(member)) all = false;
    };
    if (posted_->member == kAnySource) std::for_each(group_.local_.begin(), group_.local_.end(), open);
    else if (group_.is_local(posted_->member)) open(posted_->member);
    else group_.port(posted_->member, Lane::point_to_point);
    return all;
  }

  Group& group_;
  const Posted& posted_;
  bool is_open_ = false;
};

// Waits until what was queued on a port is sent: an eager message is complete before it is sent.
class Group::Flushed : public Wait {
 public:
  explicit Flushed(Port& port) : port_(port) {}
  bool ready() override {
    if (!port_.flushed()) port_.flush();
    return port_.flushed();
  }
  void blockers(std::vector<int>& ranks) const override { ranks.push_back(port_.peer()); }

 protected:
  Port& port_;
};

// The same for a grant: a sender that has left the job does not wait for it.
class Group::FlushedOrLost final : public Flushed {
 public:
  using Flushed::Flushed;
  bool ready() override { return Flushed::ready() || port_.lost(); }
};

OperationPtr Group::submit_send(int member, uint64_t tag, Part part, DType dtype, bool background) {
  auto message = std::make_shared<Message>();
  message->data = static_cast<std::byte*>(part.data);
  message->bytes = part.count * size_of(dtype);
  message->tag = tag;
  auto describe = [to = global_rank(member), count = part.count, dtype, tag] {
    return "send of " + std::to_string(count) + " " + name_of(dtype) + " to rank " + std::to_string(to) + " with tag " +
           std::to_string(tag);
  };
  auto operation =
      std::make_shared<Operation>([=, this] { return send_message(member, message, dtype); }, std::move(describe));
  return enqueue(operation, OperationKind::send, background);
}

OperationPtr Group::submit_receive(int member, uint64_t tag, Part part, DType dtype, std::shared_ptr<int> source,
                                   bool background) {
  auto posted = std::make_shared<PostedReceive>();
  posted->member = member;
  posted->tag = tag;
  posted->dtype = dtype;
  posted->message.data = static_cast<std::byte*>(part.data);
  posted->message.bytes = part.count * size_of(dtype);
  posted->source = std::move(source);
  auto describe = [from = member == kAnySource ? -1 : global_rank(member), count = part.count, dtype, tag] {
    return "receive of " + std::to_string(count) + " " + name_of(dtype) + " from " +
           (from < 0 ? "any rank" : "rank " + std::to_string(from)) + " with tag " + std::to_string(tag);
  };
  auto operation = std::make_shared<Operation>([=, this] { return receive_message(posted); }, std::move(describe));
  return enqueue(operation, OperationKind::receive, background);
}

Task Group::send_message(int member, std::shared_ptr<Message> message, DType dtype) {
  Port* to = is_local(member) ? &local_port(member) : port(member, Lane::point_to_point);
  if (!to)
    throw Error(ErrorKind::peer_lost, "there is no connection to rank " + std::to_string(global_rank(member)),
                global_rank(member));
  to->announce(message.get(), uint64_t(dtype));
  if (is_local(member)) {
    LocalPortOpen open(*this, member);
    co_await park(open);
  }
  MessageMoved moved(*message);
  co_await park(moved);
  Flushed flushed(*to);
  co_await park(flushed);
}

Task Group::receive_message(Posted posted) {
  posted_.push_back(posted);
  Matched matched(*this, posted);
  co_await park(matched);
  MessageMoved moved(posted->message);
  co_await park(moved);
  FlushedOrLost flushed(*posted->port);  // the grant, which the sender counts
  co_await park(flushed);
}

void Group::on_announce(Port& port, const FrameHeader& header, std::string eager_data) {
  // Receives are served in the order in which they were posted. None of them matches an earlier announcement: each was
  // compared with all of those when it was posted.
  Announced announced{&port, header, std::move(eager_data)};
  auto it =
      std::find_if(posted_.begin(), posted_.end(), [&](auto& one) { return !one->port && fits(*one, announced); });
  if (it == posted_.end()) announced_.push_back(std::move(announced));
  else accept(Posted(*it), announced);
}

bool Group::fits(const PostedReceive& posted, const Announced& announced) const {
  bool is_sender = posted.member == kAnySource || global_rank(posted.member) == announced.port->peer();
  return is_sender && announced.header.tag == posted.tag;
}

bool Group::try_match(const Posted& posted) {
  if (posted->port) return true;
  for (auto it = announced_.begin(); it != announced_.end(); ++it) {
    if (!fits(*posted, *it)) continue;
    Announced announced = std::move(*it);
    announced_.erase(it);
    accept(posted, announced);
    return true;
  }
  return false;
}

void Group::accept(const Posted& posted, const Announced& announced) {
  const FrameHeader& h = announced.header;
  int from = announced.port->peer();
  if (h.total_bytes != posted->message.bytes || h.offset != uint64_t(posted->dtype)) {
    size_t es = h.offset < uint64_t(DType::count_) ? size_of(DType(h.offset)) : 1;
    throw Error(ErrorKind::collective_mismatch,
                "ranks disagree: rank " + std::to_string(from) + " sends " + std::to_string(h.total_bytes / es) + " " +
                    name_of(DType(h.offset)) + " with tag " + std::to_string(h.tag) + ", rank " +
                    std::to_string(global_rank(me_)) + " receives " +
                    std::to_string(posted->message.bytes / size_of(posted->dtype)) + " " + name_of(posted->dtype) +
                    ". Sender and receiver must use tensors of the same size and dtype.");
  }
  std::erase(posted_, posted);
  posted->port = announced.port;
  if (posted->source) *posted->source = member_of(from);
  posted->message.tag = h.tag;
  announced.port->grant(h, announced.eager_data, &posted->message);
}

}  // namespace paceline
