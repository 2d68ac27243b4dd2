// Block formats: how a float32 tensor is encoded for the network.
//
// A tensor is split into BLOCKS of a fixed number of values, and each becomes a fixed number of bytes, one block after
// the other: a payload may be split at any block boundary. The last block is filled up with zeros.
//
//   bf16, fp16   256 values   16 bits each, to nearest, ties to even; too large becomes infinite
//   int8         256 values   float32 STEP = largest size / 127, then a byte each: value = byte * step
//   int4         512 values   float32 step = largest size / 7, then 256 bytes: byte j holds value j in its low and
//                             value 256 + j in its high half, -7 to 7; rounded at random, so that the mean is right
//   onebit      2048 values   float32 mean of those >= 0, float32 mean of those < 0, then a bit each, 1 for >= 0;
//                             bit i % 8 of byte i / 8 belongs to value i
//
// A block of int8, int4 or onebit with a value that is not finite has NaN for its step or means: all of it decodes to
// NaN. A step that would be subnormal is 0 instead, and the block decodes to 0: the values of such a block are below
// 1e-35, and the step has too few bits left.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline::codec {

enum class Format : int { bf16, fp16, int8, int4, onebit, count_ };

struct Block {
  size_t values;
  size_t bytes;
};

constexpr Block block_of(Format format) {
  switch (format) {
    case Format::int8: return {256, 4 + 256};
    case Format::int4: return {512, 4 + 256};
    case Format::onebit: return {2048, 8 + 256};
    default: return {256, 512};
  }
}

constexpr size_t num_blocks(Format format, size_t count) {
  const size_t values = block_of(format).values;
  return (count + values - 1) / values;
}

constexpr const char* name_of(Format format) {
  switch (format) {
    case Format::bf16: return "bf16";
    case Format::fp16: return "fp16";
    case Format::int8: return "int8";
    case Format::int4: return "int4";
    case Format::onebit: return "onebit";
    default: return "unknown";
  }
}

}  // namespace paceline::codec
