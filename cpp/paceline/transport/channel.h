// A byte stream to one peer, in both directions, that never blocks.
#pragma once
#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "paceline/transport/local_link.h"
#include "paceline/transport/segment.h"

namespace paceline {

class Channel {
 public:
  virtual ~Channel() = default;
  // Both return the number of bytes moved; 0 means "not now" or lost().
  virtual size_t write_some(const iovec* parts, int num_parts) = 0;
  virtual size_t read_some(void* to, size_t bytes) = 0;
  // The driver is about to sleep and needs this many bytes: fewer must not wake it.
  virtual void wake_at(size_t) {}
  virtual void close_after_fork() {}
  // Clean close: first end this direction, then drop what still arrives until the peer has ended its direction.
  virtual void end_output() {}
  virtual bool ended() { return true; }
  bool lost() const { return lost_; }              // nothing more will arrive
  bool unwritable() const { return unwritable_; }  // nothing more can be sent; something may still arrive
  // Whether bytes can be damaged on the way, so that a checksum is worth its price.
  virtual bool needs_checksum() const = 0;
  virtual bool over_network() const = 0;

 protected:
  bool lost_ = false, unwritable_ = false;
};

// A connected, authenticated TCP socket.
class TcpChannel final : public Channel {
 public:
  explicit TcpChannel(Fd socket);
  size_t write_some(const iovec* parts, int num_parts) override;
  size_t read_some(void* to, size_t bytes) override;
  void wake_at(size_t bytes) override;
  void close_after_fork() override;
  void end_output() override;
  bool ended() override;
  bool needs_checksum() const override { return true; }
  bool over_network() const override { return true; }
  int socket() const { return socket_.get(); }

 private:
  Fd socket_;
  int wakes_at_ = 1;  // bytes
};

// Two rings in shared memory, one per direction, each with one writer and one reader.
class ShmChannel final : public Channel {
 public:
  static constexpr size_t kRingBytes = 512 << 10;
  static constexpr size_t segment_bytes() { return 2 * sizeof(Ring); }

  // `first` is the side that writes into the first ring: the one with the lower rank.
  ShmChannel(Segment segment, bool first, std::shared_ptr<LocalLink> link);
  size_t write_some(const iovec* parts, int num_parts) override;
  size_t read_some(void* to, size_t bytes) override;
  bool needs_checksum() const override { return false; }
  bool over_network() const override { return false; }

 private:
  struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::byte data[kRingBytes];
  };
  Segment segment_;
  Ring* out_;
  Ring* in_;
  std::shared_ptr<LocalLink> link_;
};

}  // namespace paceline
