// AVX2 kernels: the blockwise reduction compiled for AVX2, and by hand the one that matters most,
// the float32 sum, which is bound by memory: one cache line of every source is added in registers
// and written to every destination, with prefetching and optional streaming stores.
#include <immintrin.h>

#include <algorithm>

#include "paceline/reduce/bits_avx2.h"
#include "paceline/reduce/blockwise.h"
#include "paceline/reduce/kernel_set.h"
#include "paceline/reduce/stochastic.h"

namespace paceline {
namespace {

constexpr size_t kLine = 16;           // floats in a cache line
constexpr size_t kAhead = 16 * kLine;  // prefetch distance in floats

inline void store_line(float* to, __m256 lo, __m256 hi, bool streaming) {
  if (streaming) {
    _mm256_stream_ps(to, lo);
    _mm256_stream_ps(to + 8, hi);
  } else {
    _mm256_storeu_ps(to, lo);
    _mm256_storeu_ps(to + 8, hi);
  }
}

inline void prefetch(const float* p) { _mm_prefetch(reinterpret_cast<const char*>(p + kAhead), _MM_HINT_T0); }

// N and M > 0: numbers of sources and destinations, known at compile time; 0: taken from num_sources and num_dst. The
// pointers are copied to where no store can change them: otherwise they would be read again for every line.
template <size_t N, size_t M, bool streaming, bool divide>
void sum_lines(const float* const* sources, size_t num_sources, float* const* destinations, size_t num_dst,
               size_t lines, __m256 divisor) {
  const size_t n = N ? N : num_sources, m = M ? M : num_dst;
  const float* some_sources[N ? N : 1];
  float* some_destinations[M ? M : 1];
  if (N) std::copy_n(sources, N, some_sources);
  if (M) std::copy_n(destinations, M, some_destinations);
  const float* const* src = N ? some_sources : sources;
  float* const* dst = M ? some_destinations : destinations;
  for (size_t i = 0; i < lines * kLine; i += kLine) {
    prefetch(src[0] + i);
    __m256 lo = _mm256_loadu_ps(src[0] + i), hi = _mm256_loadu_ps(src[0] + i + 8);
    for (size_t k = 1; k < n; ++k) {
      prefetch(src[k] + i);
      lo = _mm256_add_ps(lo, _mm256_loadu_ps(src[k] + i));
      hi = _mm256_add_ps(hi, _mm256_loadu_ps(src[k] + i + 8));
    }
    if (divide) {
      lo = _mm256_div_ps(lo, divisor);
      hi = _mm256_div_ps(hi, divisor);
    }
    for (size_t j = 0; j < m; ++j) store_line(dst[j] + i, lo, hi, streaming);
  }
  if (streaming) _mm_sfence();
}

template <bool streaming, bool divide>
void sum_lines_of(const float* const* src, size_t n, float* const* dst, size_t m, size_t lines, __m256 divisor) {
  if (n == 2 && m == 1) return sum_lines<2, 1, streaming, divide>(src, n, dst, m, lines, divisor);
  if (n == 2 && m == 2) return sum_lines<2, 2, streaming, divide>(src, n, dst, m, lines, divisor);
  if (n == 4 && m == 1) return sum_lines<4, 1, streaming, divide>(src, n, dst, m, lines, divisor);
  if (n == 4 && m == 4) return sum_lines<4, 4, streaming, divide>(src, n, dst, m, lines, divisor);
  sum_lines<0, 0, streaming, divide>(src, n, dst, m, lines, divisor);
}

void sum_float32(size_t divisor, const void* const* sources, size_t n, void* const* destinations, size_t m,
                 size_t count, bool streaming) {
  auto* src = reinterpret_cast<const float* const*>(sources);
  auto* dst = reinterpret_cast<float* const*>(destinations);
  // Streaming stores need 32-byte alignment of every destination.
  for (size_t j = 0; j < m; ++j) streaming &= reinterpret_cast<uintptr_t>(dst[j]) % 32 == 0;
  size_t lines = count / kLine;
  __m256 div = _mm256_set1_ps(float(divisor));
  if (divisor > 1)
    streaming ? sum_lines_of<true, true>(src, n, dst, m, lines, div)
              : sum_lines_of<false, true>(src, n, dst, m, lines, div);
  else
    streaming ? sum_lines_of<true, false>(src, n, dst, m, lines, div)
              : sum_lines_of<false, false>(src, n, dst, m, lines, div);
  for (size_t i = lines * kLine; i < count; ++i) {
    float v = src[0][i];
    for (size_t k = 1; k < n; ++k) v += src[k][i];
    if (divisor > 1) v /= float(divisor);
    for (size_t j = 0; j < m; ++j) dst[j][i] = v;
  }
}

void reduce_avx2(const Reduction& what, const void* const* sources, size_t num_sources, void* const* destinations,
                 size_t num_destinations, size_t count, bool streaming) {
  bool is_sum = what.op == ReduceOp::sum || what.op == ReduceOp::mean;
  if (what.dtype == DType::float32 && is_sum)
    return sum_float32(what.divisor, sources, num_sources, destinations, num_destinations, count, streaming);
  reduce_any(what, sources, num_sources, destinations, num_destinations, count);
}

void copy_avx2(void* to, const void* from, size_t bytes, bool streaming) {
  if (!streaming || bytes < 4096) {
    std::memcpy(to, from, bytes);
    return;
  }
  auto* d = static_cast<char*>(to);
  auto* s = static_cast<const char*>(from);
  size_t head = (32 - reinterpret_cast<uintptr_t>(d) % 32) % 32;
  std::memcpy(d, s, head);
  d += head, s += head, bytes -= head;
  size_t body = bytes / 64 * 64;
  for (size_t i = 0; i < body; i += 64) {
    _mm_prefetch(s + i + 1024, _MM_HINT_T0);
    __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + i));
    __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(d + i), lo);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(d + i + 32), hi);
  }
  _mm_sfence();
  std::memcpy(d + body, s + body, bytes - body);
}

}  // namespace

const KernelSet kAvx2Kernels = {"avx2",     reduce_avx2,  copy_avx2,    round_any,  pack_avx2,
                                track_avx2, correct_avx2, majority_any, unpack_avx2};

}  // namespace paceline
