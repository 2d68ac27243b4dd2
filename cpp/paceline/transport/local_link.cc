#include "paceline/transport/local_link.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "paceline/base/error.h"

namespace paceline {
namespace {
constexpr uint32_t kMagic = 0x4b4c4350;  // "PCLK"
constexpr size_t kMaxFds = 2;
constexpr size_t kMaxSegments = 4096;  // each holds a descriptor, in the peer as well
constexpr size_t kControlBytes = CMSG_SPACE(sizeof(int) * kMaxFds) + CMSG_SPACE(sizeof(ucred));
}  // namespace

LocalLink::LocalLink(int peer, Fd socket, Deliver deliver, OnProcess on_process)
    : peer_(peer), socket_(std::move(socket)), deliver_(std::move(deliver)), on_process_(std::move(on_process)) {
  int one = 1;
  fcntl(socket_.get(), F_SETFL, fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &one, sizeof one);
}

void LocalLink::introduce(const Segment& presence, int doorbell) {
  send({0, LinkKind::presence, 0, presence.bytes(), 0}, {presence.fd(), doorbell});
}

void LocalLink::mark_lost() { lost_.store(true, std::memory_order_release); }

void LocalLink::send(LinkMessage message, std::vector<int> fds) {
  message.magic = kMagic;
  std::lock_guard lock(mu_);
  if (lost()) return;
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
    alignas(cmsghdr) char control[kControlBytes] = {};
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
      if (message.kind == LinkKind::presence) {  // sent explicitly: the peer may not have enabled SO_PASSCRED yet
        ucred me{getpid(), geteuid(), getegid()};
        header.msg_controllen += CMSG_SPACE(sizeof me);
        c = CMSG_NXTHDR(&header, c);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_CREDENTIALS;
        c->cmsg_len = CMSG_LEN(sizeof me);
        memcpy(CMSG_DATA(c), &me, sizeof me);
      }
    }
    ssize_t n = sendmsg(socket_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETOOMANYREFS)) return;
    if (n < 0 && errno == EINTR) continue;
    if (n != ssize_t(sizeof message)) {  // the peer is gone, or the stream is out of step
      mark_lost();
      outgoing_.clear();
      return;
    }
    outgoing_.pop_front();
  }
}

void LocalLink::receive() {
  std::lock_guard lock(mu_);
  if (lost()) return;
  // Checked first: what the peer sent before its end is read below. A child that it forked may keep the socket
  // open for longer than the peer lives.
  bool has_ended = process_.has_ended();
  flush_locked();
  receive_locked();
  if (has_ended) mark_lost();
  if (!outgoing_.empty()) note_news();
}

void LocalLink::receive_locked() {
  for (;;) {
    LinkMessage message;
    iovec part{&message, sizeof message};
    alignas(cmsghdr) char control[kControlBytes];
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    ssize_t n = recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    std::vector<Fd> fds;
    int sender = -1;
    if (n > 0)
      for (cmsghdr* c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
        if (c->cmsg_level != SOL_SOCKET) continue;
        if (c->cmsg_type == SCM_RIGHTS)
          for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            fds.emplace_back(fd);
          }
        if (c->cmsg_type == SCM_CREDENTIALS) {
          ucred credentials;
          memcpy(&credentials, CMSG_DATA(c), sizeof credentials);
          sender = credentials.pid;
        }
      }
    if (n != ssize_t(sizeof message) || message.magic != kMagic) return mark_lost();  // end of stream, or not ours
    // The progress thread calls this: a peer that sends what cannot be used is lost, and nothing else ends.
    try {
      handle(message, std::move(fds), sender);
    } catch (const Error& e) {
      fprintf(stderr, "paceline: the link to rank %d is closed: %s\n", peer_, e.what());
      return mark_lost();
    }
    if (lost()) return;
  }
}

void LocalLink::handle(const LinkMessage& message, std::vector<Fd> fds, int sender) {
  switch (message.kind) {
    case LinkKind::presence:
      if (fds.size() != 2 || present() || message.bytes < sizeof(Presence)) break;
      presence_segment_ = Segment::map(std::move(fds[0]), message.bytes);
      presence_ = reinterpret_cast<Presence*>(presence_segment_.data());
      doorbell_ = std::move(fds[1]);
      pid_.store(presence_->pid, std::memory_order_relaxed);
      process_ = Neighbour::open(sender, socket_.get());
      if (process_) on_process_(process_.fd());
      present_.store(true, std::memory_order_release);
      return;
    case LinkKind::segment:
      if (fds.size() != 1) break;
      if (segments_.size() >= kMaxSegments && !segments_.contains(message.id))
        throw Error(ErrorKind::bad_frame,
                    "it has more than " + std::to_string(kMaxSegments) +
                        " segments of engine memory. Allocate fewer and larger tensors in engine memory.",
                    peer_);
      if (!segments_.contains(message.id))
        segments_[message.id] = std::make_shared<Segment>(Segment::map(std::move(fds[0]), message.bytes));
      return;
    case LinkKind::segment_gone: segments_.erase(message.id); return;
    case LinkKind::group:
    case LinkKind::channel: deliver_(peer_, message, fds.empty() ? Fd() : std::move(fds[0])); return;
    case LinkKind::neighbour:
      if (fds.size() != 1) break;
      deliver_(peer_, message, std::move(fds[0]));
      return;
    case LinkKind::goodbye: left_.store(true, std::memory_order_release); return;
  }
  mark_lost();  // a message that no version of Paceline sends
}

bool LocalLink::kill_process(double timeout_s) {
  Neighbour held;
  {
    std::lock_guard lock(mu_);
    if (process_) held = process_.again();
    else if (!lost())
      throw Error(ErrorKind::usage,
                  "rank " + std::to_string(peer_) +
                      " cannot be killed by this process: the kernel did not"
                      " report its pid (another pid namespace?)",
                  peer_);
  }
  return held.end(timeout_s);
}

void LocalLink::forget() {
  std::lock_guard lock(mu_);
  mark_lost();
  outgoing_.clear();
  segments_.clear();
  presence_ = nullptr;
  presence_segment_ = Segment();
  doorbell_.reset();
  process_.reset();
  socket_.reset();
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
  receive();  // the announcement was sent before the segment could be named
  return look();
}

std::byte* LocalLink::resolve(const Location& where, size_t bytes) {
  auto segment = find(where, bytes);
  return segment ? segment->data() + where.offset : nullptr;
}

void LocalLink::ring_if_sleeping() {
  if (presence_ && presence_->sleeping.load(std::memory_order_relaxed)) {
    uint64_t one = 1;
    if (write(doorbell_.get(), &one, sizeof one) < 0 && errno != EAGAIN) mark_lost();
  }
}

double LocalLink::silent_s(double now) {
  uint64_t beat = presence_ ? presence_->heartbeat.load(std::memory_order_relaxed) : 0;
  // A side that did not check for a while knows nothing about the time in between.
  if (beat != last_beat_ || now - sampled_s_ > 1.0) {
    last_beat_ = beat;
    beat_s_ = now;
  }
  sampled_s_ = now;
  return now - beat_s_;
}

}  // namespace paceline
