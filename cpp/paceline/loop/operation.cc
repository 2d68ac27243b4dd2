#include "paceline/loop/operation.h"

#include <algorithm>

#include "paceline/base/fence.h"
#include "paceline/base/futex.h"

namespace paceline {

void Operation::resume(std::coroutine_handle<> handle) {
  Fiber* before = std::exchange(Fiber::current, &fiber_);
  handle.resume();
  Fiber::current = before;
  if (task_.done()) finish(task_.error());
}

bool Operation::advance() {
  if (!task_.handle()) {
    task_ = start_();
    resume(task_.handle());
    return true;
  }
  if (fiber_.wait && !fiber_.wait->ready()) return false;
  resume(fiber_.parked);
  return true;
}

void Operation::fail(std::exception_ptr error) {
  if (finished()) return;
  if (!task_.handle()) return finish(error);
  fiber_.failure = error;
  resume(fiber_.parked);
  if (!finished()) finish(error);  // a task that caught the failure and waits again is abandoned
}

void Operation::finish(std::exception_ptr error) {
  error_ = error;
  task_ = Task();
  start_ = nullptr;  // lets go of what the request held
  state_.store(kDone, std::memory_order_release);
  full_fence();
  if (sleepers_.load(std::memory_order_relaxed)) futex_wake_all(state_);
}

bool Operation::wait_finished(double timeout_s) {
  double deadline = now_s() + timeout_s;
  for (int i = 0; i < 200 && !finished(); ++i) cpu_pause();
  while (!finished()) {
    double left = deadline - now_s();
    if (left <= 0) return false;
    sleepers_.fetch_add(1);
    full_fence();
    if (!finished()) futex_wait(state_, kPending, std::min(left, 1.0));
    sleepers_.fetch_sub(1);
  }
  return true;
}

}  // namespace paceline
