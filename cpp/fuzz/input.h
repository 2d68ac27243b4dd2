// The bytes of a fuzzer, read from the front, and frames whose checksums and counters are made right.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "paceline/wire/crc32c.h"
#include "paceline/wire/frame.h"

namespace fuzz {

// Takes numbers from the front; 0 when nothing is left.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), left_(size) {}
  template <class T = uint8_t>
  T take() {
    T value{};
    const size_t n = std::min(sizeof value, left_);
    std::memcpy(&value, at_, n);
    at_ += n, left_ -= n;
    return value;
  }
  // Exactly this many bytes, in memory of exactly this size: ASan detects a read past its end.
  std::vector<uint8_t> bytes(size_t size) {
    std::vector<uint8_t> found(size);
    const size_t n = std::min(size, left_);
    if (n) std::memcpy(found.data(), at_, n);
    at_ += n, left_ -= n;
    return found;
  }
  std::vector<uint8_t> rest() { return bytes(left_); }
  size_t left() const { return left_; }

 private:
  const uint8_t* at_;
  size_t left_;
};

// Makes magic, version, generation, sequence and checksums of all frames in a stream right, and nothing else: without
// this every changed bit would be refused at the first check.
inline void repair(std::vector<uint8_t>& stream, uint32_t generation) {
  using namespace paceline;
  uint32_t sequence = 0;
  const uint32_t reserved = 0;
  for (size_t at = 0; at + kFrameHeaderBytes <= stream.size(); ++sequence) {
    uint8_t* h = stream.data() + at;
    uint32_t payload;
    std::memcpy(&payload, h + 48, 4);
    payload %= 2 * kMaxFramePayload;  // some are too long
    const size_t present = std::min<size_t>(payload, stream.size() - at - kFrameHeaderBytes);
    const uint32_t crc = crc32c(0, h + kFrameHeaderBytes, present);
    std::memcpy(h, &kFrameMagic, 4);
    std::memcpy(h + 4, &kWireVersion, 2);
    std::memcpy(h + 8, &generation, 4);
    std::memcpy(h + 12, &sequence, 4);
    std::memcpy(h + 48, &payload, 4);
    std::memcpy(h + 52, &crc, 4);
    std::memcpy(h + 56, &reserved, 4);
    const uint32_t header_crc = crc32c(0, h, 60);
    std::memcpy(h + 60, &header_crc, 4);
    at += kFrameHeaderBytes + present;
  }
}

// A property that must hold; what follows is the fuzzer's report.
inline void require(bool holds) {
  if (!holds) __builtin_trap();
}

}  // namespace fuzz
