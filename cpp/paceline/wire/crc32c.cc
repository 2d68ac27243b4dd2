#include "paceline/wire/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

constexpr uint32_t kPoly = 0x82f63b78;  // Castagnoli, bit-reversed

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c & 1) ? (c >> 1) ^ kPoly : c >> 1;
    table[i] = c;
  }
  return table;
}
constexpr auto kTable = make_table();

#if defined(__x86_64__)
// The crc32 instruction has a latency of three cycles but a throughput of one, so three LANES are run
// side by side and joined: the registers of the first two lanes are advanced over zero bytes in place of the
// following lanes, by a table lookup per byte of the register. Lanes are long for most of the data, because
// the hardware's prefetching needs a few pages to start (cold memory: 6 GB/s with lanes of 2 KB, 19 GB/s with
// 16 KB), and short for the rest.
constexpr size_t kLongLane = 16384, kShortLane = 512;

constexpr uint32_t advance_zeros(uint32_t crc, size_t n) {
  for (size_t i = 0; i < n; ++i) crc = kTable[crc & 0xff] ^ (crc >> 8);
  return crc;
}

struct SkipTable {
  uint32_t t[4][256];
  explicit SkipTable(size_t n) {
    // Advancing is linear over GF(2): build from the 32 single-bit registers.
    uint32_t bit[32];
    for (int b = 0; b < 32; ++b) bit[b] = advance_zeros(1u << b, n);
    for (int byte = 0; byte < 4; ++byte)
      for (int v = 0; v < 256; ++v) {
        uint32_t r = 0;
        for (int b = 0; b < 8; ++b)
          if (v >> b & 1) r ^= bit[byte * 8 + b];
        t[byte][v] = r;
      }
  }
  uint32_t skip(uint32_t c) const {
    return t[0][c & 0xff] ^ t[1][c >> 8 & 0xff] ^ t[2][c >> 16 & 0xff] ^ t[3][c >> 24];
  }
};

inline uint64_t load64(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}

template <size_t lane>
void fold_lanes(uint64_t& c, const uint8_t*& p, size_t& n) {
  static const SkipTable one_lane(lane);
  for (; n >= 3 * lane; p += 3 * lane, n -= 3 * lane) {
    uint64_t c1 = 0, c2 = 0;
    for (size_t i = 0; i < lane; i += 8) {
      c = __builtin_ia32_crc32di(c, load64(p + i));
      c1 = __builtin_ia32_crc32di(c1, load64(p + lane + i));
      c2 = __builtin_ia32_crc32di(c2, load64(p + 2 * lane + i));
    }
    c = one_lane.skip(uint32_t(c)) ^ c1;
    c = one_lane.skip(uint32_t(c)) ^ c2;
  }
}

uint32_t crc32c_sse42(uint32_t crc, const uint8_t* p, size_t n) {
  uint64_t c = ~crc;
  fold_lanes<kLongLane>(c, p, n);
  fold_lanes<kShortLane>(c, p, n);
  for (; n >= 8; p += 8, n -= 8) c = __builtin_ia32_crc32di(c, load64(p));
  uint32_t c32 = uint32_t(c);
  for (; n; ++p, --n) c32 = __builtin_ia32_crc32qi(c32, *p);
  return ~c32;
}

// x^n modulo the polynomial, bit-reversed as the data is.
constexpr uint32_t power_of_x(int n) {
  uint32_t r = 0x80000000;
  for (; n > 0; --n) r = (r >> 1) ^ (r & 1 ? kPoly : 0);
  return r;
}

// Wide carry-less multiplication moves 16 bytes ahead over any distance: their first 8 bytes times one power of x plus
// their last 8 times another are 16 bytes with the same remainder. Four registers of four such lanes hide the latency:
// 59 GB/s for data in the cache, the crc32 instruction 29.
#define PACELINE_WIDE __attribute__((target("avx512f,avx512vl,avx512dq,vpclmulqdq,pclmul,sse4.2")))
constexpr size_t kWideBytes = 256;

struct Distance {
  uint64_t first, last;
  explicit constexpr Distance(int bits) : first(power_of_x(bits + 31)), last(power_of_x(bits - 33)) {}
};

PACELINE_WIDE inline __m512i ahead(__m512i x, Distance d, __m512i next) {
  __m512i k = _mm512_set4_epi64(int64_t(d.last), int64_t(d.first), int64_t(d.last), int64_t(d.first));
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), next,
                                   0x96);  // 0x96: exclusive or of three
}

PACELINE_WIDE inline __m128i ahead(__m128i x, Distance d, __m128i next) {
  __m128i k = _mm_set_epi64x(int64_t(d.last), int64_t(d.first));
  return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)));
}

PACELINE_WIDE uint32_t crc32c_wide(uint32_t crc, const uint8_t* p, size_t n) {
  if (n < kWideBytes) return crc32c_sse42(crc, p, n);
  constexpr Distance one_lane(128), two_lanes(256), three_lanes(384), one_register(512), four_registers(2048);
  __m512i x[4];
  for (int i = 0; i < 4; ++i) x[i] = _mm512_loadu_si512(p + 64 * i);
  x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int32_t(~crc))));
  for (p += kWideBytes, n -= kWideBytes; n >= kWideBytes; p += kWideBytes, n -= kWideBytes)
    for (int i = 0; i < 4; ++i) x[i] = ahead(x[i], four_registers, _mm512_loadu_si512(p + 64 * i));
  for (int i = 1; i < 4; ++i) x[i] = ahead(x[i - 1], one_register, x[i]);
  alignas(64) __m128i lanes[4];
  _mm512_store_si512(lanes, x[3]);
  __m128i last = ahead(lanes[0], three_lanes, lanes[3]);
  last = ahead(lanes[1], two_lanes, last);
  last = ahead(lanes[2], one_lane, last);
  uint64_t c = __builtin_ia32_crc32di(0, uint64_t(_mm_extract_epi64(last, 0)));
  c = __builtin_ia32_crc32di(c, uint64_t(_mm_extract_epi64(last, 1)));
  return crc32c_sse42(~uint32_t(c), p, n);
}
#endif

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t n) {
  auto* p = static_cast<const uint8_t*>(data);
  uint32_t c = ~crc;
  for (size_t i = 0; i < n; ++i) c = kTable[(c ^ p[i]) & 0xff] ^ (c >> 8);
  return ~c;
}

uint32_t crc32c(uint32_t crc, const void* data, size_t n) {
#if defined(__x86_64__)
  static const bool is_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq");
  if (is_wide) return crc32c_wide(crc, static_cast<const uint8_t*>(data), n);
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return crc32c_sse42(crc, static_cast<const uint8_t*>(data), n);
#endif
  return crc32c_portable(crc, data, n);
}

}  // namespace paceline
