#include "paceline/engine/engine.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "paceline/base/error.h"
#include "paceline/base/fence.h"
#include "paceline/base/futex.h"

namespace paceline {
namespace {
constexpr double kBeat_s = 0.2;      // heartbeat of an idle process
constexpr double kBackgroundPatience_s = 10e-6;
constexpr double kInspect_s = 0.05;  // how often a waiting driver looks at deadlines and peers
constexpr double kOldPicture_s = 1.0;
constexpr double kWatch_s = 0.01;    // how often a watcher looks at the seat unasked
constexpr double kYield_s = 200e-6;
constexpr double kEnd_s = 0.5;       // how long the kernel may take to end a process
constexpr double kLeave_s = 1.0;     // how long the channels of a failed group wait for the others to end theirs

int first_finished(std::span<Operation* const> operations) {
  for (size_t i = 0; i < operations.size(); ++i)
    if (operations[i]->finished()) return int(i);
  return -1;
}
}  // namespace

Engine::Engine(const EngineConfig& config)
    : config_(config),
      arena_([this](uint64_t id, size_t bytes, int fd) {
        for (auto& link : links()) {
          if (fd >= 0) link->send({0, LinkKind::segment, id, bytes, 0}, {fd});
          else link->send({0, LinkKind::segment_gone, id, bytes, 0});
        }
      }),
      presence_segment_(Segment::create("paceline-presence", 4096)),
      presence_(reinterpret_cast<Presence*>(presence_segment_.data())),
      doorbell_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!doorbell_ || !epoll_) throw Error(ErrorKind::shared_memory, "engine: out of file descriptors");
  presence_->pid = getpid();
  watch(doorbell_.get());
  set_num_local(config_.num_local);
  thread_ = std::thread([this] { run_progress_thread(); });
}

Engine::~Engine() {
  if (in_forked_child_) return;
  {
    std::lock_guard lock(thread_mu_);
    stopping_ = true;
  }
  thread_cv_.notify_all();
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(doorbell_.get(), &one, sizeof one);
  thread_.join();
}

void Engine::set_num_local(int num_local) {
  bool crowded = num_local > int(sysconf(_SC_NPROCESSORS_ONLN));
  // A peer on the same core cannot move while we spin, and a lone yield costs less than a microsecond:
  // yielding is the better part of waiting, also where every process has a core of its own.
  spin_s_.store(crowded ? 0 : 4e-6, std::memory_order_relaxed);
}

void Engine::watch(int fd, bool is_process) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u32 = is_process;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    throw Error(ErrorKind::shared_memory, "engine: cannot watch another socket (descriptor limit?)");
}

void Engine::add_local_peer(int rank, Fd socket) {
  auto deliver = [this](int from, const LinkMessage& m, Fd fd) {
    std::lock_guard lock(parcels_mu_);
    parcels_.push_back({from, m, std::move(fd)});
  };
  auto link = std::make_shared<LocalLink>(rank, std::move(socket), deliver, [this](int process) { watch(process, true); });
  link->introduce(presence_segment_, doorbell_.get());
  {
    std::lock_guard lock(links_mu_);
    if (!links_.emplace(rank, link).second)
      throw Error(ErrorKind::usage, "rank " + std::to_string(rank) + " is linked already: ranks are never used twice",
                  rank);
  }
  // From here on new segments announce themselves; one that does so meanwhile is announced twice.
  arena_.for_each_segment([&](uint64_t id, size_t bytes, int fd) {
    link->send({0, LinkKind::segment, id, bytes, 0}, {fd});
  });
  watch(link->socket());
}

void Engine::await_local_peers(double timeout_s, std::vector<int> ranks) {
  double deadline = now_s() + timeout_s;
  for (auto& l : links()) {
    if (!ranks.empty() && std::find(ranks.begin(), ranks.end(), l->peer()) == ranks.end()) continue;
    while (!l->present()) {
      bool is_lost = l->lost();  // asked first: it may have introduced itself before its end
      l->receive();
      if (l->present()) break;
      if (is_lost || now_s() > deadline)
        throw Error(is_lost ? ErrorKind::peer_lost : ErrorKind::peer_timeout,
                    "rank " + std::to_string(config_.rank) + ": rank " + std::to_string(l->peer()) +
                        " on this host " + (is_lost ? "went away" : "did not answer") +
                        " while the shared memory was being set up. Look at its output for the cause.", l->peer());
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
  return l->end_process(kEnd_s);
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
  // In the driver's seat: an operation must not find the memory gone from under its hands.
  as_driver([&] { gone->forget(); });
  std::lock_guard lock(parcels_mu_);
  std::erase_if(parcels_, [&](const Parcel& parcel) { return parcel.rank == rank; });
}

void Engine::receive_links() {
  for (auto& link : links()) link->receive();
}

void Engine::drop_parcels_before(uint64_t id, uint64_t generation) {
  std::lock_guard lock(parcels_mu_);
  std::erase_if(parcels_, [&](const Parcel& p) { return p.message.id == id && p.message.extra < generation; });
}

bool Engine::try_expect(int rank, LinkKind kind, uint64_t id, uint64_t extra, uint64_t& bytes, Fd& fd) {
  if (auto l = link(rank)) l->receive();
  std::lock_guard lock(parcels_mu_);
  for (auto it = parcels_.begin(); it != parcels_.end(); ++it)
    if (it->rank == rank && it->message.kind == kind && it->message.id == id && it->message.extra == extra) {
      bytes = it->message.bytes;
      fd = std::move(it->fd);
      parcels_.erase(it);
      return true;
    }
  return false;
}

Fd Engine::expect(int rank, LinkKind kind, uint64_t id, uint64_t extra, uint64_t& bytes, double timeout_s) {
  auto l = link(rank);
  double start = now_s(), deadline = start + timeout_s, warning = start + config_.warn_s;
  for (Fd fd;;) {
    bool is_lost = !l || l->lost();  // asked first: what it sent before its end is found below
    if (try_expect(rank, kind, id, extra, bytes, fd)) return fd;
    if (now_s() > warning) {
      warning = start + 3 * (warning - start);
      fprintf(stderr, "paceline: rank %d: forming a group has waited %.0f s for rank %d\n", config_.rank,
              now_s() - start, rank);
    }
    if (is_lost || now_s() > deadline)
      throw Error(is_lost ? ErrorKind::peer_lost : ErrorKind::peer_timeout,
                  "rank " + std::to_string(config_.rank) + ": rank " + std::to_string(rank) +
                      (is_lost ? " went away" : " did not arrive in time") +
                      " while a group was being formed. Every member must create the same groups in the same order.",
                  rank);
    pollfd p{l->socket(), POLLIN, 0};
    ::poll(&p, 1, 20);
  }
}

void Engine::attach(Pollable* pollable) {
  as_driver([&] { pollables_.push_back(pollable); });
}

void Engine::detach(Pollable* pollable) {
  as_driver([&] { std::erase(pollables_, pollable); });
}

void Engine::announce_work(const Operation& operation) {
  pending_.fetch_add(1, std::memory_order_seq_cst);
  if (operation.in_background) background_.fetch_add(1, std::memory_order_seq_cst);
  if (presence_->sleeping.load(std::memory_order_seq_cst)) {
    uint64_t one = 1;
    [[maybe_unused]] ssize_t n = write(doorbell_.get(), &one, sizeof one);
  }
}

void Engine::work_finished(const Operation& operation) {
  pending_.fetch_sub(1, std::memory_order_relaxed);
  if (operation.in_background) background_.fetch_sub(1, std::memory_order_relaxed);
  wake_watchers();
}

void Engine::call_progress_thread() {
  {
    std::lock_guard lock(thread_mu_);
    if (wanted_) return;
    wanted_ = true;
  }
  thread_cv_.notify_one();
}

int Engine::wait_any(std::span<Operation* const> operations, double timeout_s) {
  int ready = first_finished(operations);
  if (ready >= 0) return ready;
  double deadline = timeout_s < 1e8 ? now_s() + timeout_s : 1e300;
  do {
    if (try_take_seat() || watch_driver(operations, deadline)) run_seated([&] { drive(operations, deadline); });
    ready = first_finished(operations);
  } while (ready < 0 && now_s() < deadline);
  if (background_.load(std::memory_order_relaxed) > 0) call_progress_thread();
  return ready;
}

bool Engine::try_take_seat() {
  if (contenders_.load(std::memory_order_relaxed)) return false;  // they were here first
  if (drive_mu_.try_lock()) return true;
  // The progress thread drives and may be asleep: whoever waits can do it sooner.
  if (!in_background_.load(std::memory_order_relaxed)) return false;
  take_seat();
  return true;
}

// Sleeps until the driver has finished something or left. True when the seat was free after all: it is taken.
bool Engine::watch_driver(std::span<Operation* const> operations, double deadline_s) {
  watchers_.fetch_add(1, std::memory_order_seq_cst);
  uint32_t seen = events_.load(std::memory_order_acquire);
  full_fence();
  // What happens from here on moves `events_`; what happened before must be seen now.
  bool seated = try_take_seat();
  if (!seated && first_finished(operations) < 0)
    futex_wait(events_, seen, std::clamp(deadline_s - now_s(), 0.0, kWatch_s));
  watchers_.fetch_sub(1, std::memory_order_relaxed);
  return seated;
}

void Engine::wake_watchers() {
  full_fence();
  if (watchers_.load(std::memory_order_relaxed) == 0) return;
  events_.fetch_add(1, std::memory_order_release);
  futex_wake_all(events_);
}

bool Engine::poll_all() {
  bool moved = false;
  for (size_t i = 0; i < pollables_.size(); ++i) moved |= pollables_[i]->poll();
  return moved;
}

bool Engine::awaits_rest() const {
  return std::any_of(pollables_.begin(), pollables_.end(), [](const Pollable* p) { return p->awaits_rest(); });
}

void Engine::inspect_all(double now) {
  inspected_s_ = now;
  receive_links();
  for (size_t i = 0; i < pollables_.size(); ++i) {
    pollables_[i]->inspect(now);
    pollables_[i]->beat(now);
  }
  std::lock_guard lock(waits_mu_);
  waits_.swap(noted_waits_);
  waits_s_ = now;
  noted_waits_.clear();
}

std::vector<LongWait> Engine::long_waits() {
  std::lock_guard lock(waits_mu_);
  // Nobody inspects when nothing is pending; an old picture says nothing about now.
  bool is_old = pending_.load(std::memory_order_relaxed) == 0 || now_s() - waits_s_ > kOldPicture_s;
  return is_old ? std::vector<LongWait>() : waits_;
}

// Drives until one of the operations has finished (without any, as long as something is pending), or somebody
// wants the seat.
void Engine::drive(std::span<Operation* const> until, double deadline_s) {
  bool in_background = until.empty();
  auto is_done = [&] {
    return in_background ? pending_.load(std::memory_order_relaxed) == 0 : first_finished(until) >= 0;
  };
  double idle_since = 0;  // 0: something moved in the last round
  int rounds = 0;
  for (;;) {
    if (contenders_.load(std::memory_order_relaxed)) return;
    bool moved = poll_all();
    if (is_done()) return;
    if (moved) {
      idle_since = 0;
      continue;
    }
    // A slow wire brings one packet after the other: in the background sleep until there are many (before_sleep).
    bool trickles = in_background && awaits_rest();
    if (!trickles && ++rounds % 16) {  // reading the clock costs more than a round
      cpu_pause();
      continue;
    }
    double now = now_s();
    if (idle_since == 0) idle_since = now;
    if (now - inspected_s_ > kInspect_s) inspect_all(now);
    if (now > deadline_s || is_done()) return;  // looking around may have ended operations
    // In the background nobody waits, but somebody computes, perhaps on this very core: sleep soon.
    double idle = now - idle_since, patience_s = in_background ? kBackgroundPatience_s : kYield_s;
    double spin_s = spin_s_.load(std::memory_order_relaxed);
    if (!in_background && idle < spin_s) cpu_pause();
    else if (!trickles && idle < spin_s + patience_s) sched_yield();
    else sleep();
  }
}

void Engine::sleep() {
  presence_->sleeping.store(1, std::memory_order_seq_cst);
  full_fence();
  // Whatever changed before the flag was up must be seen now: nobody will ring for it.
  if (!poll_all() && !contenders_.load()) {
    for (Pollable* p : pollables_) p->before_sleep();
    epoll_event events[8];
    int n = epoll_wait(epoll_.get(), events, 8, int(kInspect_s * 1e3));
    for (int i = 0; i < n; ++i)
      if (events[i].events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR) || events[i].data.u32) inspected_s_ = 0;
  }
  presence_->sleeping.store(0, std::memory_order_relaxed);
  uint64_t count;
  [[maybe_unused]] ssize_t n = read(doorbell_.get(), &count, sizeof count);
}

void Engine::take_seat() {
  contenders_.fetch_add(1, std::memory_order_seq_cst);
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(doorbell_.get(), &one, sizeof one);
  drive_mu_.lock();
  contenders_.fetch_sub(1, std::memory_order_seq_cst);
}

void Engine::beat() { presence_->heartbeat.fetch_add(1, std::memory_order_relaxed); }

void Engine::run_progress_thread() {
  pthread_setname_np(pthread_self(), "paceline-io");
  for (;;) {
    beat();
    bool is_contended = false;
    if (pending_.load(std::memory_order_seq_cst) > 0 && drive_mu_.try_lock()) {
      run_seated([&] {
        in_background_.store(true, std::memory_order_relaxed);
        drive({}, now_s() + kBeat_s);
        is_contended = contenders_.load(std::memory_order_relaxed) > 0;
        in_background_.store(false, std::memory_order_relaxed);
      });
      std::lock_guard lock(thread_mu_);
      if (stopping_) return;
      if (!is_contended) continue;  // to move the heartbeat
    } else {
      receive_links();
      as_driver_if_free([&] {
        for (Pollable* p : pollables_) p->beat(now_s());
      });
    }
    drop_ended_channels();
    // Idle, or somebody else drives and will call when it leaves.
    std::unique_lock lock(thread_mu_);
    thread_cv_.wait_for(lock, std::chrono::duration<double>(kBeat_s), [this] { return stopping_ || wanted_; });
    if (stopping_) return;
    wanted_ = false;
  }
}

void Engine::take_leave(std::vector<std::unique_ptr<Port>> ports) {
  std::lock_guard lock(leaving_mu_);
  for (auto& port : ports) {
    port->end_output();
    leaving_.push_back({now_s() + kLeave_s, std::move(port)});
  }
}

// True when none is left.
bool Engine::drop_ended_channels() {
  std::lock_guard lock(leaving_mu_);
  double now = now_s();
  std::erase_if(leaving_, [&](Leaving& l) { return l.port->ended() || now > l.until_s; });
  return leaving_.empty();
}

void Engine::say_goodbye() {
  for (auto& link : links()) link->send({0, LinkKind::goodbye, 0, 0, 0});
  while (!drop_ended_channels()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Engine::close_after_fork() {
  in_forked_child_ = true;
  new std::thread(std::move(thread_));  // lost on purpose: there is no such thread here to join
  for (auto& [rank, link] : links_) link->close_after_fork();
  for (Pollable* p : pollables_) p->close_after_fork();
  for (auto& leaving : leaving_) leaving.port->close_after_fork();
}

}  // namespace paceline
