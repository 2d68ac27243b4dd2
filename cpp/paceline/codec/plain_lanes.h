// Eight floats at a time, in plain C++. Each lane does what the vector units of processors do, so that kernels that are
// written with lanes give the same bits with either kind (avx2_lanes.h).
#pragma once
#include <cstddef>
#include <cstring>

#include "paceline/codec/numbers.h"

namespace paceline::codec {
namespace {

struct PlainLanes {
  struct Eight {
    float lane[8];
  };
  template <class Each>
  static Eight each(Each value_of) {
    Eight result;
    for (size_t j = 0; j < 8; ++j) result.lane[j] = value_of(j);
    return result;
  }
  static Eight load(const float* p) {
    return each([=](size_t j) { return p[j]; });
  }
  static Eight all(float v) {
    return each([=](size_t) { return v; });
  }
  static void store(float* p, Eight v) { std::memcpy(p, v.lane, sizeof v.lane); }
  static Eight add(Eight a, Eight b) {
    return each([&](size_t j) { return a.lane[j] + b.lane[j]; });
  }
  static Eight sub(Eight a, Eight b) {
    return each([&](size_t j) { return a.lane[j] - b.lane[j]; });
  }
  static Eight mul(Eight a, Eight b) {
    return each([&](size_t j) { return a.lane[j] * b.lane[j]; });
  }
  static Eight div(Eight a, Eight b) {
    return each([&](size_t j) { return a.lane[j] / b.lane[j]; });
  }
  // `yes` where v is finite.
  static Eight if_finite(Eight v, Eight yes, Eight no) {
    return each([&](size_t j) { return is_finite(v.lane[j]) ? yes.lane[j] : no.lane[j]; });
  }
  // The largest size as bits.
  static uint32_t largest(const float* p, size_t count) { return largest_bits(p, count); }

  // Large results can go past the cache where the processor offers it.
  static bool can_stream(const void*, size_t) { return false; }
  static void stream(float* p, Eight v) { store(p, v); }
  static void finish_stream() {}
  static void stream_bytes(uint8_t* to, const uint8_t* from, size_t count) { std::memcpy(to, from, count); }
  // Prefetches memory that is read soon.
  static void prefetch(const float*) {}
  static void prefetch_bytes(const uint8_t*, size_t) {}
};

}  // namespace
}  // namespace paceline::codec
