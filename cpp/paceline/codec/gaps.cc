#include "paceline/codec/gaps.h"

#include <cstring>
#include <string>

#include "paceline/base/error.h"
#include "paceline/codec/sparse.h"

namespace paceline::codec {
namespace {

template <class Unit>
size_t pack(const int32_t* indices, size_t k, size_t count, uint8_t* bytes) {
  constexpr uint32_t kEscape = Unit(-1);
  const size_t room = gap_bound(count, k, sizeof(Unit));
  size_t used = 0;
  auto put = [&](uint32_t number) {
    for (size_t b = 0; b < sizeof(Unit); ++b) bytes[used++] = uint8_t(number >> 8 * b);
  };
  uint32_t at = 0;
  for (size_t i = 0; i < k; ++i) {
    uint32_t gap = uint32_t(indices[i]) - at;
    for (; gap >= kEscape; gap -= kEscape) put(kEscape);
    put(gap);
    at = uint32_t(indices[i]) + 1;
  }
  std::memset(bytes + used, 0xff, room - used);
  return used;
}

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::bad_frame, "gaps between indices: " + what);
}

template <class Unit>
void unpack(const uint8_t* bytes, size_t num_bytes, size_t k, size_t count, int32_t* indices) {
  constexpr uint32_t kEscape = Unit(-1);
  uint64_t at = 0;
  size_t found = 0;
  for (size_t i = 0; i < num_bytes; i += sizeof(Unit)) {
    uint32_t number = bytes[i];
    if constexpr (sizeof(Unit) == 2) number |= uint32_t(bytes[i + 1]) << 8;
    at += number;
    if (number == kEscape) continue;
    if (found == k) refuse("more than the expected " + std::to_string(k) + " entries");
    if (at >= count) refuse("index " + std::to_string(at) + " in a tensor of " + std::to_string(count) + " elements");
    indices[found++] = int32_t(at++);
  }
  if (found < k) refuse(std::to_string(found) + " entries instead of the expected " + std::to_string(k));
}

}  // namespace

size_t pack_gaps(const int32_t* indices, size_t k, size_t count, size_t width, uint8_t* bytes) {
  check_row({indices, nullptr, k}, 0, count);
  return width == 1 ? pack<uint8_t>(indices, k, count, bytes) : pack<uint16_t>(indices, k, count, bytes);
}

void unpack_gaps(const uint8_t* bytes, size_t num_bytes, size_t k, size_t count, size_t width, int32_t* indices) {
  if (num_bytes != gap_bound(count, k, width))
    refuse(std::to_string(num_bytes) + " bytes instead of " + std::to_string(gap_bound(count, k, width)));
  width == 1 ? unpack<uint8_t>(bytes, num_bytes, k, count, indices)
             : unpack<uint16_t>(bytes, num_bytes, k, count, indices);
}

}  // namespace paceline::codec
