// The engine's links to the neighbours on this host, the descriptors that arrive through them, and the channels of
// closed groups whose other ends are still open.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "paceline/base/error.h"
#include "paceline/engine/engine.h"

namespace paceline {
namespace {
constexpr double kKill_s = 0.5;    // how long the kernel may take to end a process
constexpr int kMaxReceived = 512;  // of one neighbour: each holds a file descriptor
constexpr double kLinger_s = 1.0;  // how long the channels of a closed group wait for the peers to end theirs
}  // namespace

void Engine::add_local_peer(int rank, Fd socket) {
  auto deliver = [this](int from, const LinkMessage& m, Fd fd) {
    std::lock_guard lock(received_mu_);
    if (m.kind == LinkKind::neighbour) {
      introduced_.push_back({from, m, std::move(fd)});
      return;
    }
    auto kept = std::count_if(received_.begin(), received_.end(), [&](auto& one) { return one.rank == from; });
    if (kept >= kMaxReceived)
      throw Error(ErrorKind::bad_frame,
                  "rank " + std::to_string(from) + " has sent " + std::to_string(kept + 1) +
                      " descriptors of groups that this process has not formed, expected up to " +
                      std::to_string(kMaxReceived) + ". Create the same groups in the same order on every member.",
                  from);
    received_.push_back({from, m, std::move(fd)});
  };
  uint64_t number = next_number_.fetch_add(2, std::memory_order_relaxed);
  auto link = std::make_shared<LocalLink>(rank, std::move(socket), deliver,
                                          [=, this](int process) { add_to_epoll(process, number | kProcess); });
  link->introduce(presence_segment_, doorbell_.get());
  {
    std::lock_guard lock(links_mu_);
    if (!links_.emplace(rank, link).second)
      throw Error(ErrorKind::usage, "rank " + std::to_string(rank) + " is linked already: ranks are never reused",
                  rank);
    link_by_number_[number] = link;
  }
  // From here on new segments are announced to this link; one created meanwhile is announced twice.
  arena_.for_each_segment(
      [&](uint64_t id, size_t bytes, int fd) { link->send({0, LinkKind::segment, id, bytes, 0}, {fd}); });
  add_to_epoll(link->socket(), number);
}

void Engine::introduce_neighbours(double timeout_s) {
  double deadline = now_s() + timeout_s;
  auto all = links();
  for (size_t a = 0; a < all.size(); ++a) {
    for (size_t b = a + 1; b < all.size(); ++b) {
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
        throw Error(ErrorKind::shared_memory, "engine: out of file descriptors while neighbours were introduced");
      Fd first(ends[0]), second(ends[1]);
      all[a]->send({0, LinkKind::neighbour, uint64_t(all[b]->peer()), 0, 0}, {first.get()});
      all[b]->send({0, LinkKind::neighbour, uint64_t(all[a]->peer()), 0, 0}, {second.get()});
    }
    // What has not left holds descriptors: go on when the neighbours have taken theirs.
    for (auto& link : all)
      while (!link->flushed() && !link->lost()) {
        if (now_s() > deadline)
          throw Error(ErrorKind::peer_timeout,
                      "rank " + std::to_string(config_.rank) + ": rank " + std::to_string(link->peer()) +
                          " on this host did not take the sockets to its neighbours within the timeout",
                      link->peer());
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
  }
}

bool Engine::await_introductions(int hub, const std::vector<int>& ranks, double timeout_s) {
  double deadline = now_s() + timeout_s;
  for (auto l = link(hub);;) {
    bool is_lost = !l || l->lost();  // checked first: it may have sent everything before its end
    if (l) l->receive();
    std::vector<ReceivedDescriptor> introduced;
    {
      std::lock_guard lock(received_mu_);
      introduced.swap(introduced_);
    }
    for (auto& one : introduced) {
      int rank = int(one.message.id);
      bool is_wanted = one.rank == hub && std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
      if (is_wanted && !link(rank)) add_local_peer(rank, std::move(one.fd));
    }
    if (std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return link(rank) != nullptr; })) return true;
    if (is_lost)
      throw Error(ErrorKind::peer_lost,
                  "rank " + std::to_string(config_.rank) + ": rank " + std::to_string(hub) +
                      " ended while it introduced the processes of this host to each other. Check the output of that "
                      "rank.",
                  hub);
    if (now_s() > deadline) return false;
    pollfd p{l->socket(), POLLIN, 0};
    ::poll(&p, 1, 20);
  }
}

bool Engine::has_many_links() {
  std::lock_guard lock(links_mu_);
  return links_.size() > kFewLinks;
}

void Engine::note_news(uint64_t number) {
  std::lock_guard lock(links_mu_);
  auto it = link_by_number_.find(number);
  if (it == link_by_number_.end()) return;
  if (auto link = it->second.lock()) link->note_news();
  else link_by_number_.erase(it);
}

void Engine::await_local_peers(double timeout_s, std::vector<int> ranks) {
  double deadline = now_s() + timeout_s;
  for (auto& l : links()) {
    if (!ranks.empty() && std::find(ranks.begin(), ranks.end(), l->peer()) == ranks.end()) continue;
    while (!l->present()) {
      bool is_lost = l->lost();  // checked first: the peer may have introduced itself before its end
      l->receive();
      if (l->present()) break;
      if (is_lost || now_s() > deadline)
        throw Error(is_lost ? ErrorKind::peer_lost : ErrorKind::peer_timeout,
                    "rank " + std::to_string(config_.rank) + ": rank " + std::to_string(l->peer()) + " on this host " +
                        (is_lost ? "ended" : "did not answer") +
                        " while the shared memory was being set up. Check the output of that rank.",
                    l->peer());
      pollfd p{l->socket(), POLLIN, 0};
      ::poll(&p, 1, 50);
    }
  }
}

std::shared_ptr<LocalLink> Engine::link(int rank) {
  std::lock_guard lock(links_mu_);
  auto it = links_.find(rank);
  return it == links_.end() ? nullptr : it->second;
}

std::vector<std::shared_ptr<LocalLink>> Engine::links() {
  std::vector<std::shared_ptr<LocalLink>> all;
  std::lock_guard lock(links_mu_);
  for (auto& [rank, link] : links_) all.push_back(link);
  return all;
}

bool Engine::end_peer(int rank) {
  auto l = link(rank);
  if (!l) return false;
  l->receive();
  return l->kill_process(kKill_s);
}

void Engine::forget_peer(int rank) {
  std::shared_ptr<LocalLink> gone;
  {
    std::lock_guard lock(links_mu_);
    auto it = links_.find(rank);
    if (it == links_.end()) return;
    gone = std::move(it->second);
    links_.erase(it);
  }
  // As the driver, so that no operation uses the memory while it is released.
  as_driver([&] { gone->forget(); });
  std::lock_guard lock(received_mu_);
  std::erase_if(received_, [&](const ReceivedDescriptor& received) { return received.rank == rank; });
}

void Engine::receive_links() {
  bool only_news = has_many_links();
  for (auto& link : links()) {
    if (only_news) link->receive_news();
    else link->receive();
  }
}

void Engine::drop_descriptors_before(uint64_t id, uint64_t generation) {
  std::lock_guard lock(received_mu_);
  std::erase_if(received_,
                [&](const ReceivedDescriptor& p) { return p.message.id == id && p.message.extra < generation; });
}

bool Engine::try_expect(int rank, LinkKind kind, uint64_t id, uint64_t extra, uint64_t& bytes, Fd& fd) {
  if (auto l = link(rank)) l->receive();
  std::lock_guard lock(received_mu_);
  for (auto it = received_.begin(); it != received_.end(); ++it)
    if (it->rank == rank && it->message.kind == kind && it->message.id == id && it->message.extra == extra) {
      bytes = it->message.bytes;
      fd = std::move(it->fd);
      received_.erase(it);
      return true;
    }
  return false;
}

Fd Engine::expect(int rank, LinkKind kind, uint64_t id, uint64_t extra, uint64_t& bytes, double timeout_s) {
  auto l = link(rank);
  double start = now_s(), deadline = start + timeout_s, warning = start + config_.warn_s;
  for (Fd fd;;) {
    bool is_lost = !l || l->lost();  // checked first: what it sent before its end is found below
    if (try_expect(rank, kind, id, extra, bytes, fd)) return fd;
    if (now_s() > warning) {
      warning = start + 3 * (warning - start);
      fprintf(stderr, "paceline: rank %d: forming a group has waited %.0f s for rank %d\n", config_.rank,
              now_s() - start, rank);
    }
    if (is_lost || now_s() > deadline)
      throw Error(is_lost ? ErrorKind::peer_lost : ErrorKind::peer_timeout,
                  "rank " + std::to_string(config_.rank) + ": rank " + std::to_string(rank) +
                      (is_lost ? " ended" : " did not arrive within the timeout") +
                      " while a group was being formed. Every member must create the same groups in the same order.",
                  rank);
    pollfd p{l->socket(), POLLIN, 0};
    ::poll(&p, 1, 20);
  }
}

void Engine::request_channel(const ChannelRequest& request) {
  {
    std::lock_guard lock(requests_mu_);
    requests_.push_back(request);
  }
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(requests_bell_.get(), &one, sizeof one);
}

std::vector<ChannelRequest> Engine::take_channel_requests() {
  uint64_t count;
  [[maybe_unused]] ssize_t n = read(requests_bell_.get(), &count, sizeof count);
  std::lock_guard lock(requests_mu_);
  return std::exchange(requests_, {});
}

void Engine::linger(std::vector<std::unique_ptr<Port>> ports) {
  std::lock_guard lock(lingering_mu_);
  for (auto& port : ports) {
    port->end_output();
    lingering_.push_back({now_s() + kLinger_s, std::move(port)});
  }
}

// True if none is left.
bool Engine::drop_ended_ports() {
  std::lock_guard lock(lingering_mu_);
  double now = now_s();
  std::erase_if(lingering_, [&](LingeringPort& l) { return l.port->ended() || now > l.until_s; });
  return lingering_.empty();
}

void Engine::say_goodbye() {
  for (auto& link : links()) link->send({0, LinkKind::goodbye, 0, 0, 0});
  await_ended_ports();
}

void Engine::await_ended_ports() {
  while (!drop_ended_ports()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace paceline
