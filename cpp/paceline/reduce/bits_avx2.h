// Signs (bits.h) by hand for AVX2: whole words here, what is left over by the plain loops. Included by
// kernels_avx2.cc only.
#pragma once
#include <immintrin.h>

#include "paceline/reduce/bits_loops.h"

namespace paceline {
namespace {

// Results are read when all buckets are done: those that are larger than this go past the cache, and are not read
// into it in order to be overwritten.
constexpr size_t kPastCacheBytes = 1u << 20;
constexpr size_t kAheadBytes = 2048;  // prefetch distance

bool goes_past_cache(const void* to, size_t bytes) {
  return bytes >= kPastCacheBytes && reinterpret_cast<uintptr_t>(to) % 32 == 0;
}

template <class T>
void prefetch_line(const T* p, size_t at) {
  constexpr size_t kInLine = 64 / sizeof(T);
  if (at % kInLine == 0) _mm_prefetch(reinterpret_cast<const char*>(p + at) + kAheadBytes, _MM_HINT_T0);
}

// Eight floats or four doubles. `Mask` has a bit for each of them.
template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr size_t kCount = 8;
  using Vector = __m256;
  static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
  static void stream(float* p, Vector v) { _mm256_stream_ps(p, v); }
  static Vector all(float v) { return _mm256_set1_ps(v); }
  static Vector size(Vector v) { return _mm256_andnot_ps(all(-0.0f), v); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector both(Vector a, Vector b) { return _mm256_and_ps(a, b); }
  static Vector at_least(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  static Vector either(Vector a, Vector b) { return _mm256_or_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static Vector differ(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_NEQ_UQ); }
  // Adds to the sums of elements 0 to 3 and 4 to 7.
  static void add_up(Vector v, size_t, __m256d& low, __m256d& high) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(v)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
  }
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
  static void stream(double* p, Vector v) { _mm256_stream_pd(p, v); }
  static Vector all(double v) { return _mm256_set1_pd(v); }
  static Vector size(Vector v) { return _mm256_andnot_pd(all(-0.0), v); }
  static Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_pd(a, b); }
  static Vector both(Vector a, Vector b) { return _mm256_and_pd(a, b); }
  static Vector at_least(Vector a, Vector b) { return _mm256_cmp_pd(a, b, _CMP_GE_OQ); }
  static Vector either(Vector a, Vector b) { return _mm256_or_pd(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm256_sub_pd(a, b); }
  static Vector differ(Vector a, Vector b) { return _mm256_cmp_pd(a, b, _CMP_NEQ_UQ); }
  static void add_up(Vector v, size_t at, __m256d& low, __m256d& high) {
    if (at % 8) high = _mm256_add_pd(high, v);
    else low = _mm256_add_pd(low, v);
  }
  static uint64_t signs(Vector v) { return unsigned(_mm256_movemask_pd(v)); }
  static uint64_t decided(Vector v) {
    __m256i bits = _mm256_castpd_si256(size(v));
    __m256i above = _mm256_cmpgt_epi64(bits, _mm256_setzero_si256());
    __m256i below = _mm256_cmpgt_epi64(_mm256_set1_epi64x(0x7ff0000000000000), bits);
    return unsigned(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_and_si256(above, below))));
  }
};

// `each(at)` gives the vector that belongs to the elements from `at` on. Returns how many have a sign.
template <class T, class Each>
uint64_t pack_words(size_t words, const Coin& coin, uint64_t* bits, Each each) {
  using L = Lanes<T>;
  uint64_t num_signed = 0;
  for (size_t word = 0; word < words; ++word) {
    uint64_t minus = 0, decided = 0;
    for (size_t i = 0; i < 64; i += L::kCount) {
      auto v = each(word * 64 + i);
      minus |= L::signs(v) << i;
      decided |= L::decided(v) << i;
    }
    bits[word] = ~minus;
    if (decided != ~uint64_t(0)) bits[word] = (~minus & decided) | (coin_word(coin, word) & ~decided);
    num_signed += uint64_t(std::popcount(decided));
  }
  return num_signed;
}

template <class T>
void pack_avx2_of(const T* values, size_t count, const Coin& coin, uint64_t* bits) {
  pack_words<T>(count / 64, coin, bits, [=](size_t at) {
    prefetch_line(values, at);
    return Lanes<T>::load(values + at);
  });
  pack_plain(values, count, coin, bits, count / 64);
}

template <class T, bool streaming>
void track_words(const T* values, const T* last, T* next, size_t count, T keep, T take, const Coin& coin,
                   uint64_t* bits) {
  using L = Lanes<T>;
  const auto kept = L::all(keep), taken = L::all(take);
  const auto largest = L::all(std::numeric_limits<T>::max()), smallest = L::all(std::numeric_limits<T>::min());
  pack_words<T>(count / 64, coin, bits, [=](size_t at) {
    prefetch_line(values, at);
    prefetch_line(last, at);
    auto value = L::load(values + at);
    value = L::both(value, L::at_least(largest, L::size(value)));
    auto now = L::add(L::mul(kept, L::load(last + at)), L::mul(taken, value));
    now = L::both(now, L::at_least(L::size(now), smallest));
    streaming ? L::stream(next + at, now) : L::store(next + at, now);
    return now;
  });
  if (streaming) _mm_sfence();
  track_plain(values, last, next, count, keep, take, coin, bits, count / 64);
}

template <class T>
void track_avx2_of(const T* values, const T* last, T* next, size_t count, T keep, T take, const Coin& coin,
                   uint64_t* bits) {
  bool streaming = next != last && goes_past_cache(next, count * sizeof(T));
  streaming ? track_words<T, true>(values, last, next, count, keep, take, coin, bits)
            : track_words<T, false>(values, last, next, count, keep, take, coin, bits);
}

template <class T>
Sizes correct_avx2_of(const T* values, const T* last, T* next, size_t count, T scale, const Coin& coin,
                      uint64_t* bits) {
  using L = Lanes<T>;
  const auto scales = L::all(scale), top = L::all(T(-0.0)), zero = L::all(T(0));
  const auto largest = L::all(std::numeric_limits<T>::max()), smallest = L::all(std::numeric_limits<T>::min());
  __m256d low = _mm256_setzero_pd(), high = low;
  uint64_t num_signed = pack_words<T>(count / 64, coin, bits, [&](size_t at) {
    prefetch_line(values, at);
    prefetch_line(last, at);
    auto value = L::load(values + at), before = L::load(last + at);
    value = L::both(value, L::at_least(largest, L::size(value)));
    auto left_out = L::sub(before, L::either(scales, L::both(before, top)));
    auto now = L::add(value, L::both(left_out, L::differ(before, zero)));
    auto size = L::size(now);
    now = L::both(now, L::both(L::at_least(size, smallest), L::at_least(largest, size)));
    L::store(next + at, now);
    L::add_up(L::size(now), at, low, high);
    return now;
  });
  double sums[kSums];
  _mm256_storeu_pd(sums, low);
  _mm256_storeu_pd(sums + 4, high);
  num_signed += correct_plain(values, last, next, count, scale, coin, bits, sums, count / 64);
  return total(sums, num_signed);
}

// A byte of bits becomes eight floats: each lane looks at its own bit of the byte.
template <bool streaming>
void unpack_float32(const uint64_t* bits, size_t count, uint32_t plus, uint32_t* values) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), top = _mm256_set1_epi32(INT32_MIN);
  const __m256i minus = _mm256_or_si256(_mm256_set1_epi32(int32_t(plus)), top);
  for (size_t word = 0; word < count / 64; ++word)
    for (size_t byte = 0; byte < 8; ++byte) {
      __m256i mine = _mm256_and_si256(_mm256_set1_epi32(int32_t(bits[word] >> 8 * byte & 0xff)), lane);
      __m256i is_plus = _mm256_and_si256(_mm256_cmpeq_epi32(mine, lane), top);
      auto* to = reinterpret_cast<__m256i*>(values + 64 * word + 8 * byte);
      __m256i eight = _mm256_xor_si256(minus, is_plus);
      streaming ? _mm256_stream_si256(to, eight) : _mm256_storeu_si256(to, eight);
    }
  if (streaming) _mm_sfence();
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

Sizes correct_avx2(const void* values, const void* last, void* next, size_t count, DType dtype, double scale,
                   const Coin& coin, uint64_t* bits) {
  auto run = [&]<class T>(T) {
    return correct_avx2_of(static_cast<const T*>(values), static_cast<const T*>(last), static_cast<T*>(next), count,
                           T(scale), coin, bits);
  };
  return dtype == DType::float64 ? run(double()) : run(float());
}

void unpack_avx2(const uint64_t* bits, size_t count, DType dtype, double scale, void* values) {
  if (dtype != DType::float32) return unpack_any(bits, count, dtype, scale, values);
  auto* to = static_cast<uint32_t*>(values);
  auto plus = pattern_of<float, uint32_t>(scale);
  goes_past_cache(to, count * sizeof(float)) ? unpack_float32<true>(bits, count, plus, to)
                                             : unpack_float32<false>(bits, count, plus, to);
}

}  // namespace
}  // namespace paceline
