// Coroutines for operations: a collective reads as straight code and parks wherever it must wait.
//
// WAIT   a condition on shared memory or a channel, polled by the driver of the engine.
// FIBER  where an operation is parked: the innermost suspended coroutine and its wait.
// TASK   a coroutine that can be awaited by another; an operation is a root task with its fiber.
//
// Nothing here deals with threads: the engine guarantees that one thread at a time resumes fibers.
#pragma once
#include <coroutine>
#include <exception>
#include <utility>
#include <vector>

namespace paceline {

class Wait {
 public:
  // May do work to become ready (pump a channel); called often, must be cheap when nothing changed.
  virtual bool ready() = 0;
  // Appends the ranks that this wait depends on; called only if it takes long.
  virtual void blockers(std::vector<int>& ranks) const = 0;

 protected:
  ~Wait() = default;
};

struct Fiber {
  std::coroutine_handle<> parked;
  Wait* wait = nullptr;
  std::exception_ptr failure;  // thrown at the place where the fiber is parked
  static inline thread_local Fiber* current = nullptr;
};

// co_await park(wait): resume when the wait is ready, or throw the failure that was injected.
// The wait lives in the awaiting coroutine's frame, so that no temporary crosses a suspension.
inline auto park(Wait& wait) {
  struct Awaiter {
    Wait& wait;
    bool await_ready() { return wait.ready(); }
    void await_suspend(std::coroutine_handle<> handle) {
      Fiber::current->parked = handle;
      Fiber::current->wait = &wait;
    }
    void await_resume() {
      Fiber::current->wait = nullptr;
      if (Fiber::current->failure) std::rethrow_exception(std::exchange(Fiber::current->failure, nullptr));
    }
  };
  return Awaiter{wait};
}

class [[nodiscard]] Task {
 public:
  struct promise_type {
    std::coroutine_handle<> continuation = std::noop_coroutine();
    std::exception_ptr error;

    Task get_return_object() { return Task(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    auto final_suspend() noexcept {
      struct Final {
        bool await_ready() noexcept { return false; }
        std::coroutine_handle<> await_suspend(Handle h) noexcept { return h.promise().continuation; }
        void await_resume() noexcept {}
      };
      return Final{};
    }
    void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }
  };
  using Handle = std::coroutine_handle<promise_type>;

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    if (this != &other) {
      if (handle_) handle_.destroy();
      handle_ = std::exchange(other.handle_, {});
    }
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  Handle handle() const { return handle_; }
  bool done() const { return handle_.done(); }
  std::exception_ptr error() const { return handle_.promise().error; }

  auto operator co_await() const {
    struct Awaiter {
      Handle handle;
      bool await_ready() { return handle.done(); }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<> caller) {
        handle.promise().continuation = caller;
        return handle;
      }
      void await_resume() {
        if (handle.promise().error) std::rethrow_exception(handle.promise().error);
      }
    };
    return Awaiter{handle_};
  }

 private:
  explicit Task(Handle handle) : handle_(handle) {}
  Handle handle_;
};

}  // namespace paceline
