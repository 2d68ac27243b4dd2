#include "paceline/transport/local_link.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "paceline/base/error.h"

namespace paceline {
namespace {
constexpr uint32_t kMagic = 0x4b4c4350;  // "PCLK"
constexpr size_t kMaxFds = 2;
}  // namespace

LocalLink::LocalLink(int peer, Fd socket, Deliver deliver)
    : peer_(peer), socket_(std::move(socket)), deliver_(std::move(deliver)) {
  fcntl(socket_.get(), F_SETFL, fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
}

void LocalLink::send(LinkMessage message, std::vector<int> fds) {
  message.magic = kMagic;
  std::lock_guard lock(mu_);
  std::vector<Fd> own;  // duplicates, because the original may be closed while this is queued
  for (int fd : fds) own.emplace_back(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  outgoing_.emplace_back(message, std::move(own));
  flush_locked();
}

bool LocalLink::flushed() {
  std::lock_guard lock(mu_);
  flush_locked();
  return outgoing_.empty();
}

void LocalLink::flush_locked() {
  while (!outgoing_.empty()) {
    auto& [message, fds] = outgoing_.front();
    iovec part{&message, sizeof message};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    if (!fds.empty()) {
      header.msg_control = control;
      header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
      cmsghdr* c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
      for (size_t i = 0; i < fds.size(); ++i) {
        int fd = fds[i].get();
        memcpy(CMSG_DATA(c) + i * sizeof fd, &fd, sizeof fd);
      }
    }
    ssize_t n = sendmsg(socket_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETOOMANYREFS)) return;
    if (n < 0 && errno == EINTR) continue;
    if (n != ssize_t(sizeof message)) {  // the peer is gone, or the stream is out of step
      lost_.store(true, std::memory_order_release);
      outgoing_.clear();
      return;
    }
    outgoing_.pop_front();
  }
}

void LocalLink::receive() {
  std::lock_guard lock(mu_);
  if (lost_) return;
  flush_locked();
  for (;;) {
    LinkMessage message;
    iovec part{&message, sizeof message};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)];
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    ssize_t n = recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    std::vector<Fd> fds;
    if (n > 0)
      for (cmsghdr* c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
          for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            fds.emplace_back(fd);
          }
    if (n != ssize_t(sizeof message) || message.magic != kMagic) {  // end of stream, or not ours
      lost_.store(true, std::memory_order_release);
      return;
    }
    handle(message, std::move(fds));
  }
}

void LocalLink::handle(const LinkMessage& message, std::vector<Fd> fds) {
  switch (message.kind) {
    case LinkKind::presence:
      if (fds.size() != 2) break;
      presence_segment_ = Segment::map(std::move(fds[0]), message.bytes);
      presence_ = reinterpret_cast<Presence*>(presence_segment_.data());
      doorbell_ = std::move(fds[1]);
      return;
    case LinkKind::segment:
      if (fds.size() != 1) break;
      if (!segments_.contains(message.id))
        segments_[message.id] = std::make_shared<Segment>(Segment::map(std::move(fds[0]), message.bytes));
      return;
    case LinkKind::segment_gone:
      segments_.erase(message.id);
      return;
    case LinkKind::group:
    case LinkKind::channel:
      deliver_(peer_, message, fds.empty() ? Fd() : std::move(fds[0]));
      return;
    case LinkKind::goodbye:
      left_.store(true, std::memory_order_release);
      return;
  }
  lost_.store(true, std::memory_order_release);  // a message that no version of us sends
}

std::shared_ptr<Segment> LocalLink::find(const Location& where, size_t bytes) {
  auto look = [&]() -> std::shared_ptr<Segment> {
    std::lock_guard lock(mu_);
    auto it = segments_.find(where.segment);
    if (it == segments_.end()) return nullptr;
    size_t size = it->second->bytes();
    if (where.offset > size || bytes > size - where.offset) return nullptr;
    return it->second;
  };
  if (auto segment = look()) return segment;
  receive();  // the announcement was sent before anybody could name the segment
  return look();
}

std::byte* LocalLink::resolve(const Location& where, size_t bytes) {
  auto segment = find(where, bytes);
  return segment ? segment->data() + where.offset : nullptr;
}

void LocalLink::ring_if_sleeping() {
  if (presence_ && presence_->sleeping.load(std::memory_order_relaxed)) {
    uint64_t one = 1;
    if (write(doorbell_.get(), &one, sizeof one) < 0 && errno != EAGAIN)
      lost_.store(true, std::memory_order_release);
  }
}

double LocalLink::silent_s(double now) {
  uint64_t beat = presence_ ? presence_->heartbeat.load(std::memory_order_relaxed) : 0;
  // A side that did not look for a while knows nothing about the time in between.
  if (beat != last_beat_ || now - sampled_s_ > 1.0) {
    last_beat_ = beat;
    beat_s_ = now;
  }
  sampled_s_ = now;
  return now - beat_s_;
}

}  // namespace paceline
