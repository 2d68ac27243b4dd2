// The formats (format.h) in plain loops, a block at a time. `encode` takes a whole block of values, of which the first
// n count and the others are 0; `decode` writes a whole block, or adds to it.
#pragma once
#include <cstring>

#include "paceline/codec/draw.h"
#include "paceline/codec/format.h"
#include "paceline/codec/numbers.h"
#include "paceline/reduce/half.h"

namespace paceline::codec {
namespace {

template <Format format>
struct OfFormat {
  static constexpr Format kFormat = format;
  static constexpr size_t kValues = block_of(format).values, kBytes = block_of(format).bytes;
};

template <bool add>
inline void put(float value, float& out) {
  if constexpr (add) out += value;
  else out = value;
}

struct PlainBf16 : OfFormat<Format::bf16> {
  static void encode(const float* v, size_t, const Draw&, uint64_t, uint8_t* to) {
    for (size_t i = 0; i < kValues; ++i) {
      uint16_t bits = to_bfloat(v[i]).bits;
      std::memcpy(to + 2 * i, &bits, 2);
    }
  }
  template <bool add>
  static void decode(const uint8_t* from, float* out) {
    for (size_t i = 0; i < kValues; ++i) {
      BFloat b;
      std::memcpy(&b, from + 2 * i, 2);
      put<add>(to_float(b), out[i]);
    }
  }
};

struct PlainFp16 : OfFormat<Format::fp16> {
  static void encode(const float* v, size_t, const Draw&, uint64_t, uint8_t* to) {
    for (size_t i = 0; i < kValues; ++i) {
      uint16_t bits = to_half(v[i]).bits;
      std::memcpy(to + 2 * i, &bits, 2);
    }
  }
  template <bool add>
  static void decode(const uint8_t* from, float* out) {
    for (size_t i = 0; i < kValues; ++i) {
      Half h;
      std::memcpy(&h, from + 2 * i, 2);
      if ((h.bits & 0x7fff) > 0x7c00) h.bits |= 0x200;  // a quiet NaN, as the processor's conversion gives
      put<add>(to_float(h), out[i]);
    }
  }
};

struct PlainInt8 : OfFormat<Format::int8> {
  static void encode(const float* v, size_t, const Draw&, uint64_t, uint8_t* to) {
    const float step = step_of(largest_bits(v, kValues), 127);
    std::memcpy(to, &step, 4);
    if (!(step > 0)) {
      std::memset(to + 4, 0, kValues);
      return;
    }
    const float inverse = 1 / step;
    for (size_t i = 0; i < kValues; ++i) to[4 + i] = uint8_t(std::bit_cast<uint32_t>(v[i] * inverse + kRounder));
  }
  template <bool add>
  static void decode(const uint8_t* from, float* out) {
    float step;
    std::memcpy(&step, from, 4);
    for (size_t i = 0; i < kValues; ++i) put<add>(float(int8_t(from[4 + i])) * step, out[i]);
  }
};

// Rounding at random in fixed point: a number with 24 bits behind the point plus 24 random bits, of which the integer
// part stays. Whole numbers stay what they are.
struct PlainInt4 : OfFormat<Format::int4> {
  static constexpr size_t kHalf = kValues / 2;
  static void encode(const float* v, size_t, const Draw& draw, uint64_t at, uint8_t* to) {
    const float step = step_of(largest_bits(v, kValues), 7);
    std::memcpy(to, &step, 4);
    if (!(step > 0)) {
      std::memset(to + 4, 0, kHalf);
      return;
    }
    const float inverse = 1 / step;
    alignas(64) uint32_t random[kValues];
    alignas(64) int32_t level[kValues];
    draw_numbers(draw, at, kValues, random);
    for (size_t i = 0; i < kValues; ++i) {
      int32_t rounded = (int32_t(v[i] * inverse * 0x1p24f) + int32_t(random[i] >> 8)) >> 24;
      level[i] = std::min(std::max(rounded, -7), 7);
    }
    for (size_t i = 0; i < kHalf; ++i) to[4 + i] = uint8_t((level[i] & 15) | (level[i + kHalf] & 15) << 4);
  }
  template <bool add>
  static void decode(const uint8_t* from, float* out) {
    float step;
    std::memcpy(&step, from, 4);
    for (size_t i = 0; i < kHalf; ++i) put<add>(float(((from[4 + i] & 15) ^ 8) - 8) * step, out[i]);
    for (size_t i = 0; i < kHalf; ++i) put<add>(float(((from[4 + i] >> 4) ^ 8) - 8) * step, out[i + kHalf]);
  }
};

}  // namespace
}  // namespace paceline::codec
