// Random numbers for every element of a tensor: a function of seed, step and index only, so that all workers with the
// same values draw the same numbers, whichever part they compute.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "paceline/reduce/scramble.h"

namespace paceline::codec {

struct Draw {
  uint64_t key;    // of seed and step
  uint64_t first;  // index of the element of the first number
};

namespace {

inline Draw make_draw(uint64_t seed, uint64_t step, uint64_t first) { return {key_of(key_of(seed) + step), first}; }

// "lowbias32" with a key before each of its multiplications, so that two keys do not give two parts of one sequence.
inline uint32_t scramble_keyed(uint32_t x, uint32_t key0, uint32_t key1) {
  x += key0;
  x = (x ^ x >> 16) * 0x7feb352du ^ key1;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// One hash gives two elements 16 bits each: the elements j and j + 8 of every sixteen (by index) share a WORD, whose
// lower half is that of j. So eight words in a vector are the numbers of sixteen neighbours, without a shuffle.
constexpr size_t kPerWords = 16;

inline uint64_t word_of(uint64_t index) { return index / kPerWords * 8 + index % 8; }

// The keys of a word. Its upper 32 bits rarely change, and are in the keys.
struct WordKeys {
  uint32_t key0, key1;
};
inline WordKeys keys_of(const Draw& draw, uint64_t word) {
  const uint64_t key = key_of(draw.key ^ key_of(word >> 32));
  return {uint32_t(key), uint32_t(key >> 32)};
}

// Whether the words of these elements have the same keys, and the first element is the first of sixteen.
inline bool is_aligned(const Draw& draw, uint64_t at, size_t count) {
  const uint64_t first = draw.first + at;
  return first % kPerWords == 0 && word_of(first) >> 32 == word_of(first + count - 1) >> 32;
}

// numbers[i] = 16 random bits of element draw.first + at + i.
inline void draw_numbers(const Draw& draw, uint64_t at, size_t count, uint32_t* numbers) {
  const uint64_t first = draw.first + at;
  WordKeys keys = keys_of(draw, word_of(first));
  uint64_t upper = word_of(first) >> 32;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t index = first + i, word = word_of(index);
    if (word >> 32 != upper) keys = keys_of(draw, word), upper = word >> 32;
    const uint32_t bits = scramble_keyed(uint32_t(word), keys.key0, keys.key1);
    numbers[i] = index % kPerWords < 8 ? bits & 0xffff : bits >> 16;
  }
}

}  // namespace
}  // namespace paceline::codec
