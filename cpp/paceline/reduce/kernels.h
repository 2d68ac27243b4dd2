// Element-wise reduction of several sources into several destinations, in one pass over memory.
//
// The sources are folded strictly in the order given, so the same inputs give the same bits whoever
// computes them. 16-bit floats are accumulated in float32 and rounded once. Division for `mean`
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

// destinations[j][i] = fold(sources[0][i], sources[1][i], ...) for all i < count.
// A destination may be the same memory as a source (not overlap it in part). `streaming` writes past
// the cache: for results larger than it, which nobody reads at once.
void reduce(const Reduction& what, const void* const* sources, size_t num_sources,
            void* const* destinations, size_t num_destinations, size_t count, bool streaming);

// memcpy that can write past the cache.
void copy(void* to, const void* from, size_t bytes, bool streaming);

// "avx2" or "portable"; `use_portable_kernels(true)` is for the tests that compare both.
const char* kernel_name();
void use_portable_kernels(bool on);

}  // namespace paceline
