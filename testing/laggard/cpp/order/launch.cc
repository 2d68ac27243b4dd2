#include "order/launch.h"

#include <Python.h>

#include "memory/device_memory.h"
#include "memory/pinned_memory.h"
#include "order/synchronizations.h"

namespace laggard {
namespace {

// torch waits with the GIL in some calls (`storage.cpu()`), and a stream may wait for a collective, which Python runs.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

VectorClock stream_clocks[kStreams];    // guarded by: device lock
VectorClock host_clock;                 // guarded by: device lock
RaceMode race_mode = RaceMode::RECORD;  // guarded by: device lock
auto& races = *new std::vector<Race>;   // guarded by: device lock

AccessLog* log_of(const Region& region) {
  if (auto* log = device_log_of(region.begin)) return log;
  return pinned_log_of(region.begin);
}

// One missing wait is one report: of the launches of a stream that race with this one, the newest.
void keep_newest(std::vector<Race>& found, Race race) {
  for (auto& other : found) {
    if (other.earlier.stream != race.earlier.stream) continue;
    if (other.earlier.launch < race.earlier.launch) other = std::move(race);
    return;
  }
  found.push_back(std::move(race));
}

// In simulated time an event is complete if its time is not later than that of the thread that asks.
// The time is known once the stream has come that far; a stream that waits for a gate may take long.
bool is_due(const CompletionPtr& completion) {
  demand(completion);
  if (!completion->wait_for_a_while()) return false;
  launch_time_ms();  // asking takes time, so that a loop that asks again comes to an end
  return completion->time_ms() <= clock_ms();
}

void host_sees(const VectorClock& clock) {
  {
    std::lock_guard lock(device_lock());
    host_clock.join(clock);
    unlock_pinned_memory();
  }
  drop_finished();
  raise_kernel_error();
}

}  // namespace

std::recursive_mutex& device_lock() {
  static auto* mutex = new std::recursive_mutex;  // frees may come after static destructors
  return *mutex;
}

uint64_t launch_locked(Launch work) {
  if (is_stopped()) return 0;
  auto& clock = stream_clocks[work.stream];
  clock.join(host_clock);  // the host launches only what it has waited for
  const uint64_t number = ++clock.seen[work.stream];
  std::vector<Race> found;
  if (race_mode != RaceMode::OFF) {
    for (auto& use : work.uses) {
      AccessLog* log = use.region.empty() ? nullptr : log_of(use.region);
      if (!log) continue;
      Access access{std::move(use.region), work.stream, number, use.writes, work.op, work.stack};
      for (auto& race : check_and_log(*log, std::move(access), clock)) keep_newest(found, std::move(race));
    }
  }
  for (auto& race : found) races.push_back(std::move(race));
  // In simulated time kernels and copies cost the host a launch; events and the allocator's fills do not.
  const double launched_ms = work.cost.kind == Cost::NOTHING ? clock_ms() : launch_time_ms();
  const uint64_t task =
      queue_of(work.stream)
          .push({std::move(work.op), std::move(work.run), work.delayed, std::move(work.hold), work.cost, launched_ms});
  if (work.queued) work.queued();
  return task;
}

void launch(Launch work) {
  refuse_after_fork();
  const HostSection section;
  drop_finished();
  work.stack = take_stack();
  std::optional<Race> found;
  {
    std::lock_guard lock(device_lock());
    const size_t before = races.size();
    launch_locked(std::move(work));
    if (race_mode == RaceMode::RAISE && races.size() > before) found = races.back();
  }
  TORCH_CHECK(!found, "laggard found a race: ", found->report());
}

CompletionPtr record(int stream) {
  refuse_after_fork();
  const HostSection section;
  auto completion = std::make_shared<Completion>();
  std::lock_guard lock(device_lock());
  completion->stream = stream;
  completion->task = launch_locked({stream, "record", {}, [completion] { completion->set(); }, {}, /*delayed=*/false});
  completion->clock = stream_clocks[stream];
  if (is_stopped()) completion->set();
  return completion;
}

void wait(int stream, const CompletionPtr& completion) {
  const HostSection section;
  std::lock_guard lock(device_lock());
  stream_clocks[stream].join(completion->clock);
  auto run = [completion] {
    demand(completion);
    completion->wait();
  };
  launch_locked({stream, "wait", {}, run, {}, /*delayed=*/false});
}

void host_wait(const CompletionPtr& completion) {
  const HostSection section;
  demand(completion);
  {
    const WithoutGil released;
    completion->wait();
  }
  host_sees(completion->clock);
}

void synchronize_stream(int stream, const char* reason) {
  count_synchronization(reason);
  host_wait(record(stream));
}

void synchronize_device(int device, const char* reason) {
  count_synchronization(reason);
  std::vector<CompletionPtr> completions;
  for (int i = 0; i < kStreamsPerDevice; ++i) {
    const int stream = device * kStreamsPerDevice + i;
    if (queue_of(stream).used()) completions.push_back(record(stream));
  }
  for (auto& completion : completions) host_wait(completion);
}

void synchronize_event(const CompletionPtr& completion) {
  count_synchronization("Event.synchronize");
  host_wait(completion);
}

bool host_query(const CompletionPtr& completion) {
  const HostSection section;
  if (is_time_simulated() && !is_due(completion)) return false;
  if (!completion->is_set()) {
    demand(completion);
    return false;
  }
  host_sees(completion->clock);
  return true;
}

bool host_has_seen(int stream, uint64_t launch) { return host_clock.seen[stream] >= launch; }
uint64_t clock_of(int stream) { return stream_clocks[stream].seen[stream]; }
void join_stream(int stream, const VectorClock& clock) { stream_clocks[stream].join(clock); }

void set_race_mode(RaceMode mode) {
  std::lock_guard lock(device_lock());
  race_mode = mode;
}

std::vector<Race> take_races() {
  std::lock_guard lock(device_lock());
  std::vector<Race> taken;
  taken.swap(races);
  return taken;
}

}  // namespace laggard
