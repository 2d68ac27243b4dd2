// Keys of large values (select.h), in plain loops.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "paceline/codec/numbers.h"
#include "paceline/codec/select.h"

namespace paceline::codec {
namespace {

inline uint64_t key_of_value(uint32_t bits, uint32_t index) {
  return uint64_t(bits & kSizeMask) << 32 | uint64_t(kLastIndex - index) << 1 | bits >> 31;
}

inline size_t collect_plain(const float* values, float* residual, size_t count, uint32_t first, uint32_t threshold,
                            uint64_t* keys, size_t at = 0) {
  size_t found = 0;
  for (; at < count; ++at) {
    float v = values[at];
    if (residual) residual[at] = v = v + residual[at];
    uint32_t bits = std::bit_cast<uint32_t>(v);
    if ((bits & kSizeMask) >= threshold) keys[found++] = key_of_value(bits, first + uint32_t(at));
  }
  return found;
}

}  // namespace
}  // namespace paceline::codec
