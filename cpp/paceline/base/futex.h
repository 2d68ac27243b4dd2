// Sleeping on a 32-bit word inside one process.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace paceline {

// Returns when the word is no longer `expected`, after a wake-up, or after the timeout.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, double timeout_s) {
  timespec t;
  t.tv_sec = time_t(timeout_s);
  t.tv_nsec = long((timeout_s - double(t.tv_sec)) * 1e9);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, &t, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

}  // namespace paceline
