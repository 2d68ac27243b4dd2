// OpenSSL's libcrypto, found at run time: the copy that this process has already loaded (Python's `ssl` and `hashlib`
// use it), else the system's. The core has no dependency on it, and no cryptography of its own.
#pragma once
#include <cstddef>
#include <string>

namespace paceline {

// Only the functions that the core calls; all exist in OpenSSL 1.1.1 and 3, with these types.
struct Libcrypto {
  void* (*new_context)();
  void (*free_context)(void*);
  const void* (*aes_256_gcm)();
  const void* (*chacha20_poly1305)();
  int (*init)(void* context, const void* cipher, void* engine, const unsigned char* key, const unsigned char* nonce,
              int encrypts);
  int (*update)(void* context, unsigned char* out, int* out_bytes, const unsigned char* in, int in_bytes);
  int (*finish)(void* context, unsigned char* out, int* out_bytes);
  int (*control)(void* context, int type, int argument, void* pointer);
  const void* (*sha256)();
  unsigned char* (*hmac)(const void* hash, const void* key, int key_bytes, const unsigned char* data, size_t data_bytes,
                         unsigned char* out, unsigned int* out_bytes);
  int (*compare)(const void* a, const void* b, size_t bytes);  // 0 if equal, in constant time
  std::string where;                                           // the path, for `paceline doctor`

  // Loads it once. Throws Error(usage) that names PACELINE_ENCRYPT if there is none.
  static const Libcrypto& get();
};

// Whether the CPU has instructions for AES: without them ChaCha20 is faster.
bool cpu_has_aes();

}  // namespace paceline
