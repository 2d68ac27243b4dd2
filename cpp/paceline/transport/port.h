// Frames on a channel: whole messages in both directions, checked.
//
// Two ways to send. EXPECTED messages (collectives): both sides post the same messages in the same order,
// so data is sent at once; a side that has not posted its receive yet stops reading.
// ANNOUNCED messages (point to point): the sender announces size and tag, the receiver grants the message
// when a matching receive exists, then the data is sent; so any order of tags works. Small messages are sent within
// their announcement (EAGER), up to a bounded number that the receiver has not matched yet. A peer that announces
// far more messages than any honest one is refused.
//
// A port may exist before its channel: what is sent waits until open() is called.
//
// Driver only. Messages belong to the caller and must outlive their transfer.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "paceline/transport/channel.h"
#include "paceline/wire/frame.h"

namespace paceline {

struct Message {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  uint64_t tag = 0;
  bool any_tag = false;  // receives the next message, if it has this size
  int peer = -1;         // global rank, for error messages
  uint64_t moved = 0;    // bytes that have left or arrived
  bool done = false;
};

class Port {
 public:
  using OnAnnounce = std::function<void(Port&, const FrameHeader&, std::string eager_data)>;
  using OnAbort = std::function<void(const FrameHeader&, std::string text)>;

  // `channel` may be null. `sent` counts the payload that goes out, of messages only; it outlives the port.
  Port(int peer, std::unique_ptr<Channel> channel, uint32_t generation, OnAnnounce on_announce, OnAbort on_abort,
       std::atomic<uint64_t>* sent = nullptr);

  void open(std::unique_ptr<Channel> channel);
  bool is_open() const { return channel_ != nullptr; }

  void send(Message* message);
  void receive(Message* message);
  void announce(Message* message, uint64_t detail);  // detail: what both ends must agree on (dtype)
  void grant(const FrameHeader& announced, const std::string& eager_data, Message* message);
  void abort(uint64_t kind, int rank, const std::string& text);
  void heartbeat();
  // Drops references to all messages, because their operations have ended; only flush() may follow.
  void forget();

  // Moves what can be moved; true when anything did. Throws bad_frame.
  bool pump();
  // The driver is about to sleep: it need not wake before the rest of a payload is there.
  void before_sleep() {
    if (channel_) channel_->wake_at(in_payload_ ? in_header_.payload_bytes - in_at_ : 1);
  }
  // Whether the rest of a payload is still on the wire.
  bool awaits_rest() const { return in_payload_ && channel_->over_network(); }
  bool flush();                                                               // the outgoing half of it
  bool flushed() const { return control_.empty() && out_at_ == out_total_; }  // no control frame left to send

  int peer() const { return peer_; }
  // The peer is gone, and nothing that it sent is left to read, or what is left will never be received.
  bool lost() const { return channel_ && (channel_->lost() || (channel_->unwritable() && is_parked())); }
  double heard_s() const { return heard_s_; }
  bool has_heard() const { return in_sequence_ > 0 || in_at_ > 0; }  // the peer has sent anything
  void close_after_fork() {
    if (channel_) channel_->close_after_fork();
  }
  void end_output() {
    if (channel_) channel_->end_output();
  }
  bool ended() { return !channel_ || channel_->ended(); }

 private:
  struct Control {
    FrameHeader header;
    std::string payload;
  };
  bool next_frame();
  bool pump_in();
  bool begin_payload();
  bool is_parked() const { return !in_payload_ && in_at_ == kFrameHeaderBytes; }  // at data without a posted receive
  void end_payload();
  void accept_control();

  static constexpr uint32_t kPieceBytes = 256 << 10;  // stays in the cache between checksum and send
  static constexpr uint32_t kEagerBytes = 8 << 10;
  static constexpr int kMaxEager = 64;
  static constexpr int kMaxAnnounced = 1 << 17;  // twice the messages that a server lets another one leave unread

  int peer_;
  std::unique_ptr<Channel> channel_;
  uint32_t generation_;
  OnAnnounce on_announce_;
  OnAbort on_abort_;
  std::atomic<uint64_t>* sent_;

  // Outgoing: control frames overtake data between frames.
  std::deque<Control> control_;
  std::deque<Message*> sending_;            // front is being cut into frames
  std::map<uint64_t, Message*> announced_;  // by message number, waiting for a grant
  std::map<Message*, uint64_t> number_of_;  // granted messages in sending_
  uint64_t next_number_ = 1;
  int eager_ = 0;  // eager messages that the peer has not matched yet
  uint32_t out_sequence_ = 0;
  std::array<std::byte, kFrameHeaderBytes> out_header_;
  std::string out_text_;
  const std::byte* out_payload_ = nullptr;
  uint32_t out_payload_bytes_ = 0;
  size_t out_at_ = 0, out_total_ = 0;  // position in header + payload; equal: no frame under way
  Message* out_message_ = nullptr;

  // Incoming.
  std::deque<Message*> expected_;
  std::map<uint64_t, Message*> granted_;
  std::array<std::byte, kFrameHeaderBytes> in_header_bytes_;
  size_t in_at_ = 0;
  bool in_payload_ = false;
  FrameHeader in_header_;
  std::string in_text_;
  std::byte* in_target_ = nullptr;
  Message* in_message_ = nullptr;
  uint32_t in_sequence_ = 0;
  uint32_t in_crc_ = 0;  // of the payload so far
  int unmatched_ = 0;    // eager messages of the peer whose data is kept here
  int ungranted_ = 0;    // announcements of the peer, with data or without, that are kept here
  double heard_s_;
};

}  // namespace paceline
