#include "paceline/wire/record.h"

#include <cstring>
#include <string>

#include "paceline/base/error.h"
#include "paceline/wire/crc32c.h"
#include "paceline/wire/libcrypto.h"

namespace paceline {
namespace {

// Of openssl/evp.h; the numbers are part of its ABI.
constexpr int kGetTag = 0x10, kSetTag = 0x11;
constexpr size_t kNonceBytes = 12;

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

RecordCipher::RecordCipher(CipherKind kind, const Key& key, Direction direction, uint64_t records_per_key)
    : direction_(direction), key_(key), records_per_key_(records_per_key) {
  const Libcrypto& c = Libcrypto::get();
  context_ = c.new_context();
  if (!context_) throw Error(ErrorKind::usage, "libcrypto has no memory for a cipher");
  try {
    set_key(kind == CipherKind::aes_256_gcm ? c.aes_256_gcm() : c.chacha20_poly1305());
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
}

// Sets the nonce of the next record and authenticates its prefix. The next key is HMAC-SHA-256(key, label).
void RecordCipher::begin_record(const unsigned char* prefix) {
  const Libcrypto& c = Libcrypto::get();
  if (number_ != 0 && number_ % records_per_key_ == 0) {
    static constexpr unsigned char label[] = "paceline next record key";
    Key next;
    unsigned int bytes = kKeyBytes;
    if (!c.hmac(c.sha256(), key_.data(), int(kKeyBytes), label, sizeof label - 1, next.data(), &bytes))
      throw Error(ErrorKind::usage, "libcrypto refuses to derive a key");
    key_ = next;
    explicit_bzero(next.data(), next.size());
    set_key(nullptr);
  }
  unsigned char nonce[kNonceBytes] = {};
  std::memcpy(nonce + kNonceBytes - sizeof number_, &number_, sizeof number_);
  require(c.init(context_, nullptr, nullptr, nullptr, nonce, -1), "set a nonce");
  int n = 0;
  require(c.update(context_, nullptr, &n, prefix, int(kRecordPrefixBytes)), "authenticate a prefix");
}

size_t RecordCipher::seal(std::span<const std::byte> data, std::byte* record) {
  const Libcrypto& c = Libcrypto::get();
  uint32_t length = uint32_t(data.size()), check = check_of(length, number_);
  std::memcpy(record, &length, sizeof length);
  std::memcpy(record + sizeof length, &check, sizeof check);
  begin_record(raw(record));
  int n = 0;
  unsigned char* out = raw(record + kRecordPrefixBytes);
  require(c.update(context_, out, &n, raw(data.data()), int(length)), "encrypt");
  require(c.finish(context_, out + n, &n), "encrypt");
  require(c.control(context_, kGetTag, int(kRecordTagBytes), out + length), "make a tag");
  ++number_;
  return data.size() + kRecordOverhead;
}

bool RecordCipher::open(std::span<const std::byte> record, std::byte* to) {
  const Libcrypto& c = Libcrypto::get();
  size_t length = record.size() - kRecordOverhead;
  unsigned char tag[kRecordTagBytes];
  std::memcpy(tag, record.data() + kRecordPrefixBytes + length, sizeof tag);
  begin_record(raw(record.data()));
  int n = 0;
  require(c.update(context_, raw(to), &n, raw(record.data() + kRecordPrefixBytes), int(length)), "decrypt");
  require(c.control(context_, kSetTag, int(kRecordTagBytes), tag), "check a tag");
  if (c.finish(context_, raw(to) + n, &n) <= 0) return false;
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
