// AES-256-GCM of Intel's library libIPSec_MB, if it is installed: about 4 times as fast as OpenSSL 3.0 on CPUs whose
// vector instructions include AES (VAES with AVX-512; also CPUs of AMD). The same standard, so the same bytes: one end
// of a link may use it and the other end not. ADR 80.
#pragma once
#include <cstddef>
#include <string>

namespace paceline {

// The cipher of one key. Not thread-safe.
class IpsecMbGcm {
 public:
  // Whether the library is installed, has code for this CPU, and gives the bytes of libcrypto. Tried once.
  static bool is_available();
  static const std::string& where();  // the library's name and version, or why it is not used; for `paceline doctor`

  explicit IpsecMbGcm(const unsigned char* key);
  ~IpsecMbGcm();
  IpsecMbGcm(const IpsecMbGcm&) = delete;

  void set_key(const unsigned char* key);
  // `nonce` has 12 bytes, `tag` 16; `prefix` is authenticated and not encrypted. `out` may be `in`.
  void seal(const unsigned char* nonce, const unsigned char* prefix, size_t prefix_bytes, const unsigned char* in,
            size_t bytes, unsigned char* out, unsigned char* tag);
  // Writes the tag that the bytes should have. The caller compares it with the tag that came with them.
  void open(const unsigned char* nonce, const unsigned char* prefix, size_t prefix_bytes, const unsigned char* in,
            size_t bytes, unsigned char* out, unsigned char* tag);

 private:
  // The library's structures, in version 1.3 of 1,008 and 88 bytes. With room to spare, because their size is only in
  // its headers; is_available() compares results before anything is trusted to them.
  alignas(64) unsigned char key_data_[4096];
  alignas(64) unsigned char context_[512];
};

}  // namespace paceline
