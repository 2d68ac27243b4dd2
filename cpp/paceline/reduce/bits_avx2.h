// Signs (bits.h) by hand for AVX2: whole words here, what is left over by the plain loops. Included by
// kernels_avx2.cc only.
#pragma once
#include <immintrin.h>

#include "paceline/reduce/bits_loops.h"

namespace paceline {
namespace {

// Eight floats or four doubles. `Mask` has a bit for each of them.
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
  static uint64_t signs(Vector v) { return unsigned(_mm256_movemask_ps(v)); }
  static uint64_t decided(Vector v) {
    __m256i bits = _mm256_castps_si256(size(v));
    __m256i above = _mm256_cmpgt_epi32(bits, _mm256_setzero_si256());
    __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), bits);
    return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_and_si256(above, below))));
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
  static uint64_t signs(Vector v) { return unsigned(_mm256_movemask_pd(v)); }
  static uint64_t decided(Vector v) {
    __m256i bits = _mm256_castpd_si256(size(v));
    __m256i above = _mm256_cmpgt_epi64(bits, _mm256_setzero_si256());
    __m256i below = _mm256_cmpgt_epi64(_mm256_set1_epi64x(0x7ff0000000000000), bits);
    return unsigned(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_and_si256(above, below))));
  }
};

// `each(at)` gives the vector that belongs to the elements from `at` on.
template <class T, class Each>
void pack_words(size_t words, const Coin& coin, uint64_t* bits, Each each) {
  using L = Lanes<T>;
  for (size_t word = 0; word < words; ++word) {
    uint64_t minus = 0, decided = 0;
    for (size_t i = 0; i < 64; i += L::kCount) {
      auto v = each(word * 64 + i);
      minus |= L::signs(v) << i;
      decided |= L::decided(v) << i;
    }
    bits[word] = ~minus;
    if (decided != ~uint64_t(0)) bits[word] = (~minus & decided) | (coin_word(coin, word) & ~decided);
  }
}

template <class T>
void pack_avx2_of(const T* values, size_t count, const Coin& coin, uint64_t* bits) {
  pack_words<T>(count / 64, coin, bits, [=](size_t at) { return Lanes<T>::load(values + at); });
  pack_plain(values, count, coin, bits, count / 64);
}

template <class T>
void track_avx2_of(const T* values, const T* last, T* next, size_t count, T keep, T take, const Coin& coin,
                   uint64_t* bits) {
  using L = Lanes<T>;
  const auto kept = L::all(keep), taken = L::all(take);
  const auto largest = L::all(std::numeric_limits<T>::max()), smallest = L::all(std::numeric_limits<T>::min());
  pack_words<T>(count / 64, coin, bits, [=](size_t at) {
    auto value = L::load(values + at);
    value = L::both(value, L::at_least(largest, L::size(value)));
    auto now = L::add(L::mul(kept, L::load(last + at)), L::mul(taken, value));
    now = L::both(now, L::at_least(L::size(now), smallest));
    L::store(next + at, now);
    return now;
  });
  track_plain(values, last, next, count, keep, take, coin, bits, count / 64);
}

// A byte of bits becomes eight floats: each lane looks at its own bit of the byte.
void unpack_float32(const uint64_t* bits, size_t count, uint32_t plus, uint32_t* values) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), top = _mm256_set1_epi32(INT32_MIN);
  const __m256i minus = _mm256_or_si256(_mm256_set1_epi32(int32_t(plus)), top);
  for (size_t word = 0; word < count / 64; ++word)
    for (size_t byte = 0; byte < 8; ++byte) {
      __m256i mine = _mm256_and_si256(_mm256_set1_epi32(int32_t(bits[word] >> 8 * byte & 0xff)), lane);
      __m256i is_plus = _mm256_and_si256(_mm256_cmpeq_epi32(mine, lane), top);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + 64 * word + 8 * byte), _mm256_xor_si256(minus, is_plus));
    }
  unpack_patterns(bits, count, plus, values, count / 64);
}

void pack_avx2(const void* values, size_t count, DType dtype, const Coin& coin, uint64_t* bits) {
  if (dtype == DType::float64) pack_avx2_of(static_cast<const double*>(values), count, coin, bits);
  else pack_avx2_of(static_cast<const float*>(values), count, coin, bits);
}

void track_avx2(const void* values, const void* last, void* next, size_t count, DType dtype, double keep,
                const Coin& coin, uint64_t* bits) {
  auto run = [&]<class T>(T) {
    track_avx2_of(static_cast<const T*>(values), static_cast<const T*>(last), static_cast<T*>(next), count, T(keep),
                  T(1 - keep), coin, bits);
  };
  dtype == DType::float64 ? run(double()) : run(float());
}

void unpack_avx2(const uint64_t* bits, size_t count, DType dtype, double scale, void* values) {
  if (dtype != DType::float32) return unpack_any(bits, count, dtype, scale, values);
  unpack_float32(bits, count, pattern_of<float, uint32_t>(scale), static_cast<uint32_t*>(values));
}

}  // namespace
}  // namespace paceline
