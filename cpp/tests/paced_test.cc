// Emulated links: when bytes arrive, and that they arrive whole.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "paceline/emulation/paced_channel.h"
#include "paceline/transport/encrypted_channel.h"

using namespace paceline;
using test::error_of;

namespace {

using Bytes = std::vector<std::byte>;
constexpr uint64_t kMs = 1'000'000;

// A file of links that is gone at the end.
struct File {
  explicit File(const LinkFacts& facts) {
    char made[] = "/tmp/paced-test-XXXXXX";
    CHECK(mkdtemp(made) != nullptr);
    directory = made;
    path = directory + "/links";
    EmulatedLinks::create(path, facts);
  }
  ~File() {
    unlink(path.c_str());
    rmdir(directory.c_str());
  }
  std::string directory, path;
};

// Two ends of a connection between rank 0 and rank 1, each with its own map of the links, as in two processes.
struct Pair {
  Pair(const std::string& path, bool is_encrypted) : first(path), second(path) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    auto plain = [&](int end) { return std::make_unique<TcpChannel>(Fd(ends[end])); };
    auto sealed = [&](int end) {
      Key there{}, back{};
      there[0] = 1, back[0] = 2;
      LinkKeys keys{CipherKind::aes_256_gcm, end ? back : there, end ? there : back};
      return std::make_unique<EncryptedChannel>(Fd(ends[end]), keys, 1 - end);
    };
    auto make = [&](int end) -> std::unique_ptr<Channel> {
      if (is_encrypted) return sealed(end);
      return plain(end);
    };
    from = std::make_unique<PacedChannel>(make(0), first, 0, 1);
    to = std::make_unique<PacedChannel>(make(1), second, 1, 0);
  }
  EmulatedLinks first, second;
  std::unique_ptr<PacedChannel> from, to;
};

}  // namespace

TEST(each_direction_of_a_host_is_occupied_by_what_passes_it) {
  File file({3, 1448e3, 5e-3});  // a packet of 1448 bytes and 66 of headers takes 1.0456 ms
  EmulatedLinks links(file.path);
  uint64_t packet = links.duration_ns(1448), now = 1000 * kMs;
  CHECK(packet > uint64_t(1.04 * kMs) && packet < uint64_t(1.05 * kMs));
  CHECK(links.send(0, 1, 1448, now) == now + packet + 5 * kMs);
  CHECK(links.send(0, 2, 1448, now) == now + 2 * packet + 5 * kMs);  // after the first, on the link of host 0
  CHECK(links.send(2, 1, 1448, now) == now + 2 * packet + 5 * kMs);  // after the first, on the link of host 1
  CHECK(links.send(1, 0, 1448, now) == now + packet + 5 * kMs);      // the other directions are free
  CHECK(links.busy_until(1, 0, now) == 0);
  for (int i = 0; i < 20; ++i) links.send(0, 1, 1448, now);  // more than may wait
  CHECK(links.busy_until(0, 2, now) > now && links.busy_until(2, 1, now) > now);
  CHECK(links.busy_until(0, 2, now + 22 * packet) == 0);
  CHECK(links.send(0, 2, 100, now, true) < now + 8 * kMs);  // a small message does not wait for all of them
}

TEST(bytes_arrive_whole_and_not_before_the_link_has_carried_them) {
  for (bool is_encrypted : {false, true}) {
    File file({2, 12.5e6, 3e-3});
    Pair pair(file.path, is_encrypted);
    std::mt19937 rng(7);
    Bytes sent(400'000), received(sent.size());
    for (auto& one : sent) one = std::byte(rng());
    uint64_t begin = EmulatedLinks::now_ns();
    size_t out = 0, in = 0;
    while (in < received.size()) {
      // As a port does: what was not taken is offered again.
      size_t frame = std::min<size_t>(100'040 - out % 100'040, sent.size() - out);
      iovec part{sent.data() + out, frame};
      if (out < sent.size()) out += pair.from->write_some(&part, 1);
      in += pair.to->read_some(received.data() + in, 1 + rng() % 70'000);
      CHECK(in == 0 || EmulatedLinks::now_ns() - begin > 3 * kMs);
      CHECK(EmulatedLinks::now_ns() - begin < 20'000 * kMs);
      pair.to->wake_at(received.size() - in);
      pair.from->wake_at(1);
    }
    CHECK(received == sent);
    CHECK(EmulatedLinks::now_ns() - begin >= pair.first.duration_ns(sent.size()) + 3 * kMs);
  }
}

TEST(a_file_that_is_something_else_is_refused) {
  CHECK(error_of([&] { EmulatedLinks("/nowhere/links"); }).kind == ErrorKind::usage);
  CHECK(error_of([&] { EmulatedLinks("/proc/self/cmdline"); }).kind == ErrorKind::usage);
  CHECK(error_of([&] { EmulatedLinks::create("/tmp/unused", {0, 1e6, 0}); }).kind == ErrorKind::usage);
}

TEST(a_peer_that_sends_no_chunks_is_refused) {
  File file({2, 12.5e6, 0});
  EmulatedLinks links(file.path);
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  Fd peer(ends[1]);
  PacedChannel channel(std::make_unique<TcpChannel>(Fd(ends[0])), links, 0, 1);
  Bytes foreign(64, std::byte(0x55)), to(64);
  CHECK(send(peer.get(), foreign.data(), foreign.size(), MSG_NOSIGNAL) == 64);
  CHECK(error_of([&] { channel.read_some(to.data(), to.size()); }).kind == ErrorKind::bad_frame);
}

int main() { return test::run_all(); }
