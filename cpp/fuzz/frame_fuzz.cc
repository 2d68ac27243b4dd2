// The header of an engine frame: whatever decode() accepts, encode() writes again.
#include <array>

#include "input.h"
#include "paceline/base/error.h"

using namespace paceline;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const bool is_repaired = input.take() & 1;
  auto bytes = input.bytes(kFrameHeaderBytes);
  if (is_repaired) fuzz::repair(bytes, 1);
  std::array<std::byte, kFrameHeaderBytes> header, again;
  std::memcpy(header.data(), bytes.data(), bytes.size());
  try {
    const FrameHeader found = decode(header);
    fuzz::require(found.payload_bytes <= kMaxFramePayload && found.total_bytes <= kMaxMessageBytes);
    encode(found, again);
    fuzz::require(header == again);
  } catch (const Error& e) {
    fuzz::require(e.kind == ErrorKind::bad_frame);
  }
  return 0;
}
