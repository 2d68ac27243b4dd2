// The formats (format.h) by hand for AVX2, with the bits of plain_formats.h. Included by kernels_avx2.cc only.
#pragma once
#include <immintrin.h>

#include "paceline/codec/avx2_lanes.h"
#include "paceline/codec/plain_formats.h"

namespace paceline::codec {
namespace {

struct Avx2 {
  using Lanes = Avx2Lanes;
  using Eight = __m256;
};

// Four vectors of small integers as 32 bytes.
inline __m256i narrow(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d)), order);
}

struct Avx2Bf16 : Avx2, OfFormat<Format::bf16> {
  static __m256i round(__m256i bits) {
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  }
  // Rounding would turn some NaN into infinity or zero. They are rare: a block that has one is encoded again.
  static void encode(const float* v, size_t n, const Draw& draw, uint64_t at, uint8_t* to) {
    __m256 nan = _mm256_setzero_ps();
    for (size_t i = 0; i < kValues; i += 16) {
      Lanes::prefetch(v + i);
      __m256 a = _mm256_loadu_ps(v + i), b = _mm256_loadu_ps(v + i + 8);
      nan = _mm256_or_ps(nan, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
      __m256i both = _mm256_packus_epi32(round(_mm256_castps_si256(a)), round(_mm256_castps_si256(b)));
      store_bits(to + 2 * i, _mm256_permute4x64_epi64(both, 0b11011000));
    }
    if (_mm256_movemask_ps(nan)) PlainBf16::encode(v, n, draw, at, to);
  }
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from) : from(from) {}
    Eight at(size_t i) const {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(from + 2 * i)), 16));
    }
    const uint8_t* from;
  };
};

struct Avx2Fp16 : Avx2, OfFormat<Format::fp16> {
  static void encode(const float* v, size_t, const Draw&, uint64_t, uint8_t* to) {
    auto half = [=](size_t i) { return _mm256_cvtps_ph(_mm256_loadu_ps(v + i), _MM_FROUND_TO_NEAREST_INT); };
    for (size_t i = 0; i < kValues; i += 16) {
      Lanes::prefetch(v + i);
      store_bits(to + 2 * i, _mm256_set_m128i(half(i + 8), half(i)));
    }
  }
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from) : from(from) {}
    Eight at(size_t i) const { return _mm256_cvtph_ps(load_half(from + 2 * i)); }
    const uint8_t* from;
  };
};

struct Avx2Int8 : Avx2, OfFormat<Format::int8> {
  static void encode(const float* v, size_t, const Draw&, uint64_t, uint8_t* to) {
    const float step = step_of(Lanes::largest(v, kValues), 127);
    std::memcpy(to, &step, 4);
    if (!(step > 0)) {
      std::memset(to + 4, 0, kValues);
      return;
    }
    const __m256 inverse = _mm256_set1_ps(1 / step);
    auto level = [&](size_t i) { return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(v + i), inverse)); };
    for (size_t i = 0; i < kValues; i += 32)
      store_bits(to + 4 + i, narrow(level(i), level(i + 8), level(i + 16), level(i + 24)));
  }
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from) : levels(from + 4), step(_mm256_set1_ps(read_float(from))) {}
    Eight at(size_t i) const {
      return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_quarter(levels + i))), step);
    }
    const uint8_t* levels;
    __m256 step;
  };
};

struct Avx2Int4 : Avx2, OfFormat<Format::int4> {
  static constexpr size_t kHalf = kValues / 2;
  static void encode(const float* v, size_t, const Draw& draw, uint64_t at, uint8_t* to) {
    const float step = step_of(Lanes::largest(v, kValues), 7);
    std::memcpy(to, &step, 4);
    if (!(step > 0)) {
      std::memset(to + 4, 0, kHalf);
      return;
    }
    // Sixteen levels from eight words; blocks that do not begin with a sixteen are rare.
    if (!is_aligned(draw, at, kValues)) return PlainInt4::encode(v, kValues, draw, at, to);
    const uint64_t word = word_of(draw.first + at);
    const WordKeys keys = keys_of(draw, word);
    const __m256i start = _mm256_add_epi32(_mm256_set1_epi32(int32_t(uint32_t(word) + keys.key0)),
                                           _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i key1 = _mm256_set1_epi32(int32_t(keys.key1));
    const __m256 inverse = _mm256_set1_ps(1 / step), unit = _mm256_set1_ps(0x1p16f);
    auto scrambled = [&](size_t i) {  // scramble_keyed
      __m256i x = _mm256_add_epi32(start, _mm256_set1_epi32(int32_t(i / 2)));
      x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
      x = _mm256_xor_si256(_mm256_mullo_epi32(x, _mm256_set1_epi32(0x7feb352d)), key1);
      x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
      x = _mm256_mullo_epi32(x, _mm256_set1_epi32(int32_t(0x846ca68bu)));
      return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    };
    auto level = [&](size_t i, __m256i random) {
      __m256i fixed = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(v + i), inverse), unit));
      return _mm256_srai_epi32(_mm256_add_epi32(fixed, random), 16);
    };
    const __m256i half = _mm256_set1_epi32(0xffff), top = _mm256_set1_epi8(7), bottom = _mm256_set1_epi8(-7);
    auto levels = [&](size_t i) {  // of 32 values
      const __m256i a = scrambled(i), b = scrambled(i + 16);
      __m256i all = narrow(level(i, _mm256_and_si256(a, half)), level(i + 8, _mm256_srli_epi32(a, 16)),
                           level(i + 16, _mm256_and_si256(b, half)), level(i + 24, _mm256_srli_epi32(b, 16)));
      return _mm256_min_epi8(_mm256_max_epi8(all, bottom), top);
    };
    const __m256i low = _mm256_set1_epi8(15);
    for (size_t i = 0; i < kHalf; i += 32) {
      __m256i a = levels(i), b = levels(i + kHalf);
      // Bits shifted out of a byte's top get into the next byte's low half, and are masked there.
      b = _mm256_andnot_si256(low, _mm256_slli_epi16(b, 4));
      store_bits(to + 4 + i, _mm256_or_si256(_mm256_and_si256(a, low), b));
    }
  }
  struct Reader {
    Reader() = default;
    explicit Reader(const uint8_t* from) : levels(from + 4), step(_mm256_set1_ps(read_float(from))) {}
    Eight at(size_t i) const {
      // Four bits to the top and back again: the sign comes along.
      const int to_top = i < kHalf ? 28 : 24;
      __m256i bytes = _mm256_cvtepu8_epi32(load_quarter(levels + i % kHalf));
      __m256i level = _mm256_srai_epi32(_mm256_slli_epi32(bytes, to_top), 28);
      return _mm256_mul_ps(_mm256_cvtepi32_ps(level), step);
    }
    const uint8_t* levels;
    __m256 step;
  };
};

}  // namespace
}  // namespace paceline::codec
