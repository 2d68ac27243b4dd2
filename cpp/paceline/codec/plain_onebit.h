// The format onebit (format.h) in plain loops.
//
// The order of summation is part of the format's definition, for all instruction sets to give the same bits: eight
// EIGHTS of values that follow each other are added in pairs, as floats, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), and
// that to eight sums of doubles, which are added up at the end, one after the other.
#pragma once
#include <cstring>

#include "paceline/codec/plain_formats.h"

namespace paceline::codec {
namespace {

struct Side {
  double sums[8] = {};
  double total() const {
    double sum = 0;
    for (double s : sums) sum += s;
    return sum;
  }
};

inline float sum_in_pairs(const float (&v)[8]) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

inline float mean_of(double sum, size_t count) { return count ? float(sum / double(count)) : 0.0f; }

// Where a sum of eight floats is not finite: either a value is not, or they are very large.
inline bool add_slowly(const float* v, size_t count, double& plus, double& minus) {
  plus = minus = 0;
  for (size_t i = 0; i < count; ++i) {
    if (!is_finite(v[i])) return false;
    (v[i] < 0 ? minus : plus) += double(v[i]);
  }
  return true;
}

// Writes the head of a block whose bits are complete, except that those after the n-th must still be cleared.
inline void finish_onebit(const float* v, size_t n, const Side& plus, const Side& minus, uint8_t* to) {
  constexpr size_t kValues = block_of(Format::onebit).values;
  double sums[2] = {plus.total(), minus.total()};
  uint8_t* bits = to + 8;
  if (!(sums[0] - sums[1] <= std::numeric_limits<double>::max()) && !add_slowly(v, n, sums[0], sums[1])) {
    const float nan[2] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::quiet_NaN()};
    std::memcpy(to, nan, 8);
    std::memset(bits, 0, kValues / 8);
    return;
  }
  if (n < kValues) {
    bits[n / 8] &= uint8_t((1u << n % 8) - 1);
    std::memset(bits + n / 8 + 1, 0, kValues / 8 - n / 8 - 1);
  }
  size_t num_plus = 0;
  for (size_t w = 0; w < kValues / 64; ++w) {
    uint64_t word;
    std::memcpy(&word, bits + 8 * w, 8);
    num_plus += size_t(std::popcount(word));
  }
  const float means[2] = {mean_of(sums[0], num_plus), mean_of(sums[1], n - num_plus)};
  std::memcpy(to, means, 8);
}

struct PlainOnebit : Plain, OfFormat<Format::onebit> {
  static void encode(const float* v, size_t n, const Draw&, uint64_t, uint8_t* to) {
    Side plus, minus;
    for (size_t at = 0; at < kValues; at += 64) {
      for (size_t j = 0; j < 8; ++j) {
        float up[8], down[8];
        for (size_t e = 0; e < 8; ++e) {
          float value = v[at + 8 * e + j];
          up[e] = value < 0 ? 0.0f : value;
          down[e] = value < 0 ? value : 0.0f;
        }
        plus.sums[j] += double(sum_in_pairs(up));
        minus.sums[j] += double(sum_in_pairs(down));
      }
      for (size_t e = 0; e < 8; ++e) {
        unsigned byte = 0;
        for (size_t j = 0; j < 8; ++j) byte |= unsigned(!(v[at + 8 * e + j] < 0)) << j;
        to[8 + at / 8 + e] = uint8_t(byte);
      }
    }
    finish_onebit(v, n, plus, minus, to);
  }
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from) : bits(from + 8), plus(read_float(from)), minus(read_float(from + 4)) {}
    Eight at(size_t i) const {
      const unsigned byte = bits[i / 8];
      return Lanes::each([&](size_t j) { return byte >> j & 1 ? plus : minus; });
    }
    const uint8_t* bits;
    float plus, minus;
  };
};

}  // namespace
}  // namespace paceline::codec
