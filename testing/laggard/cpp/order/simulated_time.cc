#include "order/simulated_time.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

namespace laggard {
namespace {

std::atomic<bool> simulated{false};
std::atomic<uint64_t> epoch{0};
TimeModel model;  // changed only while no task runs
std::mutex timeline_mutex;
auto& timeline = *new std::vector<Span>;  // guarded by: timeline_mutex
constexpr size_t kMost = 1000000;

struct ThreadClock;
std::mutex threads_mutex;
auto& threads = *new std::map<uint64_t, ThreadClock*>;  // guarded by: threads_mutex

struct ThreadClock {
  uint64_t epoch = 0;
  double now_ms = 0, processor_ms = 0, entered_ms = 0;
  int sections = 0;
  std::atomic<double> inside_ms{0};  // read by other threads
  std::atomic<uint64_t> launches{0};

  ThreadClock() {
    std::lock_guard lock(threads_mutex);
    threads[static_cast<uint64_t>(pthread_self())] = this;
  }
  ~ThreadClock() {
    std::lock_guard lock(threads_mutex);
    threads.erase(static_cast<uint64_t>(pthread_self()));
  }
};

double processor_ms() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) * 1e3 + static_cast<double>(used.tv_nsec) / 1e6;
}

ThreadClock& thread_clock() {
  thread_local ThreadClock clock;
  if (clock.epoch != epoch) {
    clock.epoch = epoch;
    clock.now_ms = 0;
    clock.processor_ms = processor_ms();
  }
  return clock;
}

}  // namespace

void start_simulated_time(const TimeModel& chosen) {
  model = chosen;
  ++epoch;
  simulated = true;
}

void stop_simulated_time() { simulated = false; }
bool is_time_simulated() { return simulated; }
double& clock_ms() { return thread_clock().now_ms; }

double duration_ms(const Cost& cost) {
  if (cost.kind == Cost::COPY) return model.copy_us / 1e3 + cost.bytes / (model.copy_gb_s * 1e6);
  if (cost.kind == Cost::NOTHING) return 0;
  return model.kernel_us / 1e3 +
         std::max(cost.bytes / (model.memory_gb_s * 1e6), cost.flops / (model.tera_flops * 1e9));
}

void spend(const std::string& op, int stream, double launched_ms, const Cost& cost) {
  if (!simulated) return;
  double& now = clock_ms();
  const double begin = std::max(now, launched_ms);
  now = begin + duration_ms(cost);
  if (cost.kind == Cost::NOTHING) return;
  std::lock_guard lock(timeline_mutex);
  if (timeline.size() < kMost) timeline.push_back({op, stream, begin, now, cost.bytes});
}

std::vector<Span> take_timeline() {
  std::lock_guard lock(timeline_mutex);
  std::vector<Span> taken;
  taken.swap(timeline);
  return taken;
}

HostSection::HostSection() {
  if (!simulated) return;
  auto& clock = thread_clock();
  if (clock.sections++ > 0) return;
  clock.entered_ms = processor_ms();
  clock.now_ms += model.host_speed * (clock.entered_ms - clock.processor_ms);
}

HostSection::~HostSection() {
  auto& clock = thread_clock();
  if (clock.sections == 0 || --clock.sections > 0) return;
  clock.processor_ms = processor_ms();
  clock.inside_ms = clock.inside_ms + clock.processor_ms - clock.entered_ms;
}

double launch_time_ms() {
  if (!simulated) return 0;
  const HostSection section;
  ++thread_clock().launches;
  return clock_ms() += model.launch_us / 1e3;
}

HostUse host_use(uint64_t thread) {
  std::lock_guard lock(threads_mutex);
  const auto found = threads.find(thread);
  return found == threads.end() ? HostUse{} : HostUse{found->second->inside_ms, found->second->launches};
}

}  // namespace laggard
