// Tensors of which only some values are sent, with their indices in ascending order.
#pragma once
#include <cstddef>
#include <cstdint>

#include "paceline/codec/draw.h"

namespace paceline::codec {

struct SparseRow {
  const int32_t* indices;
  const float* values;
  size_t count;
};

// Throws unless the indices ascend and are below `count`: they come from other processes.
void check_row(const SparseRow& row, size_t number, size_t count);

// out = the sum of values / num_rows of all rows, in their order, and 0 elsewhere; only in [begin, end). The rows have
// been checked.
void scatter_mean(const SparseRow* rows, size_t num_rows, size_t begin, size_t end, float* out);

// One index out of each of k STRATA of equal size: index number j lies in [j * count / k, (j + 1) * count / k).
// Writes those of the strata from `begin` to `end`.
void random_indices(size_t count, size_t k, const Draw& draw, size_t begin, size_t end, int32_t* indices);

}  // namespace paceline::codec
