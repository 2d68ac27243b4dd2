#include "paceline/codec/blocks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "paceline/codec/kernel_table.h"
#include "paceline/reduce/kernels.h"

namespace paceline::codec {
namespace {

#if defined(__x86_64__)
// Not __builtin_cpu_supports: clang 14 does not know "f16c".
bool has_f16c_and_popcnt() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && (c & bit_POPCNT);
}
#endif

}  // namespace

const Kernels& kernels() {
#if defined(__x86_64__)
  static const bool has_both = has_f16c_and_popcnt();
  if (has_both && !kernels_are_portable()) return kAvx2Codecs;
#endif
  return kPortableCodecs;
}

void encode(Format format, const float* values, float* residual, size_t count, const Draw& draw, uint8_t* payload) {
  kernels().formats[size_t(format)].encode(values, residual, count, draw, payload);
}

void decode_mean(Format format, const uint8_t* const* rows, size_t num_rows, size_t count, float* out) {
  kernels().formats[size_t(format)].decode_mean(rows, num_rows, count, out);
}

void recode(Format format, const uint8_t* const* rows, size_t num_rows, float* residual, size_t count, const Draw& draw,
            uint8_t* payload) {
  kernels().formats[size_t(format)].recode(rows, num_rows, residual, count, draw, payload);
}

void block_largest(const float* values, const float* residual, size_t count, float* largest) {
  kernels().block_largest(values, residual, count, largest);
}

void encode_shared(const float* values, float* residual, size_t count, const float* largest, int levels,
                   int8_t* bytes) {
  kernels().encode_shared(values, residual, count, largest, levels, bytes);
}

void decode_shared(const int8_t* bytes, size_t count, const float* largest, int levels, size_t workers, float* out) {
  kernels().decode_shared(bytes, count, largest, levels, workers, out);
}

}  // namespace paceline::codec
