#include "paceline/wire/record.h"

#include <cstring>
#include <string>

#include "paceline/base/error.h"
#include "paceline/wire/crc32c.h"
#include "paceline/wire/ipsec_mb.h"
#include "paceline/wire/libcrypto.h"

namespace paceline {
namespace {

// Of openssl/evp.h; the numbers are part of its ABI.
constexpr int kGetTag = 0x10, kSetTag = 0x11;

const unsigned char* raw(const std::byte* p) { return reinterpret_cast<const unsigned char*>(p); }
unsigned char* raw(std::byte* p) { return reinterpret_cast<unsigned char*>(p); }

void require(int result, const char* what) {
  if (result <= 0) throw Error(ErrorKind::usage, std::string("libcrypto refuses to ") + what);
}

uint32_t check_of(uint32_t length, uint64_t number) {
  uint32_t crc = crc32c(0, &length, sizeof length);
  return crc32c(crc, &number, sizeof number);
}

}  // namespace

const char* name_of(CipherKind kind) { return kind == CipherKind::aes_256_gcm ? "aes-256-gcm" : "chacha20-poly1305"; }

CipherKind preferred_cipher() {
  Libcrypto::get();
  return cpu_has_aes() ? CipherKind::aes_256_gcm : CipherKind::chacha20_poly1305;
}

std::string cipher_library() {
  const std::string& libcrypto = Libcrypto::get().where;
  if (preferred_cipher() != CipherKind::aes_256_gcm) return libcrypto;
  if (IpsecMbGcm::is_available()) return IpsecMbGcm::where() + " (keys: " + libcrypto + ")";
  return libcrypto + " (" + IpsecMbGcm::where() + ")";
}

RecordCipher::RecordCipher(CipherKind kind, const Key& key, Direction direction, uint64_t records_per_key,
                           Library library)
    : direction_(direction), key_(key), records_per_key_(records_per_key) {
  const Libcrypto& c = Libcrypto::get();
  context_ = c.new_context();
  if (!context_) throw Error(ErrorKind::usage, "libcrypto has no memory for a cipher");
  try {
    set_key(kind == CipherKind::aes_256_gcm ? c.aes_256_gcm() : c.chacha20_poly1305());
    if (kind == CipherKind::aes_256_gcm && library == Library::fastest && IpsecMbGcm::is_available())
      fast_ = std::make_unique<IpsecMbGcm>(key.data());
  } catch (...) {
    c.free_context(context_);
    throw;
  }
}

RecordCipher::~RecordCipher() {
  Libcrypto::get().free_context(context_);
  explicit_bzero(key_.data(), key_.size());
}

void RecordCipher::set_key(const void* cipher) {
  require(Libcrypto::get().init(context_, cipher, nullptr, key_.data(), nullptr, direction_ == Direction::seal),
          "use this cipher");
  if (fast_) fast_->set_key(key_.data());
}

// Sets the nonce of the next record, and its key. The next key is HMAC-SHA-256(key, label).
void RecordCipher::begin_record() {
  if (number_ != 0 && number_ % records_per_key_ == 0) {
    const Libcrypto& c = Libcrypto::get();
    static constexpr unsigned char label[] = "paceline next record key";
    Key next;
    unsigned int bytes = kKeyBytes;
    if (!c.hmac(c.sha256(), key_.data(), int(kKeyBytes), label, sizeof label - 1, next.data(), &bytes))
      throw Error(ErrorKind::usage, "libcrypto refuses to derive a key");
    key_ = next;
    explicit_bzero(next.data(), next.size());
    set_key(nullptr);
  }
  std::memcpy(nonce_.data() + nonce_.size() - sizeof number_, &number_, sizeof number_);
}

// Gives libcrypto the nonce and lets it authenticate the record's prefix.
void RecordCipher::set_prefix(const unsigned char* prefix) {
  const Libcrypto& c = Libcrypto::get();
  require(c.init(context_, nullptr, nullptr, nullptr, nonce_.data(), -1), "set a nonce");
  int n = 0;
  require(c.update(context_, nullptr, &n, prefix, int(kRecordPrefixBytes)), "authenticate a prefix");
}

size_t RecordCipher::seal(std::span<const std::byte> data, std::byte* record) {
  uint32_t length = uint32_t(data.size()), check = check_of(length, number_);
  std::memcpy(record, &length, sizeof length);
  std::memcpy(record + sizeof length, &check, sizeof check);
  begin_record();
  unsigned char* out = raw(record + kRecordPrefixBytes);
  if (fast_) {
    fast_->seal(nonce_.data(), raw(record), kRecordPrefixBytes, raw(data.data()), length, out, out + length);
  } else {
    const Libcrypto& c = Libcrypto::get();
    set_prefix(raw(record));
    int n = 0;
    require(c.update(context_, out, &n, raw(data.data()), int(length)), "encrypt");
    require(c.finish(context_, out + n, &n), "encrypt");
    require(c.control(context_, kGetTag, int(kRecordTagBytes), out + length), "make a tag");
  }
  ++number_;
  return data.size() + kRecordOverhead;
}

bool RecordCipher::open(std::span<const std::byte> record, std::byte* to) {
  const Libcrypto& c = Libcrypto::get();
  size_t length = record.size() - kRecordOverhead;
  const unsigned char *prefix = raw(record.data()), *in = prefix + kRecordPrefixBytes;
  unsigned char tag[kRecordTagBytes];
  std::memcpy(tag, in + length, sizeof tag);
  begin_record();
  if (fast_) {
    unsigned char expected[kRecordTagBytes];
    fast_->open(nonce_.data(), prefix, kRecordPrefixBytes, in, length, raw(to), expected);
    if (c.compare(expected, tag, sizeof tag) != 0) return false;
  } else {
    set_prefix(prefix);
    int n = 0;
    require(c.update(context_, raw(to), &n, in, int(length)), "decrypt");
    require(c.control(context_, kSetTag, int(kRecordTagBytes), tag), "check a tag");
    if (c.finish(context_, raw(to) + n, &n) <= 0) return false;
  }
  ++number_;
  return true;
}

bool RecordCipher::expects(const std::byte* prefix) const {
  uint32_t length = record_length(prefix), check;
  std::memcpy(&check, prefix + sizeof length, sizeof check);
  return length >= 1 && length <= kMaxRecordBytes && check == check_of(length, number_);
}

uint32_t record_length(const std::byte* prefix) {
  uint32_t length;
  std::memcpy(&length, prefix, sizeof length);
  return length;
}

}  // namespace paceline
