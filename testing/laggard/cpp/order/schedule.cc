#include "order/schedule.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace laggard {
namespace {

std::atomic<int> delay_us{200};
std::atomic<uint64_t> delay_seed{1};
std::atomic<bool> lazy{false}, stopped{false}, threads_started{false};

std::mutex error_mutex;
auto& error = *new std::string;  // guarded by: error_mutex
std::mutex finished_mutex;
auto& finished = *new std::vector<c10::Storage>;  // guarded by: finished_mutex

void keep_error(const std::string& what) {
  std::lock_guard lock(error_mutex);
  if (error.empty()) error = what;
}

void keep_finished(std::vector<c10::Storage>& storages) {
  if (storages.empty()) return;
  std::lock_guard lock(finished_mutex);
  for (auto& storage : storages) finished.push_back(std::move(storage));
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Never destroyed: their threads run until the process ends.
StreamQueue* all_queues() {
  static StreamQueue* queues = [] {
    auto* made = new StreamQueue[kStreams];
    for (int i = 0; i < kStreams; ++i) made[i].index = i;
    return made;
  }();
  return queues;
}

}  // namespace

void Completion::set() {
  std::lock_guard lock(mutex_);
  set_ = true;
  time_ms_ = is_time_simulated() ? clock_ms() : now_ms();
  changed_.notify_all();
}

void Completion::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return set_; });
  if (is_time_simulated()) clock_ms() = std::max(clock_ms(), time_ms_);
}

bool Completion::wait_for_a_while() {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(1), [&] { return set_; });
}

bool Completion::is_set() {
  std::lock_guard lock(mutex_);
  return set_;
}

double Completion::time_ms() {
  std::lock_guard lock(mutex_);
  return time_ms_;
}

uint64_t StreamQueue::push(Task task) {
  std::lock_guard lock(mutex_);
  if (!started_) {
    started_ = threads_started = true;
    std::thread([this] { loop(); }).detach();
  }
  task.number = ++last_;
  tasks_.push_back(std::move(task));
  changed_.notify_one();
  return last_;
}

void StreamQueue::demand(uint64_t task) {
  std::lock_guard lock(mutex_);
  if (task <= demanded_) return;
  demanded_ = task;
  changed_.notify_one();
}

void StreamQueue::demand_all() {
  std::lock_guard lock(mutex_);
  demanded_ = last_;
  changed_.notify_one();
}

bool StreamQueue::is_idle() {
  std::lock_guard lock(mutex_);
  return tasks_.empty() && !busy_;
}

void StreamQueue::wait_until_idle() {
  std::unique_lock lock(mutex_);
  // A stream that waits for a gate which no thread sets must not keep the process from ending.
  idle_.wait_for(lock, std::chrono::seconds(10), [&] { return tasks_.empty() && !busy_; });
}

void StreamQueue::wake() {
  std::lock_guard lock(mutex_);
  changed_.notify_one();
}

bool StreamQueue::used() {
  std::lock_guard lock(mutex_);
  return started_;
}

bool StreamQueue::may_run() const { return !tasks_.empty() && (!lazy || tasks_.front().number <= demanded_); }

void StreamQueue::sleep_a_while() {
  const int most = delay_us;
  if (most <= 0) return;
  if (seeded_ != delay_seed) {
    seeded_ = delay_seed;
    random_.seed(seeded_ * 1000003 + index);
  }
  usleep(most / 4 + random_() % most);
}

void StreamQueue::loop() {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      idle_.notify_all();
      changed_.wait(lock, [&] { return may_run(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
    }
    if (task.delayed) sleep_a_while();
    spend(task.op, index, task.launched_ms, task.cost);
    try {
      task.run();
    } catch (const std::exception& e) {
      keep_error(e.what());
    }
    task.run = nullptr;
    keep_finished(task.hold);
  }
}

StreamQueue& queue_of(int stream) { return all_queues()[stream]; }

void demand(const CompletionPtr& completion) {
  if (completion->stream >= 0) queue_of(completion->stream).demand(completion->task);
}

void set_delay(int microseconds, uint64_t seed) {
  delay_us = microseconds;
  delay_seed = seed + 1;
}

void set_lazy(bool on) {
  lazy = on;
  for (int i = 0; i < kStreams; ++i) queue_of(i).wake();
}

bool is_stopped() { return stopped; }
bool has_threads() { return threads_started; }

void stop_schedule() {
  set_delay(0, 0);
  set_lazy(false);
  for (int i = 0; i < kStreams; ++i)
    if (queue_of(i).used()) queue_of(i).wait_until_idle();
  stopped = true;
}

void raise_kernel_error() {
  std::string what;
  {
    std::lock_guard lock(error_mutex);
    what.swap(error);
  }
  TORCH_CHECK(what.empty(), "laggard: a kernel failed earlier (errors are raised at the next synchronisation): ", what);
}

void drop_finished() {
  std::vector<c10::Storage> dropped;
  std::lock_guard lock(finished_mutex);
  dropped.swap(finished);
}

}  // namespace laggard
