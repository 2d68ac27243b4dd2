#include "paceline/transport/encrypted_channel.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "paceline/base/error.h"

namespace paceline {

void EncryptedChannel::Buffer::make_room(size_t bytes) {
  if (bytes <= room - at) return;
  size_t used = size();
  if (bytes <= room) {
    std::memmove(data.get(), front(), used);
  } else {
    size_t grown_room = std::max(bytes, 2 * room);
    auto grown = std::make_unique_for_overwrite<std::byte[]>(grown_room);
    if (used) std::memcpy(grown.get(), front(), used);
    data = std::move(grown);
    room = grown_room;
  }
  at = 0;
  end = used;
}

EncryptedChannel::EncryptedChannel(Fd socket, const LinkKeys& keys, int peer)
    : tcp_(std::move(socket)),
      peer_(peer),
      sealer_(keys.cipher, keys.send, Direction::seal),
      opener_(keys.cipher, keys.receive, Direction::open) {}

// Each part is a record of its own: the receiver verifies a header before it uses it, and can decrypt the payload into
// its destination.
void EncryptedChannel::seal(const iovec* parts, int num_parts) {
  out_plain_ = 0;
  for (int i = 0; i < num_parts; ++i) {
    size_t bytes = std::min(parts[i].iov_len, kMaxRecordBytes);
    if (bytes == 0) continue;
    out_.make_room(out_.size() + bytes + kRecordOverhead);
    out_.end += sealer_.seal({static_cast<const std::byte*>(parts[i].iov_base), bytes}, out_.data.get() + out_.end);
    out_plain_ += bytes;
    if (bytes < parts[i].iov_len) return;
  }
}

size_t EncryptedChannel::write_some(const iovec* parts, int num_parts) {
  if (unwritable_) return 0;
  if (out_.size() == 0) {
    out_.at = out_.end = 0;
    seal(parts, num_parts);
  }
  while (out_.size()) {
    iovec rest{out_.front(), out_.size()};
    size_t n = tcp_.write_some(&rest, 1);
    unwritable_ = tcp_.unwritable();
    if (n == 0) return 0;
    out_.at += n;
  }
  return out_plain_;
}

// Bytes of the record that begins at in_.at, as far as that is known.
size_t EncryptedChannel::record_bytes() const {
  return in_.size() < kRecordPrefixBytes ? kRecordPrefixBytes : record_length(in_.front()) + kRecordOverhead;
}

// The peer is not to blame, so it is not a bad frame: the connection is broken, and an elastic job recovers from that.
void EncryptedChannel::refuse(const std::string& why) const {
  throw Error(ErrorKind::peer_lost,
              "encrypted record " + std::to_string(opener_.number()) + " from rank " + std::to_string(peer_) + " " +
                  why +
                  ": it was altered, replayed, reordered or not sent by that rank. The connection is closed. Check the "
                  "network between the hosts.",
              peer_);
}

// False if the rest of the next record has not arrived yet.
bool EncryptedChannel::receive_record() {
  for (;;) {
    bool has_prefix = in_.size() >= kRecordPrefixBytes;
    if (has_prefix && !opener_.expects(in_.front())) refuse("has a wrong prefix");
    size_t wanted = record_bytes();
    if (has_prefix && in_.size() >= wanted) return true;
    in_.make_room(wanted + kAheadBytes);
    size_t n = tcp_.read_some(in_.data.get() + in_.end, wanted + kAheadBytes - in_.size());
    in_.end += n;
    if (n) continue;
    lost_ = tcp_.lost();  // a part of a record is never used: its tag is missing
    return false;
  }
}

void EncryptedChannel::open_record(std::byte* to, size_t length) {
  if (!opener_.open({in_.front(), length + kRecordOverhead}, to)) refuse("has a wrong tag");
  in_.at += length + kRecordOverhead;
}

size_t EncryptedChannel::read_some(void* to, size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  if (lost_ || bytes == 0) return 0;
  if (plain_.size() == 0) {
    if (!receive_record()) return 0;
    size_t length = record_length(in_.front());
    if (length <= bytes) {
      open_record(target, length);
      return length;
    }
    plain_.at = plain_.end = 0;
    plain_.make_room(length);
    open_record(plain_.data.get(), length);
    plain_.end = length;
  }
  size_t n = std::min(bytes, plain_.size());
  std::memcpy(target, plain_.front(), n);
  plain_.at += n;
  return n;
}

// The whole of a record must be there before any of it can be used.
void EncryptedChannel::wake_at(size_t) {
  size_t wanted = record_bytes();
  tcp_.wake_at(wanted > in_.size() ? wanted - in_.size() : 1);
}

}  // namespace paceline
