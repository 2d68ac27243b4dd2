// Tensors block by block, for any format: written once, compiled once per instruction set. A block's values, their sum
// and what they decode to stay in the L1 cache; memory is passed once.
#pragma once
#include <algorithm>
#include <cstring>

#include "paceline/codec/blocks.h"
#include "paceline/codec/numbers.h"

namespace paceline::codec {
namespace {

// What the loops need from the instruction set beside the formats.
struct PlainMemory {
  static bool goes_past_cache(const float*, size_t) { return false; }
  static void copy_past_cache(float* to, const float* from, size_t count) {
    std::memcpy(to, from, count * sizeof(float));
  }
  static void finish() {}
};

inline void add_block(const float* __restrict a, const float* __restrict b, size_t count, float* __restrict sum) {
  for (size_t i = 0; i < count; ++i) sum[i] = a[i] + b[i];
}

inline void divide_block(float* values, size_t count, float divisor) {
  for (size_t i = 0; i < count; ++i) values[i] /= divisor;
}

// A sum of `times` values missed their mean by this much, `times` times.
template <bool add>
void keep_rest(const float* __restrict v, const float* __restrict decoded, float times, size_t count,
               float* __restrict residual) {
  for (size_t i = 0; i < count; ++i) {
    float rest = v[i] - decoded[i];
    if (add) rest = residual[i] + times * rest;
    residual[i] = is_finite(decoded[i]) ? rest : residual[i];
  }
}

template <class F>
void encode_blocks(const float* values, float* residual, size_t count, const Draw& draw, uint8_t* payload) {
  constexpr size_t kValues = F::kValues;
  alignas(64) float sum[kValues], decoded[kValues];
  for (size_t at = 0; at < count; at += kValues, payload += F::kBytes) {
    const size_t n = std::min(kValues, count - at);
    const float* v = values + at;
    if (n < kValues) std::memset(sum + n, 0, (kValues - n) * sizeof(float));
    if (residual) {
      add_block(values + at, residual + at, n, sum);
      v = sum;
    } else if (n < kValues) {
      std::memcpy(sum, values + at, n * sizeof(float));
      v = sum;
    }
    F::encode(v, n, draw, at, payload);
    if (residual) {
      F::template decode<false>(payload, decoded);
      keep_rest<false>(sum, decoded, 1, n, residual + at);
    }
  }
}

template <class F>
void mean_of_block(const uint8_t* const* rows, size_t num_rows, size_t offset, float* out) {
  F::template decode<false>(rows[0] + offset, out);
  for (size_t row = 1; row < num_rows; ++row) F::template decode<true>(rows[row] + offset, out);
  if (num_rows > 1) divide_block(out, F::kValues, float(num_rows));
}

template <class F, class Memory>
void mean_of_blocks(const uint8_t* const* rows, size_t num_rows, size_t count, float* out) {
  constexpr size_t kValues = F::kValues;
  alignas(64) float mean[kValues];
  const bool past_cache = Memory::goes_past_cache(out, count);
  size_t offset = 0;
  for (size_t at = 0; at < count; at += kValues, offset += F::kBytes) {
    const size_t n = std::min(kValues, count - at);
    const bool in_place = n == kValues && !past_cache;
    mean_of_block<F>(rows, num_rows, offset, in_place ? out + at : mean);
    if (in_place) continue;
    if (n == kValues) Memory::copy_past_cache(out + at, mean, n);
    else std::memcpy(out + at, mean, n * sizeof(float));
  }
  if (past_cache) Memory::finish();
}

template <class F>
void recode_blocks(const uint8_t* const* rows, size_t num_rows, float* residual, size_t count, const Draw& draw,
                   uint8_t* payload) {
  constexpr size_t kValues = F::kValues;
  alignas(64) float mean[kValues], decoded[kValues];
  size_t offset = 0;
  for (size_t at = 0; at < count; at += kValues, offset += F::kBytes) {
    const size_t n = std::min(kValues, count - at);
    mean_of_block<F>(rows, num_rows, offset, mean);
    if (n < kValues) std::memset(mean + n, 0, (kValues - n) * sizeof(float));
    F::encode(mean, n, draw, at, payload + offset);
    if (!residual) continue;
    F::template decode<false>(payload + offset, decoded);
    keep_rest<true>(mean, decoded, float(num_rows), n, residual + at);
  }
}

}  // namespace
}  // namespace paceline::codec
