#include "paceline/wire/ipsec_mb.h"

#include <dlfcn.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "paceline/wire/libcrypto.h"

namespace paceline {
namespace {

constexpr size_t kNonceBytes = 12, kTagBytes = 16;

// The functions for CPUs with VAES and AVX-512. Other CPUs gain little over OpenSSL.
struct Library {
  void (*precompute)(const void* key, void* key_data) = nullptr;
  void (*encrypt)(const void* key_data, void* context, uint8_t* out, const uint8_t* in, uint64_t bytes,
                  const uint8_t* nonce, const uint8_t* prefix, uint64_t prefix_bytes, uint8_t* tag,
                  uint64_t tag_bytes) = nullptr;
  decltype(encrypt) decrypt = nullptr;
  bool usable = false;
  std::string where;
};

bool cpu_has_vector_aes() {
#if defined(__x86_64__)
  // Older compilers do not know these two by name.
  constexpr unsigned kVaes = 1u << 9, kVpclmulqdq = 1u << 10;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c & kVaes) || !(c & kVpclmulqdq)) return false;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

Library load() {
  Library found;
  if (!cpu_has_vector_aes()) {
    found.where = "this CPU has no VAES with AVX-512";
    return found;
  }
  void* handle = dlopen("libIPSec_MB.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    found.where = "libIPSec_MB.so.1 is not installed";
    return found;
  }
  auto find = [handle](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    return function != nullptr;
  };
  const char* (*version)() = nullptr;
  if (!find("aes_gcm_pre_256_vaes_avx512", found.precompute) || !find("aes_gcm_enc_256_vaes_avx512", found.encrypt) ||
      !find("aes_gcm_dec_256_vaes_avx512", found.decrypt) || !find("imb_get_version_str", version)) {
    found.where = "this version of libIPSec_MB has other functions";
    return found;
  }
  found.where = std::string("libIPSec_MB ") + version();
  found.usable = true;
  return found;
}

Library& library() {
  static Library loaded = load();
  return loaded;
}

// What libcrypto makes of the same input. False if it refuses.
bool encrypt_with_libcrypto(const unsigned char* key, const unsigned char* nonce, const unsigned char* prefix,
                            size_t prefix_bytes, const std::vector<unsigned char>& in, std::vector<unsigned char>& out,
                            unsigned char* tag) {
  constexpr int kGetTag = 0x10;  // of openssl/evp.h
  const Libcrypto& c = Libcrypto::get();
  void* context = c.new_context();
  int n = 0;
  bool done = context && c.init(context, c.aes_256_gcm(), nullptr, key, nonce, 1) > 0 &&
              c.update(context, nullptr, &n, prefix, int(prefix_bytes)) > 0 &&
              c.update(context, out.data(), &n, in.data(), int(in.size())) > 0 &&
              c.finish(context, out.data() + n, &n) > 0 && c.control(context, kGetTag, int(kTagBytes), tag) > 0;
  c.free_context(context);
  return done;
}

// Lengths around the blocks that the library works in, and one long record.
bool agrees_with_libcrypto() {
  unsigned char key[32], nonce[kNonceBytes], prefix[8];
  std::fill(std::begin(key), std::end(key), 0x5a);
  std::fill(std::begin(nonce), std::end(nonce), 0xc3);
  std::fill(std::begin(prefix), std::end(prefix), 0x99);
  IpsecMbGcm cipher(key);
  for (size_t bytes : {1, 16, 255, 256, 769, 4096 + 7, 128 << 10}) {
    std::vector<unsigned char> in(bytes), out(bytes), expected(bytes), back(bytes);
    for (size_t i = 0; i < bytes; ++i) in[i] = (unsigned char)(i * 131 + bytes);
    unsigned char tag[kTagBytes], expected_tag[kTagBytes], back_tag[kTagBytes];
    if (!encrypt_with_libcrypto(key, nonce, prefix, sizeof prefix, in, expected, expected_tag)) return false;
    cipher.seal(nonce, prefix, sizeof prefix, in.data(), bytes, out.data(), tag);
    cipher.open(nonce, prefix, sizeof prefix, out.data(), bytes, back.data(), back_tag);
    if (out != expected || back != in || std::memcmp(tag, expected_tag, kTagBytes) != 0 ||
        std::memcmp(back_tag, tag, kTagBytes) != 0)
      return false;
  }
  return true;
}

}  // namespace

bool IpsecMbGcm::is_available() {
  static const bool available = [] {
    if (!library().usable) return false;
    if (agrees_with_libcrypto()) return true;
    library().where += " is not used: its results differ from those of libcrypto";
    return false;
  }();
  return available;
}

const std::string& IpsecMbGcm::where() {
  is_available();
  return library().where;
}

IpsecMbGcm::IpsecMbGcm(const unsigned char* key) { set_key(key); }

IpsecMbGcm::~IpsecMbGcm() {
  explicit_bzero(key_data_, sizeof key_data_);
  explicit_bzero(context_, sizeof context_);
}

void IpsecMbGcm::set_key(const unsigned char* key) { library().precompute(key, key_data_); }

void IpsecMbGcm::seal(const unsigned char* nonce, const unsigned char* prefix, size_t prefix_bytes,
                      const unsigned char* in, size_t bytes, unsigned char* out, unsigned char* tag) {
  library().encrypt(key_data_, context_, out, in, bytes, nonce, prefix, prefix_bytes, tag, kTagBytes);
}

void IpsecMbGcm::open(const unsigned char* nonce, const unsigned char* prefix, size_t prefix_bytes,
                      const unsigned char* in, size_t bytes, unsigned char* out, unsigned char* tag) {
  library().decrypt(key_data_, context_, out, in, bytes, nonce, prefix, prefix_bytes, tag, kTagBytes);
}

}  // namespace paceline
