#include "paceline/codec/sparse.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "paceline/base/error.h"

namespace paceline::codec {

void check_row(const SparseRow& row, size_t number, size_t count) {
  int64_t last = -1;
  for (size_t i = 0; i < row.count; ++i) {
    const int64_t index = row.indices[i];
    if (index <= last || index >= int64_t(count))
      throw Error(ErrorKind::bad_frame, "sparse row " + std::to_string(number) + ": index " + std::to_string(index) +
                                            " at position " + std::to_string(i) + " should lie above " +
                                            std::to_string(last) + " and below " + std::to_string(count));
    last = index;
  }
}

void scatter_mean(const SparseRow* rows, size_t num_rows, size_t begin, size_t end, float* out) {
  constexpr size_t kPiece = 4096;  // stays in the L1 cache while all rows are added
  std::vector<size_t> cursors(num_rows);
  for (size_t r = 0; r < num_rows; ++r) {
    auto* indices = rows[r].indices;
    cursors[r] = size_t(std::lower_bound(indices, indices + rows[r].count, int64_t(begin)) - indices);
  }
  const float divisor = float(num_rows);
  for (size_t at = begin; at < end; at += kPiece) {
    const size_t stop = std::min(end, at + kPiece);
    std::memset(out + at, 0, (stop - at) * sizeof(float));
    for (size_t r = 0; r < num_rows; ++r) {
      const SparseRow& row = rows[r];
      size_t& i = cursors[r];
      for (; i < row.count && size_t(row.indices[i]) < stop; ++i) out[row.indices[i]] += row.values[i] / divisor;
    }
  }
}

void random_indices(size_t count, size_t k, const Draw& draw, size_t begin, size_t end, int32_t* indices) {
  const uint64_t key = key_of(draw.key + draw.first);
  uint64_t from = uint64_t(begin) * count / k;
  for (size_t j = begin; j < end; ++j) {
    const uint64_t to = uint64_t(j + 1) * count / k;
    const uint64_t chance = key_of(key ^ j) >> 32;  // times the width, without its lower half: a number below the width
    indices[j - begin] = int32_t(from + (chance * (to - from) >> 32));
    from = to;
  }
}

}  // namespace paceline::codec
