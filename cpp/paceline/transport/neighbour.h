// The process at the other end of a link, held by a PIDFD: unlike a pid, it never refers to another process after
// this one has ended.
#pragma once
#include "paceline/transport/segment.h"

namespace paceline {

class Neighbour {
 public:
  Neighbour() = default;
  // `pid` is the kernel's value for the sender of a message on `socket`. It is opened only if the socket is still
  // open at the other end afterwards: then the process has existed all the time, and the pid is its own.
  static Neighbour open(int pid, int socket);

  explicit operator bool() const { return bool(fd_); }
  int fd() const { return fd_.get(); }  // readable once the process has ended
  bool has_ended() const;
  // Kills the process, also a stopped one, and waits until it is gone; false if it was gone before. If the kernel
  // cannot end the process in this time (the machine thrashes, a debugger or a freezer holds it), the process
  // nevertheless runs no more instructions.
  bool end(double timeout_s);
  Neighbour again() const;  // a second reference to the same process
  void reset() { fd_.reset(); }

 private:
  explicit Neighbour(Fd fd) : fd_(std::move(fd)) {}
  bool ends_within(double timeout_s) const;
  Fd fd_;
};

}  // namespace paceline
