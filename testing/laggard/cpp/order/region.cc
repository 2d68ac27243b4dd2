#include "order/region.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace laggard {
namespace {

using Piece = std::pair<const char*, const char*>;
constexpr size_t kMostPieces = 4096;

// The contiguous pieces of a region in the order of their addresses, or one piece if there are too many.
std::vector<Piece> pieces_of(const Region& region) {
  if (region.dense) return {{region.begin, region.end}};
  std::vector<size_t> order(region.sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](size_t i, size_t j) { return region.byte_strides[i] < region.byte_strides[j]; });
  int64_t length = region.item_bytes;
  std::vector<const char*> starts{region.begin};
  for (size_t dim : order) {
    const int64_t size = region.sizes[dim], stride = region.byte_strides[dim];
    if (size == 1 || stride == 0) continue;  // an expanded dimension visits the same bytes again
    if (starts.size() == 1 && stride == length) {
      length *= size;
      continue;
    }
    if (starts.size() * size > kMostPieces) return {{region.begin, region.end}};
    std::vector<const char*> more;
    for (int64_t i = 0; i < size; ++i)
      for (const char* start : starts) more.push_back(start + i * stride);
    starts = std::move(more);
  }
  std::sort(starts.begin(), starts.end());
  std::vector<Piece> pieces;
  for (const char* start : starts) pieces.emplace_back(start, start + length);
  return pieces;
}

}  // namespace

bool overlap(const Region& a, const Region& b) {
  if (a.begin >= b.end || b.begin >= a.end) return false;
  if (a.dense && b.dense) return true;
  const auto left = pieces_of(a), right = pieces_of(b);
  for (size_t i = 0, j = 0; i < left.size() && j < right.size();) {
    if (left[i].first < right[j].second && right[j].first < left[i].second) return true;
    if (left[i].second <= right[j].second) ++i;
    else ++j;
  }
  return false;
}

}  // namespace laggard
