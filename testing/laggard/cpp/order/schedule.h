// When work runs: one thread and one queue for each stream, and how late the threads are.
//
//   random  each task waits a random time first. The seed decides the times; it gives different
//           interleavings of streams, so that a missing wait shows as a wrong value in some of them.
//   lazy    a stream runs a task only once a host or another stream waits for it or for a later task
//           of that stream. Work that is waited for by accident alone never runs in time.
//
// None of both finds every bug: lazy misses a prefetch loop without record_stream, random needs luck.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "order/clock.h"
#include "order/simulated_time.h"

namespace laggard {

// Set when a stream reaches one point of its queue. Each record of an event makes a new one, so that a
// wait means the record before it, whatever is recorded later. Python uses one as a gate: a host thread
// sets it and a stream waits for it.
class Completion {
 public:
  void set();
  void wait();
  bool wait_for_a_while();  // a second at most; without moving the clock of the thread
  bool is_set();
  double time_ms();  // when it was set, in simulated time if that is on

  VectorClock clock;  // what an actor that waits for it has seen
  int stream = -1;    // -1: set by a host thread
  uint64_t task = 0;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  double time_ms_ = 0;
};
using CompletionPtr = std::shared_ptr<Completion>;

struct Task {
  std::string op;
  std::function<void()> run;
  bool delayed = true;               // kernels and copies; records and waits are on time
  std::vector<c10::Storage> hold{};  // pinned host memory that must outlive the copy
  Cost cost{};
  double launched_ms = 0;  // simulated
  uint64_t number = 0;
};

class StreamQueue {
 public:
  uint64_t push(Task task);
  void demand(uint64_t task);  // the lazy schedule may run up to this task
  void demand_all();
  bool is_idle();
  void wait_until_idle();
  void wake();
  bool used();

  int index = 0;

 private:
  void loop();
  bool may_run() const;
  void sleep_a_while();

  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<Task> tasks_;                         // guarded by: mutex_
  uint64_t last_ = 0, demanded_ = 0, seeded_ = 0;  // guarded by: mutex_
  bool started_ = false, busy_ = false;            // guarded by: mutex_
  std::mt19937_64 random_;                         // the stream thread's
};

StreamQueue& queue_of(int stream);
void demand(const CompletionPtr& completion);

void set_delay(int microseconds, uint64_t seed);
void set_lazy(bool lazy);
void stop_schedule();  // at the end of the process: run everything, then refuse more
bool is_stopped();
bool has_threads();  // a stream has been used in this process, or in the one that it was forked from

// Errors of kernels are kept and raised at the next synchronisation, as devices do.
void raise_kernel_error();
// Let go of pinned memory of finished copies. Host threads do this, because a storage may need the GIL.
void drop_finished();

}  // namespace laggard
