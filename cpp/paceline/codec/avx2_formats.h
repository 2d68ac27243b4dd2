// The formats (format.h) by hand for AVX2, with the bits of plain_formats.h. Included by kernels_avx2.cc only.
#pragma once
#include <immintrin.h>

#include "paceline/codec/plain_formats.h"

namespace paceline::codec {
namespace {

inline __m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i load_quarter(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline void store_bits(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

template <bool add>
inline void put(__m256 value, float* out) {
  _mm256_storeu_ps(out, add ? _mm256_add_ps(_mm256_loadu_ps(out), value) : value);
}

inline uint32_t largest_bits_avx2(const float* v, size_t count) {
  const __m256i mask = _mm256_set1_epi32(int32_t(kSizeMask));
  __m256i largest[4] = {};
  for (size_t i = 0; i < count; i += 32)
    for (size_t j = 0; j < 4; ++j)
      largest[j] = _mm256_max_epi32(largest[j], _mm256_and_si256(load_bits(v + i + 8 * j), mask));
  __m256i all = _mm256_max_epi32(_mm256_max_epi32(largest[0], largest[1]), _mm256_max_epi32(largest[2], largest[3]));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01001110));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b10110001));
  return uint32_t(_mm_cvtsi128_si32(four));
}

// Four vectors of small integers as 32 bytes.
inline __m256i narrow(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d)), order);
}

struct Avx2Bf16 : PlainBf16 {
  static __m256i round(__m256i bits) {
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(int32_t(kSizeMask)));
    __m256i is_nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(int32_t(kInfinityBits)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  }
  static void encode(const float* v, size_t, const Draw&, uint64_t, uint8_t* to) {
    for (size_t i = 0; i < kValues; i += 16) {
      __m256i both = _mm256_packus_epi32(round(load_bits(v + i)), round(load_bits(v + i + 8)));
      store_bits(to + 2 * i, _mm256_permute4x64_epi64(both, 0b11011000));
    }
  }
  template <bool add>
  static void decode(const uint8_t* from, float* out) {
    for (size_t i = 0; i < kValues; i += 8) {
      __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(from + 2 * i)), 16);
      put<add>(_mm256_castsi256_ps(bits), out + i);
    }
  }
};

struct Avx2Fp16 : PlainFp16 {
  static void encode(const float* v, size_t, const Draw&, uint64_t, uint8_t* to) {
    for (size_t i = 0; i < kValues; i += 8) {
      __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(v + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), halves);
    }
  }
  template <bool add>
  static void decode(const uint8_t* from, float* out) {
    for (size_t i = 0; i < kValues; i += 8) put<add>(_mm256_cvtph_ps(load_half(from + 2 * i)), out + i);
  }
};

struct Avx2Int8 : PlainInt8 {
  static void encode(const float* v, size_t, const Draw&, uint64_t, uint8_t* to) {
    const float step = step_of(largest_bits_avx2(v, kValues), 127);
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
  template <bool add>
  static void decode(const uint8_t* from, float* out) {
    const __m256 step = _mm256_broadcast_ss(reinterpret_cast<const float*>(from));
    for (size_t i = 0; i < kValues; i += 8) {
      __m256 level = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_quarter(from + 4 + i)));
      put<add>(_mm256_mul_ps(level, step), out + i);
    }
  }
};

struct Avx2Int4 : PlainInt4 {
  static void encode(const float* v, size_t, const Draw& draw, uint64_t at, uint8_t* to) {
    const float step = step_of(largest_bits_avx2(v, kValues), 7);
    std::memcpy(to, &step, 4);
    if (!(step > 0)) {
      std::memset(to + 4, 0, kHalf);
      return;
    }
    alignas(64) uint32_t random[kValues];
    draw_numbers(draw, at, kValues, random);
    const __m256 inverse = _mm256_set1_ps(1 / step), unit = _mm256_set1_ps(0x1p24f);
    auto level = [&](size_t i) {
      __m256 scaled = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(v + i), inverse), unit);
      __m256i fixed = _mm256_add_epi32(_mm256_cvttps_epi32(scaled), _mm256_srli_epi32(load_bits(random + i), 8));
      __m256i rounded = _mm256_srai_epi32(fixed, 24);
      return _mm256_min_epi32(_mm256_max_epi32(rounded, _mm256_set1_epi32(-7)), _mm256_set1_epi32(7));
    };
    const __m256i low = _mm256_set1_epi8(15);
    for (size_t i = 0; i < kHalf; i += 32) {
      __m256i a = narrow(level(i), level(i + 8), level(i + 16), level(i + 24));
      const size_t j = i + kHalf;
      __m256i b = narrow(level(j), level(j + 8), level(j + 16), level(j + 24));
      // What is shifted out of a byte's top gets into the next one's low half, and is masked there.
      b = _mm256_andnot_si256(low, _mm256_slli_epi16(b, 4));
      store_bits(to + 4 + i, _mm256_or_si256(_mm256_and_si256(a, low), b));
    }
  }
  template <bool add>
  static void decode(const uint8_t* from, float* out) {
    const __m256 step = _mm256_broadcast_ss(reinterpret_cast<const float*>(from));
    for (size_t i = 0; i < kHalf; i += 8) {
      __m256i bytes = _mm256_cvtepu8_epi32(load_quarter(from + 4 + i));
      // Four bits to the top and back again: the sign comes along.
      __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(bytes, 28), 28);
      __m256i high = _mm256_srai_epi32(_mm256_slli_epi32(bytes, 24), 28);
      put<add>(_mm256_mul_ps(_mm256_cvtepi32_ps(low), step), out + i);
      put<add>(_mm256_mul_ps(_mm256_cvtepi32_ps(high), step), out + i + kHalf);
    }
  }
};

}  // namespace
}  // namespace paceline::codec
