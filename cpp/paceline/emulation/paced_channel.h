// A connection over an emulated link: what is sent arrives as late as it would over that link.
//
// The sender cuts its bytes into CHUNKS and writes before each one when it arrives (EmulatedLinks::send). The receiver
// leaves a chunk unread until then. Nothing is copied or kept: early bytes wait in the buffers of the socket. A sender
// that is too far ahead waits, so that several connections share a link. Frames of a few kilobytes never wait, because
// nothing may drive this process after them; the link is occupied for their time all the same.
#pragma once
#include <array>
#include <memory>

#include "paceline/emulation/links.h"
#include "paceline/transport/channel.h"

namespace paceline {

class PacedChannel final : public Channel {
 public:
  // `channel` is a TCP connection between processes of one machine, encrypted or not. `links` outlives this.
  PacedChannel(std::unique_ptr<Channel> channel, EmulatedLinks& links, int rank, int peer);
  size_t write_some(const iovec* parts, int num_parts) override;
  size_t read_some(void* to, size_t bytes) override;
  void wake_at(size_t bytes) override;
  void close_after_fork() override;
  void end_output() override { channel_->end_output(); }
  bool ended() override { return channel_->ended(); }
  bool needs_checksum() const override { return channel_->needs_checksum(); }
  bool over_network() const override { return true; }
  int timer() const { return timer_.get(); }  // readable when a chunk arrives, or a link is free

 private:
  struct ChunkHeader {
    uint64_t arrives_ns;
    uint32_t bytes, magic;
  };
  static constexpr size_t kSmallFrame = 16 << 10;
  bool begin_chunk(const iovec* parts, int num_parts);
  bool read_header();

  std::unique_ptr<Channel> channel_;
  EmulatedLinks& links_;
  uint32_t here_, there_;
  int peer_;
  Fd timer_;
  uint64_t timer_ns_ = 0;  // when it was set to expire

  ChunkHeader out_{};
  size_t out_at_ = sizeof(ChunkHeader), out_left_ = 0;  // position in the header; bytes of the chunk not written yet
  uint64_t busy_until_ns_ = 0;                          // the link; 0: nothing waits to be sent
  ChunkHeader in_{};
  size_t in_at_ = 0, in_left_ = 0;
};

}  // namespace paceline
