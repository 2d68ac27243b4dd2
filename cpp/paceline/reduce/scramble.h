// Hashes that serve as random numbers: a function of key and index only, so that neither blocks nor threads nor the
// instruction set change what is drawn.
#pragma once
#include <cstdint>

namespace paceline {
namespace {

// A bijection of 32 bits whose output bits all depend on all input bits ("lowbias32").
inline uint32_t scramble(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// splitmix64: neighbouring seeds give unrelated keys.
inline uint64_t key_of(uint64_t seed) {
  uint64_t z = seed + 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

}  // namespace
}  // namespace paceline
