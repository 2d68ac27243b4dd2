// Element-wise reduction of several sources into several destinations, in one pass over memory.
//
// The sources are folded strictly in the order given, so the same inputs give the same bits in every
// process. 16-bit floats are accumulated in float32 and rounded once. Division for `mean`
// happens here and nowhere else: `divisor` is the number of contributions, 1 for partial sums.
#pragma once
#include <cstddef>

#include "paceline/reduce/dtype.h"

namespace paceline {

struct Reduction {
  DType dtype;
  ReduceOp op;         // `mean` folds like `sum`
  size_t divisor = 1;  // > 1 only in the last stage of a mean
};

// A result of this size does not stay in the cache until it is read.
constexpr size_t kStreamingBytes = 32u << 20;

// destinations[j][i] = fold(sources[0][i], sources[1][i], ...) for all i < count.
// A destination may be the same memory as a source (not overlap it in part). `streaming` writes past
// the cache: for results larger than the cache, which are not read at once.
void reduce(const Reduction& what, const void* const* sources, size_t num_sources, void* const* destinations,
            size_t num_destinations, size_t count, bool streaming);

// memcpy that can write past the cache.
void copy(void* to, const void* from, size_t bytes, bool streaming);

// The mean of the sources, with the bits that an all-reduce of them on one host has.
void reduce_mean(const void* const* sources, size_t num_sources, void* destination, size_t count, DType dtype);

// float32 to float16 or bfloat16, stochastically: element i draws the random bits number first + i of the seed.
void round_stochastic(const float* from, void* to, size_t count, DType dtype, uint64_t seed, uint64_t first);

// "avx2" or "portable"; `use_portable_kernels(true)` is for the tests that compare both.
const char* kernel_name();
void use_portable_kernels(bool on);
bool kernels_are_portable();

}  // namespace paceline
