// Memory that several processes map: a sealed memfd, which is freed with its last user.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace paceline {

// A file descriptor that is closed when its owner is destroyed.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }
  void reset(int fd = -1);
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

class Segment {
 public:
  Segment() = default;
  // Reserves all pages at once: running out of memory is an Error here, never a SIGBUS later.
  static Segment create(const char* name, size_t bytes);
  // Maps a peer's segment after checking that it has that size and can no longer be shrunk.
  static Segment map(Fd fd, size_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Most systems turn large pages off for shared memory, but allow a process to ask for them once the memory is there.
  // They save up to a quarter of a large all-reduce (docs/log.md). Without them everything works as well.
  void ask_for_large_pages(size_t offset, size_t bytes);

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  Segment(Fd fd, size_t bytes);
  Fd fd_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace paceline
