// Signs of numbers as bits, and the majority of several rows of them.
//
// 64 SIGNS make a word: bit i of word w belongs to element 64 w + i and is 1 for plus. Bits after the last element
// are 0. An element that is zero or not finite has no sign; it takes the bit of a coin.
//
// A COIN has a bit for every element of a model, a function of seed, step and index: bit index % 64 of a hash of seed,
// step / 2 and index / 64, and in odd steps its opposite. Every worker computes it without communication, whichever
// part it computes. Two consecutive steps that follow the coin cancel, so that a parameter without gradient does not
// move.
#pragma once
#include <cstddef>
#include <cstdint>

#include "paceline/reduce/dtype.h"

namespace paceline {

constexpr size_t kSignsInWord = 64;
constexpr size_t words_of(size_t signs) { return (signs + kSignsInWord - 1) / kSignsInWord; }

struct Coin {
  uint64_t key;    // of seed and step
  uint64_t flip;   // all ones in odd steps
  uint64_t first;  // index of the element of the first bit
};

Coin make_coin(uint64_t seed, uint64_t step, uint64_t first);

// bits[w] = the signs of the elements from 64 w on; float32 or float64.
void pack_signs(const void* values, size_t count, DType dtype, const Coin& coin, uint64_t* bits);

struct Momentum {
  void* values = nullptr;  // of the same dtype; null: there is none
  double keep = 0;
};

// momentum = keep * momentum + (1 - keep) * values, and its signs. Values that are not finite count as 0; results that
// are too small to be normal numbers become 0.
void pack_tracked(const void* values, const Momentum& momentum, size_t count, DType dtype, const Coin& coin,
                  uint64_t* bits);

struct Sizes {
  double sum = 0;      // of the sizes of all numbers
  uint64_t count = 0;  // of those that have a sign
};

// voted = values + (voted - scale * sign(voted)), and its signs and sizes: `voted` is the input of the last vote,
// `scale` the value of a sign, so the brackets contain the error of that vote. A momentum replaces the values, and is
// updated in the same pass. Values and results that are not finite count as 0,
// as do subnormal results.
Sizes pack_corrected(const void* values, const Momentum& momentum, void* voted, size_t count, DType dtype, double scale,
                     const Coin& coin, uint64_t* bits);

// A bit is 1 where more than half of the rows have a 1; where exactly half of them do, it is the coin's.
void majority(const uint64_t* const* rows, size_t num_rows, size_t words, const Coin& coin, uint64_t* bits);

// values[i] = scale or -scale; any floating-point dtype.
void unpack_signs(const uint64_t* bits, size_t count, DType dtype, double scale, void* values);

}  // namespace paceline
