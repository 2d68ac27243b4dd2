// A group of two hosts whose other member sends anything on both lanes.
#include <sys/socket.h>

#include <memory>

#include "input.h"
#include "paceline/base/error.h"
#include "paceline/collectives/group.h"

using namespace paceline;

namespace {

constexpr uint32_t kGeneration = 1;
constexpr size_t kMost = 64 << 10;  // fits into the buffers of a socket

// The other end of a lane, which has sent this and then ended.
Fd ended_peer(const std::vector<uint8_t>& bytes, Fd& theirs) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) throw Error(ErrorKind::usage, "no sockets");
  theirs.reset(pair[1]);
  [[maybe_unused]] ssize_t n = ::send(pair[1], bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  shutdown(pair[1], SHUT_WR);
  return Fd(pair[0]);
}

Request all_reduce(std::vector<float>& data) {
  Request r;
  r.kind = Kind::all_reduce;
  r.dtype = DType::float32;
  r.inputs = r.outputs = {{data.data(), data.size()}};
  r.shape = {int64_t(data.size())};
  return r;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto engine = std::make_shared<Engine>(EngineConfig{0, 2, 60, 30, 60});
  fuzz::Input input(data, size);
  const uint8_t options = input.take(), first = input.take();
  std::vector<uint8_t> transfers = input.bytes(std::min(kMost, options & 8 ? input.left() : input.left() / 2));
  std::vector<uint8_t> collectives = input.bytes(std::min(kMost, input.left()));
  if (options & 1) {
    fuzz::repair(transfers, kGeneration);
    fuzz::repair(collectives, kGeneration);
  }
  Group group(engine, GroupConfig{1, kGeneration, {0, 1}, {0, 1}, 60, 0});
  Fd one, other;
  group.add_channel(1, Lane::point_to_point, ended_peer(transfers, one));
  group.add_channel(1, Lane::collective, ended_peer(collectives, other));
  std::vector<std::vector<uint8_t>> received;
  std::vector<float> reduced(200);
  std::vector<OperationPtr> operations;
  auto source = std::make_shared<int>(-1);
  received.reserve(8);
  try {
    for (uint8_t i = 0; i < (first & 7); ++i) {
      auto& memory = received.emplace_back(size_t(i) * 100 + (first >> 3));
      const int from = i % 2 ? kAnySource : 1;
      operations.push_back(group.submit_receive(from, i, {memory.data(), memory.size()}, DType::uint8, source, false));
    }
    if (options & 2) operations.push_back(group.submit(all_reduce(reduced), false));
    if (options & 4)
      operations.push_back(group.submit_send(1, 1, {reduced.data(), reduced.size()}, DType::float32, false));
  } catch (const Error&) {  // the progress thread has driven the first of them, and the group has failed
  }
  engine->as_driver([&] {
    for (int i = 0; i < 200 && group.poll(); ++i)
      if (i % 8 == 0) group.inspect(now_s());
    group.inspect(now_s());
    group.poll();
  });
  group.close();
  for (auto& operation : operations) fuzz::require(operation->finished());
  return 0;
}
