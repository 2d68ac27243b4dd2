// The limit of a parameter server on one host: what this machine can do when nothing but the memory
// stands in the way. Two workers have a gradient each; each gradient is applied to the parameters
// (SGD, in place), and the worker gets a copy of them. All of it in memory that the processes share.
//
//   g++ -O3 -march=native -std=c++20 server_limit.cc -o limit && echo "1 100000000 5" | ./limit 2
//
// Each line of stdin is "mode bytes samples", with the size of the parameters; the answer is a line
// with the seconds of each sample, from the common start until both workers have their copy. While
// no line comes, both processes sleep in read(): other contenders have the machine to themselves.
//
//   mode 0  two passes: apply (read g, read p, write p), then copy (read p, write w)
//   mode 1  one pass: each block is copied while it is in the cache
//   mode 2  one pass, and the copy goes past the cache (streaming stores)
//   mode 3  as mode 2, but one process does the work for both workers, as one busy server would
//
// Process k does the work of worker k. Each begins with another half of the parameters, so that no
// two updates meet. It knows nothing of keys, clocks or other optimizers: it is a yardstick.
#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kWorkers = 2;
constexpr size_t kMaxBytes = size_t{256} << 20;
constexpr size_t kBlock = 16;  // floats: one cache line
constexpr int kSpins = 2000;
constexpr float kRate = 1;  // whole numbers stay exact

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

Control* control;
int process;
float* params;
float* grads[kWorkers];
float* copies[kWorkers];

template <typename T>
T* share(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    perror("server_limit: mmap");
    exit(1);
  }
  madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<T*>(memory);
}

void barrier() {
  const int turn = control->turn.load();
  if (control->arrived.fetch_add(1) == kWorkers - 1) {
    control->arrived = 0;
    control->turn.store(turn + 1);
    return;
  }
  for (int spins = 0; control->turn.load(std::memory_order_acquire) == turn; ++spins) {
    spins < kSpins ? _mm_pause() : static_cast<void>(sched_yield());
  }
}

void apply(float* __restrict p, const float* __restrict g, size_t count) {
  for (size_t i = 0; i < count; ++i) p[i] -= kRate * g[i];
}

// Applies and copies in one pass; `kStreams` says whether the copy goes past the cache.
template <bool kStreams>
void apply_and_copy(float* p, const float* g, float* w, size_t count) {
  const __m256 rate = _mm256_set1_ps(kRate);
  for (size_t i = 0; i < count; i += 8) {
    const __m256 step = _mm256_mul_ps(rate, _mm256_load_ps(g + i));
    const __m256 fresh = _mm256_sub_ps(_mm256_load_ps(p + i), step);
    _mm256_store_ps(p + i, fresh);
    kStreams ? _mm256_stream_ps(w + i, fresh) : _mm256_store_ps(w + i, fresh);
  }
  if (kStreams) _mm_sfence();
}

void push_and_pull(int mode, int worker, size_t begin, size_t count) {
  float *p = params + begin, *g = grads[worker] + begin, *w = copies[worker] + begin;
  if (mode == 0) {
    apply(p, g, count);
    memcpy(w, p, count * sizeof(float));
  } else if (mode == 1) {
    apply_and_copy<false>(p, g, w, count);
  } else {
    apply_and_copy<true>(p, g, w, count);
  }
}

void exchange(int mode, size_t count) {
  const size_t half = count / 2;
  for (int turn = 0; turn < 2; ++turn) {
    for (int worker = 0; worker < kWorkers; ++worker) {
      const bool is_mine = mode == 3 ? process == 0 : process == worker;
      if (is_mine) push_and_pull(mode, worker, (worker + turn) % 2 * half, half);
    }
    barrier();
  }
}

float value(size_t i, int worker, int sample) { return float(i % 1021 + 7 * worker + sample % 5); }

// A worker's copy has its own gradient, and the other's too in the half where it came second.
bool is_right(int worker, size_t count, int sample) {
  const size_t half = count / 2;
  for (size_t i = 0; i < count; ++i) {
    const float own = value(i, worker, sample), other = value(i, 1 - worker, sample);
    const bool was_first = (i >= half) == (worker == 1);
    if (copies[worker][i] != -own - (was_first ? 0 : other)) return false;
    if (params[i] != -own - other) return false;
  }
  return true;
}

void run(const Command& command) {
  const size_t count = command.bytes / sizeof(float), half = count / 2;
  static size_t touched = 0;  // page faults are not what is measured
  if (command.bytes > touched) memset(copies[process], 0, touched = command.bytes);
  for (int sample = 0; sample < command.samples; ++sample) {
    memset(params + process * half, 0, half * sizeof(float));
    for (size_t i = 0; i < count; ++i) grads[process][i] = value(i, process, sample);
    barrier();
    const auto start = std::chrono::steady_clock::now();
    exchange(command.mode, count);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (!is_right(process, count, sample)) control->wrong = true;
    barrier();
    if (process == 0) printf("%.9f ", taken.count());
  }
  if (process == 0) {
    printf("%s\n", control->wrong ? "wrong" : "");
    fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && atoi(argv[1]) != kWorkers) {
    fprintf(stderr, "server_limit: %s workers; it knows 2\n", argv[1]);
    return 2;
  }
  control = share<Control>(sizeof(Control));
  params = share<float>(kMaxBytes);
  for (int worker = 0; worker < kWorkers; ++worker) {
    grads[worker] = share<float>(kMaxBytes);
    copies[worker] = share<float>(kMaxBytes);
  }
  int pipes[2];
  if (pipe(pipes) != 0) return 1;
  Command command;
  if (fork() == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(pipes[1]);
    process = 1;
    while (read(pipes[0], &command, sizeof command) == sizeof command) run(command);
    return 0;
  }
  while (scanf("%d %zu %d", &command.mode, &command.bytes, &command.samples) == 3) {
    if (command.bytes > kMaxBytes || command.bytes % (2 * kBlock * sizeof(float)) != 0) return 2;
    if (write(pipes[1], &command, sizeof command) != sizeof command) return 1;
    run(command);
  }
  close(pipes[1]);
  while (wait(nullptr) > 0) {
  }
  return 0;
}
