// Messages of one collective between hosts; the descriptors are compared before any byte is used.
#pragma once
#include <deque>
#include <vector>

#include "paceline/collectives/group.h"

namespace paceline {

// Waits until the messages in a range have been moved.
class Moved final : public Wait {
 public:
  explicit Moved(const std::deque<Message>& messages) : messages_(messages) {}
  bool ready() override {
    while (at_ < messages_.size() && messages_[at_].done) ++at_;
    return at_ == messages_.size();
  }
  void blockers(std::vector<int>& ranks) const override {
    for (auto& m : messages_)
      if (!m.done) ranks.push_back(m.peer);
  }

 private:
  const std::deque<Message>& messages_;
  size_t at_ = 0;
};

class MessageMoved final : public Wait {
 public:
  explicit MessageMoved(const Message& message) : message_(message) {}
  bool ready() override { return message_.done; }
  void blockers(std::vector<int>& ranks) const override { ranks.push_back(message_.peer); }

 private:
  const Message& message_;
};

class Exchange {
 public:
  Exchange(Group& group, const Descriptor& shown) : group_(group), shown_(shown) {}

  // Sends this rank's call to `to`, and compares it with the call of `from`.
  Task agree(const std::vector<int>& to, const std::vector<int>& from);

  // Both return the message, which stays put until the exchange ends.
  Message& send(int member, const void* data, uint64_t bytes);
  Message& receive(int member, void* data, uint64_t bytes);
  Task finish();

 private:
  Message& post(std::deque<Message>& list, int member, const void* data, uint64_t bytes);
  Group& group_;
  const Descriptor shown_;
  std::deque<Message> sends_, receives_;
  std::deque<Descriptor> theirs_;
};

}  // namespace paceline
