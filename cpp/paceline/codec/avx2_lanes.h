// Eight floats in a vector. See plain_lanes.h. Included by kernels_avx2.cc only.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "paceline/codec/numbers.h"

namespace paceline::codec {
namespace {

inline __m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m128i load_quarter(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline void store_bits(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

struct Avx2Lanes {
  using Eight = __m256;
  static Eight load(const float* p) { return _mm256_loadu_ps(p); }
  static Eight all(float v) { return _mm256_set1_ps(v); }
  static void store(float* p, Eight v) { _mm256_storeu_ps(p, v); }
  static Eight add(Eight a, Eight b) { return _mm256_add_ps(a, b); }
  static Eight sub(Eight a, Eight b) { return _mm256_sub_ps(a, b); }
  static Eight mul(Eight a, Eight b) { return _mm256_mul_ps(a, b); }
  static Eight div(Eight a, Eight b) { return _mm256_div_ps(a, b); }
  static Eight if_finite(Eight v, Eight yes, Eight no) {
    __m256i size = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(int32_t(kSizeMask)));
    __m256i finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(int32_t(kInfinityBits)), size);
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(finite));
  }

  // The largest size as bits, of a multiple of 32 floats.
  static uint32_t largest(const float* v, size_t count) {
    const __m256i mask = _mm256_set1_epi32(int32_t(kSizeMask));
    __m256i largest[4] = {};
    for (size_t i = 0; i < count; i += 32)
      for (size_t j = 0; j < 4; ++j) {
        if (j % 2 == 0) prefetch(v + i + 8 * j);
        largest[j] = _mm256_max_epi32(largest[j], _mm256_and_si256(load_bits(v + i + 8 * j), mask));
      }
    __m256i all = _mm256_max_epi32(_mm256_max_epi32(largest[0], largest[1]), _mm256_max_epi32(largest[2], largest[3]));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01001110));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b10110001));
    return uint32_t(_mm_cvtsi128_si32(four));
  }

  // Results are read when all buckets are done: those that are larger than this go past the cache, and are not read
  // into it in order to be overwritten.
  static constexpr size_t kStreamBytes = 1u << 20;
  static bool can_stream(const void* to, size_t bytes) {
    return bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(to) % 32 == 0;
  }
  static void stream(float* p, Eight v) { _mm256_stream_ps(p, v); }
  static void finish_stream() { _mm_sfence(); }

  static void stream_bytes(uint8_t* to, const uint8_t* from, size_t count) {
    for (size_t i = 0; i < count; i += 32) _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), load_bits(from + i));
  }

  static constexpr size_t kAheadBytes = 4096;
  static void prefetch(const float* p) { prefetch_at(p); }
  static void prefetch_bytes(const uint8_t* p, size_t count) {
    for (size_t i = 0; i < count; i += 64) prefetch_at(p + i);
  }

 private:
  // An address beyond the end of memory does no harm.
  static void prefetch_at(const void* p) {
    _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) + kAheadBytes), _MM_HINT_T0);
  }
};

}  // namespace
}  // namespace paceline::codec
