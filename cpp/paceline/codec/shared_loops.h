// int8 with shared steps (blocks.h), written once and compiled once per instruction set.
#pragma once
#include <algorithm>

#include "paceline/codec/block_loops.h"

namespace paceline::codec {
namespace {

inline const float* sum_of(const float* values, const float* residual, size_t at, size_t count, float* sum) {
  if (!residual) return values + at;
  add_block(values + at, residual + at, count, sum);
  return sum;
}

void block_largest_loop(const float* values, const float* residual, size_t count, float* largest) {
  alignas(64) float sum[kSharedValues];
  for (size_t at = 0; at < count; at += kSharedValues) {
    const size_t n = std::min(kSharedValues, count - at);
    const uint32_t bits = largest_bits(sum_of(values, residual, at, n, sum), n);
    *largest++ = bits < kInfinityBits ? std::bit_cast<float>(bits) : std::numeric_limits<float>::quiet_NaN();
  }
}

inline float shared_step(float largest, int levels) {
  return step_of(std::bit_cast<uint32_t>(largest) & kSizeMask, float(levels));
}

// A value above what was agreed on would spoil the sum of all workers: it is cut off, and its rest kept.
inline void quantise_shared(const float* __restrict v, size_t count, float inverse, float levels,
                            int8_t* __restrict bytes) {
  for (size_t i = 0; i < count; ++i) {
    float level = std::min(std::max(v[i] * inverse, -levels), levels);
    bytes[i] = int8_t(uint8_t(std::bit_cast<uint32_t>(level + kRounder)));
  }
}

void encode_shared_loop(const float* values, float* residual, size_t count, const float* largest, int levels,
                        int8_t* bytes) {
  alignas(64) float sum[kSharedValues], decoded[kSharedValues];
  for (size_t at = 0; at < count; at += kSharedValues) {
    const size_t n = std::min(kSharedValues, count - at);
    const float step = shared_step(*largest++, levels);
    const float* v = sum_of(values, residual, at, n, sum);
    if (step > 0) quantise_shared(v, n, 1 / step, float(levels), bytes + at);
    else std::memset(bytes + at, 0, n);
    if (!residual) continue;
    for (size_t i = 0; i < n; ++i) decoded[i] = float(bytes[at + i]) * step;
    keep_rest<false>(v, decoded, 1, n, residual + at);
  }
}

void decode_shared_loop(const int8_t* bytes, size_t count, const float* largest, int levels, size_t workers,
                        float* out) {
  for (size_t at = 0; at < count; at += kSharedValues) {
    const size_t n = std::min(kSharedValues, count - at);
    const float step = shared_step(*largest++, levels) / float(workers);
    for (size_t i = 0; i < n; ++i) out[at + i] = float(bytes[at + i]) * step;
  }
}

}  // namespace
}  // namespace paceline::codec
