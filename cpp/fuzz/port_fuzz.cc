// A port that receives any stream of frames, with messages in both directions under way.
#include <deque>
#include <memory>
#include <string>

#include "input.h"
#include "paceline/base/error.h"
#include "paceline/transport/port.h"

using namespace paceline;

namespace {

constexpr uint32_t kGeneration = 1;

// Delivers a stream in pieces of this size, and takes everything that is written.
class Stream final : public Channel {
 public:
  Stream(std::vector<uint8_t> bytes, size_t piece, bool has_checksums)
      : bytes_(std::move(bytes)), piece_(piece), has_checksums_(has_checksums) {}
  size_t write_some(const iovec* parts, int num_parts) override {
    size_t sum = 0;
    for (int i = 0; i < num_parts; ++i) sum += parts[i].iov_len;
    return sum;
  }
  size_t read_some(void* to, size_t bytes) override {
    const size_t n = std::min({bytes, piece_, bytes_.size() - at_});
    if (n == 0) lost_ = true;
    else std::memcpy(to, bytes_.data() + at_, n);
    at_ += n;
    return n;
  }
  bool over_network() const override { return has_checksums_; }
  bool needs_checksum() const override { return has_checksums_; }

 private:
  std::vector<uint8_t> bytes_;
  size_t at_ = 0;
  const size_t piece_;
  const bool has_checksums_;
};

// What a group does with announcements: it grants those that it wants, now or later.
struct Receiver {
  struct Waiting {
    FrameHeader header;
    std::string eager;
  };
  std::deque<Waiting> announced;
  std::deque<std::pair<std::vector<std::byte>, Message>> granted;
  size_t eager_bytes = 0;

  void announce(Port& port, const FrameHeader& header, std::string eager) {
    eager_bytes += eager.size();
    fuzz::require(eager_bytes <= 64 * (8 << 10));  // a peer must not fill this process's memory
    announced.push_back({header, std::move(eager)});
    if (header.tag % 3) grant_first(port);
  }
  void grant_first(Port& port) {
    Waiting waiting = std::move(announced.front());
    announced.pop_front();
    eager_bytes -= waiting.eager.size();
    if (waiting.header.total_bytes > (64 << 10)) return;
    auto& [memory, message] = granted.emplace_back();
    memory.resize(waiting.header.total_bytes);
    message.data = memory.data();
    message.bytes = memory.size();
    message.tag = waiting.header.tag;
    port.grant(waiting.header, waiting.eager, &message);
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const uint8_t options = input.take(), expected = input.take(), piece = input.take();
  std::vector<uint8_t> stream = input.rest();
  if (options & 1) fuzz::repair(stream, kGeneration);
  Receiver receiver;
  std::deque<std::pair<std::vector<std::byte>, Message>> own;
  auto memory = [&](size_t bytes, uint64_t tag) {
    auto& [buffer, message] = own.emplace_back();
    buffer.resize(bytes);
    message.data = buffer.data();
    message.bytes = bytes;
    message.tag = tag;
    message.any_tag = tag % 4 == 3;
    return &message;
  };
  Port port(
      1, std::make_unique<Stream>(std::move(stream), piece + 1u, options & 2), kGeneration,
      [&](Port& p, const FrameHeader& h, std::string eager) { receiver.announce(p, h, std::move(eager)); },
      [](const FrameHeader&, std::string text) { throw Error(ErrorKind::usage, text); });
  try {
    for (int i = 0; i < (expected & 7); ++i) port.receive(memory(size_t(i) * 100 + (expected >> 3), uint64_t(i)));
    for (size_t i = 0; i < (options >> 4 & 7u); ++i) port.announce(memory(i * 3000, i), 0);
    if (options & 4) port.send(memory(5000, 1));
    port.heartbeat();
    while (port.pump())
      if (!receiver.announced.empty()) receiver.grant_first(port);
  } catch (const Error& e) {
    fuzz::require(e.kind == ErrorKind::bad_frame || e.kind == ErrorKind::usage);
    port.forget();
    port.abort(uint64_t(e.kind), 0, e.what());
  }
  port.flush();
  return 0;
}
