// Encrypted records and channels: known bytes, round trips, and every kind of attack on the way.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "paceline/transport/encrypted_channel.h"
#include "paceline/wire/libcrypto.h"
#include "paceline/wire/record.h"

using namespace paceline;

namespace {

using Bytes = std::vector<std::byte>;
std::mt19937_64 rng(20261118);
constexpr CipherKind kKinds[] = {CipherKind::aes_256_gcm, CipherKind::chacha20_poly1305};

Key key_of(unsigned char first) {
  Key key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = (unsigned char)(first + i);
  return key;
}

Bytes random_bytes(size_t n) {
  Bytes bytes(n);
  for (auto& b : bytes) b = std::byte(rng());
  return bytes;
}

Bytes seal(RecordCipher& cipher, const Bytes& plain) {
  Bytes record(plain.size() + kRecordOverhead);
  CHECK(cipher.seal(plain, record.data()) == record.size());
  return record;
}

bool opens(RecordCipher& cipher, const Bytes& record, const Bytes& plain) {
  Bytes out(record.size() - kRecordOverhead);
  return cipher.open(record, out.data()) && out == plain;
}

// Two channels, and the network between them in the hands of the test.
class Network {
 public:
  explicit Network(CipherKind kind = CipherKind::aes_256_gcm) {
    Key there = key_of(1), back = key_of(101);
    int first[2], second[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, first) == 0);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, second) == 0);
    from_ = Fd(first[1]), to_ = Fd(second[1]);
    sender = std::make_unique<EncryptedChannel>(Fd(first[0]), LinkKeys{kind, there, back}, 1);
    receiver = std::make_unique<EncryptedChannel>(Fd(second[0]), LinkKeys{kind, back, there}, 0);
  }
  // Returns what the sender has sent.
  Bytes take(size_t most = 1 << 20) {
    Bytes all(most);
    ssize_t n = recv(from_.get(), all.data(), all.size(), MSG_DONTWAIT);
    all.resize(size_t(std::max<ssize_t>(n, 0)));
    return all;
  }
  void deliver(const Bytes& bytes) {
    CHECK(send(to_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == ssize_t(bytes.size()));
  }
  void end() { to_.reset(); }
  void write(const Bytes& bytes) {
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    CHECK(sender->write_some(&part, 1) == bytes.size());
  }
  Bytes read(size_t n) {
    Bytes out(n);
    out.resize(receiver->read_some(out.data(), n));
    return out;
  }
  std::unique_ptr<EncryptedChannel> sender, receiver;

 private:
  Fd from_, to_;
};

}  // namespace

// Computed with Python's `cryptography`: the prefix, then AESGCM(bytes(32)).encrypt(bytes(12), bytes(16), prefix).
TEST(known_bytes_pin_the_format) {
  RecordCipher cipher(CipherKind::aes_256_gcm, Key{}, Direction::seal);
  Bytes record = seal(cipher, Bytes(16));
  const unsigned char expected[] = {0x10, 0x00, 0x00, 0x00, 0x4e, 0x6d, 0x49, 0x32, 0xce, 0xa7, 0x40, 0x3d, 0x4d, 0x60,
                                    0x6b, 0x6e, 0x07, 0x4e, 0xc5, 0xd3, 0xba, 0xf3, 0x9d, 0x18, 0x5a, 0xb6, 0x1a, 0x2d,
                                    0x1b, 0xff, 0xc0, 0x0a, 0x0f, 0xdb, 0xee, 0x89, 0x6f, 0x31, 0xc9, 0x0d};
  CHECK(record.size() == sizeof expected && std::memcmp(record.data(), expected, sizeof expected) == 0);
}

TEST(records_survive_the_round_trip) {
  for (CipherKind kind : kKinds) {
    RecordCipher sealer(kind, key_of(7), Direction::seal), opener(kind, key_of(7), Direction::open);
    for (size_t n : {size_t(1), size_t(15), size_t(16), size_t(17), size_t(64), size_t(4097), kMaxRecordBytes}) {
      Bytes plain = random_bytes(n), record = seal(sealer, plain);
      CHECK(record_length(record.data()) == n && opener.expects(record.data()));
      CHECK(n < 16 || std::search(record.begin(), record.end(), plain.begin(), plain.begin() + 8) == record.end());
      CHECK(opens(opener, record, plain));
    }
    CHECK(opener.number() == 7);
  }
}

TEST(equal_texts_look_different_in_every_record) {
  RecordCipher sealer(CipherKind::aes_256_gcm, key_of(7), Direction::seal);
  Bytes plain(32);
  CHECK(seal(sealer, plain) != seal(sealer, plain));
}

TEST(every_altered_bit_is_noticed) {
  for (CipherKind kind : kKinds) {
    Bytes plain = random_bytes(40);
    RecordCipher sealer(kind, key_of(7), Direction::seal);
    Bytes record = seal(sealer, plain);
    for (size_t bit = 0; bit < record.size() * 8; ++bit) {
      RecordCipher opener(kind, key_of(7), Direction::open);
      Bytes altered = record;
      altered[bit / 8] ^= std::byte(1 << (bit % 8));
      CHECK(!opens(opener, altered, plain));  // also in the prefix, which the tag covers
      CHECK(opener.expects(altered.data()) == (bit >= 64));
      CHECK(opens(opener, record, plain));
    }
  }
}

TEST(replayed_reordered_and_reflected_records_are_refused) {
  RecordCipher sealer(CipherKind::aes_256_gcm, key_of(7), Direction::seal);
  RecordCipher opener(CipherKind::aes_256_gcm, key_of(7), Direction::open);
  RecordCipher other_direction(CipherKind::aes_256_gcm, key_of(8), Direction::open);
  Bytes plain = random_bytes(100), first = seal(sealer, plain), second = seal(sealer, plain);
  CHECK(!opens(other_direction, first, plain));
  CHECK(!opens(opener, second, plain));
  CHECK(opens(opener, first, plain));
  CHECK(!opens(opener, first, plain));
  CHECK(opens(opener, second, plain));
}

TEST(keys_change_on_both_sides_after_so_many_records) {
  RecordCipher sealer(CipherKind::aes_256_gcm, key_of(7), Direction::seal, 3);
  RecordCipher opener(CipherKind::aes_256_gcm, key_of(7), Direction::open, 3);
  RecordCipher never(CipherKind::aes_256_gcm, key_of(7), Direction::open);
  for (int i = 0; i < 10; ++i) {
    Bytes plain = random_bytes(50), record = seal(sealer, plain);
    CHECK(opens(opener, record, plain));
    CHECK(opens(never, record, plain) == (i < 3));
  }
}

TEST(a_record_decrypts_in_place) {
  RecordCipher sealer(CipherKind::aes_256_gcm, key_of(7), Direction::seal);
  RecordCipher opener(CipherKind::aes_256_gcm, key_of(7), Direction::open);
  Bytes plain = random_bytes(1000), record = seal(sealer, plain);
  CHECK(opener.open(record, record.data() + kRecordPrefixBytes));
  CHECK(std::equal(plain.begin(), plain.end(), record.begin() + kRecordPrefixBytes));
}

TEST(a_channel_carries_parts_of_any_size) {
  for (CipherKind kind : kKinds) {
    Network network(kind);
    for (size_t n : {size_t(1), size_t(64), size_t(5000), kMaxRecordBytes}) {
      Bytes header = random_bytes(64), payload = random_bytes(n);
      iovec parts[] = {{header.data(), header.size()}, {payload.data(), payload.size()}};
      CHECK(network.sender->write_some(parts, 2) == 64 + n);
      network.deliver(network.take());
      CHECK(network.read(64) == header);
      CHECK(network.read(n) == payload);
      CHECK(network.read(1).empty() && !network.receiver->lost());
    }
  }
}

TEST(a_reader_may_ask_for_less_or_more_than_a_record) {
  Network network;
  Bytes text = random_bytes(300);
  network.write(text);
  network.write(text);
  network.deliver(network.take());
  for (size_t at = 0; at < 300; at += 100)
    CHECK(network.read(100) == Bytes(text.begin() + at, text.begin() + at + 100));
  CHECK(network.read(1000) == text);
}

TEST(bytes_that_arrive_one_by_one_are_used_when_the_tag_is_there) {
  Network network;
  Bytes text = random_bytes(40);
  network.write(text);
  Bytes record = network.take();
  for (size_t i = 0; i + 1 < record.size(); ++i) {
    network.deliver({record[i]});
    CHECK(network.read(40).empty());
  }
  network.deliver({record.back()});
  CHECK(network.read(40) == text);
}

TEST(a_full_socket_takes_the_same_record_later) {
  Network network;
  Bytes sent, received, piece;
  auto pass_on = [&] {
    for (Bytes some; !(some = network.take(10'000)).empty();) {
      network.deliver(some);
      for (Bytes got; !(got = network.read(100'000)).empty();) received.insert(received.end(), got.begin(), got.end());
    }
  };
  int refused = 0;
  while (sent.size() < (4 << 20)) {
    piece = random_bytes(100'000);
    iovec part{piece.data(), piece.size()};
    for (; network.sender->write_some(&part, 1) == 0; ++refused) pass_on();
    sent.insert(sent.end(), piece.begin(), piece.end());
  }
  pass_on();
  CHECK(refused > 0 && received == sent);
}

TEST(a_channel_names_the_record_and_the_rank_of_an_attack) {
  for (int attack = 0; attack < 4; ++attack) {
    Network network;
    Bytes text = random_bytes(64);
    network.write(text);
    Bytes first = network.take();
    network.deliver(first);
    CHECK(network.read(64) == text);
    network.write(text);
    Bytes second = network.take();
    if (attack == 0) second[30] ^= std::byte(4);                    // altered
    if (attack == 1) second = first;                                // replayed
    if (attack == 2) network.write(text), second = network.take();  // left out
    if (attack == 3) second[3] = std::byte(0x7f);                   // a length of 2 GB
    network.deliver(second);
    Error error = test::error_of([&] { network.read(64); });
    std::string found = error.what();
    CHECK(error.kind == ErrorKind::peer_lost && error.rank == 0);
    CHECK(found.find("record 1 from rank 0") != std::string::npos);
    CHECK(found.find(attack == 0 ? "wrong tag" : "wrong prefix") != std::string::npos);
  }
}

TEST(a_connection_that_is_cut_is_lost_and_yields_no_part_of_a_record) {
  Network network;
  Bytes text = random_bytes(64);
  network.write(text);
  network.write(text);
  Bytes both = network.take();
  both.pop_back();
  network.deliver(both);
  network.end();
  CHECK(network.read(64) == text);
  CHECK(!network.receiver->lost());
  CHECK(network.read(64).empty());
  CHECK(network.receiver->lost());
}

// Compares libIPSec_MB with libcrypto where the former is installed; elsewhere both sides are libcrypto.
TEST(records_of_either_library_open_with_the_other) {
  using Library = RecordCipher::Library;
  for (bool fast_seals : {true, false}) {
    Library seals = fast_seals ? Library::fastest : Library::libcrypto;
    Library opens_it = fast_seals ? Library::libcrypto : Library::fastest;
    RecordCipher sealer(CipherKind::aes_256_gcm, key_of(7), Direction::seal, 5, seals);
    RecordCipher opener(CipherKind::aes_256_gcm, key_of(7), Direction::open, 5, opens_it);
    for (size_t n : {size_t(1), size_t(15), size_t(16), size_t(17), size_t(767), size_t(768), size_t(769), size_t(4097),
                     kMaxRecordBytes - 1, kMaxRecordBytes}) {
      Bytes plain = random_bytes(n);
      CHECK(opens(opener, seal(sealer, plain), plain));
    }
  }
}

TEST(a_library_is_named) {
  CHECK(!Libcrypto::get().where.empty());
  CHECK(cipher_library().find(Libcrypto::get().where) != std::string::npos);
}

int main() { return test::run_all(); }
