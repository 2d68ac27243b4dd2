#include "paceline/transport/neighbour.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "paceline/base/clock.h"

namespace paceline {

Neighbour Neighbour::open(int pid, int socket) {
  if (pid <= 0 || pid == getpid()) return {};  // of another pid namespace; or a test's two ends in one process
  Neighbour process(Fd(int(syscall(SYS_pidfd_open, pid, 0))));
  pollfd p{socket, POLLRDHUP, 0};
  if (poll(&p, 1, 0) != 0) return {};
  return process;
}

bool Neighbour::ends_within(double timeout_s) const {
  double deadline = now_s() + timeout_s;
  for (;;) {
    pollfd p{fd_.get(), POLLIN, 0};
    int n = poll(&p, 1, int(std::max(0.0, deadline - now_s()) * 1e3));
    if (n < 0 && errno == EINTR) continue;
    return n > 0;
  }
}

Neighbour Neighbour::again() const { return Neighbour(Fd(fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0))); }

bool Neighbour::has_ended() const { return fd_ && ends_within(0); }

bool Neighbour::end(double timeout_s) {
  if (!fd_ || has_ended()) return false;
  if (syscall(SYS_pidfd_send_signal, fd_.get(), SIGKILL, nullptr, 0) != 0) return false;
  ends_within(timeout_s);
  return true;
}

}  // namespace paceline
