// Indices that ascend, as the gaps between them, in 8 or 16 bits each.
//
// A reader starts at index 0. A number below the ESCAPE (255 or 65535) means: skip this many indices, the next index is
// an entry, continue after it. The escape means: skip this many indices, without an entry. The rest of the buffer is
// filled with escapes, which therefore have no effect at the end. 16 bits: low byte first.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline::codec {

// The maximum number of bytes of k indices below `count`; `width` is 1 or 2 bytes.
constexpr size_t gap_bound(size_t count, size_t k, size_t width) {
  return width * (k + count / (width == 1 ? 255 : 65535) + 1);
}

// `bytes` has gap_bound() bytes. Returns the number of bytes used. Throws unless the indices ascend below `count`.
size_t pack_gaps(const int32_t* indices, size_t k, size_t count, size_t width, uint8_t* bytes);

// Throws unless `bytes` holds exactly k entries, all below `count`, and nothing else.
void unpack_gaps(const uint8_t* bytes, size_t num_bytes, size_t k, size_t count, size_t width, int32_t* indices);

}  // namespace paceline::codec
