// Operations that have finished, of those that a thread waits for: it takes them as they come, and need not look at all
// that have not.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace paceline {

class Completions {
 public:
  // Any thread.
  bool has_any() const { return num_.load(std::memory_order_acquire) > 0; }

  // What was noted for each operation that has finished since the last call. Any thread.
  std::vector<int64_t> take() {
    std::lock_guard lock(mu_);
    num_.store(0, std::memory_order_relaxed);
    return std::exchange(noted_, {});
  }

  // Driver, or the thread that adds an operation.
  void note(int64_t what) {
    std::lock_guard lock(mu_);
    noted_.push_back(what);
    num_.store(noted_.size(), std::memory_order_release);
  }

 private:
  std::mutex mu_;
  std::vector<int64_t> noted_;  // guarded by mu_
  std::atomic<size_t> num_{0};
};

}  // namespace paceline
