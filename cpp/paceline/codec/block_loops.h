// Tensors block by block, for any format: written once, compiled once per instruction set. A block's values stay in the
// L1 cache, sums of rows in registers; memory is passed once.
//
// A format F has `encode(v, n, draw, at, to)`, which takes a whole block of values of which the first n count and the
// others are 0, and a READER, which gives eight decoded values of a block at a time.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>

#include "paceline/codec/blocks.h"

namespace paceline::codec {
namespace {

// Writes the blocks of a payload: in place, or, if it writes past the cache, eight at a time, which fill whole
// vectors.
template <class F>
class Output {
 public:
  using L = typename F::Lanes;
  Output(uint8_t* payload, size_t count)
      : payload_(payload), is_staged_(L::can_stream(payload, num_blocks(F::kFormat, count) * F::kBytes)) {}
  uint8_t* block() { return is_staged_ ? stage_ + staged_ : payload_; }
  void next() {
    if (!is_staged_) {
      payload_ += F::kBytes;
    } else if ((staged_ += F::kBytes) == sizeof stage_) {
      L::stream_bytes(payload_, stage_, staged_);
      payload_ += staged_;
      staged_ = 0;
    }
  }
  void finish() {
    if (!is_staged_) return;
    std::memcpy(payload_, stage_, staged_);
    L::finish_stream();
  }

 private:
  uint8_t* payload_;
  const bool is_staged_;
  size_t staged_ = 0;
  alignas(64) uint8_t stage_[8 * F::kBytes];
  static_assert(sizeof stage_ % 32 == 0);
};

template <class F>
void encode_block(const float* values, float* residual, size_t n, const Draw& draw, uint64_t at, uint8_t* payload) {
  using L = typename F::Lanes;
  constexpr size_t kValues = F::kValues;
  if (!residual) return F::encode(values, n, draw, at, payload);
  alignas(64) float sum[kValues];
  for (size_t i = 0; i < kValues; i += 16) {
    L::prefetch(values + i);
    L::prefetch(residual + i);
    L::store(sum + i, L::add(L::load(values + i), L::load(residual + i)));
    L::store(sum + i + 8, L::add(L::load(values + i + 8), L::load(residual + i + 8)));
  }
  F::encode(sum, n, draw, at, payload);
  const typename F::Reader reader(payload);
  for (size_t i = 0; i < kValues; i += 8) {
    auto decoded = reader.at(i);
    auto rest = L::sub(L::load(sum + i), decoded);
    L::store(residual + i, L::if_finite(decoded, rest, L::load(residual + i)));
  }
}

// Encodes whole blocks one after the other.
template <class F>
class Encoding {
 public:
  Encoding(const float* values, float* residual, size_t begin, size_t end, const Draw& draw, uint8_t* payload)
      : values_(values),
        residual_(residual),
        at_(begin),
        end_(end),
        draw_(draw),
        output_(payload + begin / F::kValues * F::kBytes, end - begin) {}
  bool has_block() const { return at_ + F::kValues <= end_; }
  void encode_block() {
    codec::encode_block<F>(values_ + at_, residual_ ? residual_ + at_ : nullptr, F::kValues, draw_, at_,
                           output_.block());
    at_ += F::kValues;
    output_.next();
  }
  // The rest is less than a block.
  void finish() {
    if (const size_t n = end_ - at_) {
      alignas(64) float last[F::kValues] = {}, left[F::kValues] = {};
      std::memcpy(last, values_ + at_, n * sizeof(float));
      if (residual_) std::memcpy(left, residual_ + at_, n * sizeof(float));
      codec::encode_block<F>(last, residual_ ? left : nullptr, n, draw_, at_, output_.block());
      if (residual_) std::memcpy(residual_ + at_, left, n * sizeof(float));
      output_.next();
    }
    output_.finish();
  }

 private:
  const float* values_;
  float* residual_;
  size_t at_;
  const size_t end_;
  const Draw draw_;
  Output<F> output_;
};

// A processor reads faster from two streams than from one: each stream has a limited number of cache lines in
// flight. So large tensors are encoded in two halves, block by block in turns.
template <class F>
void encode_blocks(const float* values, float* residual, size_t count, const Draw& draw, uint8_t* payload) {
  constexpr size_t kTwoFrom = 1 << 18, kStaged = 8 * F::kValues;
  const size_t half = count < kTwoFrom ? 0 : count / 2 / kStaged * kStaged;
  Encoding<F> first(values, residual, 0, half, draw, payload), second(values, residual, half, count, draw, payload);
  while (first.has_block()) {
    first.encode_block();
    second.encode_block();
  }
  first.finish();
  while (second.has_block()) second.encode_block();
  second.finish();
}

// Division, by a multiplication where that gives the same bits.
template <class L>
struct Divisor {
  explicit Divisor(size_t number)
      : is_exact(std::has_single_bit(number)), number(L::all(float(number))), inverse(L::all(1 / float(number))) {}
  typename L::Eight divide(typename L::Eight v) const { return is_exact ? L::mul(v, inverse) : L::div(v, number); }
  const bool is_exact;
  const typename L::Eight number, inverse;
};

// put(i, sum) gets the sums of N rows, and of what there was before, if anything.
template <class F, size_t N, class Put>
void add_rows(const uint8_t* const* rows, size_t offset, const float* before, Put put) {
  using L = typename F::Lanes;
  typename F::Reader readers[N];
  for (size_t r = 0; r < N; ++r) {
    readers[r] = typename F::Reader(rows[r] + offset);
    L::prefetch_bytes(rows[r] + offset, F::kBytes);
  }
  for (size_t i = 0; i < F::kValues; i += 8) {
    auto sum = readers[0].at(i);
    if (before) sum = L::add(L::load(before + i), sum);
    for (size_t r = 1; r < N; ++r) sum = L::add(sum, readers[r].at(i));
    put(i, sum);
  }
}

template <class F>
void mean_of_block(const uint8_t* const* rows, size_t num_rows, size_t offset, const Divisor<typename F::Lanes>& by,
                   bool streaming, float* out) {
  using L = typename F::Lanes;
  alignas(64) float sums[F::kValues];
  const float* before = nullptr;
  for (; num_rows > 4; rows += 4, num_rows -= 4, before = sums)
    add_rows<F, 4>(rows, offset, before, [&](size_t i, auto sum) { L::store(sums + i, sum); });
  auto put = [&](size_t i, auto sum) {
    auto mean = by.divide(sum);
    streaming ? L::stream(out + i, mean) : L::store(out + i, mean);
  };
  switch (num_rows) {
    case 1: return add_rows<F, 1>(rows, offset, before, put);
    case 2: return add_rows<F, 2>(rows, offset, before, put);
    case 3: return add_rows<F, 3>(rows, offset, before, put);
    default: return add_rows<F, 4>(rows, offset, before, put);
  }
}

template <class F>
void mean_of_blocks(const uint8_t* const* rows, size_t num_rows, size_t count, float* out) {
  constexpr size_t kValues = F::kValues;
  const Divisor<typename F::Lanes> by(num_rows);
  const bool streaming = F::Lanes::can_stream(out, count * sizeof(float));
  size_t at = 0, offset = 0;
  for (; at + kValues <= count; at += kValues, offset += F::kBytes)
    mean_of_block<F>(rows, num_rows, offset, by, streaming, out + at);
  if (streaming) F::Lanes::finish_stream();
  if (at == count) return;
  alignas(64) float last[kValues];
  mean_of_block<F>(rows, num_rows, offset, by, false, last);
  std::memcpy(out + at, last, (count - at) * sizeof(float));
}

// A payload misses the sum of so many rows by that many times what it misses their mean by.
template <class F>
void recode_block(const uint8_t* const* rows, size_t num_rows, size_t offset, const Divisor<typename F::Lanes>& by,
                  float* residual, size_t n, const Draw& draw, uint64_t at, uint8_t* payload) {
  using L = typename F::Lanes;
  alignas(64) float mean[F::kValues];
  mean_of_block<F>(rows, num_rows, offset, by, false, mean);
  std::memset(mean + n, 0, (F::kValues - n) * sizeof(float));
  F::encode(mean, n, draw, at, payload);
  if (!residual) return;
  const typename F::Reader reader(payload);
  for (size_t i = 0; i < F::kValues; i += 8) {
    L::prefetch(residual + i);
    auto decoded = reader.at(i), before = L::load(residual + i);
    auto missed = L::mul(by.number, L::sub(L::load(mean + i), decoded));
    L::store(residual + i, L::if_finite(decoded, L::add(before, missed), before));
  }
}

template <class F>
void recode_blocks(const uint8_t* const* rows, size_t num_rows, float* residual, size_t count, const Draw& draw,
                   uint8_t* payload) {
  constexpr size_t kValues = F::kValues;
  const Divisor<typename F::Lanes> by(num_rows);
  Output<F> output(payload, count);
  size_t at = 0, offset = 0;
  for (; at + kValues <= count; at += kValues, offset += F::kBytes, output.next())
    recode_block<F>(rows, num_rows, offset, by, residual ? residual + at : nullptr, kValues, draw, at, output.block());
  if (at == count) return output.finish();
  alignas(64) float left[kValues] = {};
  const size_t n = count - at;
  if (residual) std::memcpy(left, residual + at, n * sizeof(float));
  recode_block<F>(rows, num_rows, offset, by, residual ? left : nullptr, n, draw, at, output.block());
  if (residual) std::memcpy(residual + at, left, n * sizeof(float));
  output.next();
  output.finish();
}

}  // namespace
}  // namespace paceline::codec
