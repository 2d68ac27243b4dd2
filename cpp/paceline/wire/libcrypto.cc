#include "paceline/wire/libcrypto.h"

#include <dlfcn.h>

#include <fstream>
#include <vector>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "paceline/base/error.h"

namespace paceline {
namespace {

// The files of this process whose name begins with "libcrypto". Wheels bring copies with longer names
// ("libcrypto-d3570994.so.3"); the plain name, which the interpreter uses, comes first.
std::vector<std::string> loaded_paths() {
  std::vector<std::string> plain, others;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    size_t path = line.find('/');
    if (path == std::string::npos) continue;
    std::string file = line.substr(path), name = file.substr(file.rfind('/') + 1);
    if (name.rfind("libcrypto", 0) != 0) continue;
    auto& found = name.rfind("libcrypto.so", 0) == 0 ? plain : others;
    if (found.empty() || found.back() != file) found.push_back(file);
  }
  plain.insert(plain.end(), others.begin(), others.end());
  return plain;
}

template <class F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

bool fill(void* library, Libcrypto& c) {
  return find(library, "EVP_CIPHER_CTX_new", c.new_context) && find(library, "EVP_CIPHER_CTX_free", c.free_context) &&
         find(library, "EVP_aes_256_gcm", c.aes_256_gcm) &&
         find(library, "EVP_chacha20_poly1305", c.chacha20_poly1305) && find(library, "EVP_CipherInit_ex", c.init) &&
         find(library, "EVP_CipherUpdate", c.update) && find(library, "EVP_CipherFinal_ex", c.finish) &&
         find(library, "EVP_CIPHER_CTX_ctrl", c.control) && find(library, "EVP_sha256", c.sha256) &&
         find(library, "HMAC", c.hmac) && find(library, "CRYPTO_memcmp", c.compare);
}

Libcrypto load() {
  Libcrypto c{};
  for (const std::string& path : loaded_paths())
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); library && fill(library, c)) {
      c.where = path;
      return c;
    }
  if (fill(RTLD_DEFAULT, c)) {  // some interpreters contain it
    c.where = "the interpreter";
    return c;
  }
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"})
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL); library && fill(library, c)) {
      c.where = name;
      return c;
    }
  throw Error(ErrorKind::usage,
              "data between hosts is encrypted, but this process finds no OpenSSL library (libcrypto.so.3): install "
              "OpenSSL, or turn encryption off on a network that you trust (--no-encrypt, PACELINE_ENCRYPT=off)");
}

}  // namespace

const Libcrypto& Libcrypto::get() {
  static const Libcrypto loaded = load();  // if it throws, the next call tries again
  return loaded;
}

bool cpu_has_aes() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  return getauxval(AT_HWCAP) & HWCAP_AES;
#else
  return false;
#endif
}

}  // namespace paceline
