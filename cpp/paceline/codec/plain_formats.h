// The formats (format.h) in plain C++, a block at a time (block_loops.h).
#pragma once
#include <cstring>

#include "paceline/codec/draw.h"
#include "paceline/codec/format.h"
#include "paceline/codec/numbers.h"
#include "paceline/codec/plain_lanes.h"
#include "paceline/reduce/half.h"

namespace paceline::codec {
namespace {

template <Format format>
struct OfFormat {
  static constexpr Format kFormat = format;
  static constexpr size_t kValues = block_of(format).values, kBytes = block_of(format).bytes;
};

struct Plain {
  using Lanes = PlainLanes;
  using Eight = PlainLanes::Eight;
};

inline float read_float(const uint8_t* from) {
  float value;
  std::memcpy(&value, from, 4);
  return value;
}

struct PlainBf16 : Plain, OfFormat<Format::bf16> {
  static void encode(const float* v, size_t, const Draw&, uint64_t, uint8_t* to) {
    for (size_t i = 0; i < kValues; ++i) {
      uint16_t bits = to_bfloat(v[i]).bits;
      std::memcpy(to + 2 * i, &bits, 2);
    }
  }
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from) : from(from) {}
    Eight at(size_t i) const {
      BFloat b[8];
      std::memcpy(b, from + 2 * i, sizeof b);
      return Lanes::each([&](size_t j) { return to_float(b[j]); });
    }
    const uint8_t* from;
  };
};

struct PlainFp16 : Plain, OfFormat<Format::fp16> {
  static void encode(const float* v, size_t, const Draw&, uint64_t, uint8_t* to) {
    for (size_t i = 0; i < kValues; ++i) {
      uint16_t bits = to_half(v[i]).bits;
      std::memcpy(to + 2 * i, &bits, 2);
    }
  }
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from) : from(from) {}
    Eight at(size_t i) const {
      Half h[8];
      std::memcpy(h, from + 2 * i, sizeof h);
      return Lanes::each([&](size_t j) {
        if ((h[j].bits & 0x7fff) > 0x7c00) h[j].bits |= 0x200;  // a quiet NaN, as the processor's conversion gives
        return to_float(h[j]);
      });
    }
    const uint8_t* from;
  };
};

struct PlainInt8 : Plain, OfFormat<Format::int8> {
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
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from) : levels(from + 4), step(read_float(from)) {}
    Eight at(size_t i) const {
      return Lanes::each([&](size_t j) { return float(int8_t(levels[i + j])) * step; });
    }
    const uint8_t* levels;
    float step;
  };
};

// Rounding at random in fixed point: a number with 16 bits after the point plus 16 random bits; the integer part is
// kept. Whole numbers do not change.
struct PlainInt4 : Plain, OfFormat<Format::int4> {
  static constexpr size_t kHalf = kValues / 2;
  static void encode(const float* v, size_t, const Draw& draw, uint64_t at, uint8_t* to) {
    const float step = step_of(largest_bits(v, kValues), 7);
    std::memcpy(to, &step, 4);
    if (!(step > 0)) {
      std::memset(to + 4, 0, kHalf);
      return;
    }
    const float inverse = 1 / step;  // times 2^16 it may be infinite
    alignas(64) uint32_t random[kValues];
    alignas(64) int32_t level[kValues];
    draw_numbers(draw, at, kValues, random);
    for (size_t i = 0; i < kValues; ++i) {
      const auto fixed =
          int32_t(std::bit_cast<uint32_t>(v[i] * inverse * 0x1p16f + kRounder) - std::bit_cast<uint32_t>(kRounder));
      level[i] = std::min(std::max((fixed + int32_t(random[i])) >> 16, -7), 7);
    }
    for (size_t i = 0; i < kHalf; ++i) to[4 + i] = uint8_t((level[i] & 15) | (level[i + kHalf] & 15) << 4);
  }
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from) : levels(from + 4), step(read_float(from)) {}
    Eight at(size_t i) const {
      const uint8_t* bytes = levels + i % kHalf;
      const unsigned shift = i < kHalf ? 0 : 4;
      return Lanes::each([&](size_t j) { return float(((bytes[j] >> shift & 15) ^ 8) - 8) * step; });
    }
    const uint8_t* levels;
    float step;
  };
};

}  // namespace
}  // namespace paceline::codec
