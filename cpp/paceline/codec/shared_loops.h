// int8 with shared scales (blocks.h), written once and compiled once per instruction set: L are its lanes.
#pragma once
#include <algorithm>
#include <cstring>

#include "paceline/codec/blocks.h"
#include "paceline/codec/numbers.h"

namespace paceline::codec {
namespace {

template <class L>
void add_residual(const float* values, const float* residual, float* sum) {
  for (size_t i = 0; i < kSharedValues; i += 8) {
    auto v = L::load(values + i);
    L::store(sum + i, residual ? L::add(v, L::load(residual + i)) : v);
  }
}

// Calls each(at, n, values, residual) for every block; what it gets has the length of a block.
template <class Each>
void for_shared_blocks(const float* values, const float* residual, size_t count, Each each) {
  size_t at = 0;
  for (; at + kSharedValues <= count; at += kSharedValues)
    each(at, kSharedValues, values + at, residual ? residual + at : nullptr);
  if (at == count) return;
  alignas(32) float last[kSharedValues] = {}, left[kSharedValues] = {};
  std::memcpy(last, values + at, (count - at) * sizeof(float));
  if (residual) std::memcpy(left, residual + at, (count - at) * sizeof(float));
  each(at, count - at, last, residual ? left : nullptr);
}

template <class L>
void block_largest_loop(const float* values, const float* residual, size_t count, float* largest) {
  alignas(32) float sum[kSharedValues];
  for_shared_blocks(values, residual, count, [&](size_t, size_t, const float* v, const float* r) {
    add_residual<L>(v, r, sum);
    const uint32_t bits = L::largest(sum, kSharedValues);
    *largest++ = bits < kInfinityBits ? std::bit_cast<float>(bits) : std::numeric_limits<float>::quiet_NaN();
  });
}

inline float shared_step(float largest, int levels) {
  return step_of(std::bit_cast<uint32_t>(largest) & kSizeMask, float(levels));
}

// A value above the shared scale would overflow the sum of all workers: it is clipped, and the rest kept.
inline void quantise_shared(const float* v, float inverse, float levels, int8_t* bytes) {
  for (size_t i = 0; i < kSharedValues; ++i) {
    float level = v[i] * inverse;
    level = level > levels ? levels : level;
    level = level < -levels ? -levels : level;
    bytes[i] = int8_t(uint8_t(std::bit_cast<uint32_t>(level + kRounder)));
  }
}

template <class L>
void encode_shared_loop(const float* values, float* residual, size_t count, const float* largest, int levels,
                        int8_t* bytes) {
  alignas(32) float sum[kSharedValues], level[kSharedValues], rest[kSharedValues];
  alignas(32) int8_t whole[kSharedValues];
  for_shared_blocks(values, residual, count, [&](size_t at, size_t n, const float* v, const float* r) {
    add_residual<L>(v, r, sum);
    const float step = shared_step(*largest++, levels);
    if (step > 0) quantise_shared(sum, 1 / step, float(levels), whole);
    else std::memset(whole, 0, sizeof whole);
    std::memcpy(bytes + at, whole, n);
    if (!residual) return;
    for (size_t i = 0; i < kSharedValues; ++i) level[i] = float(whole[i]);
    for (size_t i = 0; i < kSharedValues; i += 8) {
      auto decoded = L::mul(L::load(level + i), L::all(step));
      L::store(rest + i, L::if_finite(decoded, L::sub(L::load(sum + i), decoded), L::load(r + i)));
    }
    std::memcpy(residual + at, rest, n * sizeof(float));
  });
}

template <class L>
void decode_shared_loop(const int8_t* bytes, size_t count, const float* largest, int levels, size_t workers,
                        float* out) {
  const bool streaming = L::can_stream(out, count * sizeof(float));
  alignas(32) float mean[kSharedValues];
  for (size_t at = 0; at < count; at += kSharedValues) {
    const size_t n = std::min(kSharedValues, count - at);
    const float step = shared_step(*largest++, levels) / float(workers);
    for (size_t i = 0; i < n; ++i) mean[i] = float(bytes[at + i]) * step;
    if (!streaming || n < kSharedValues) {
      std::memcpy(out + at, mean, n * sizeof(float));
      continue;
    }
    for (size_t i = 0; i < n; i += 8) L::stream(out + at + i, L::load(mean + i));
  }
  if (streaming) L::finish_stream();
}

}  // namespace
}  // namespace paceline::codec
