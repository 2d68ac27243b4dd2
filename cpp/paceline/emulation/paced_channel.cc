#include "paceline/emulation/paced_channel.h"

#include <sys/timerfd.h>

#include <algorithm>
#include <string>

#include "paceline/base/error.h"

namespace paceline {
namespace {
constexpr uint32_t kMagic = 0x706b6e6c;
constexpr size_t kEnough = 32 << 10;              // wake up for so many bytes, as for other connections
constexpr size_t kChunksAtOnce = 4;               // or for what a link carries in a millisecond
constexpr uint64_t kLatest_ns = 600'000'000'000;  // no chunk of an honest peer is on its way for so long
}  // namespace

PacedChannel::PacedChannel(std::unique_ptr<Channel> channel, EmulatedLinks& links, int rank, int peer)
    : channel_(std::move(channel)),
      links_(links),
      here_(links.host_of(rank)),
      there_(links.host_of(peer)),
      peer_(peer),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
  if (!timer_) throw Error(ErrorKind::shared_memory, "emulated links: out of file descriptors");
}

void PacedChannel::close_after_fork() {
  channel_->close_after_fork();
  timer_.reset();
}

// False if the link is busy for so long that others must be let in.
bool PacedChannel::begin_chunk(const iovec* parts, int num_parts) {
  size_t offered = 0;
  for (int i = 0; i < num_parts; ++i) offered += parts[i].iov_len;
  uint64_t now = EmulatedLinks::now_ns();
  bool is_small = offered <= kSmallFrame;
  busy_until_ns_ = is_small ? 0 : links_.busy_until(here_, there_, now);
  if (busy_until_ns_ || offered == 0) return false;
  out_left_ = is_small ? offered : std::min(offered, links_.chunk_bytes());
  size_t bytes = out_left_ + sizeof out_;
  uint64_t arrives = links_.send(here_, there_, bytes, now, is_small);
  // A small message overtakes those of other connections, not the one before it on its own.
  out_ = {std::max(arrives, out_.arrives_ns + links_.duration_ns(bytes)), uint32_t(out_left_), kMagic};
  out_at_ = 0;
  return true;
}

size_t PacedChannel::write_some(const iovec* parts, int num_parts) {
  constexpr int kParts = 4;
  if (unwritable_ || (out_left_ == 0 && !begin_chunk(parts, num_parts))) return 0;
  iovec now[kParts + 1];
  int n = 0;
  size_t header = sizeof out_ - out_at_, room = out_left_;
  if (header) now[n++] = {reinterpret_cast<std::byte*>(&out_) + out_at_, header};
  for (int i = 0; i < std::min(num_parts, kParts) && room; ++i) {
    now[n++] = {parts[i].iov_base, std::min(parts[i].iov_len, room)};
    room -= now[n - 1].iov_len;
  }
  size_t written = channel_->write_some(now, n);
  unwritable_ = channel_->unwritable();
  out_at_ += std::min(written, header);
  written -= std::min(written, header);
  out_left_ -= written;
  return written;
}

// True if a chunk has begun; then in_left_ > 0.
bool PacedChannel::read_header() {
  while (in_at_ < sizeof in_) {
    size_t n = channel_->read_some(reinterpret_cast<std::byte*>(&in_) + in_at_, sizeof in_ - in_at_);
    lost_ = channel_->lost();
    if (n == 0) return false;
    in_at_ += n;
    if (in_at_ < sizeof in_) continue;
    if (in_.magic != kMagic || in_.bytes == 0 || in_.arrives_ns > EmulatedLinks::now_ns() + kLatest_ns)
      throw Error(ErrorKind::bad_frame,
                  "rank " + std::to_string(peer_) +
                      " sends what is no chunk of an emulated link: all processes of a job must have the same "
                      "PACELINE_EMULATE_LINKS",
                  peer_);
    in_left_ = in_.bytes;
  }
  return true;
}

size_t PacedChannel::read_some(void* to, size_t bytes) {
  if (lost_ || !read_header() || in_.arrives_ns > EmulatedLinks::now_ns()) return 0;
  size_t n = channel_->read_some(to, std::min(bytes, in_left_));
  lost_ = channel_->lost();
  in_left_ -= n;
  if (in_left_ == 0) in_at_ = 0;
  return n;
}

void PacedChannel::wake_at(size_t bytes) {
  uint64_t at = busy_until_ns_;
  bool is_early = in_at_ == sizeof in_ && in_.arrives_ns > EmulatedLinks::now_ns();
  if (is_early) {
    // A fast link would wake this thread thousands of times a second, which other processes need the core for.
    size_t wanted = std::min(bytes, std::max(kEnough, kChunksAtOnce * links_.chunk_bytes()));
    uint64_t arrives = in_.arrives_ns + (wanted > in_left_ ? links_.duration_ns(wanted - in_left_) : 0);
    at = at ? std::min(at, arrives) : arrives;
  }
  channel_->wake_at(is_early ? kEnough : bytes);
  if (at == 0 || at == timer_ns_) return;
  timer_ns_ = at;
  itimerspec expires{{0, 0}, {time_t(at / 1'000'000'000), long(at % 1'000'000'000)}};
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &expires, nullptr);
}

}  // namespace paceline
