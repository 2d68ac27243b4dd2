// The limit of an all-reduce over shared memory: what this machine can do when nothing but the
// memory stands in the way. Float32 sum; every rank writes fresh values before each sample, so that
// cache lines really have to cross from core to core, as they do with new gradients.
//
//   g++ -O3 -march=native -std=c++20 shm_limit.cc -o shm_limit && echo "0 16777216 5" | ./shm_limit 2
//
// argv[1] is the number of ranks. Each line of stdin is "mode bytes samples"; the answer is a line
// with the seconds of each sample, from the common start until all ranks have finished. While no
// line comes, all ranks sleep in read(): other contenders have the machine to themselves.
//
//   mode 0  in place, two phases: reduce my share, barrier, copy the other ranks' shares
//   mode 1  one pass: every rank adds everything into its own output, with streaming stores
//   mode 2  the owner of a share reads it from all inputs and writes the sum into all of them
//   mode 3  the same into separate outputs, with streaming stores
//
// It deliberately knows nothing of groups, types, failures or odd sizes: it is a yardstick.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "limit.h"

namespace {

using namespace limit;

constexpr size_t kPrefetch = 128;  // floats ahead, on what another core wrote

float* input[kMaxRanks];
float* output[kMaxRanks];

// Sums elements [begin, end) of all inputs, in rank order, and hands each block to `store`.
template <int kWorld, typename Store>
void sum(size_t begin, size_t end, Store store) {
  for (size_t i = begin; i < end; i += kBlock) {
    __m256 low = _mm256_load_ps(input[0] + i), high = _mm256_load_ps(input[0] + i + 8);
    _mm_prefetch(reinterpret_cast<const char*>(input[0] + i + kPrefetch), _MM_HINT_T0);
    for (int r = 1; r < kWorld; ++r) {
      _mm_prefetch(reinterpret_cast<const char*>(input[r] + i + kPrefetch), _MM_HINT_T0);
      low = _mm256_add_ps(low, _mm256_load_ps(input[r] + i));
      high = _mm256_add_ps(high, _mm256_load_ps(input[r] + i + 8));
    }
    store(i, low, high);
  }
}

void put(float* to, __m256 low, __m256 high) {
  _mm256_store_ps(to, low);
  _mm256_store_ps(to + 8, high);
}

void stream(float* to, __m256 low, __m256 high) {
  _mm256_stream_ps(to, low);
  _mm256_stream_ps(to + 8, high);
}

void copy(float* to, const float* from, size_t count) {
  for (size_t i = 0; i < count; i += kBlock) {
    _mm_prefetch(reinterpret_cast<const char*>(from + i + kPrefetch), _MM_HINT_T0);
    put(to + i, _mm256_load_ps(from + i), _mm256_load_ps(from + i + 8));
  }
}

template <int kWorld>
const float* all_reduce(int mode, size_t count) {
  const size_t part = count / kWorld, begin = rank * part, end = begin + part;
  if (mode == 0) {
    float* const mine = input[rank];
    sum<kWorld>(begin, end, [=](size_t i, __m256 a, __m256 b) { put(mine + i, a, b); });
    barrier();
    for (int k = 1; k < kWorld; ++k) {
      const int owner = (rank + k) % kWorld;
      copy(mine + owner * part, input[owner] + owner * part, part);
    }
    return mine;
  }
  if (mode == 1) {
    float* const mine = output[rank];
    sum<kWorld>(0, count, [=](size_t i, __m256 a, __m256 b) { stream(mine + i, a, b); });
  } else if (mode == 2) {
    sum<kWorld>(begin, end, [](size_t i, __m256 a, __m256 b) {
      for (int r = 0; r < kWorld; ++r) put(input[r] + i, a, b);
    });
  } else {
    sum<kWorld>(begin, end, [](size_t i, __m256 a, __m256 b) {
      for (int r = 0; r < kWorld; ++r) stream(output[r] + i, a, b);
    });
  }
  _mm_sfence();
  return mode == 2 ? input[rank] : output[rank];
}

float value(size_t i, int owner, int sample) { return float(i % 1021 + 7 * owner + sample % 5); }

bool is_right(const float* result, size_t count, int sample) {
  const float bias = 7.0f * world * (world - 1) / 2 + world * (sample % 5);
  float worst = 0;
  for (size_t i = 0; i < count; ++i) {
    worst = std::max(worst, std::abs(result[i] - (world * float(i % 1021) + bias)));
  }
  return worst == 0;
}

void run(const Command& command) {
  const size_t count = command.bytes / sizeof(float);
  static size_t touched = 0;  // page faults are not what is measured
  if (command.bytes > touched) memset(output[rank], 0, touched = command.bytes);
  for (int sample = 0; sample < command.samples; ++sample) {
    for (size_t i = 0; i < count; ++i) input[rank][i] = value(i, rank, sample);
    barrier();
    const auto start = std::chrono::steady_clock::now();
    const float* result = world == 2   ? all_reduce<2>(command.mode, count)
                          : world == 4 ? all_reduce<4>(command.mode, count)
                                       : all_reduce<8>(command.mode, count);
    barrier();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (!is_right(result, count, sample)) control->wrong = true;
    barrier();
    if (rank == 0) printf("%.9f ", taken.count());
  }
  end_answer();
}

}  // namespace

int main(int argc, char** argv) {
  const int num_ranks = argc > 1 ? atoi(argv[1]) : 2;
  if (num_ranks != 2 && num_ranks != 4 && num_ranks != 8) {
    fprintf(stderr, "shm_limit: %d ranks; it knows 2, 4 and 8\n", num_ranks);
    return 2;
  }
  prepare(num_ranks);
  for (int r = 0; r < world; ++r) {
    input[r] = share<float>(kMaxBytes + 4096);  // prefetching may look past the end
    output[r] = share<float>(kMaxBytes);
  }
  return serve(run);
}
