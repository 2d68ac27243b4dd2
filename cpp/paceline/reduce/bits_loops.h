// Signs and majorities (bits.h), written once and compiled once per instruction set; loops are plain so that the
// compiler vectorises them.
//
// Whole words are visited in STREAMS: parts that lie side by side in memory are walked through at the same time, a
// word of each in turn. A core fetches from several pages at once, but hardly beyond the end of one: in one stream
// it reads at two thirds of the speed.
//
// The majority is counted with BIT-SLICED COUNTERS: plane j holds bit j of 64 counters in each word, and a row is
// added to all of them at once, as in a ripple-carry adder. The counters are then compared with half the rows, from
// the highest plane down.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "paceline/reduce/bits.h"
#include "paceline/reduce/blockwise.h"

namespace paceline {
namespace {

// splitmix64, of which word w of a coin is the result number w.
inline uint64_t coin_hash(uint64_t key, uint64_t word) {
  uint64_t z = key + (word + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// 64 bits of a coin, from the element 64 * word on.
inline uint64_t coin_word(const Coin& coin, size_t word) {
  uint64_t index = coin.first + kSignsInWord * word, at = index / 64;
  unsigned shift = index % 64;
  uint64_t bits = coin_hash(coin.key, at) >> shift;
  if (shift) bits |= coin_hash(coin.key, at + 1) << (64 - shift);
  return bits ^ coin.flip;
}

constexpr size_t kBlockWords = 256;

// `count` words of a coin, at most kBlockWords: each hash is computed once.
inline void coin_words(const Coin& coin, size_t word, size_t count, uint64_t* bits) {
  uint64_t hashes[kBlockWords + 1];
  const uint64_t index = coin.first + kSignsInWord * word, at = index / 64;
  const unsigned shift = index % 64;
  for (size_t i = 0; i <= count; ++i) hashes[i] = coin_hash(coin.key, at + i);
  for (size_t i = 0; i < count; ++i) bits[i] = (hashes[i] >> shift | hashes[i + 1] << 1 << (63 - shift)) ^ coin.flip;
}

constexpr size_t kStreams = 4, kStreamWords = 72;

template <class Visit>
void visit_words(size_t words, Visit visit) {
  constexpr size_t kTogether = kStreams * kStreamWords;
  const size_t in_streams = words / kTogether * kTogether;
  for (size_t first = 0; first < in_streams; first += kTogether)
    for (size_t word = first; word < first + kStreamWords; ++word)
      for (size_t stream = 0; stream < kStreams; ++stream) visit(word + stream * kStreamWords);
  for (size_t word = in_streams; word < words; ++word) visit(word);
}

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

// Up to 64 signs. Looks at patterns, not at numbers: some threads take subnormal numbers for zero.
template <class T>
uint64_t sign_word(const T* values, size_t count, const Coin& coin, size_t word) {
  using Bits = BitsOf<T>;
  constexpr Bits kInfinity = std::bit_cast<Bits>(std::numeric_limits<T>::infinity());
  uint64_t plus = 0, decided = 0;
  for (size_t i = 0; i < count; ++i) {
    Bits pattern = std::bit_cast<Bits>(values[i]), size = pattern & (~Bits(0) >> 1);
    plus |= uint64_t(pattern == size) << i;
    decided |= uint64_t(Bits(size - 1) < kInfinity - 1) << i;  // neither zero nor infinite nor NaN
  }
  uint64_t all = count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
  if (decided == all) return plus;
  return (plus & decided) | (coin_word(coin, word) & ~decided & all);
}

template <class T>
bool is_finite(T value) {
  return std::abs(value) <= std::numeric_limits<T>::max();
}

// The input of the vote: called once for every element, in the order of visit_words(), and changes what is kept.
template <class T>
struct Plain {
  const T* values;

  T operator()(size_t i) { return values[i]; }
};

template <class T>
struct Tracked {
  const T* values;
  T* momentum;
  T keep, take;

  T operator()(size_t i) {
    T next = keep * momentum[i] + take * (is_finite(values[i]) ? values[i] : T(0));
    // A momentum that fades away would end as a subnormal number, for ever, and those are slow.
    return momentum[i] = std::abs(next) >= std::numeric_limits<T>::min() ? next : T(0);
  }
};

constexpr size_t kSums = 8;  // side by side, added up at the end: the same in both kernel sets

template <class T, class Source>  // Plain or Tracked
struct Corrected {
  Source source;
  T* voted;
  T scale;
  double sums[kSums] = {};
  uint64_t num_signed = 0;

  T operator()(size_t i) {
    T value = source(i), last = voted[i];
    T left_out = last == 0 ? T(0) : last - std::copysign(scale, last);
    T next = (is_finite(value) ? value : T(0)) + left_out;
    bool counts = is_finite(next) && std::abs(next) >= std::numeric_limits<T>::min();
    voted[i] = counts ? next : T(0);
    sums[i % kSums] += double(std::abs(voted[i]));
    num_signed += counts;
    return voted[i];
  }

  Sizes sizes() const {
    Sizes all{0, num_signed};
    for (double sum : sums) all.sum += sum;
    return all;
  }
};

// Word number `word` of the signs of `count` elements.
template <class T, class Each>
void pack_word(size_t word, size_t count, const Coin& coin, uint64_t* bits, Each& each) {
  T values[kSignsInWord];
  const size_t first = word * kSignsInWord, n = std::min(kSignsInWord, count - first);
  for (size_t i = 0; i < n; ++i) values[i] = each(first + i);
  bits[word] = sign_word(values, n, coin, word);
}

template <class T, class Each>
void pack_each(size_t count, const Coin& coin, uint64_t* bits, Each& each) {
  visit_words(count / kSignsInWord, [&](size_t word) { pack_word<T>(word, count, coin, bits, each); });
  if (count % kSignsInWord) pack_word<T>(count / kSignsInWord, count, coin, bits, each);
}

// Calls `run(Plain)` or `run(Tracked)`, depending on the arguments.
template <class T, class Run>
auto with_source(const void* values, const Momentum& momentum, Run run) {
  auto* from = static_cast<const T*>(values);
  if (!momentum.values) return run(Plain<T>{from});
  return run(Tracked<T>{from, static_cast<T*>(momentum.values), T(momentum.keep), T(1 - momentum.keep)});
}

constexpr size_t kMaxPlanes = 32;  // rows are counted in 32 bits

void majority_any(const uint64_t* const* rows, size_t num_rows, size_t words, const Coin& coin, uint64_t* bits) {
  const size_t num_planes = size_t(std::bit_width(num_rows)), half = num_rows / 2;
  const bool can_tie = num_rows % 2 == 0;
  alignas(64) uint64_t planes[kMaxPlanes][kBlockWords], carry[kBlockWords], equal[kBlockWords];
  for (size_t at = 0; at < words; at += kBlockWords) {
    const size_t n = std::min(kBlockWords, words - at);
    for (size_t j = 0; j < num_planes; ++j) std::memset(planes[j], 0, n * sizeof(uint64_t));
    for (size_t row = 0; row < num_rows; ++row) {
      std::memcpy(carry, rows[row] + at, n * sizeof(uint64_t));
      const size_t reached = size_t(std::bit_width(row + 1));  // so far no counter is larger
      for (size_t j = 0; j < reached; ++j)
        for (size_t w = 0; w < n; ++w) {
          uint64_t both = planes[j][w] & carry[w];
          planes[j][w] ^= carry[w];
          carry[w] = both;
        }
    }
    uint64_t* result = bits + at;
    std::fill_n(result, n, 0);
    std::fill_n(equal, n, ~uint64_t(0));
    for (size_t j = num_planes; j-- > 0;)
      if (half >> j & 1)
        for (size_t w = 0; w < n; ++w) equal[w] &= planes[j][w];
      else
        for (size_t w = 0; w < n; ++w) {
          result[w] |= equal[w] & planes[j][w];
          equal[w] &= ~planes[j][w];
        }
    if (!can_tie) continue;
    coin_words(coin, at, n, carry);
    for (size_t w = 0; w < n; ++w) result[w] |= equal[w] & carry[w];
  }
}

template <class Bits>
void unpack_patterns(const uint64_t* bits, size_t count, Bits plus, Bits* values, size_t word = 0) {
  constexpr int kTop = 8 * sizeof(Bits) - 1;
  for (size_t at = word * 64; at < count; at += 64, ++word) {
    const size_t n = std::min<size_t>(64, count - at);
    for (size_t i = 0; i < n; ++i) values[at + i] = Bits(plus ^ Bits(Bits(~bits[word] >> i & 1) << kTop));
  }
}

template <class T, class Bits>
Bits pattern_of(double scale) {
  using S = Stored<T>;
  T stored = S::store(typename S::Acc(scale));
  Bits bits;
  std::memcpy(&bits, &stored, sizeof bits);
  return bits;
}

void unpack_any(const uint64_t* bits, size_t count, DType dtype, double scale, void* values) {
  switch (dtype) {
    case DType::float64:
      return unpack_patterns(bits, count, pattern_of<double, uint64_t>(scale), static_cast<uint64_t*>(values));
    case DType::float16:
      return unpack_patterns(bits, count, pattern_of<Half, uint16_t>(scale), static_cast<uint16_t*>(values));
    case DType::bfloat16:
      return unpack_patterns(bits, count, pattern_of<BFloat, uint16_t>(scale), static_cast<uint16_t*>(values));
    default: return unpack_patterns(bits, count, pattern_of<float, uint32_t>(scale), static_cast<uint32_t*>(values));
  }
}

}  // namespace
}  // namespace paceline
