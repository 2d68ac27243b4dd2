#include "paceline/wire/frame.h"

#include <cstring>
#include <string>

#include "paceline/base/error.h"
#include "paceline/wire/crc32c.h"

namespace paceline {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little-endian");

// Field offsets; the header checksum stands last and covers everything before it.
enum : size_t {
  kMagic = 0,
  kVersion = 4,
  kKind = 6,
  kGeneration = 8,
  kSequence = 12,
  kTag = 16,
  kMessage = 24,
  kTotal = 32,
  kOffset = 40,
  kPayload = 48,
  kPayloadCrc = 52,
  kReserved = 56,
  kHeaderCrc = 60
};

template <class T>
void put(std::byte* p, size_t at, T v) {
  std::memcpy(p + at, &v, sizeof v);
}

template <class T>
T take(const std::byte* p, size_t at) {
  T v;
  std::memcpy(&v, p + at, sizeof v);
  return v;
}

[[noreturn]] void bad(const char* field, uint64_t found, uint64_t expected) {
  throw Error(ErrorKind::bad_frame, std::string("bad frame: ") + field + " is " + std::to_string(found) +
                                        ", expected " + std::to_string(expected));
}

}  // namespace

void encode(const FrameHeader& h, std::span<std::byte, kFrameHeaderBytes> out) {
  std::byte* p = out.data();
  put(p, kMagic, kFrameMagic);
  put(p, kVersion, kWireVersion);
  put(p, kKind, uint16_t(h.kind));
  put(p, kGeneration, h.generation);
  put(p, kSequence, h.sequence);
  put(p, kTag, h.tag);
  put(p, kMessage, h.message);
  put(p, kTotal, h.total_bytes);
  put(p, kOffset, h.offset);
  put(p, kPayload, h.payload_bytes);
  put(p, kPayloadCrc, h.payload_crc);
  put(p, kReserved, uint32_t(0));
  put(p, kHeaderCrc, crc32c(0, p, kHeaderCrc));
}

FrameHeader decode(std::span<const std::byte, kFrameHeaderBytes> in) {
  const std::byte* p = in.data();
  if (auto v = take<uint32_t>(p, kMagic); v != kFrameMagic) bad("magic", v, kFrameMagic);
  if (auto v = take<uint16_t>(p, kVersion); v != kWireVersion) bad("version", v, kWireVersion);
  if (auto v = take<uint32_t>(p, kHeaderCrc), want = crc32c(0, p, kHeaderCrc); v != want)
    bad("header checksum", v, want);
  FrameHeader h;
  auto kind = take<uint16_t>(p, kKind);
  if (kind < uint16_t(FrameKind::data) || kind > uint16_t(FrameKind::abort))
    bad("kind", kind, uint16_t(FrameKind::data));
  h.kind = FrameKind(kind);
  h.generation = take<uint32_t>(p, kGeneration);
  h.sequence = take<uint32_t>(p, kSequence);
  h.tag = take<uint64_t>(p, kTag);
  h.message = take<uint64_t>(p, kMessage);
  h.total_bytes = take<uint64_t>(p, kTotal);
  h.offset = take<uint64_t>(p, kOffset);
  h.payload_bytes = take<uint32_t>(p, kPayload);
  h.payload_crc = take<uint32_t>(p, kPayloadCrc);
  if (auto v = take<uint32_t>(p, kReserved); v != 0) bad("reserved field", v, 0);
  if (h.payload_bytes > kMaxFramePayload) bad("payload length", h.payload_bytes, kMaxFramePayload);
  if (h.total_bytes > kMaxMessageBytes) bad("message length", h.total_bytes, kMaxMessageBytes);
  if (h.kind == FrameKind::data && (h.offset > h.total_bytes || h.payload_bytes > h.total_bytes - h.offset))
    bad("end of piece", h.offset + h.payload_bytes, h.total_bytes);
  return h;
}

}  // namespace paceline
