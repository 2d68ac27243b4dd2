// Element types and reduction operations, with the names that error messages use.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

enum class DType : uint8_t {
  float32,
  float64,
  float16,
  bfloat16,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  boolean,
  count_
};

enum class ReduceOp : uint8_t { sum, mean, min, max, product, bit_and, bit_or, bit_xor, count_ };

size_t size_of(DType dtype);
const char* name_of(DType dtype);
const char* name_of(ReduceOp op);
bool is_floating(DType dtype);

}  // namespace paceline
