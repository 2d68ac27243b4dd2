// The format onebit (format.h) by hand for AVX2, with the bits of plain_onebit.h. Included by kernels_avx2.cc only.
#pragma once
#include <immintrin.h>

#include "paceline/codec/avx2_formats.h"
#include "paceline/codec/plain_onebit.h"

namespace paceline::codec {
namespace {

struct EightSums {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  void add(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 sum = _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d));
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
    EightSums plus, minus;
    for (size_t at = 0; at < kValues; at += 32) {
      __m256 value[4], below[4], up[4], down[4];
      uint32_t bits = 0;
      for (size_t e = 0; e < 4; ++e) {
        value[e] = _mm256_loadu_ps(v + at + 8 * e);
        below[e] = _mm256_cmp_ps(value[e], _mm256_setzero_ps(), _CMP_LT_OQ);
        up[e] = _mm256_andnot_ps(below[e], value[e]);
        down[e] = _mm256_and_ps(below[e], value[e]);
        bits |= uint32_t(_mm256_movemask_ps(below[e])) << 8 * e;
      }
      plus.add(up[0], up[1], up[2], up[3]);
      minus.add(down[0], down[1], down[2], down[3]);
      bits = ~bits;
      std::memcpy(to + 8 + at / 8, &bits, 4);
    }
    finish_onebit(v, n, plus.side(), minus.side(), to);
  }
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from)
        : bits(from + 8), plus(_mm256_set1_ps(read_float(from))), minus(_mm256_set1_ps(read_float(from + 4))) {}
    // Each lane has 32 bits and shifts its own one to the top, where it chooses.
    Eight at(size_t i) const {
      int32_t word;
      std::memcpy(&word, bits + i / 32 * 4, 4);
      __m256i shift = _mm256_sub_epi32(_mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24), _mm256_set1_epi32(i % 32));
      __m256i top = _mm256_sllv_epi32(_mm256_set1_epi32(word), shift);
      return _mm256_blendv_ps(minus, plus, _mm256_castsi256_ps(top));
    }
    const uint8_t* bits;
    __m256 plus, minus;
  };
};

}  // namespace
}  // namespace paceline::codec
