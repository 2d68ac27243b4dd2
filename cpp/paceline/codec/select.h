// The k values of largest size, and the rest for next time.
//
// A KEY contains magnitude, index and sign of a value, so that comparing keys compares values: from the top its size in 31
// bits (infinity and NaN above all numbers), then 2^31 - 1 - index, so that the lower index wins among equals, then
// the sign.
//
// A THRESHOLD is estimated from a sample: the size that a few more than k values should reach. One pass over memory
// collects the keys of those that do, in the order of their indices. Among them the k-th largest is found; values
// not below it are sent. If too few have reached the threshold, a lower one is tried. The result is exact and
// does not depend on the sample.
#pragma once
#include <cstddef>
#include <cstdint>

#include "paceline/codec/draw.h"

namespace paceline::codec {

constexpr uint32_t kLastIndex = 0x7fffffff;

// With v = values + residual: indices ascend, chosen[j] = v[indices[j]], and residual = v with these set to 0.
// 0 <= k <= count < 2^31.
void select(const float* values, float* residual, size_t count, size_t k, const Draw& draw, size_t num_threads,
            int32_t* indices, float* chosen);

}  // namespace paceline::codec
