// The process at the other end of a link, held by a PIDFD: unlike a number, it never comes to mean another
// process when that one has ended.
#pragma once
#include "paceline/transport/segment.h"

namespace paceline {

class Neighbour {
 public:
  Neighbour() = default;
  // `pid` is what the kernel said about the sender of a message on `socket`. It is opened only if the socket
  // is still open at the other end afterwards: then its process was there all the time, and the number its own.
  static Neighbour open(int pid, int socket);

  explicit operator bool() const { return bool(fd_); }
  int fd() const { return fd_.get(); }  // readable once the process has ended
  bool has_ended() const;
  // Ends the process, also one that is stopped, and waits until it is gone; false when it was gone before.
  // One that the kernel cannot take down in this time (its machine thrashes, a debugger or a freezer holds it)
  // runs no instruction of its own any more either.
  bool end(double timeout_s);
  Neighbour again() const;  // a second hold on the same process
  void reset() { fd_.reset(); }

 private:
  explicit Neighbour(Fd fd) : fd_(std::move(fd)) {}
  bool ends_within(double timeout_s) const;
  Fd fd_;
};

}  // namespace paceline
