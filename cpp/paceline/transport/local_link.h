// The connection between two processes of one host: a Unix socket that carries file descriptors, shows at once
// that the peer died, and gives each side the other's PRESENCE page and doorbell.
//
// The socket is authenticated already. Messages have a fixed size and may carry a segment's descriptor. The first
// message of each side carries its credentials, which the kernel verifies: so the peer's PROCESS is known too, and
// can be killed when it must no longer touch shared memory.
//
// A peer that is gone may be FORGOTTEN: its descriptors and mappings are released at once, and the link only records
// that it was lost. Memory of the peer that is still referenced (find) stays mapped.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "paceline/transport/arena.h"
#include "paceline/transport/neighbour.h"
#include "paceline/transport/segment.h"

namespace paceline {

// One page per process, mapped by all of its neighbours.
struct Presence {
  std::atomic<uint64_t> heartbeat;  // moves several times a second while the process can run
  std::atomic<uint32_t> sleeping;   // the process waits at its doorbell: ring after a change
  int32_t pid;
};

// `neighbour`: a connected socket to another process of the host, from a process that both are linked to.
enum class LinkKind : uint32_t { presence = 1, segment, segment_gone, group, channel, goodbye, neighbour };

struct LinkMessage {
  uint32_t magic = 0;
  LinkKind kind{};
  uint64_t id = 0;
  uint64_t bytes = 0;
  uint64_t extra = 0;
};

class LocalLink {
 public:
  // Receives descriptors that the peer sent for a group, or of a socket (group, channel and neighbour messages).
  using Deliver = std::function<void(int peer, const LinkMessage&, Fd)>;

  // Gets the descriptor that becomes readable when the peer's process ends.
  using OnProcess = std::function<void(int fd)>;

  LocalLink(int peer, Fd socket, Deliver deliver, OnProcess on_process);

  // Sends this side's page and doorbell to the peer; once, before anything else.
  void introduce(const Segment& presence, int doorbell);
  void send(LinkMessage message, std::vector<int> fds = {});
  // Reads what has arrived. Never blocks.
  void receive();
  // The same if its socket, or the peer's process, had an event since the last time, or something is left to send.
  void receive_news() {
    if (has_news_.exchange(false, std::memory_order_seq_cst)) receive();
  }
  void note_news() { has_news_.store(true, std::memory_order_seq_cst); }
  // True when everything sent has left this process.
  bool flushed();

  // The peer's tensor, or null when its segment is unknown or the range is outside of it.
  std::byte* resolve(const Location& where, size_t bytes);
  // The peer's segment that contains it, mapped for as long as it is referenced, whatever the peer does.
  std::shared_ptr<Segment> find(const Location& where, size_t bytes);

  void ring_if_sleeping();
  // Seconds since the peer's heartbeat last moved, as far as this side has checked.
  double silent_s(double now);

  int peer() const { return peer_; }
  int socket() const { return socket_.get(); }
  void close_after_fork() { socket_.reset(); }
  int pid() const { return pid_.load(std::memory_order_relaxed); }  // -1 until the peer has introduced itself
  bool present() const { return present_.load(std::memory_order_acquire); }

  // Kills the peer's process; false if it had ended before. Any thread.
  bool kill_process(double timeout_s);
  // Releases all resources of the peer. Driver only: no operation may be about to use its memory.
  void forget();
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  bool left() const { return left_.load(std::memory_order_acquire); }

 private:
  void flush_locked();
  void receive_locked();
  void handle(const LinkMessage& message, std::vector<Fd> fds, int sender);
  void mark_lost();

  int peer_;
  Fd socket_;  // closed under mu_
  Deliver deliver_;
  OnProcess on_process_;
  std::mutex mu_;
  std::deque<std::pair<LinkMessage, std::vector<Fd>>> outgoing_;  // guarded by mu_
  std::map<uint64_t, std::shared_ptr<Segment>> segments_;         // guarded by mu_
  Neighbour process_;                                             // guarded by mu_
  // Written under mu_ before present_, and by the driver in forget(); read by the driver.
  Segment presence_segment_;
  Presence* presence_ = nullptr;
  Fd doorbell_;
  std::atomic<bool> present_{false}, lost_{false}, left_{false}, has_news_{true};
  std::atomic<int> pid_{-1};
  uint64_t last_beat_ = 0;             // driver only
  double beat_s_ = 0, sampled_s_ = 0;  // driver only
};

}  // namespace paceline
