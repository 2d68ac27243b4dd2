// Tensors and payloads, block by block (format.h). The caller checks lengths: a payload has num_blocks() blocks for
// `count` values. The result is the same wherever the work is split, as long as that is at block boundaries and
// draw.first advances with it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "paceline/codec/draw.h"
#include "paceline/codec/format.h"

namespace paceline::codec {

// With v = values + residual: payload = v encoded, residual = v - what the payload decodes to. Without a residual
// (nullptr) v = values. A residual stays as it was where the payload does not decode to a finite number.
void encode(Format format, const float* values, float* residual, size_t count, const Draw& draw, uint8_t* payload);

// out = the mean of the decoded rows, added in their order and divided once.
void decode_mean(Format format, const uint8_t* const* rows, size_t num_rows, size_t count, float* out);

// payload = the mean of the rows, encoded; residual += num_rows * (mean - what the payload decodes to).
void recode(Format format, const uint8_t* const* rows, size_t num_rows, float* residual, size_t count, const Draw& draw,
            uint8_t* payload);

// int8 with SHARED SCALES: all workers quantise a block with the largest magnitude that any of them has in it, so that
// bytes of several workers can be added. With `levels` = 127 / workers the sum fits a byte as well. Blocks of 256 values.
constexpr size_t kSharedValues = 256;
// largest[b] = the largest size of values + residual in block b; NaN when one of them is not finite.
void block_largest(const float* values, const float* residual, size_t count, float* largest);
// bytes = (values + residual) / largest * levels, to nearest; residual = what is left.
void encode_shared(const float* values, float* residual, size_t count, const float* largest, int levels, int8_t* bytes);
// out = bytes * largest / levels / workers: the mean, from the sum of the workers' bytes.
void decode_shared(const int8_t* bytes, size_t count, const float* largest, int levels, size_t workers, float* out);

}  // namespace paceline::codec
