// The codecs for AVX2 and F16C: formats by hand, the loops around them compiled for this instruction set.
#include <immintrin.h>

#include "paceline/codec/avx2_formats.h"
#include "paceline/codec/avx2_onebit.h"
#include "paceline/codec/block_loops.h"
#include "paceline/codec/collect_loops.h"
#include "paceline/codec/kernel_table.h"
#include "paceline/codec/shared_loops.h"

namespace paceline::codec {
namespace {

template <class F>
constexpr FormatKernels of() {
  return {encode_blocks<F>, mean_of_blocks<F>, recode_blocks<F>};
}

template <bool has_residual>
size_t collect_eights(const float* values, float* residual, size_t count, uint32_t first, uint32_t threshold,
                      uint64_t* keys) {
  const __m256i size_mask = _mm256_set1_epi32(int32_t(kSizeMask)), below = _mm256_set1_epi32(int32_t(threshold) - 1);
  size_t found = 0, i = 0;
  for (; i + 8 <= count; i += 8) {
    __m256 v = _mm256_loadu_ps(values + i);
    if (has_residual) {
      v = _mm256_add_ps(v, _mm256_loadu_ps(residual + i));
      _mm256_storeu_ps(residual + i, v);
    }
    __m256i reached = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(v), size_mask), below);
    auto lanes = unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(reached)));
    if (!lanes) continue;
    alignas(32) uint32_t bits[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(bits), _mm256_castps_si256(v));
    for (; lanes; lanes &= lanes - 1) {
      const auto lane = unsigned(std::countr_zero(lanes));
      keys[found++] = key_of_value(bits[lane], first + uint32_t(i) + lane);
    }
  }
  return found + collect_plain(values, residual, count, first, threshold, keys + found, i);
}

size_t collect_avx2(const float* values, float* residual, size_t count, uint32_t first, uint32_t threshold,
                    uint64_t* keys) {
  return residual ? collect_eights<true>(values, residual, count, first, threshold, keys)
                  : collect_eights<false>(values, residual, count, first, threshold, keys);
}

}  // namespace

const Kernels kAvx2Codecs = {{of<Avx2Bf16>(), of<Avx2Fp16>(), of<Avx2Int8>(), of<Avx2Int4>(), of<Avx2Onebit>()},
                             block_largest_loop<Avx2Lanes>,
                             encode_shared_loop<Avx2Lanes>,
                             decode_shared_loop<Avx2Lanes>,
                             collect_avx2};

}  // namespace paceline::codec
