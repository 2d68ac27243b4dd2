// The frame: the unit that is sent on a channel between two processes. docs/protocol.md describes it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline {

enum class FrameKind : uint16_t {
  data = 1,       // a piece of an expected message (collectives); tag = operation, offset = where
  announce = 2,   // point to point: a message of total_bytes waits for a matching receive
  grant = 3,      // point to point: send the announced message now
  heartbeat = 4,  // the sender is alive
  abort = 5,      // the sender's group failed; payload = error text, offset = error kind, tag = rank
};

constexpr uint32_t kFrameMagic = 0x314c4350;  // "PCL1" in memory
constexpr uint16_t kWireVersion = 1;
constexpr size_t kFrameHeaderBytes = 64;
constexpr uint32_t kMaxFramePayload = 1u << 20;
constexpr uint64_t kMaxMessageBytes = 1ull << 42;

struct FrameHeader {
  FrameKind kind = FrameKind::data;
  uint32_t generation = 0;
  uint32_t sequence = 0;  // counts frames on this channel, to detect a replayed or lost frame
  uint64_t tag = 0;
  uint64_t message = 0;  // which announced message a grant or data frame belongs to
  uint64_t total_bytes = 0;
  uint64_t offset = 0;
  uint32_t payload_bytes = 0;
  uint32_t payload_crc = 0;
};

void encode(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> out);

// Throws Error(bad_frame) for anything that encode() cannot have produced: magic, version, kind,
// header checksum, lengths over the limits, a piece outside of its message.
FrameHeader decode(std::span<const std::byte, kFrameHeaderBytes> in);

}  // namespace paceline
