#include "paceline/engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "paceline/base/error.h"
#include "paceline/base/fence.h"
#include "paceline/base/futex.h"

namespace paceline {
namespace {
constexpr double kBeat_s = 0.2;  // heartbeat of an idle process
constexpr int kEvents = 64;      // that are taken from epoll at a time
constexpr double kBackgroundPatience_s = 10e-6;
constexpr double kInspect_s = 0.05;  // how often a waiting driver checks deadlines and peers
constexpr double kStaleWaits_s = 1.0;
constexpr double kWatch_s = 0.01;  // how often a watcher checks, without an event, whether a thread drives
constexpr double kYield_s = 200e-6;
}  // namespace

int Engine::Goal::finished() const {
  for (size_t i = 0; i < operations.size(); ++i)
    if (operations[i]->finished()) return int(i);
  return -1;
}

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
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      requests_bell_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!doorbell_ || !epoll_ || !requests_bell_)
    throw Error(ErrorKind::shared_memory, "engine: out of file descriptors");
  if (!config_.links.empty()) emulated_links_.emplace(config_.links);
  presence_->pid = getpid();
  watch(doorbell_.get());
  set_num_local(config_.num_local);
  thread_ = std::thread([this] { run_progress_thread(); });
}

Engine::~Engine() {
  if (in_forked_child_) return;
  await_ended_ports();
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
  // A peer on the same core cannot advance while this thread spins, and a yield without a taker costs less than a
  // microsecond: yielding is the better way to wait, even if every process has its own core.
  spin_s_.store(crowded ? 0 : 4e-6, std::memory_order_relaxed);
}

void Engine::watch(int fd, const Pollable* owner) { add_to_epoll(fd, owner ? owner->number_ : kNobody); }

void Engine::add_to_epoll(int fd, uint64_t about) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = about;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    throw Error(ErrorKind::shared_memory, "engine: cannot watch another socket (descriptor limit?)");
}

void Engine::attach(Pollable* pollable) {
  pollable->number_ = next_number_.fetch_add(2, std::memory_order_relaxed);
  as_driver([&] {
    pollables_.push_back(pollable);
    by_number_[pollable->number_] = pollable;
    num_on_sockets_ += pollable->is_on_sockets();
  });
}

void Engine::detach(Pollable* pollable) {
  as_driver([&] {
    std::erase(pollables_, pollable);
    by_number_.erase(pollable->number_);
    num_on_sockets_ -= pollable->is_on_sockets();
    if (!lets_rest())  // from now on the driver reads the sockets without asking for events
      for (Pollable* one : pollables_) one->wake();
  });
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

int Engine::wait_any(std::span<Operation* const> operations, const Completions* completions, double timeout_s) {
  const Goal goal{operations, completions};
  if (goal.is_reached()) return goal.finished();
  double deadline = timeout_s < 1e8 ? now_s() + timeout_s : 1e300;
  do {
    if (try_become_driver() || watch_driver(goal, deadline)) run_as_driver([&] { drive(&goal, deadline); });
  } while (!goal.is_reached() && now_s() < deadline);
  return_background();
  return goal.finished();
}

bool Engine::try_become_driver() {
  if (contenders_.load(std::memory_order_relaxed)) return false;  // they were first
  if (drive_mu_.try_lock()) return true;
  // The progress thread drives and may be asleep: the waiting thread reacts sooner.
  if (!in_background_.load(std::memory_order_relaxed)) return false;
  become_driver();
  return true;
}

// Sleeps until the driver has finished an operation or stops driving. True if no thread drove: this thread drives now.
bool Engine::watch_driver(const Goal& goal, double deadline_s) {
  watchers_.fetch_add(1, std::memory_order_seq_cst);
  uint32_t seen = events_.load(std::memory_order_acquire);
  full_fence();
  // Events from here on increment `events_`; earlier ones must be seen now.
  bool is_driver = try_become_driver();
  if (!is_driver && !goal.is_reached()) futex_wait(events_, seen, std::clamp(deadline_s - now_s(), 0.0, kWatch_s));
  watchers_.fetch_sub(1, std::memory_order_relaxed);
  return is_driver;
}

void Engine::wake_watchers() {
  full_fence();
  if (watchers_.load(std::memory_order_relaxed) == 0) return;
  events_.fetch_add(1, std::memory_order_release);
  futex_wake_all(events_);
}

bool Engine::poll_all() {
  bool moved = false;
  if (lets_rest()) take_events(0);
  for (size_t i = 0; i < pollables_.size(); ++i)
    if (!pollables_[i]->rests()) moved |= pollables_[i]->poll();
  return moved;
}

// Waits until there are events, and wakes the pollables that they are about.
void Engine::take_events(int timeout_ms) {
  epoll_event events[kEvents];
  int n;
  do {
    n = epoll_wait(epoll_.get(), events, kEvents, timeout_ms);
    for (int i = 0; i < n; ++i) {
      uint64_t about = events[i].data.u64;
      if (events[i].events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR) || about & kProcess) inspected_s_ = 0;
      // The pollable or link may be gone: its sockets are closed later than it.
      if (auto it = by_number_.find(about); it != by_number_.end()) it->second->wake();
      else if (about != kNobody) note_news(about & ~kProcess);
    }
    timeout_ms = 0;
  } while (n == kEvents);
}

bool Engine::awaits_rest() const {
  return std::any_of(pollables_.begin(), pollables_.end(),
                     [](const Pollable* p) { return !p->rests() && p->awaits_rest(); });
}

void Engine::inspect_all(double now) {
  if (has_many_links()) take_events(0);
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
  // Without pending operations there are no inspections, and the last result is stale.
  bool is_old = pending_.load(std::memory_order_relaxed) == 0 || now_s() - waits_s_ > kStaleWaits_s;
  return is_old ? std::vector<LongWait>() : waits_;
}

// Drives until the goal is reached (without one, while something is pending), or another thread wants to drive.
void Engine::drive(const Goal* goal, double deadline_s) {
  bool in_background = goal == nullptr;
  auto is_done = [&] { return in_background ? pending_.load(std::memory_order_relaxed) == 0 : goal->is_reached(); };
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
    // A slow network delivers single packets: in the background, sleep until there are many (before_sleep).
    bool trickles = in_background && awaits_rest();
    if (!trickles && ++rounds % 16) {  // reading the clock costs more than a round
      cpu_pause();
      continue;
    }
    double now = now_s();
    if (idle_since == 0) idle_since = now;
    if (now - inspected_s_ > kInspect_s) inspect_all(now);
    if (now > deadline_s || is_done()) return;  // the inspection may have ended operations
    // In the background no caller waits, but a thread computes, perhaps on this core: sleep soon.
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
  // Changes before the flag was set must be seen now: the peers do not ring for them.
  if (!poll_all() && !contenders_.load()) {
    for (Pollable* p : pollables_)
      if (!p->rests()) p->before_sleep();
    take_events(int(kInspect_s * 1e3));
  }
  presence_->sleeping.store(0, std::memory_order_relaxed);
  uint64_t count;
  [[maybe_unused]] ssize_t n = read(doorbell_.get(), &count, sizeof count);
}

void Engine::become_driver() {
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
    drop_ended_ports();
    bool is_contended = false;
    if (pending_.load(std::memory_order_seq_cst) > 0 && drive_mu_.try_lock()) {
      run_as_driver([&] {
        in_background_.store(true, std::memory_order_relaxed);
        drive(nullptr, now_s() + kBeat_s);
        is_contended = contenders_.load(std::memory_order_relaxed) > 0;
        in_background_.store(false, std::memory_order_relaxed);
      });
      std::lock_guard lock(thread_mu_);
      if (stopping_) return;
      if (!is_contended) continue;  // to move the heartbeat
    } else {
      as_driver_if_free([&] {
        if (has_many_links()) take_events(0);
      });
      receive_links();
      as_driver_if_free([&] {
        for (Pollable* p : pollables_) p->beat(now_s());
      });
    }
    // Idle, or another thread drives and will wake this one when it stops.
    std::unique_lock lock(thread_mu_);
    thread_cv_.wait_for(lock, std::chrono::duration<double>(kBeat_s), [this] { return stopping_ || wanted_; });
    if (stopping_) return;
    wanted_ = false;
  }
}

void Engine::close_after_fork() {
  in_forked_child_ = true;
  new std::thread(std::move(thread_));  // leaked on purpose: the thread does not exist in the child
  arena_.close_after_fork();
  for (auto& [rank, link] : links_) link->close_after_fork();
  for (Pollable* p : pollables_) p->close_after_fork();
  for (auto& lingering : lingering_) lingering.port->close_after_fork();
}

}  // namespace paceline
