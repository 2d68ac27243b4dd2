// Monotonic time as float seconds; a step of the wall clock must not make a peer look dead.
#pragma once
#include <time.h>

namespace paceline {

inline double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("" ::: "memory");
#endif
}

}  // namespace paceline
