// Frames and checksums: round trips, golden bytes, and every kind of damage.
#include <array>
#include <cstring>
#include <random>

#include "check.h"
#include "paceline/wire/crc32c.h"
#include "paceline/wire/frame.h"

using namespace paceline;

namespace {

std::mt19937_64 rng(20240601);
using Bytes = std::array<std::byte, kFrameHeaderBytes>;

FrameHeader random_header() {
  FrameHeader h;
  h.kind = FrameKind(1 + rng() % 5);
  h.generation = uint32_t(rng());
  h.sequence = uint32_t(rng());
  h.tag = rng();
  h.message = rng();
  h.total_bytes = rng() % (kMaxMessageBytes + 1);
  h.payload_bytes = uint32_t(rng() % (std::min<uint64_t>(kMaxFramePayload, h.total_bytes) + 1));
  h.offset = rng() % (h.total_bytes - h.payload_bytes + 1);
  h.payload_crc = uint32_t(rng());
  return h;
}

bool same(const FrameHeader& a, const FrameHeader& b) {
  return a.kind == b.kind && a.generation == b.generation && a.sequence == b.sequence && a.tag == b.tag &&
         a.message == b.message && a.total_bytes == b.total_bytes && a.offset == b.offset &&
         a.payload_bytes == b.payload_bytes && a.payload_crc == b.payload_crc;
}

// Makes a header whose checksum is right although its fields are not.
Bytes seal(Bytes bytes) {
  uint32_t crc = crc32c(0, bytes.data(), 60);
  std::memcpy(bytes.data() + 60, &crc, 4);
  return bytes;
}

}  // namespace

TEST(headers_survive_the_round_trip) {
  for (int i = 0; i < 10000; ++i) {
    FrameHeader h = random_header();
    Bytes bytes;
    encode(h, bytes);
    CHECK(same(decode(bytes), h));
  }
}

TEST(golden_bytes_pin_version_1) {
  FrameHeader h;
  h.kind = FrameKind::data;
  h.generation = 7;
  h.sequence = 9;
  h.tag = 0x1122334455667788;
  h.total_bytes = 1024;
  h.offset = 512;
  h.payload_bytes = 256;
  h.payload_crc = 0xdeadbeef;
  Bytes bytes;
  encode(h, bytes);
  const unsigned char start[] = {'P', 'C', 'L', '1', 1, 0, 1, 0, 7, 0, 0, 0, 9, 0, 0, 0, 0x88, 0x77, 0x66, 0x55};
  CHECK(std::memcmp(bytes.data(), start, sizeof start) == 0);
}

TEST(every_flipped_bit_is_noticed) {
  FrameHeader h = random_header();
  Bytes bytes;
  encode(h, bytes);
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    Bytes damaged = bytes;
    damaged[bit / 8] ^= std::byte(1 << bit % 8);
    CHECK(test::error_of([&] { decode(damaged); }).kind == ErrorKind::bad_frame);
  }
}

TEST(random_bytes_are_refused) {
  for (int i = 0; i < 100000; ++i) {
    Bytes bytes;
    for (auto& b : bytes) b = std::byte(rng());
    CHECK(test::error_of([&] { decode(bytes); }).kind == ErrorKind::bad_frame);
  }
}

TEST(wrong_lengths_are_refused_even_with_a_right_checksum) {
  auto with = [](size_t at, uint64_t value, size_t size) {
    FrameHeader h;
    h.total_bytes = 100;
    h.payload_bytes = 50;
    Bytes bytes;
    encode(h, bytes);
    std::memcpy(bytes.data() + at, &value, size);
    return seal(bytes);
  };
  CHECK(test::error_of([&] { decode(with(48, kMaxFramePayload + 1, 4)); }).kind == ErrorKind::bad_frame);
  CHECK(test::error_of([&] { decode(with(32, kMaxMessageBytes + 1, 8)); }).kind == ErrorKind::bad_frame);
  CHECK(test::error_of([&] { decode(with(40, 51, 8)); }).kind == ErrorKind::bad_frame);
  CHECK(test::error_of([&] { decode(with(40, ~0ull, 8)); }).kind == ErrorKind::bad_frame);
  CHECK(test::error_of([&] { decode(with(6, 6, 2)); }).kind == ErrorKind::bad_frame);
  CHECK(test::error_of([&] { decode(with(6, 0, 2)); }).kind == ErrorKind::bad_frame);
  CHECK(test::error_of([&] { decode(with(4, 2, 2)); }).kind == ErrorKind::bad_frame);
  CHECK(test::error_of([&] { decode(with(56, 1, 4)); }).kind == ErrorKind::bad_frame);
}

TEST(crc_matches_the_published_check_value) {
  CHECK(crc32c(0, "123456789", 9) == 0xe3069283);
  CHECK(crc32c_portable(0, "123456789", 9) == 0xe3069283);
}

TEST(crc_is_the_same_with_and_without_the_instruction) {
  std::vector<unsigned char> data(50000);
  for (auto& b : data) b = static_cast<unsigned char>(rng());
  for (int i = 0; i < 300; ++i) {
    size_t start = rng() % 100, n = rng() % (data.size() - start);
    CHECK(crc32c(0, data.data() + start, n) == crc32c_portable(0, data.data() + start, n));
  }
}

TEST(crc_can_be_extended_piece_by_piece) {
  std::vector<unsigned char> data(20000, 0x5a);
  uint32_t whole = crc32c(0, data.data(), data.size());
  CHECK(crc32c(crc32c(0, data.data(), 7001), data.data() + 7001, data.size() - 7001) == whole);
}

int main() { return test::run_all(); }
