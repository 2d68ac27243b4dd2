// Eight floats or four doubles in a register. What answers a question has all ones in the lanes where it is yes.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace paceline {
namespace {

template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr size_t kCount = 8;
  using Vector = __m256;
  static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
  static Vector all(float v) { return _mm256_set1_ps(v); }
  static Vector size(Vector v) { return _mm256_andnot_ps(all(-0.0f), v); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector both(Vector a, Vector b) { return _mm256_and_ps(a, b); }
  static Vector at_least(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  static Vector either(Vector a, Vector b) { return _mm256_or_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static Vector differ(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_NEQ_UQ); }
  static Vector normal(Vector v) {
    __m256i bits = _mm256_castps_si256(v), turned = _mm256_set1_epi32(0x7f000000);
    turned = _mm256_add_epi32(_mm256_add_epi32(bits, bits), turned);  // the smallest one becomes the smallest integer
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(0x7e000000), turned));
  }
  // Adds the sizes of what was stored to the sums of elements 0 to 3 and 4 to 7.
  static void add_up(const float* p, size_t, __m256d& low, __m256d& high) {
    const __m256d top = _mm256_set1_pd(-0.0);
    low = _mm256_add_pd(low, _mm256_andnot_pd(top, _mm256_cvtps_pd(_mm_loadu_ps(p))));
    high = _mm256_add_pd(high, _mm256_andnot_pd(top, _mm256_cvtps_pd(_mm_loadu_ps(p + 4))));
  }
  static Vector ones() { return _mm256_castsi256_ps(_mm256_set1_epi32(-1)); }
  static Vector finite(Vector v) { return at_least(all(std::numeric_limits<float>::max()), size(v)); }
  static Vector at_least_normal(Vector v) { return at_least(size(v), all(std::numeric_limits<float>::min())); }
  static uint64_t signs(Vector v) { return unsigned(_mm256_movemask_ps(v)); }
  // Looks at patterns, as sign_word() does.
  static Vector decided(Vector v) {
    __m256i bits = _mm256_castps_si256(size(v));
    __m256i above = _mm256_cmpgt_epi32(bits, _mm256_setzero_si256());
    __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), bits);
    return _mm256_castsi256_ps(_mm256_and_si256(above, below));
  }
};

template <>
struct Lanes<double> {
  static constexpr size_t kCount = 4;
  using Vector = __m256d;
  static Vector load(const double* p) { return _mm256_loadu_pd(p); }
  static void store(double* p, Vector v) { _mm256_storeu_pd(p, v); }
  static Vector all(double v) { return _mm256_set1_pd(v); }
  static Vector size(Vector v) { return _mm256_andnot_pd(all(-0.0), v); }
  static Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_pd(a, b); }
  static Vector both(Vector a, Vector b) { return _mm256_and_pd(a, b); }
  static Vector at_least(Vector a, Vector b) { return _mm256_cmp_pd(a, b, _CMP_GE_OQ); }
  static Vector either(Vector a, Vector b) { return _mm256_or_pd(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm256_sub_pd(a, b); }
  static Vector differ(Vector a, Vector b) { return _mm256_cmp_pd(a, b, _CMP_NEQ_UQ); }
  static Vector normal(Vector v) {
    __m256i bits = _mm256_castpd_si256(v), turned = _mm256_set1_epi64x(0x7fe0000000000000);
    turned = _mm256_add_epi64(_mm256_add_epi64(bits, bits), turned);
    return _mm256_castsi256_pd(_mm256_cmpgt_epi64(_mm256_set1_epi64x(0x7fc0000000000000), turned));
  }
  static void add_up(const double* p, size_t at, __m256d& low, __m256d& high) {
    __m256d& sum = at % 8 ? high : low;
    sum = _mm256_add_pd(sum, size(load(p)));
  }
  static Vector ones() { return _mm256_castsi256_pd(_mm256_set1_epi32(-1)); }
  static Vector finite(Vector v) { return at_least(all(std::numeric_limits<double>::max()), size(v)); }
  static Vector at_least_normal(Vector v) { return at_least(size(v), all(std::numeric_limits<double>::min())); }
  static uint64_t signs(Vector v) { return unsigned(_mm256_movemask_pd(v)); }
  static Vector decided(Vector v) {
    __m256i bits = _mm256_castpd_si256(size(v));
    __m256i above = _mm256_cmpgt_epi64(bits, _mm256_setzero_si256());
    __m256i below = _mm256_cmpgt_epi64(_mm256_set1_epi64x(0x7ff0000000000000), bits);
    return _mm256_castsi256_pd(_mm256_and_si256(above, below));
  }
};

}  // namespace
}  // namespace paceline
