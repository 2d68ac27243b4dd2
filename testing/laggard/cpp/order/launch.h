// The one way to give work to a stream, and the clocks of streams and host.
//
// One lock, the device lock, guards clocks, access logs, the allocators, and the order of launches.
// Stream threads never take it, so a host thread may hold it while it waits for nothing. It is
// recursive, because dropping a tensor inside a launch frees memory, which is a launch.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "order/race.h"
#include "order/schedule.h"

namespace laggard {

std::recursive_mutex& device_lock();

struct Use {
  Region region;
  bool writes;
};

struct Launch {
  int stream;
  std::string op;
  std::vector<Use> uses;
  std::function<void()> run;
  Cost cost{};  // in simulated time
  bool delayed = true;
  std::vector<c10::Storage> hold{};
  std::function<void()> queued = nullptr;  // called with the device lock held, before any thread can wait for it
  PythonStack stack = nullptr;             // of the caller; `launch` takes it
};

// Check a launch for races and queue it. Raises the race if mode is RAISE.
void launch(Launch work);
// The same with the device lock held and without a raise.
uint64_t launch_locked(Launch work);

CompletionPtr record(int stream);
void wait(int stream, const CompletionPtr& completion);

// Block this host thread. `reason` goes to the counter of host synchronisations.
void host_wait(const CompletionPtr& completion);
void synchronize_stream(int stream, const char* reason);
void synchronize_device(int device, const char* reason);
void synchronize_event(const CompletionPtr& completion);
// True if it is complete; then the host has seen it, as after a wait.
bool host_query(const CompletionPtr& completion);

// True if the host has waited for this launch. Call with the device lock held.
bool host_has_seen(int stream, uint64_t launch);
uint64_t clock_of(int stream);                           // launches so far; device lock held
void join_stream(int stream, const VectorClock& clock);  // device lock held

enum class RaceMode { OFF, RECORD, RAISE };
void set_race_mode(RaceMode mode);
std::vector<Race> take_races();

}  // namespace laggard
