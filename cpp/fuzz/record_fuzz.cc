// Encrypted records on a connection that is in the hands of an attacker without the key: what is read is what was sent,
// up to the first change.
#include <sys/socket.h>

#include <memory>

#include "input.h"
#include "paceline/base/error.h"
#include "paceline/transport/encrypted_channel.h"

using namespace paceline;

namespace {

constexpr size_t kMost = 64 << 10;  // fits into the buffers of a socket
using Bytes = std::vector<std::byte>;

struct Sent {
  Bytes plain, stream;
  std::vector<size_t> starts;  // of the records in the stream
};

Key key_of(unsigned char first) {
  Key key;
  key.fill(first);
  return key;
}

Sent seal(fuzz::Input& input, CipherKind kind) {
  RecordCipher cipher(kind, key_of(1), Direction::seal);
  Sent sent;
  for (int left = input.take() % 6; left > 0; --left) {
    Bytes plain(1 + input.take<uint16_t>() % 3000, std::byte(left)), record(plain.size() + kRecordOverhead);
    cipher.seal(plain, record.data());
    sent.plain.insert(sent.plain.end(), plain.begin(), plain.end());
    sent.starts.push_back(sent.stream.size());
    sent.stream.insert(sent.stream.end(), record.begin(), record.end());
  }
  return sent;
}

// Makes the checksum of a prefix right: without this every changed length would be refused at once.
void repair(Bytes& stream, size_t at, uint32_t length, uint64_t number) {
  if (at + kRecordPrefixBytes > stream.size()) return;
  const uint32_t check = crc32c(crc32c(0, &length, sizeof length), &number, sizeof number);
  std::memcpy(stream.data() + at, &length, sizeof length);
  std::memcpy(stream.data() + at + sizeof length, &check, sizeof check);
}

void change(fuzz::Input& input, Sent& sent) {
  Bytes& stream = sent.stream;
  const uint8_t what = input.take() % 6;
  const size_t number = sent.starts.empty() ? 0 : input.take() % sent.starts.size();
  const size_t start = sent.starts.empty() ? 0 : std::min(sent.starts[number], stream.size());
  const size_t at = std::min(start + input.take<uint16_t>(), stream.size());
  auto place = [&](size_t position) { return stream.begin() + ptrdiff_t(position); };
  if (what == 0 && at < stream.size()) stream[at] ^= std::byte(input.take());
  if (what == 1) stream.erase(place(start), place(at));
  if (what == 2) stream.resize(at);
  if (what == 3) repair(stream, start, input.take<uint32_t>() % (2 * kMaxRecordBytes), number);
  if (what == 4) {  // sent again, somewhere
    const Bytes again(place(start), place(at));
    const size_t where = input.take<uint16_t>() % (stream.size() + 1);
    stream.insert(place(where), again.begin(), again.end());
  }
  if (what == 5) {
    const auto noise = input.bytes(input.take());
    for (uint8_t one : noise) stream.push_back(std::byte(one));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const auto kind = CipherKind(input.take() % 2);
  const size_t piece = 1 + input.take<uint16_t>() % 5000;
  Sent sent = seal(input, kind);
  const Bytes original = sent.stream;
  while (input.left() && sent.stream.size() < kMost) change(input, sent);
  sent.stream.resize(std::min(sent.stream.size(), kMost));

  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) return 0;
  Fd theirs(pair[1]);
  EncryptedChannel channel(Fd(pair[0]), LinkKeys{kind, key_of(2), key_of(1)}, 3);
  fuzz::require(::send(theirs.get(), sent.stream.data(), sent.stream.size(), MSG_NOSIGNAL) ==
                ssize_t(sent.stream.size()));
  shutdown(theirs.get(), SHUT_WR);
  Bytes received, room(piece);
  bool is_refused = false;
  try {
    while (const size_t n = channel.read_some(room.data(), piece))
      received.insert(received.end(), room.begin(), room.begin() + ptrdiff_t(n));
  } catch (const Error& e) {
    fuzz::require(e.kind == ErrorKind::peer_lost && e.rank == 3);
    is_refused = true;
  }
  fuzz::require(received.size() <= sent.plain.size());
  fuzz::require(std::equal(received.begin(), received.end(), sent.plain.begin()));
  if (sent.stream == original) fuzz::require(!is_refused && received == sent.plain);
  return 0;
}
