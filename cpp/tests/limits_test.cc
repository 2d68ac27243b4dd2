// What a peer that knows the secret can make this process keep: each has a limit, and an error that names the peer.
#include <dirent.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "paceline/collectives/group.h"
#include "paceline/transport/port.h"

using namespace paceline;

namespace {

constexpr uint32_t kGeneration = 3;
constexpr uint32_t kLinkMagic = 0x4b4c4350;

// Announces message after message, without data, and takes everything that is written.
class Announcing final : public Channel {
 public:
  explicit Announcing(size_t num_frames) : left_(num_frames * kFrameHeaderBytes) {}
  size_t write_some(const iovec* parts, int num_parts) override {
    size_t sum = 0;
    for (int i = 0; i < num_parts; ++i) sum += parts[i].iov_len;
    return sum;
  }
  size_t read_some(void* to, size_t bytes) override {
    if (left_ == 0) return 0;
    if (at_ == 0) {
      FrameHeader h;
      h.kind = FrameKind::announce;
      h.generation = kGeneration;
      h.sequence = number_;
      h.message = ++number_;
      h.total_bytes = 1 << 20;
      encode(h, frame_);
    }
    size_t n = std::min(bytes, kFrameHeaderBytes - at_);
    std::memcpy(to, frame_.data() + at_, n);
    at_ = (at_ + n) % kFrameHeaderBytes;
    left_ -= n;
    return n;
  }
  bool over_network() const override { return true; }
  bool needs_checksum() const override { return false; }

 private:
  size_t left_, at_ = 0;
  uint32_t number_ = 0;
  std::array<std::byte, kFrameHeaderBytes> frame_;
};

[[noreturn]] void raise(const FrameHeader&, std::string text) { throw Error(ErrorKind::usage, text); }

int open_descriptors() {
  int count = 0;
  DIR* d = opendir("/proc/self/fd");
  while (readdir(d)) ++count;
  closedir(d);
  return count;
}

// A neighbour that is only a socket: it sends what the test wants.
class RawNeighbour {
 public:
  RawNeighbour(Engine& engine, int rank) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    socket_ = Fd(pair[1]);
    engine.add_local_peer(rank, Fd(pair[0]));
  }
  bool send(LinkKind kind, uint64_t id, uint64_t generation) {
    LinkMessage message{kLinkMagic, kind, id, 4096, generation};
    iovec part{&message, sizeof message};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    int fd = segment_.fd();
    std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
    return sendmsg(socket_.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) == ssize_t(sizeof message);
  }

 private:
  Fd socket_;
  Segment segment_ = Segment::create("limits-test", 4096);
};

}  // namespace

TEST(announcements_without_data_have_a_limit) {
  size_t announced = 0;
  auto count = [&](Port&, const FrameHeader&, std::string) { ++announced; };
  Port within(4, std::make_unique<Announcing>(1 << 17), kGeneration, count, raise);
  while (within.pump()) {}
  CHECK(announced == 1 << 17);  // a server may leave half as many unread, and the tensors of the last one
  Port beyond(4, std::make_unique<Announcing>((1 << 17) + 1), kGeneration, count, raise);
  auto error = test::error_of([&] {
    while (beyond.pump()) {}
  });
  CHECK(error.kind == ErrorKind::bad_frame && error.rank == 4);
  CHECK(std::string(error.what()).find("rank 4: it has announced 131073 messages") != std::string::npos);
  CHECK(announced == 2 << 17);
}

TEST(granted_announcements_do_not_count) {
  std::vector<std::unique_ptr<Message>> messages;
  std::byte memory{};
  auto grant = [&](Port& port, const FrameHeader& header, std::string data) {
    auto& message = messages.emplace_back(std::make_unique<Message>());
    message->data = &memory;
    message->bytes = header.total_bytes;
    port.grant(header, data, message.get());
  };
  Port port(4, std::make_unique<Announcing>((1 << 17) + 1000), kGeneration, grant, raise);
  while (port.pump()) {}
  CHECK(messages.size() == (1 << 17) + 1000);
}

TEST(descriptors_of_a_neighbour_have_a_limit) {
  auto engine = std::make_shared<Engine>(EngineConfig{0, 2, 20, 3, 2});
  RawNeighbour neighbour(*engine, 1), other(*engine, 2);
  int before = open_descriptors();
  for (uint64_t id = 0; id < 1000 && neighbour.send(LinkKind::channel, id, 1); ++id) engine->receive_links();
  CHECK(engine->link(1)->lost() && !engine->link(2)->lost());
  CHECK(open_descriptors() - before <= 520);
  engine->forget_peer(1);
  CHECK(open_descriptors() - before <= 8);
  CHECK(other.send(LinkKind::channel, 7, 1));
  uint64_t bytes = 0;
  Fd fd;
  CHECK(engine->try_expect(2, LinkKind::channel, 7, 1, bytes, fd) && fd);
}

TEST(segments_of_a_neighbour_have_a_limit) {
  auto engine = std::make_shared<Engine>(EngineConfig{0, 2, 20, 3, 2});
  RawNeighbour neighbour(*engine, 1);
  for (uint64_t id = 1; id <= 4097 && neighbour.send(LinkKind::segment, id, 0); ++id) {
    if (id % 64 && id < 4096) continue;
    engine->receive_links();
    CHECK(engine->link(1)->lost() == (id > 4096));
  }
  CHECK(engine->link(1)->lost());
}

// A neighbour opens a channel to send something; this rank leaves the group without receiving it.
TEST(a_group_leaves_no_descriptors_of_its_neighbours) {
  auto engine = std::make_shared<Engine>(EngineConfig{0, 2, 20, 3, 2});
  RawNeighbour neighbour(*engine, 1);
  int before = open_descriptors();
  for (uint64_t id = 1; id <= 600; ++id) {
    Group group(engine, GroupConfig{id, 5, {0}, {0}, 20});
    CHECK(neighbour.send(LinkKind::channel, id, 5));
    engine->receive_links();
  }
  CHECK(!engine->link(1)->lost());
  CHECK(open_descriptors() - before <= 8);
}

int main() {
  rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 10000);  // not the limit of the kernel is tested
  setrlimit(RLIMIT_NOFILE, &files);
  return test::run_all();
}
