// Common parts of the formats: patterns of floats, and the step of a block.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace paceline::codec {
namespace {

constexpr uint32_t kSizeMask = 0x7fffffff, kInfinityBits = 0x7f800000;

inline bool is_finite(float v) { return (std::bit_cast<uint32_t>(v) & kSizeMask) < kInfinityBits; }

// The largest size as bits: sizes of floats are ordered as their bits are, infinity and NaN above all numbers.
inline uint32_t largest_bits(const float* v, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t size = std::bit_cast<uint32_t>(v[i]) & kSizeMask;
    largest = size > largest ? size : largest;
  }
  return largest;
}

// The value of one level. NaN when the largest is not finite; 0 rather than a subnormal number, so that its
// inverse is finite; and `levels` of them do not overflow.
inline float step_of(uint32_t largest, float levels) {
  if (largest >= kInfinityBits) return std::numeric_limits<float>::quiet_NaN();
  float step = std::bit_cast<float>(largest) / levels;
  if (step < std::numeric_limits<float>::min()) return 0;
  if (step * levels > std::numeric_limits<float>::max()) step = std::bit_cast<float>(std::bit_cast<uint32_t>(step) - 1);
  return step;
}

// To nearest, ties to even, for sizes below 2^22: added to this, a number loses its fraction, and its integer is in
// the lowest bits.
constexpr float kRounder = 12582912;  // 1.5 * 2^23

}  // namespace
}  // namespace paceline::codec
