// The codecs' kernels as a table, filled once per instruction set and chosen at run time.
#pragma once
#include "paceline/codec/blocks.h"

namespace paceline::codec {

struct FormatKernels {
  void (*encode)(const float* values, float* residual, size_t count, const Draw& draw, uint8_t* payload);
  void (*decode_mean)(const uint8_t* const* rows, size_t num_rows, size_t count, float* out);
  void (*recode)(const uint8_t* const* rows, size_t num_rows, float* residual, size_t count, const Draw& draw,
                 uint8_t* payload);
};

struct Kernels {
  FormatKernels formats[size_t(Format::count_)];  // in the order of Format
  void (*block_largest)(const float* values, const float* residual, size_t count, float* largest);
  void (*encode_shared)(const float* values, float* residual, size_t count, const float* largest, int levels,
                        int8_t* bytes);
  void (*decode_shared)(const int8_t* bytes, size_t count, const float* largest, int levels, size_t workers,
                        float* out);
  // With v = values + residual (and then residual = v) if there is one: writes a key (select.h) for every v whose
  // size in bits is at least `threshold`; returns how many. `keys` has room for `count`.
  size_t (*collect)(const float* values, float* residual, size_t count, uint32_t first, uint32_t threshold,
                    uint64_t* keys);
};

extern const Kernels kPortableCodecs;
#if defined(__x86_64__)
extern const Kernels kAvx2Codecs;
#endif

const Kernels& kernels();

}  // namespace paceline::codec
