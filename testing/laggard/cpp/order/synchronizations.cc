#include "order/synchronizations.h"

#include <pthread.h>

#include <mutex>

namespace laggard {
namespace {

std::mutex mutex;
auto& synchronizations = *new std::vector<Synchronization>;  // guarded by: mutex
constexpr size_t kMost = 10000;                              // a process that never asks must not fill its memory
thread_local bool counted = true;

}  // namespace

void set_counted(bool on) { counted = on; }

void count_synchronization(const char* reason) {
  if (!counted) return;
  auto stack = take_stack();
  std::lock_guard lock(mutex);
  const auto thread = static_cast<uint64_t>(pthread_self());  // what Python calls the thread's identity on Linux
  if (synchronizations.size() < kMost) synchronizations.push_back({reason, std::move(stack), thread});
}

std::vector<Synchronization> take_synchronizations() {
  std::lock_guard lock(mutex);
  std::vector<Synchronization> taken;
  taken.swap(synchronizations);
  return taken;
}

}  // namespace laggard
