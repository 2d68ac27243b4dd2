#include "paceline/transport/port.h"

#include <algorithm>
#include <string>

#include "paceline/base/clock.h"
#include "paceline/base/error.h"
#include "paceline/wire/crc32c.h"

namespace paceline {

Port::Port(int peer, std::unique_ptr<Channel> channel, uint32_t generation, OnAnnounce on_announce, OnAbort on_abort,
           std::atomic<uint64_t>* sent)
    : peer_(peer),
      channel_(std::move(channel)),
      generation_(generation),
      on_announce_(std::move(on_announce)),
      on_abort_(std::move(on_abort)),
      sent_(sent),
      heard_s_(now_s()) {}

void Port::open(std::unique_ptr<Channel> channel) {
  channel_ = std::move(channel);
  heard_s_ = now_s();
}

void Port::send(Message* m) {
  m->peer = peer_;
  if (m->bytes == 0) m->done = true;  // both sides know: nothing is sent
  else sending_.push_back(m);
}

void Port::receive(Message* m) {
  m->peer = peer_;
  if (m->bytes == 0) m->done = true;
  else expected_.push_back(m);
}

void Port::announce(Message* m, uint64_t detail) {
  m->peer = peer_;
  FrameHeader h;
  h.kind = FrameKind::announce;
  h.tag = m->tag;
  h.message = next_number_++;
  h.total_bytes = m->bytes;
  h.offset = detail;
  if (m->bytes <= kEagerBytes && eager_ < kMaxEager) {
    control_.push_back({h, std::string(reinterpret_cast<const char*>(m->data), m->bytes)});
    ++eager_;
    m->done = true;  // a copy of its data is queued
    return;
  }
  announced_[h.message] = m;
  control_.push_back({h, {}});
}

void Port::grant(const FrameHeader& announced, const std::string& eager_data, Message* m) {
  m->peer = peer_;
  FrameHeader h;
  h.kind = FrameKind::grant;
  h.message = announced.message;
  control_.push_back({h, {}});
  --ungranted_;
  if (announced.payload_bytes) --unmatched_;
  if (announced.payload_bytes == announced.total_bytes) {  // eager, or empty
    std::copy_n(reinterpret_cast<const std::byte*>(eager_data.data()), m->bytes, m->data);
    m->done = true;
  } else {
    granted_[announced.message] = m;
  }
}

void Port::abort(uint64_t kind, int rank, const std::string& text) {
  FrameHeader h;
  h.kind = FrameKind::abort;
  h.offset = kind;
  h.tag = uint64_t(int64_t(rank));
  control_.push_back({h, text.substr(0, 4000)});
}

void Port::heartbeat() {
  if (!channel_ || !control_.empty() || out_at_ != out_total_) return;  // something is being sent anyway
  FrameHeader h;
  h.kind = FrameKind::heartbeat;
  control_.push_back({h, {}});
}

void Port::forget() {
  sending_.clear();
  announced_.clear();
  number_of_.clear();
  expected_.clear();
  granted_.clear();
  if (!out_message_) return;
  // A frame in flight cannot be cancelled, but its memory may be freed: finish it from a copy.
  out_text_.assign(reinterpret_cast<const char*>(out_payload_), out_payload_bytes_);
  out_payload_ = reinterpret_cast<const std::byte*>(out_text_.data());
  out_message_ = nullptr;
}

bool Port::pump() {
  bool out = flush(), in = pump_in();
  return out || in;
}

// Prepares the next frame; false when there is nothing to send.
bool Port::next_frame() {
  FrameHeader h;
  out_message_ = nullptr;
  if (!control_.empty()) {
    h = control_.front().header;
    out_text_ = std::move(control_.front().payload);
    control_.pop_front();
    out_payload_ = reinterpret_cast<const std::byte*>(out_text_.data());
    h.payload_bytes = uint32_t(out_text_.size());
  } else if (!sending_.empty()) {
    Message* m = out_message_ = sending_.front();
    h.kind = FrameKind::data;
    h.tag = m->tag;
    if (auto it = number_of_.find(m); it != number_of_.end()) h.message = it->second;
    h.total_bytes = m->bytes;
    h.offset = m->moved;
    h.payload_bytes = uint32_t(std::min<uint64_t>(m->bytes - m->moved, kPieceBytes));
    out_payload_ = m->data + m->moved;
  } else {
    return false;
  }
  h.generation = generation_;
  h.sequence = out_sequence_++;
  if (channel_->needs_checksum()) h.payload_crc = crc32c(0, out_payload_, h.payload_bytes);
  encode(h, out_header_);
  if (sent_ && (h.kind == FrameKind::data || h.kind == FrameKind::announce))
    sent_->fetch_add(h.payload_bytes, std::memory_order_relaxed);
  out_payload_bytes_ = h.payload_bytes;
  out_at_ = 0;
  out_total_ = kFrameHeaderBytes + h.payload_bytes;
  return true;
}

bool Port::flush() {
  bool moved = false;
  if (!channel_) return moved;
  for (;;) {
    if (out_at_ == out_total_ && !next_frame()) return moved;
    iovec parts[2];
    int n = 0;
    if (out_at_ < kFrameHeaderBytes) parts[n++] = {out_header_.data() + out_at_, kFrameHeaderBytes - out_at_};
    size_t payload_at = out_at_ > kFrameHeaderBytes ? out_at_ - kFrameHeaderBytes : 0;
    if (payload_at < out_payload_bytes_)
      parts[n++] = {const_cast<std::byte*>(out_payload_) + payload_at, out_payload_bytes_ - payload_at};
    size_t sent = channel_->write_some(parts, n);
    if (sent == 0) return moved;
    moved = true;
    out_at_ += sent;
    if (out_at_ < out_total_ || !out_message_) continue;
    Message* m = out_message_;
    out_message_ = nullptr;
    m->moved += out_payload_bytes_;
    if (m->moved == m->bytes) {
      sending_.pop_front();
      number_of_.erase(m);
      m->done = true;
    }
  }
}

bool Port::pump_in() {
  bool moved = false;
  if (!channel_) return moved;
  for (;;) {
    if (!in_payload_) {
      if (in_at_ < kFrameHeaderBytes) {
        size_t n = channel_->read_some(in_header_bytes_.data() + in_at_, kFrameHeaderBytes - in_at_);
        if (n == 0) return moved;
        moved = true;
        in_at_ += n;
        heard_s_ = now_s();
        if (in_at_ < kFrameHeaderBytes) continue;
        in_header_ = decode(in_header_bytes_);
        if (in_header_.generation != generation_ || in_header_.sequence != in_sequence_)
          throw Error(ErrorKind::bad_frame,
                      "bad frame from rank " + std::to_string(peer_) + ": generation " +
                          std::to_string(in_header_.generation) + " frame " + std::to_string(in_header_.sequence) +
                          ", expected generation " + std::to_string(generation_) + " frame " +
                          std::to_string(in_sequence_),
                      peer_);
      }
      if (!begin_payload()) return moved;  // not expected yet: leave it in the channel
      in_sequence_++;
      in_payload_ = true;
      in_at_ = 0;
      in_crc_ = 0;
    }
    while (in_at_ < in_header_.payload_bytes) {
      size_t n = channel_->read_some(in_target_ + in_at_, in_header_.payload_bytes - in_at_);
      if (n == 0) return moved;
      moved = true;
      if (channel_->needs_checksum()) in_crc_ = crc32c(in_crc_, in_target_ + in_at_, n);  // while it is in the cache
      in_at_ += n;
      heard_s_ = now_s();
    }
    end_payload();
    in_payload_ = false;
    in_at_ = 0;
  }
}

// Decides where the payload goes; false when its message has not been posted yet.
bool Port::begin_payload() {
  const FrameHeader& h = in_header_;
  in_message_ = nullptr;
  if (h.kind != FrameKind::data) {
    in_text_.resize(h.payload_bytes);
    in_target_ = reinterpret_cast<std::byte*>(in_text_.data());
    return true;
  }
  Message* m = nullptr;
  if (h.message != 0) {
    auto it = granted_.find(h.message);
    if (it != granted_.end()) m = it->second;
  } else {
    if (expected_.empty()) return false;
    m = expected_.front();
  }
  if (!m || (m->tag != h.tag && !m->any_tag) || m->bytes != h.total_bytes || m->moved != h.offset)
    throw Error(ErrorKind::bad_frame,
                "bad frame from rank " + std::to_string(peer_) + ": a piece at " + std::to_string(h.offset) +
                    " of a message of " + std::to_string(h.total_bytes) + " bytes with tag " + std::to_string(h.tag) +
                    ", expected " +
                    (m ? "offset " + std::to_string(m->moved) + " of " + std::to_string(m->bytes) + " bytes with tag " +
                             std::to_string(m->tag)
                       : std::string("none")),
                peer_);
  in_message_ = m;
  in_target_ = m->data + h.offset;
  return true;
}

void Port::end_payload() {
  const FrameHeader& h = in_header_;
  if (channel_->needs_checksum() && in_crc_ != h.payload_crc)
    throw Error(ErrorKind::bad_frame,
                "bad frame from rank " + std::to_string(peer_) + ": payload checksum " + std::to_string(in_crc_) +
                    ", expected " + std::to_string(h.payload_crc),
                peer_);
  if (!in_message_) return accept_control();
  Message* m = in_message_;
  in_message_ = nullptr;
  m->moved += h.payload_bytes;
  if (m->moved < m->bytes) return;
  if (h.message != 0) granted_.erase(h.message);
  else expected_.pop_front();
  m->done = true;
}

void Port::accept_control() {
  const FrameHeader& h = in_header_;
  switch (h.kind) {
    case FrameKind::announce:
      if (h.payload_bytes != 0 && h.payload_bytes != h.total_bytes)
        throw Error(ErrorKind::bad_frame,
                    "bad frame from rank " + std::to_string(peer_) + ": an announcement of " +
                        std::to_string(h.total_bytes) + " bytes with " + std::to_string(h.payload_bytes) + " of them",
                    peer_);
      // A peer must not fill this process's memory with data that no receive has asked for.
      if (h.payload_bytes > kEagerBytes || (h.payload_bytes && ++unmatched_ > kMaxEager))
        throw Error(ErrorKind::bad_frame,
                    "bad frame from rank " + std::to_string(peer_) + ": " + std::to_string(unmatched_) +
                        " messages were sent before they were granted, the last of " + std::to_string(h.payload_bytes) +
                        " bytes; expected up to " + std::to_string(kMaxEager) + " of " + std::to_string(kEagerBytes) +
                        " bytes",
                    peer_);
      if (++ungranted_ > kMaxAnnounced)
        throw Error(ErrorKind::bad_frame,
                    "bad frame from rank " + std::to_string(peer_) + ": it has announced " +
                        std::to_string(ungranted_) + " messages that were not received; expected up to " +
                        std::to_string(kMaxAnnounced) + ". Post the receives, or send fewer messages ahead.",
                    peer_);
      return on_announce_(*this, h, std::move(in_text_));
    case FrameKind::grant: {
      auto it = announced_.find(h.message);
      if (it == announced_.end()) {  // an eager message has been matched
        eager_ -= eager_ > 0;
        return;
      }
      Message* m = it->second;
      announced_.erase(it);
      if (m->bytes == 0) {
        m->done = true;
        return;
      }
      number_of_[m] = h.message;
      sending_.push_back(m);
      return;
    }
    case FrameKind::abort: return on_abort_(h, in_text_);
    default: return;  // a heartbeat: receiving it is enough
  }
}

}  // namespace paceline
