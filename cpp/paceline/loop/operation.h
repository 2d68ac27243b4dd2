// One submitted operation: a root task, the fiber it runs on, and a flag that other threads read.
#pragma once
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "paceline/base/clock.h"
#include "paceline/loop/completions.h"
#include "paceline/loop/task.h"

namespace paceline {

class Operation {
 public:
  using Start = std::function<Task()>;
  using Describe = std::function<std::string()>;

  // `start` creates the task when the operation's turn comes; `describe` returns its text for messages.
  Operation(Start start, Describe describe)
      : start_(std::move(start)), describe_(std::move(describe)), submitted_s_(now_s()) {}

  // Driver only. Runs until the task parks or ends; true when anything moved.
  bool advance();
  // Driver only. Ends the operation with an error at the wait where it is parked.
  void fail(std::exception_ptr error);

  const Fiber& fiber() const { return fiber_; }
  std::string describe() const { return describe_(); }
  double age_s() const { return now_s() - submitted_s_; }
  // Driver only. Measures the age from now on: what it waits for has changed.
  void restart_clock() { submitted_s_ = now_s(), next_warning_s = 0; }
  double next_warning_s = 0;   // driver only
  bool in_background = false;  // no caller is about to wait for it; set before it is submitted

  // Any thread.
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  std::exception_ptr error() const { return error_; }  // meaningful once finished
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }
  // Notes this once the operation has finished, at once if it has. At most once for each operation.
  void report_to(std::shared_ptr<Completions> completions, int64_t what);

 private:
  void resume(std::coroutine_handle<> handle);
  void finish(std::exception_ptr error);

  Start start_;
  Describe describe_;
  double submitted_s_;
  Task task_;
  Fiber fiber_;
  std::exception_ptr error_;  // written before finished_
  std::atomic<bool> finished_{false};
  std::shared_ptr<Completions> completions_;  // written, with noted_, before is_awaited_
  int64_t noted_ = 0;
  std::atomic<bool> is_awaited_{false};  // `completions_` have to be notified; cleared by the thread that does
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace paceline
