// Stochastic rounding of float32 to 16 bits, written once and compiled once per instruction set.
//
// A value between two neighbours of the target becomes the upper one with the probability of its distance from
// the lower one, so that the mean of many roundings is the value itself: updates too small for the target still
// arrive, some of the time. Random bits are a hash of seed and element index, so that the result depends on
// neither blocks nor threads nor the instruction set. Loops are plain so that the compiler vectorises them.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "paceline/reduce/dtype.h"
#include "paceline/reduce/scramble.h"

namespace paceline {
namespace {

// Without a branch, which the compiler would not vectorise.
inline uint32_t choose(bool condition, uint32_t yes, uint32_t no) { return no ^ ((yes ^ no) & -uint32_t(condition)); }

// `magnitude` is the float without its sign, `random` 32 random bits. Values up to where rounding to nearest
// would give infinity stay finite; the rest becomes what rounding to nearest makes of it.
struct ToBFloat {
  static uint32_t round(uint32_t magnitude, uint32_t random) {
    uint32_t rounded = std::min((magnitude + (random >> 16)) >> 16, 0x7f7fu);
    uint32_t special = choose(magnitude > 0x7f800000, magnitude >> 16 | 0x40, 0x7f80);
    return choose(magnitude >= 0x7f7f8000, special, rounded);
  }
};

struct ToHalf {
  static constexpr uint32_t kSmallestNormal = 0x38800000;  // 2^-14 as a float
  static uint32_t round(uint32_t magnitude, uint32_t random) {
    uint32_t normal = std::min((magnitude - 0x38000000 + (random >> 19)) >> 13, 0x7bffu);
    // Below the smallest normal half, neighbours are 2^-24 apart: a fixed-point number with 21 bits after the
    // point, which keeps the conversion within an int32.
    bool is_small = magnitude < kSmallestNormal;
    float small = std::bit_cast<float>(choose(is_small, magnitude, 0));
    uint32_t subnormal = (uint32_t(int32_t(small * 0x1p45f)) + (random >> 11)) >> 21;
    uint32_t special = choose(magnitude > 0x7f800000, 0x7e00 | (magnitude >> 13 & 0x3ff), 0x7c00);
    return choose(magnitude >= 0x477ff000, special, choose(is_small, subnormal, normal));  // from 65520 on
  }
};

// `index` counts on in 32 bits.
template <class To>
void round_keyed(const float* from, uint16_t* to, size_t count, uint32_t index, uint32_t key0, uint32_t key1) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t random = scramble(scramble(index + uint32_t(i) + key0) ^ key1);
    uint32_t bits = std::bit_cast<uint32_t>(from[i]);
    to[i] = uint16_t(To::round(bits & 0x7fffffff, random) | (bits >> 16 & 0x8000));
  }
}

template <class To>
void round_all(const float* from, uint16_t* to, size_t count, uint64_t seed, uint64_t first) {
  for (size_t at = 0; at < count;) {
    uint64_t index = first + at, key = key_of(seed ^ key_of(index >> 32));
    size_t same_key = size_t((uint64_t(1) << 32) - uint32_t(index));
    size_t n = std::min(count - at, same_key);
    round_keyed<To>(from + at, to + at, n, uint32_t(index), uint32_t(key), uint32_t(key >> 32));
    at += n;
  }
}

void round_any(const float* from, void* to, size_t count, DType dtype, uint64_t seed, uint64_t first) {
  auto* out = static_cast<uint16_t*>(to);
  if (dtype == DType::bfloat16) round_all<ToBFloat>(from, out, count, seed, first);
  else round_all<ToHalf>(from, out, count, seed, first);
}

}  // namespace
}  // namespace paceline
