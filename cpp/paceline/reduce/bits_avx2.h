// Signs (bits.h) by hand for AVX2: whole words here, the rest in the plain loops. Included by
// kernels_avx2.cc only.
#pragma once
#include "paceline/reduce/bits_loops.h"
#include "paceline/reduce/lanes_avx2.h"

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

template <class T>
using VectorOf = typename Lanes<T>::Vector;

template <class T>
struct Votes {
  VectorOf<T> values, decided;  // in which lanes there is a sign
};

// The input of the vote, as in bits_loops.h, for all lanes from `at` on. In most words every number is normal: quick()
// returns them and changes nothing; afterwards `normal` is true if all were normal. Then they are kept; otherwise
// vote() does all the work.
template <class T>
struct PlainLanes {
  const T* values;

  void prepare(size_t) {}

  VectorOf<T> quick(size_t at, VectorOf<T>& normal) const {
    prefetch_line(values, at);
    auto found = Lanes<T>::load(values + at);
    normal = Lanes<T>::both(normal, Lanes<T>::normal(found));
    return found;
  }

  void keep(size_t, VectorOf<T>) {}

  Votes<T> vote(size_t at) const {
    auto found = Lanes<T>::load(values + at);
    return {found, Lanes<T>::decided(found)};
  }
};

template <class T>
struct TrackedLanes {
  using L = Lanes<T>;
  Tracked<T> plain;

  void prepare(size_t) {}

  VectorOf<T> next(size_t at, VectorOf<T> values) const {
    return L::add(L::mul(L::all(plain.keep), L::load(plain.momentum + at)), L::mul(L::all(plain.take), values));
  }

  VectorOf<T> quick(size_t at, VectorOf<T>& normal) const {
    prefetch_line(plain.values, at);
    prefetch_line(plain.momentum, at);
    auto found = next(at, L::load(plain.values + at));  // of a value that is not finite: not finite
    normal = L::both(normal, L::normal(found));
    return found;
  }

  void keep(size_t at, VectorOf<T> found) { L::store(plain.momentum + at, found); }

  Votes<T> vote(size_t at) {
    auto values = L::load(plain.values + at);
    auto found = next(at, L::both(values, L::finite(values)));
    found = L::both(found, L::at_least_normal(found));
    keep(at, found);
    return {found, L::normal(found)};
  }
};

struct Word {
  uint64_t minus = 0, decided = 0;
};

// Apart, so that the compiler does not share out registers between this and what is usual.
template <class T, class Kind>
[[gnu::noinline]] Word vote_on_any(Kind kind, size_t first) {
  Word word;
  for (size_t i = 0; i < kSignsInWord; i += Lanes<T>::kCount) {
    auto votes = kind.vote(first + i);
    word.minus |= Lanes<T>::signs(votes.values) << i;
    word.decided |= Lanes<T>::signs(votes.decided) << i;
  }
  return word;
}

template <class T, class Kind>
[[gnu::always_inline]] inline Word vote_on_word(Kind& kind, size_t first) {
  using L = Lanes<T>;
  constexpr size_t kVectors = kSignsInWord / L::kCount;
  kind.prepare(first);
  VectorOf<T> found[kVectors], normal = L::ones();
  for (size_t i = 0; i < kVectors; ++i) found[i] = kind.quick(first + i * L::kCount, normal);
  if (L::signs(normal) != (1u << L::kCount) - 1) return vote_on_any<T>(kind, first);
  Word word{0, ~uint64_t(0)};
  for (size_t i = 0; i < kVectors; ++i) {
    kind.keep(first + i * L::kCount, found[i]);
    word.minus |= L::signs(found[i]) << i * L::kCount;
  }
  return word;
}

template <class T, class Source>  // PlainLanes or TrackedLanes
struct CorrectedLanes {
  using L = Lanes<T>;
  Source source;
  const T* values;  // what comes out of the source
  T* voted;
  T scale;

  void prepare(size_t first) {
    if constexpr (!std::is_same_v<Source, PlainLanes<T>>) vote_on_word<T>(source, first);
  }

  VectorOf<T> left_out(VectorOf<T> last) const {
    return L::sub(last, L::either(L::all(scale), L::both(last, L::all(T(-0.0)))));
  }

  VectorOf<T> quick(size_t at, VectorOf<T>& normal) const {
    prefetch_line(values, at);
    prefetch_line(voted, at);
    auto last = L::load(voted + at), found = L::add(L::load(values + at), left_out(last));
    normal = L::both(normal, L::both(L::normal(found), L::differ(last, L::all(T(0)))));
    return found;
  }

  void keep(size_t at, VectorOf<T> found) { L::store(voted + at, found); }

  Votes<T> vote(size_t at) {
    auto value = L::load(values + at), last = L::load(voted + at);
    auto found = L::add(L::both(value, L::finite(value)), L::both(left_out(last), L::differ(last, L::all(T(0)))));
    auto counts = L::both(L::finite(found), L::at_least_normal(found));
    keep(at, L::both(found, counts));
    return {L::both(found, counts), counts};
  }
};

// Packs all whole words, and calls `after(first, decided)` after each of them.
template <class T, class Kind, class After>
void pack_words(size_t words, const Coin& coin, uint64_t* bits, Kind kind, After after) {
  visit_words(words, [&](size_t at) __attribute__((always_inline)) {
    auto [minus, decided] = vote_on_word<T>(kind, at * kSignsInWord);
    bits[at] = ~minus;
    if (decided != ~uint64_t(0)) bits[at] = (~minus & decided) | (coin_word(coin, at) & ~decided);
    after(at * kSignsInWord, decided);
  });
}

template <class T, class Each>
void pack_rest(size_t count, const Coin& coin, uint64_t* bits, Each& each) {
  if (count % kSignsInWord) pack_word<T>(count / kSignsInWord, count, coin, bits, each);
}

template <class T>
PlainLanes<T> lanes_of(const Plain<T>& plain) {
  return {plain.values};
}

template <class T>
TrackedLanes<T> lanes_of(const Tracked<T>& tracked) {
  return {tracked};
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
      pack_words<T>(count / kSignsInWord, coin, bits, lanes_of(each), [](size_t, uint64_t) {});
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
      auto* coming = static_cast<const T*>(momentum.values ? momentum.values : values);
      CorrectedLanes<T, decltype(lanes_of(source))> lanes{lanes_of(source), coming, each.voted, each.scale};
      __m256d low = _mm256_setzero_pd(), high = low;
      pack_words<T>(count / kSignsInWord, coin, bits, lanes, [&](size_t first, uint64_t decided) {
        each.num_signed += uint64_t(std::popcount(decided));
        for (size_t at = first; at < first + kSignsInWord; at += Lanes<T>::kCount)
          Lanes<T>::add_up(each.voted + at, at, low, high);
      });
      _mm256_storeu_pd(each.sums, low);
      _mm256_storeu_pd(each.sums + 4, high);
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
