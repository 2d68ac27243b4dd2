// float16 and bfloat16 as bits, and the way from float32 and back: to nearest, ties to even.
//
// In an unnamed namespace on purpose: each including file gets its own copy, compiled with its own flags.
#pragma once
#include <bit>
#include <cstdint>

namespace paceline {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

inline float to_float(Half h) {
  uint32_t sign = uint32_t(h.bits & 0x8000) << 16, rest = h.bits & 0x7fff;
  // Exponent and mantissa move into place. A subnormal half counts multiples of 2^-24. No subnormal float takes part:
  // some threads flush those to zero, among them TensorFlow's, which call the engine.
  uint32_t normal = rest >= 0x7c00 ? 0x7f800000u | (rest & 0x3ff) << 13 : (rest << 13) + (112u << 23);
  uint32_t subnormal = std::bit_cast<uint32_t>(float(int32_t(rest)) * 0x1p-24f);
  return std::bit_cast<float>(sign | (rest < 0x400 ? subnormal : normal));
}

inline Half to_half(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return {uint16_t(sign | 0x7e00 | (rest >> 13 & 0x3ff))};
  if (rest >= 0x47800000) return {uint16_t(sign | 0x7c00)};  // 65536 and more, infinity
  if (rest < 0x38800000) {
    // Below the smallest normal half: adding 0.5 lets the float unit round to a multiple of 2^-24.
    float r = std::bit_cast<float>(rest) + 0.5f;
    return {uint16_t(sign | (std::bit_cast<uint32_t>(r) - 0x3f000000))};
  }
  uint32_t rounded = rest + 0xfff + (rest >> 13 & 1);
  return {uint16_t(sign | ((rounded - 0x38000000) >> 13))};
}

inline float to_float(BFloat b) { return std::bit_cast<float>(uint32_t(b.bits) << 16); }
inline BFloat to_bfloat(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  bool nan = (u & 0x7fffffff) > 0x7f800000;
  return {uint16_t(nan ? (u >> 16 | 0x40) : rounded)};
}

}  // namespace
}  // namespace paceline
