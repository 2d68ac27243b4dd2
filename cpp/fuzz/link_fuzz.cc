// A neighbour on this host that sends anything over its link, with any descriptors.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "input.h"
#include "paceline/transport/local_link.h"

using namespace paceline;

namespace {

constexpr uint32_t kMagic = 0x4b4c4350;
constexpr size_t kPage = 4096;

struct Descriptors {
  Segment page = Segment::create("fuzz-page", kPage), small = Segment::create("fuzz-small", 5);
  Fd unsealed = Fd(memfd_create("fuzz-unsealed", MFD_CLOEXEC)), null = Fd(open("/dev/null", O_RDWR | O_CLOEXEC));
  int choose(uint8_t number) const {
    const int all[] = {page.fd(), small.fd(), unsealed.get(), null.get()};
    return all[number % 4];
  }
};

void send(int socket, const void* data, size_t bytes, const std::vector<int>& fds) {
  iovec part{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(c), fds.data(), sizeof(int) * fds.size());
  }
  [[maybe_unused]] ssize_t n = sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Descriptors descriptors;
  fuzz::Input input(data, size);
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) return 0;
  Fd theirs(pair[1]);
  size_t delivered = 0;
  LocalLink link(1, Fd(pair[0]), [&](int, const LinkMessage&, Fd) { ++delivered; }, [](int) {});
  while (input.left()) {
    const uint8_t options = input.take();
    std::vector<int> fds;
    for (int i = 0; i < (options & 3); ++i) fds.push_back(descriptors.choose(input.take()));
    LinkMessage message;
    message.magic = kMagic;
    message.kind = LinkKind(options & 4 ? input.take<uint32_t>() : input.take() % 8u);
    message.id = input.take();
    const uint8_t choice = input.take();
    message.bytes = choice < 128 ? kPage : choice < 192 ? 5 : input.take<uint64_t>();
    message.extra = input.take();
    if (options & 8) {
      const auto raw = input.bytes(sizeof message);
      std::memcpy(&message, raw.data(), raw.size());
    }
    send(theirs.get(), &message, options & 16 ? input.take() % sizeof message : sizeof message, fds);
    link.receive();  // never throws: the progress thread calls it
    const uint64_t offset = input.take<uint64_t>();
    const size_t bytes = input.take<uint16_t>();
    if (const volatile std::byte* found = link.resolve({message.id, offset}, bytes))
      for (size_t i = 0; i < bytes; i += 64) (void)found[i];
    link.silent_s(1.0);
    if (link.lost()) break;
  }
  fuzz::require(delivered <= size);
  return 0;
}
