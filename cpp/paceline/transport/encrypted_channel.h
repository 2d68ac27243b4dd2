// A TCP connection to another host whose bytes are encrypted and authenticated, record by record.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "paceline/transport/channel.h"
#include "paceline/wire/record.h"

namespace paceline {

// What both ends derived from their handshake.
struct LinkKeys {
  CipherKind cipher = CipherKind::aes_256_gcm;
  Key send, receive;
};

class EncryptedChannel final : public Channel {
 public:
  // `peer` is the global rank at the other end, for error messages.
  EncryptedChannel(Fd socket, const LinkKeys& keys, int peer);
  // If the socket takes only a part of a record, this returns 0, and the next call must pass the same bytes again.
  size_t write_some(const iovec* parts, int num_parts) override;
  // Returns only bytes whose tag is right; throws Error(peer_lost) if a tag is wrong. Until it returns, it may write
  // anything to the buffer.
  size_t read_some(void* to, size_t bytes) override;
  void wake_at(size_t bytes) override;
  void close_after_fork() override { tcp_.close_after_fork(); }
  void end_output() override { tcp_.end_output(); }
  bool ended() override { return tcp_.ended(); }
  bool needs_checksum() const override { return false; }
  bool over_network() const override { return true; }

 private:
  // A receive also asks for the beginning of what usually follows a payload: the record of the next frame's header, and
  // the prefix after it. In a stream of frames one call then receives one payload.
  static constexpr size_t kAheadBytes = 64 + kRecordOverhead + kRecordPrefixBytes;
  // Grows to the size of the records in use: most connections carry little.
  struct Buffer {
    std::unique_ptr<std::byte[]> data;
    size_t room = 0, at = 0, end = 0;  // `at` to `end` is in use
    size_t size() const { return end - at; }
    std::byte* front() const { return data.get() + at; }
    void make_room(size_t bytes);  // for this many bytes after `at`
  };
  void seal(const iovec* parts, int num_parts);
  size_t record_bytes() const;
  bool receive_record();
  void open_record(std::byte* to, size_t length);
  [[noreturn]] void refuse(const std::string& why) const;

  TcpChannel tcp_;
  int peer_;
  RecordCipher sealer_, opener_;
  Buffer out_;            // records that the socket has not taken yet
  size_t out_plain_ = 0;  // plain bytes in them
  Buffer in_;             // received records, the last one perhaps in part
  Buffer plain_;          // the rest of a record that was longer than its reader's buffer
};

}  // namespace paceline
