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
#include <chrono>
#include <cstring>

#include "limit.h"

namespace {

using namespace limit;

constexpr int kWorkers = 2;  // rank k does the work of worker k
constexpr float kRate = 1;   // whole numbers stay exact

float* params;
float* grads[kWorkers];
float* copies[kWorkers];

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
      const bool is_mine = mode == 3 ? rank == 0 : rank == worker;
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
  if (command.bytes > touched) memset(copies[rank], 0, touched = command.bytes);
  for (int sample = 0; sample < command.samples; ++sample) {
    memset(params + rank * half, 0, half * sizeof(float));
    for (size_t i = 0; i < count; ++i) grads[rank][i] = value(i, rank, sample);
    barrier();
    const auto start = std::chrono::steady_clock::now();
    exchange(command.mode, count);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (!is_right(rank, count, sample)) control->wrong = true;
    barrier();
    if (rank == 0) printf("%.9f ", taken.count());
  }
  end_answer();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && atoi(argv[1]) != kWorkers) {
    fprintf(stderr, "server_limit: %s workers; it knows 2\n", argv[1]);
    return 2;
  }
  prepare(kWorkers);
  params = share<float>(kMaxBytes);
  for (int worker = 0; worker < kWorkers; ++worker) {
    grads[worker] = share<float>(kMaxBytes);
    copies[worker] = share<float>(kMaxBytes);
  }
  return serve(run);
}
