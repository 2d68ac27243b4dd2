// What the yardsticks of shared memory have in common: processes that share memory, meet at a
// barrier, and do what each line of stdin says ("mode bytes samples").
//
// While no line comes, all processes sleep in read(): other contenders have the machine to themselves.
#pragma once
#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>

namespace limit {

constexpr int kMaxRanks = 8;
constexpr size_t kMaxBytes = size_t{256} << 20;
constexpr size_t kBlock = 16;  // floats: one cache line

struct Command {
  int mode;
  size_t bytes;
  int samples;
};

struct Control {
  alignas(64) std::atomic<int> arrived;
  alignas(64) std::atomic<int> turn;
  alignas(64) std::atomic<bool> wrong;
};

inline Control* control;
inline int world, rank;
inline int spins_before_yield;  // none when ranks share cores: spinning would hold up the one awaited

template <typename T>
T* share(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    perror("limit: mmap");
    exit(1);
  }
  madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<T*>(memory);
}

inline void barrier() {
  const int turn = control->turn.load();
  if (control->arrived.fetch_add(1) == world - 1) {
    control->arrived = 0;
    control->turn.store(turn + 1);
    return;
  }
  for (int spins = 0; control->turn.load(std::memory_order_acquire) == turn; ++spins) {
    spins < spins_before_yield ? _mm_pause() : static_cast<void>(sched_yield());
  }
}

// Before any memory is shared: how many processes there will be.
inline void prepare(int num_ranks) {
  world = num_ranks;
  spins_before_yield = world <= sysconf(_SC_NPROCESSORS_ONLN) ? 2000 : 0;
  control = share<Control>(sizeof(Control));
}

// Ends the answer to a command: the times stand before it on the same line.
inline void end_answer() {
  if (rank != 0) return;
  printf("%s\n", control->wrong ? "wrong" : "");
  fflush(stdout);
}

// Forks the other ranks and lets all of them run every command; returns the exit status.
template <typename Run>
int serve(Run run) {
  int pipes[kMaxRanks][2];
  Command command;
  for (rank = 1; rank < world; ++rank) {
    if (pipe(pipes[rank]) != 0) return 1;
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(pipes[rank][1]);
      while (read(pipes[rank][0], &command, sizeof command) == sizeof command) run(command);
      return 0;
    }
    close(pipes[rank][0]);
  }
  rank = 0;
  while (scanf("%d %zu %d", &command.mode, &command.bytes, &command.samples) == 3) {
    if (command.bytes > kMaxBytes || command.bytes % (world * kBlock * sizeof(float)) != 0) return 2;
    for (int r = 1; r < world; ++r) {
      if (write(pipes[r][1], &command, sizeof command) != sizeof command) return 1;
    }
    run(command);
  }
  for (int r = 1; r < world; ++r) close(pipes[r][1]);
  while (wait(nullptr) > 0) {
  }
  return 0;
}

}  // namespace limit
