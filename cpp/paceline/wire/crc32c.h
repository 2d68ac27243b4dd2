// CRC-32C (Castagnoli), the checksum of every frame that crosses a network.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

// Extends `crc` (0 to start) over n bytes. Uses the CPU's instruction when it has one.
uint32_t crc32c(uint32_t crc, const void* data, size_t n);

// The table-driven form, on every machine; the tests compare both.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t n);

}  // namespace paceline
