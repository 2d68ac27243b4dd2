// The bytes that a tensor covers, as far as races need them.
#pragma once

#include <cstdint>
#include <vector>

namespace laggard {

struct Region {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool dense = true;  // every byte between begin and end belongs to it
  int64_t item_bytes = 1;
  std::vector<int64_t> sizes, byte_strides;  // only if it is not dense

  bool empty() const { return begin >= end; }
  // True if every byte of the other region surely belongs to this one.
  bool covers(const Region& other) const { return dense && begin <= other.begin && other.end <= end; }
};

// True if both have a byte in common. Exact for columns and other strided views of up to some
// thousand pieces; views with more pieces count as dense.
bool overlap(const Region& a, const Region& b);

}  // namespace laggard
