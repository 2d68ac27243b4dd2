// The reduction for every dtype and operation, written once and compiled once per instruction set.
//
// Work goes through a BLOCK of accumulators that fits the L1 cache: fold the sources into it in
// order, then write it to the destinations. Loops are plain so that the compiler vectorises them.
// Everything is in an unnamed namespace on purpose: each including file gets its own copy, compiled
// with its own flags.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "paceline/reduce/half.h"
#include "paceline/reduce/kernels.h"

namespace paceline {
namespace {

constexpr size_t kBlock = 2048;  // elements

struct Bool {
  uint8_t byte;
};

// Stored<T> says what a T is accumulated in and how it gets there and back.
template <class T>
struct Stored {
  using Acc = T;
  static Acc load(T v) { return v; }
  static T store(Acc v) { return v; }
};
template <>
struct Stored<Half> {
  using Acc = float;
  static float load(Half v) { return to_float(v); }
  static Half store(float v) { return to_half(v); }
};
template <>
struct Stored<BFloat> {
  using Acc = float;
  static float load(BFloat v) { return to_float(v); }
  static BFloat store(float v) { return to_bfloat(v); }
};
template <>
struct Stored<Bool> {
  using Acc = uint8_t;
  static uint8_t load(Bool v) { return v.byte != 0; }
  static Bool store(uint8_t v) { return {uint8_t(v != 0)}; }
};

// Integers wrap around: done in unsigned arithmetic, where that is defined.
template <class A>
auto wrap(A v) {
  if constexpr (std::is_integral_v<A>) return std::make_unsigned_t<A>(v);
  else return v;
}

template <ReduceOp op, bool is_bool, class A>
A fold(A a, A b) {
  if constexpr (is_bool) {
    constexpr bool any = op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bit_or;
    if constexpr (op == ReduceOp::bit_xor) return a ^ b;
    else return any ? (a | b) : (a & b);
  } else if constexpr (op == ReduceOp::sum) {
    return A(wrap(a) + wrap(b));
  } else if constexpr (op == ReduceOp::product) {
    if constexpr (sizeof(A) < 4) return A(uint32_t(wrap(a)) * uint32_t(wrap(b)));
    else return A(wrap(a) * wrap(b));
  } else if constexpr (op == ReduceOp::min) {
    return (a < b || a != a) ? a : b;  // NaN wins, as in torch.minimum
  } else if constexpr (op == ReduceOp::max) {
    return (a > b || a != a) ? a : b;
  } else if constexpr (std::is_integral_v<A>) {
    if constexpr (op == ReduceOp::bit_and) return a & b;
    else if constexpr (op == ReduceOp::bit_or) return a | b;
    else return a ^ b;
  } else {
    return a;  // unreachable: bit operations on floats are refused before
  }
}

// A mean of integers is rounded towards zero. The divisor may not fit into a small integer.
template <class A>
A divide(A sum, size_t divisor) {
  if constexpr (std::is_floating_point_v<A>) return sum / A(divisor);
  else if constexpr (std::is_signed_v<A>) return A(int64_t(sum) / int64_t(divisor));
  else return A(uint64_t(sum) / divisor);
}

template <class T, ReduceOp op>
void reduce_blocks(size_t divisor, const void* const* sources, size_t num_sources, void* const* destinations,
                   size_t num_destinations, size_t count) {
  using S = Stored<T>;
  using A = typename S::Acc;
  constexpr bool is_bool = std::is_same_v<T, Bool>;
  alignas(64) A acc[kBlock];
  alignas(64) T result[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    size_t n = std::min(kBlock, count - at);
    const T* first = static_cast<const T*>(sources[0]) + at;
    for (size_t i = 0; i < n; ++i) acc[i] = S::load(first[i]);
    for (size_t k = 1; k < num_sources; ++k) {
      const T* src = static_cast<const T*>(sources[k]) + at;
      for (size_t i = 0; i < n; ++i) acc[i] = fold<op, is_bool>(acc[i], S::load(src[i]));
    }
    if constexpr (!is_bool)
      if (divisor > 1)
        for (size_t i = 0; i < n; ++i) acc[i] = divide(acc[i], divisor);
    for (size_t i = 0; i < n; ++i) result[i] = S::store(acc[i]);
    for (size_t j = 0; j < num_destinations; ++j)
      std::memcpy(static_cast<T*>(destinations[j]) + at, result, n * sizeof(T));
  }
}

template <class T>
void reduce_typed(const Reduction& what, const void* const* s, size_t ns, void* const* d, size_t nd, size_t count) {
  size_t div = what.divisor;
  switch (what.op) {
    case ReduceOp::min: return reduce_blocks<T, ReduceOp::min>(div, s, ns, d, nd, count);
    case ReduceOp::max: return reduce_blocks<T, ReduceOp::max>(div, s, ns, d, nd, count);
    case ReduceOp::product: return reduce_blocks<T, ReduceOp::product>(div, s, ns, d, nd, count);
    case ReduceOp::bit_and: return reduce_blocks<T, ReduceOp::bit_and>(div, s, ns, d, nd, count);
    case ReduceOp::bit_or: return reduce_blocks<T, ReduceOp::bit_or>(div, s, ns, d, nd, count);
    case ReduceOp::bit_xor: return reduce_blocks<T, ReduceOp::bit_xor>(div, s, ns, d, nd, count);
    default: return reduce_blocks<T, ReduceOp::sum>(div, s, ns, d, nd, count);
  }
}

void reduce_any(const Reduction& what, const void* const* s, size_t ns, void* const* d, size_t nd, size_t count) {
  switch (what.dtype) {
    case DType::float32: return reduce_typed<float>(what, s, ns, d, nd, count);
    case DType::float64: return reduce_typed<double>(what, s, ns, d, nd, count);
    case DType::float16: return reduce_typed<Half>(what, s, ns, d, nd, count);
    case DType::bfloat16: return reduce_typed<BFloat>(what, s, ns, d, nd, count);
    case DType::int8: return reduce_typed<int8_t>(what, s, ns, d, nd, count);
    case DType::int16: return reduce_typed<int16_t>(what, s, ns, d, nd, count);
    case DType::int32: return reduce_typed<int32_t>(what, s, ns, d, nd, count);
    case DType::int64: return reduce_typed<int64_t>(what, s, ns, d, nd, count);
    case DType::uint8: return reduce_typed<uint8_t>(what, s, ns, d, nd, count);
    case DType::uint16: return reduce_typed<uint16_t>(what, s, ns, d, nd, count);
    case DType::uint32: return reduce_typed<uint32_t>(what, s, ns, d, nd, count);
    case DType::uint64: return reduce_typed<uint64_t>(what, s, ns, d, nd, count);
    default: return reduce_typed<Bool>(what, s, ns, d, nd, count);
  }
}

}  // namespace
}  // namespace paceline
