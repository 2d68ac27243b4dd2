// RECORDS: the encrypted form of a byte stream between two hosts. docs/protocol.md describes them.
//
// A record is a prefix (4 bytes: length of the encrypted part; 4 bytes: CRC-32C of length and number of the record), the
// encrypted bytes and a tag of 16 bytes that authenticates both. Each direction of each connection has a key of its own,
// and the nonce is the number of the record: it never repeats, and is not sent. A record that was altered, repeated,
// left out or moved has a wrong tag. The CRC protects from nothing, but a damaged length is noticed at once, and not
// after a wait for bytes that never come.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace paceline {

class IpsecMbGcm;

enum class CipherKind : uint8_t { aes_256_gcm, chacha20_poly1305, count_ };
const char* name_of(CipherKind kind);
// The faster one on this CPU. Throws Error(usage) if this process has no libcrypto.
CipherKind preferred_cipher();
std::string cipher_library();  // which library encrypts, and why not a faster one; for `paceline doctor`

constexpr size_t kKeyBytes = 32;
constexpr size_t kRecordPrefixBytes = 8, kRecordTagBytes = 16;
constexpr size_t kRecordOverhead = kRecordPrefixBytes + kRecordTagBytes;
constexpr size_t kMaxRecordBytes = 128 << 10;  // of plain text: it stays in the cache between copy and encryption
// After so many records both sides replace the key by one derived from it: 128 GB, far below the limits of GCM.
constexpr uint64_t kRecordsPerKey = 1 << 20;

using Key = std::array<unsigned char, kKeyBytes>;
enum class Direction : uint8_t { seal, open };

// One direction of a connection. Not thread-safe.
class RecordCipher {
 public:
  // `library` is the one for AES. Both give the same bytes.
  enum class Library { fastest, libcrypto };
  RecordCipher(CipherKind kind, const Key& key, Direction direction, uint64_t records_per_key = kRecordsPerKey,
               Library library = Library::fastest);
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;

  // Writes the next record: data.size() + kRecordOverhead bytes, which it returns. `data` has 1 to kMaxRecordBytes.
  size_t seal(std::span<const std::byte> data, std::byte* record);
  // Decrypts the next record into `to`, which has room for its length; may be where the encrypted bytes are. False if
  // the tag is wrong: then `to` is worthless, and the connection must end.
  [[nodiscard]] bool open(std::span<const std::byte> record, std::byte* to);
  // Whether this can be the prefix of the next record.
  bool expects(const std::byte* prefix) const;
  uint64_t number() const { return number_; }  // of the next record

 private:
  void begin_record();
  void set_key(const void* cipher);
  void set_prefix(const unsigned char* prefix);

  void* context_;
  std::unique_ptr<IpsecMbGcm> fast_;  // if there is one, it does the work of context_
  Direction direction_;
  Key key_;
  uint64_t records_per_key_;
  uint64_t number_ = 0;
  std::array<unsigned char, 12> nonce_{};  // of the current record
};

// Returns the plain bytes of the record that begins with this prefix.
uint32_t record_length(const std::byte* prefix);

}  // namespace paceline
