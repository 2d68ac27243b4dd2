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
constexpr size_t kAheadBytes = 512;  // prefetch distance in each stream

bool goes_past_cache(const void* to, size_t bytes) {
  return bytes >= kPastCacheBytes && reinterpret_cast<uintptr_t>(to) % 32 == 0;
}

// Inlined early: GCC takes a function that only prefetches for one without effect, and drops the call.
template <class T>
[[gnu::always_inline]] inline void prefetch_line(const T* p, size_t at) {
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
  static void add_up(Vector v, size_t at, __m256d& low, __m256d& high) {
    if (at % 8) high = _mm256_add_pd(high, v);
    else low = _mm256_add_pd(low, v);
  }
  static uint64_t signs(Vector v) { return unsigned(_mm256_movemask_pd(v)); }
  static Vector decided(Vector v) {
    __m256i bits = _mm256_castpd_si256(size(v));
    __m256i above = _mm256_cmpgt_epi64(bits, _mm256_setzero_si256());
    __m256i below = _mm256_cmpgt_epi64(_mm256_set1_epi64x(0x7ff0000000000000), bits);
    return _mm256_castsi256_pd(_mm256_and_si256(above, below));
  }
};

template <class T>
struct Voted {
  typename Lanes<T>::Vector values, decided;  // all ones in the lanes that have a sign
};

// The same as the call operators of bits_loops.h, for the elements from `at` on.
template <class T>
Voted<T> vote(Plain<T>& plain, size_t at) {
  prefetch_line(plain.values, at);
  auto values = Lanes<T>::load(plain.values + at);
  return {values, Lanes<T>::decided(values)};
}

template <class T>
Voted<T> vote(Tracked<T>& tracked, size_t at) {
  using L = Lanes<T>;
  const auto largest = L::all(std::numeric_limits<T>::max()), smallest = L::all(std::numeric_limits<T>::min());
  prefetch_line(tracked.values, at);
  prefetch_line(tracked.momentum, at);
  auto values = L::load(tracked.values + at);
  values = L::both(values, L::at_least(largest, L::size(values)));
  auto next = L::add(L::mul(L::all(tracked.keep), L::load(tracked.momentum + at)), L::mul(L::all(tracked.take), values));
  auto size = L::size(next), normal = L::at_least(size, smallest);
  next = L::both(next, normal);
  L::store(tracked.momentum + at, next);
  return {next, L::both(normal, L::at_least(largest, size))};
}

// Sums are in registers until the end.
template <class T, class Source>
struct CorrectedLanes {
  Corrected<T, Source>& plain;
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
};

template <class T, class Source>
Voted<T> vote(CorrectedLanes<T, Source>& corrected, size_t at) {
  using L = Lanes<T>;
  const auto largest = L::all(std::numeric_limits<T>::max()), smallest = L::all(std::numeric_limits<T>::min());
  const auto top = L::all(T(-0.0)), zero = L::all(T(0));
  auto& plain = corrected.plain;
  prefetch_line(plain.voted, at);
  auto values = vote(plain.source, at).values, last = L::load(plain.voted + at);
  values = L::both(values, L::at_least(largest, L::size(values)));
  auto left_out = L::sub(last, L::either(L::all(plain.scale), L::both(last, top)));
  auto next = L::add(values, L::both(left_out, L::differ(last, zero)));
  auto size = L::size(next), counts = L::both(L::at_least(size, smallest), L::at_least(largest, size));
  L::store(plain.voted + at, L::both(next, counts));
  L::add_up(L::both(size, counts), at, corrected.low, corrected.high);
  return {L::both(next, counts), counts};
}

// Packs all whole words; returns how many of their elements have a sign.
template <class T, class Each>
uint64_t pack_words(size_t words, const Coin& coin, uint64_t* bits, Each& each) {
  using L = Lanes<T>;
  uint64_t num_signed = 0;
  visit_words(words, [&](size_t word) {
    uint64_t minus = 0, decided = 0;
    for (size_t i = 0; i < kSignsInWord; i += L::kCount) {
      auto voted = vote(each, word * kSignsInWord + i);
      minus |= L::signs(voted.values) << i;
      decided |= L::signs(voted.decided) << i;
    }
    bits[word] = ~minus;
    if (decided != ~uint64_t(0)) bits[word] = (~minus & decided) | (coin_word(coin, word) & ~decided);
    num_signed += uint64_t(std::popcount(decided));
  });
  return num_signed;
}

template <class T, class Each>
void pack_rest(size_t count, const Coin& coin, uint64_t* bits, Each& each) {
  if (count % kSignsInWord) pack_word<T>(count / kSignsInWord, count, coin, bits, each);
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

void track_avx2(const void* values, const Momentum& momentum, size_t count, DType dtype, const Coin& coin,
                uint64_t* bits) {
  auto run = [&]<class T>(T) {
    with_source<T>(values, momentum, [&](auto each) {
      pack_words<T>(count / kSignsInWord, coin, bits, each);
      pack_rest<T>(count, coin, bits, each);
    });
  };
  dtype == DType::float64 ? run(double()) : run(float());
}

void pack_avx2(const void* values, size_t count, DType dtype, const Coin& coin, uint64_t* bits) {
  track_avx2(values, {}, count, dtype, coin, bits);
}

Sizes correct_avx2(const void* values, const Momentum& momentum, void* voted, size_t count, DType dtype, double scale,
                   const Coin& coin, uint64_t* bits) {
  auto run = [&]<class T>(T) {
    return with_source<T>(values, momentum, [&](auto source) {
      Corrected<T, decltype(source)> each{source, static_cast<T*>(voted), T(scale)};
      CorrectedLanes<T, decltype(source)> lanes{each};
      each.num_signed = pack_words<T>(count / kSignsInWord, coin, bits, lanes);
      _mm256_storeu_pd(each.sums, lanes.low);
      _mm256_storeu_pd(each.sums + 4, lanes.high);
      pack_rest<T>(count, coin, bits, each);
      return each.sizes();
    });
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
