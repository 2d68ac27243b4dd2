// The format onebit (format.h) by hand for AVX2, with the bits of plain_onebit.h. Included by kernels_avx2.cc only.
#pragma once
#include <immintrin.h>

#include "paceline/codec/avx2_formats.h"
#include "paceline/codec/plain_onebit.h"

namespace paceline::codec {
namespace {

struct EightSums {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  void add(const __m256 (&v)[8]) {
    auto pair = [&](size_t i) { return _mm256_add_ps(v[i], v[i + 1]); };
    __m256 sum = _mm256_add_ps(_mm256_add_ps(pair(0), pair(2)), _mm256_add_ps(pair(4), pair(6)));
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(sum)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(sum, 1)));
  }
  Side side() const {
    Side side;
    _mm256_storeu_pd(side.sums, low);
    _mm256_storeu_pd(side.sums + 4, high);
    return side;
  }
};

struct Avx2Onebit : Avx2, OfFormat<Format::onebit> {
  static void encode(const float* v, size_t n, const Draw&, uint64_t, uint8_t* to) {
    // The order of operands matters: `max` and `min` take the second one where they are equal or one is NaN. So a NaN
    // gets into `up`, and -0 is +0 in `down`, whose top bit therefore marks the values below 0.
    const __m256 zero = _mm256_setzero_ps();
    EightSums plus, minus;
    for (size_t at = 0; at < kValues; at += 64) {
      __m256 up[8], down[8];
      uint64_t below = 0;
      for (size_t e = 0; e < 8; ++e) {
        if (e % 2 == 0) Lanes::prefetch(v + at + 8 * e);
        __m256 value = _mm256_loadu_ps(v + at + 8 * e);
        up[e] = _mm256_max_ps(zero, value);
        down[e] = _mm256_min_ps(value, zero);
        below |= uint64_t(_mm256_movemask_ps(down[e])) << 8 * e;
      }
      plus.add(up);
      minus.add(down);
      const uint64_t bits = ~below;
      std::memcpy(to + 8 + at / 8, &bits, 8);
    }
    finish_onebit(v, n, plus.side(), minus.side(), to);
  }
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from) : bits(from + 8) {
      const float plus = read_float(from), minus = read_float(from + 4);
      means = _mm256_setr_ps(minus, plus, minus, plus, minus, plus, minus, plus);
    }
    // Each lane has 32 bits and shifts its own one to the bottom, where it selects one of four floats; the bit above it
    // selects too, but makes no difference.
    Eight at(size_t i) const {
      int32_t word;
      std::memcpy(&word, bits + i / 32 * 4, 4);
      __m256i shift = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(i % 32));
      return _mm256_permutevar_ps(means, _mm256_srlv_epi32(_mm256_set1_epi32(word), shift));
    }
    const uint8_t* bits;
    __m256 means;
  };
};

}  // namespace
}  // namespace paceline::codec
