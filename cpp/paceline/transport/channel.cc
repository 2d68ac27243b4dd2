#include "paceline/transport/channel.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "paceline/base/clock.h"
#include "paceline/base/fence.h"

namespace paceline {
namespace {

// BBR paces packets with a timer for every few packets. Between hosts that are near each other this costs throughput
// (docs/log.md) and gains nothing. If the system's default is BBR and the peer answers quickly, use the ordinary
// algorithm; over long distances BBR stays.
void avoid_pacing(int fd) {
  constexpr uint32_t kNear_us = 2000;
  char name[16] = {};
  socklen_t length = sizeof name - 1;
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length) != 0 || strncmp(name, "bbr", 3) != 0) return;
  tcp_info info{};
  length = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_rtt > kNear_us) return;
  if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5) != 0)
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);  // always available; if not, BBR works too
}

// After an interruption TCP retransmits at ever longer intervals: a link that was down for 3 s is used again only 3 s
// later, when peers already count as lost. Retransmit at least every second instead, if the kernel supports it.
void retry_soon(int fd) {
  constexpr int kRtoMax_ms = 44;  // TCP_RTO_MAX_MS, since Linux 6.15
  int one = 1, second_ms = 1000;
  setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &one, sizeof one);
  setsockopt(fd, IPPROTO_TCP, kRtoMax_ms, &second_ms, sizeof second_ms);
}

}  // namespace

TcpChannel::TcpChannel(Fd socket) : socket_(std::move(socket)) {
  int fd = socket_.get(), one = 1;
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  avoid_pacing(fd);
  retry_soon(fd);
}

// On a slow network every packet would wake the progress thread, which takes a tenth of a core from the computation.
// The kernel compares the available bytes again after every change, so no wake-up is missed.
void TcpChannel::wake_at(size_t bytes) {
  constexpr size_t kEnough = 32 << 10;
  int wanted = int(std::clamp<size_t>(bytes, 1, kEnough));
  if (wanted == wakes_at_ || lost_) return;
  if (setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) == 0) wakes_at_ = wanted;
}

// Closing with unread bytes would reset the connection and destroy what the peer has not read yet.
void TcpChannel::end_output() {
  if (!lost_) shutdown(socket_.get(), SHUT_WR);
}

bool TcpChannel::ended() {
  char rest[4096];
  while (!lost_) {
    ssize_t n = recv(socket_.get(), rest, sizeof rest, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (n == 0 || (n < 0 && errno != EINTR)) lost_ = true;
  }
  return true;
}

void TcpChannel::close_after_fork() { socket_.reset(); }

// A peer that has ended may have sent its error before: the channel is lost only at the end of what it sent.
size_t TcpChannel::write_some(const iovec* parts, int num_parts) {
  if (unwritable_) return 0;
  msghdr header{};
  header.msg_iov = const_cast<iovec*>(parts);
  header.msg_iovlen = size_t(num_parts);
  ssize_t n = sendmsg(socket_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n >= 0) return size_t(n);
  if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) unwritable_ = true;
  return 0;
}

size_t TcpChannel::read_some(void* to, size_t bytes) {
  if (lost_) return 0;
  ssize_t n = recv(socket_.get(), to, bytes, MSG_DONTWAIT);
  if (n > 0) return size_t(n);
  if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) lost_ = true;
  return 0;
}

ShmChannel::ShmChannel(Segment segment, bool first, std::shared_ptr<LocalLink> link)
    : segment_(std::move(segment)), link_(std::move(link)) {
  Ring* rings = reinterpret_cast<Ring*>(segment_.data());
  out_ = rings + (first ? 0 : 1);
  in_ = rings + (first ? 1 : 0);
}

size_t ShmChannel::write_some(const iovec* parts, int num_parts) {
  uint64_t at = out_->written.load(std::memory_order_relaxed);
  // The peer's counter is not trusted: a wrong one must not cause writes outside of the ring.
  size_t room = kRingBytes - std::min<uint64_t>(at - out_->read.load(std::memory_order_acquire), kRingBytes);
  size_t done = 0;
  for (int i = 0; i < num_parts && room; ++i) {
    auto* from = static_cast<const std::byte*>(parts[i].iov_base);
    size_t n = std::min(parts[i].iov_len, room);
    size_t pos = size_t((at + done) % kRingBytes), head = std::min(n, kRingBytes - pos);
    std::memcpy(out_->data + pos, from, head);
    std::memcpy(out_->data, from + head, n - head);
    done += n, room -= n;
    if (n < parts[i].iov_len) break;
  }
  if (done) {
    out_->written.store(at + done, std::memory_order_release);
    full_fence();
    link_->ring_if_sleeping();
  } else if (link_->lost()) {
    lost_ = true;
  }
  return done;
}

size_t ShmChannel::read_some(void* to, size_t bytes) {
  uint64_t at = in_->read.load(std::memory_order_relaxed);
  uint64_t filled = in_->written.load(std::memory_order_acquire) - at;
  if (filled > kRingBytes) {
    lost_ = true;  // not a state that a correct peer can produce
    return 0;
  }
  size_t n = std::min<size_t>(bytes, filled);
  if (n == 0) {
    if (link_->lost()) lost_ = true;
    return 0;
  }
  size_t pos = size_t(at % kRingBytes), head = std::min(n, kRingBytes - pos);
  std::memcpy(to, in_->data + pos, head);
  std::memcpy(static_cast<std::byte*>(to) + head, in_->data, n - head);
  in_->read.store(at + n, std::memory_order_release);
  full_fence();
  link_->ring_if_sleeping();
  return n;
}

}  // namespace paceline
