#include "paceline/reduce/dtype.h"

namespace paceline {
namespace {
struct Info {
  uint8_t size;
  const char* name;
};
constexpr Info kInfo[] = {{4, "float32"}, {8, "float64"}, {2, "float16"}, {2, "bfloat16"}, {1, "int8"},
                          {2, "int16"},   {4, "int32"},   {8, "int64"},   {1, "uint8"},    {2, "uint16"},
                          {4, "uint32"},  {8, "uint64"},  {1, "bool"}};
static_assert(sizeof kInfo / sizeof kInfo[0] == size_t(DType::count_));
constexpr const char* kOps[] = {"sum", "mean", "min", "max", "product", "band", "bor", "bxor"};
static_assert(sizeof kOps / sizeof kOps[0] == size_t(ReduceOp::count_));
}  // namespace

size_t size_of(DType dtype) { return kInfo[size_t(dtype)].size; }
const char* name_of(DType dtype) { return dtype < DType::count_ ? kInfo[size_t(dtype)].name : "?"; }
const char* name_of(ReduceOp op) { return op < ReduceOp::count_ ? kOps[size_t(op)] : "?"; }
bool is_floating(DType dtype) { return dtype <= DType::bfloat16; }

}  // namespace paceline
