#include "paceline/loop/operation.h"

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
  start_ = nullptr;  // releases what the request held
  finished_.store(true, std::memory_order_seq_cst);
  if (is_awaited_.exchange(false, std::memory_order_seq_cst)) completions_->note(noted_);
}

void Operation::report_to(std::shared_ptr<Completions> completions, int64_t what) {
  completions_ = std::move(completions);
  noted_ = what;
  is_awaited_.store(true, std::memory_order_seq_cst);
  // The driver may just have finished it without seeing this: one of the two threads notes it.
  if (finished_.load(std::memory_order_seq_cst) && is_awaited_.exchange(false, std::memory_order_seq_cst))
    completions_->note(noted_);
}

}  // namespace paceline
