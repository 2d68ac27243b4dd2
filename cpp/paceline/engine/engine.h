// The engine of one process: it drives operations forward, sleeps when nothing moves, notices peers that
// die or stop, and owns what all groups share (engine memory, links to the neighbours on this host).
//
// Threads. At any moment at most one thread is the DRIVER (holder of drive_mu_): it alone resumes fibers and
// touches driver-only state. A thread that blocks on an operation becomes the driver itself when the seat is
// free or the progress thread's: a blocking call then costs no thread switch. When another blocked thread has
// the seat, it WATCHES: it sleeps until that one has finished an operation or leaves the seat. The progress
// thread is for operations IN THE BACKGROUND: it is called when such a one is pending and nobody drives, and
// gives up the seat to whoever wants it. The others it looks after as well, but only when it moves the
// heartbeat, a few times a second: their callers are about to wait, and to drive, themselves.
//
// Waiting. The driver polls; if nothing moves it spins briefly, then yields the core, then announces that it
// sleeps and blocks in epoll on its doorbell and sockets. More processes than cores is normal: then it hardly
// spins; and the progress thread, behind which nobody waits, sleeps almost at once. The end of a peer wakes it
// like any other news of a socket, and is looked into at once.
//
// Neighbours come and go during the life of an engine: each rank is linked once, ended if it must be, and
// forgotten when it is gone. Groups hold the links of their members themselves.
#pragma once
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "paceline/loop/operation.h"
#include "paceline/transport/arena.h"
#include "paceline/transport/local_link.h"
#include "paceline/transport/port.h"

namespace paceline {

struct EngineConfig {
  int rank = 0;
  int num_local = 1;         // processes of the job on this host: decides how long to spin
  double timeout_s = 600;    // an operation that takes longer fails with peer_timeout
  double liveness_s = 5;     // a peer without heartbeat for this long counts as stopped
  double warn_s = 2;         // a longer wait says on whom and for what
};

// Payload that this process has handed to others, in bytes. On a host it is counted once for each that reads it.
struct Traffic {
  std::atomic<uint64_t> on_host{0}, over_network{0};
};

// An operation that has waited longer than EngineConfig.warn_s, as it was when it was last looked at.
struct LongWait {
  std::string operation;
  double age_s = 0;
  std::vector<int> ranks;  // without whom it cannot end
};

// Something that has operations to drive: a group.
class Pollable {
 public:
  virtual bool poll() = 0;                // driver: move whatever can move; true when something did
  virtual void before_sleep() = 0;        // driver: it is about to wait for sockets
  virtual bool awaits_rest() const = 0;   // driver: whether something comes over a wire, in the midst of it
  virtual void inspect(double now) = 0;   // driver, a few times a second: deadlines, dead peers, warnings
  virtual void beat(double now) = 0;      // driver, also while idle: show the other hosts that we live
  virtual void close_after_fork() = 0;    // in a forked child: let go of sockets that belong to the parent

 protected:
  ~Pollable() = default;
};

class Engine {
 public:
  explicit Engine(const EngineConfig& config);
  ~Engine();
  Engine(const Engine&) = delete;

  const EngineConfig& config() const { return config_; }
  Arena& arena() { return arena_; }
  Traffic& traffic() { return traffic_; }

  // Takes an authenticated Unix socket to a neighbour, which may come at any time. Any thread.
  void add_local_peer(int rank, Fd socket);
  // Blocks until these neighbours (none named: all) have shown their presence. Apart from adding them, so that
  // nobody waits for one that waits for another first. Any thread.
  void await_local_peers(double timeout_s, std::vector<int> ranks = {});
  // Kills a neighbour's process, also a stopped one, and waits until it is gone: nothing of it writes to shared
  // memory afterwards. False when it was gone already. Never hits another process. Any thread.
  bool end_peer(int rank);
  // Drops what is held of a neighbour that is gone; groups that still have it find it lost. Any thread.
  void forget_peer(int rank);
  void set_num_local(int num_local);
  std::shared_ptr<LocalLink> link(int rank);
  // Waits for a descriptor that a neighbour sent (group segment, channel).
  Fd expect(int rank, LinkKind kind, uint64_t id, uint64_t extra, uint64_t& bytes, double timeout_s);
  bool try_expect(int rank, LinkKind kind, uint64_t id, uint64_t extra, uint64_t& bytes, Fd& fd);
  // Drops what was sent for earlier generations of a group: nobody is going to ask for it.
  void drop_parcels_before(uint64_t id, uint64_t generation);
  // Keeps the channels of a group that has failed until the others have read why, without blocking.
  void take_leave(std::vector<std::unique_ptr<Port>> ports);

  void attach(Pollable* pollable);
  void detach(Pollable* pollable);
  // Wakes the sleeping driver when this socket changes, or this process (a pidfd) ends.
  void watch(int fd, bool is_process = false);

  // One more operation is pending, and known to its group.
  void announce_work(const Operation& operation);
  void work_finished(const Operation& operation);
  // Sees that somebody drives what is pending in the background.
  void call_progress_thread();
  // Blocks until one of these operations has finished, well or badly; the index of the first that has, or
  // -1 when the time is over.
  int wait_any(std::span<Operation* const> operations, double timeout_s);
  bool wait(Operation& operation, double timeout_s) {
    Operation* one = &operation;
    return wait_any({&one, 1}, timeout_s) == 0;
  }

  // Runs f while this thread is the driver.
  template <class F>
  void as_driver(F f) {
    take_seat();
    run_seated(f);
    if (background_.load(std::memory_order_relaxed) > 0) call_progress_thread();
  }
  // The same if nobody else is.
  template <class F>
  void as_driver_if_free(F f) {
    if (contenders_.load(std::memory_order_relaxed) == 0 && drive_mu_.try_lock()) run_seated(f);
  }

  // What waits for long now, and for whom. Any thread; does not disturb the driver.
  std::vector<LongWait> long_waits();
  // Driver, while it inspects.
  void note_long_wait(LongWait wait) { noted_waits_.push_back(std::move(wait)); }

  // Tells the neighbours that this process leaves in good order, and lets channels that take leave end.
  void say_goodbye();
  void receive_links();
  // A forked child must not keep the parent's sockets open: the peers would not notice its death.
  // What is left there must not be used, and is not taken down: the threads that could do it are not there.
  void close_after_fork();
  bool in_forked_child() const { return in_forked_child_; }

 private:
  bool poll_all();
  bool awaits_rest() const;
  void drive(std::span<Operation* const> until, double deadline_s);
  bool try_take_seat();
  bool watch_driver(std::span<Operation* const> operations, double deadline_s);
  void wake_watchers();
  void sleep();
  void inspect_all(double now);
  void take_seat();
  template <class F>
  void run_seated(F f) {
    {
      std::unique_lock lock(drive_mu_, std::adopt_lock);
      f();
    }
    wake_watchers();
  }
  void run_progress_thread();
  void beat();
  std::vector<std::shared_ptr<LocalLink>> links();
  bool drop_ended_channels();

  EngineConfig config_;
  Traffic traffic_;
  Arena arena_;
  Segment presence_segment_;
  Presence* presence_;
  Fd doorbell_, epoll_;
  std::atomic<double> spin_s_{0};

  std::mutex drive_mu_;                  // the driver's seat
  std::atomic<int> contenders_{0};       // threads that want the seat
  std::atomic<bool> in_background_{false};  // the progress thread has the seat
  std::vector<Pollable*> pollables_;     // driver only
  double inspected_s_ = 0;               // driver only
  std::vector<LongWait> noted_waits_;    // driver only: those of the inspection under way
  std::atomic<int> pending_{0};          // operations that have not finished
  std::atomic<int> background_{0};       // those of them in the background
  std::atomic<int> watchers_{0};         // threads that wait while another one drives
  std::atomic<uint32_t> events_{0};      // moves when something has happened that watchers wait for

  std::mutex waits_mu_;
  std::vector<LongWait> waits_;  // guarded by waits_mu_: those of the last inspection
  double waits_s_ = 0;           // guarded by waits_mu_: when that was

  std::mutex links_mu_;
  std::map<int, std::shared_ptr<LocalLink>> links_;  // guarded by links_mu_
  struct Parcel {
    int rank;
    LinkMessage message;
    Fd fd;
  };
  std::mutex parcels_mu_;
  std::vector<Parcel> parcels_;  // guarded by parcels_mu_
  struct Leaving {
    double until_s;
    std::unique_ptr<Port> port;
  };
  std::mutex leaving_mu_;
  std::vector<Leaving> leaving_;  // guarded by leaving_mu_

  std::mutex thread_mu_;
  std::condition_variable thread_cv_;
  bool stopping_ = false;  // guarded by thread_mu_
  bool wanted_ = false;    // guarded by thread_mu_: pending work and nobody who drives
  std::thread thread_;
  bool in_forked_child_ = false;
};

}  // namespace paceline
