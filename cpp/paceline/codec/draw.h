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

// numbers[i] = 32 random bits of element draw.first + at + i. The upper half of the index rarely changes, and goes into
// the key.
inline void draw_numbers(const Draw& draw, uint64_t at, size_t count, uint32_t* numbers) {
  for (uint64_t index = draw.first + at; count;) {
    const uint64_t key = key_of(draw.key ^ key_of(index >> 32));
    const uint32_t low = uint32_t(index), key0 = uint32_t(key), key1 = uint32_t(key >> 32);
    const size_t n = std::min<uint64_t>(count, (uint64_t(1) << 32) - low);
    for (size_t i = 0; i < n; ++i) numbers[i] = scramble_keyed(low + uint32_t(i), key0, key1);
    index += n, numbers += n, count -= n;
  }
}

}  // namespace
}  // namespace paceline::codec
