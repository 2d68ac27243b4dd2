// The engine of one process: it drives operations, sleeps when nothing moves, detects peers that died or are
// stopped, and owns what all groups share (engine memory, links to the neighbours on this host).
//
// Threads. At any moment at most one thread is the DRIVER (holder of drive_mu_): only the driver resumes fibers and
// touches driver-only state. A thread that blocks on an operation becomes the driver itself if there is no driver,
// or if it is the progress thread: a blocking call then costs no thread switch. If another blocked thread drives, the
// thread WATCHES: it sleeps until the driver has finished an operation or stops driving. The progress thread is for
// operations IN THE BACKGROUND: it is woken when such an operation is pending and no thread drives, and it stops
// driving when another thread wants to. It also drives the other operations, but only when it moves the heartbeat, a
// few times a second: the callers of those operations are about to wait for them, and to drive.
//
// Waiting. The driver polls. If nothing moves it spins briefly, then yields the core, then announces that it sleeps
// and blocks in epoll on its doorbell and sockets. More processes than cores is normal: then it hardly spins. The
// progress thread sleeps almost at once, because no caller waits for it. The end of a peer wakes the driver like any
// other event of a socket, and is inspected at once.
//
// Many sockets. A server has a group with each of its clients, and to ask every socket in every round would take longer
// than to serve the few that have something. If there are many groups that only use sockets, a group that could not
// move RESTS: the driver asks epoll once in each round which sockets had an event, and polls the groups that do not
// rest (docs/adr/0093-many-clients.md).
//
// Neighbours join and leave during the life of an engine: each rank is linked once, killed if necessary, and forgotten
// when it is gone. Groups hold the links of their members themselves.
#pragma once
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "paceline/emulation/links.h"
#include "paceline/loop/completions.h"
#include "paceline/loop/operation.h"
#include "paceline/transport/arena.h"
#include "paceline/transport/local_link.h"
#include "paceline/transport/port.h"

namespace paceline {

struct EngineConfig {
  int rank = 0;
  int num_local = 1;       // processes of the job on this host: determines how long to spin
  double timeout_s = 600;  // an operation that takes longer fails with peer_timeout
  double liveness_s = 5;   // a peer without heartbeat for this long counts as stopped
  double warn_s = 2;       // a longer wait is logged, with the ranks it waits for
  std::string links;       // file of emulated links (emulation/links.h); "": none
  double remote_s = 0;     // liveness_s for peers on other hosts; 0: the same

  double limit_s(bool is_neighbour) const { return is_neighbour || remote_s <= 0 ? liveness_s : remote_s; }
};

// Payload that this process has sent, in bytes. Within a host it is counted once for each process that reads it.
struct Traffic {
  std::atomic<uint64_t> on_host{0}, over_network{0};
};

// An operation that has waited longer than EngineConfig.warn_s, as of the last inspection.
struct LongWait {
  std::string operation;
  double age_s = 0;
  std::vector<int> ranks;  // that it waits for
};

// A channel to another host that a group needs: the owner of the engine connects, or waits for the other rank to.
struct ChannelRequest {
  uint64_t group;
  uint32_t generation;
  int rank;
  int lane;
};

// Something that has operations to drive: a group.
class Pollable {
 public:
  virtual bool poll() = 0;               // driver: advance what can advance; true if anything did
  virtual void before_sleep() = 0;       // driver: it is about to wait for sockets
  virtual bool awaits_rest() const = 0;  // driver: whether a message has arrived in part over the network
  virtual void inspect(double now) = 0;  // driver, a few times a second: deadlines, dead peers, warnings
  virtual void beat(double now) = 0;     // driver, also while idle: send heartbeats to the other hosts
  virtual void close_after_fork() = 0;   // in a forked child: close sockets that belong to the parent
  virtual bool is_on_sockets() const { return false; }  // whether only sockets and submissions can make it move

  // While it rests it is not polled. Whatever could make it move wakes it: an event of its sockets, or a submission.
  bool rests() const { return rests_.load(std::memory_order_seq_cst); }
  void wake() { rests_.store(false, std::memory_order_seq_cst); }
  uint64_t number() const { return number_; }  // by which sockets are watched for it; unique in its engine

 protected:
  ~Pollable() = default;
  void rest() { rests_.store(true, std::memory_order_seq_cst); }

 private:
  friend class Engine;
  std::atomic<bool> rests_{false};
  uint64_t number_ = 0;
};

class Engine {
 public:
  explicit Engine(const EngineConfig& config);
  ~Engine();
  Engine(const Engine&) = delete;

  const EngineConfig& config() const { return config_; }
  Arena& arena() { return arena_; }
  Traffic& traffic() { return traffic_; }
  EmulatedLinks* emulated_links() { return emulated_links_ ? &*emulated_links_ : nullptr; }

  // Adds an authenticated Unix socket to a neighbour, at any time. Any thread.
  void add_local_peer(int rank, Fd socket);
  // Blocks until these neighbours (none named: all) have introduced themselves. Separate from adding them, so that
  // ranks cannot wait for each other in a circle. Any thread.
  void await_local_peers(double timeout_s, std::vector<int> ranks = {});
  // On a host with many processes one of them, the HUB, links to all others and then introduces each two of them to
  // each other: it sends each one end of a connected socket. So they need no handshake of their own. Blocks until all
  // descriptors have left. Any thread.
  void introduce_neighbours(double timeout_s);
  // Links to the neighbours that the hub introduces. False if some of these are still missing after this time. Throws
  // peer_lost if the hub is lost.
  bool await_introductions(int hub, const std::vector<int>& ranks, double timeout_s);
  // Kills a neighbour's process, also a stopped one, and waits until it is gone: afterwards it cannot write to shared
  // memory. False if it was gone already. Never kills another process. Any thread.
  bool end_peer(int rank);
  // Releases the resources of a neighbour that is gone; groups that still contain it see it as lost. Any thread.
  void forget_peer(int rank);
  void set_num_local(int num_local);
  std::shared_ptr<LocalLink> link(int rank);
  // Waits for a descriptor that a neighbour sent (group segment, channel).
  Fd expect(int rank, LinkKind kind, uint64_t id, uint64_t extra, uint64_t& bytes, double timeout_s);
  bool try_expect(int rank, LinkKind kind, uint64_t id, uint64_t extra, uint64_t& bytes, Fd& fd);
  // Drops descriptors that were sent for earlier generations of a group: they will not be used.
  void drop_descriptors_before(uint64_t id, uint64_t generation);
  // Keeps the ports of a closed group open until the peers have read what was sent and closed theirs, or a second has
  // passed. Does not block.
  void linger(std::vector<std::unique_ptr<Port>> ports);

  // Channels that groups need. The descriptor is readable when there are some. Any thread.
  void request_channel(const ChannelRequest& request);
  std::vector<ChannelRequest> take_channel_requests();
  int channel_requests_fd() const { return requests_bell_.get(); }

  void attach(Pollable* pollable);
  void detach(Pollable* pollable);
  // Wakes the sleeping driver, and this pollable, when the socket has an event. Any thread.
  void watch(int fd, const Pollable* owner = nullptr);
  // Whether pollables on sockets may rest. Driver only.
  bool lets_rest() const { return num_on_sockets_ > kFewOnSockets; }

  // One more operation is pending; its group has it in its inbox.
  void announce_work(const Operation& operation);
  void work_finished(const Operation& operation);
  // Wakes the progress thread to drive the operations in the background.
  void call_progress_thread();
  // After this thread has driven: the progress thread may have found no room to drive, and gone to sleep.
  void return_background() {
    if (background_.load(std::memory_order_relaxed) > 0) call_progress_thread();
  }
  // Blocks until one of these operations has finished or failed; returns the index of the first that has, or -1 after
  // the timeout.
  int wait_any(std::span<Operation* const> operations, double timeout_s) {
    return wait_any(operations, nullptr, timeout_s);
  }
  // The same until there are completions too; -1 also if there are some.
  int wait_any(std::span<Operation* const> operations, const Completions* completions, double timeout_s);
  bool wait(Operation& operation, double timeout_s) {
    Operation* one = &operation;
    return wait_any({&one, 1}, timeout_s) == 0;
  }

  // Runs f while this thread is the driver.
  template <class F>
  void as_driver(F f) {
    become_driver();
    run_as_driver(f);
    return_background();
  }
  // The same, if no other thread drives.
  template <class F>
  void as_driver_if_free(F f) {
    if (contenders_.load(std::memory_order_relaxed) == 0 && drive_mu_.try_lock()) run_as_driver(f);
  }

  // How often a thread should look for what another process is about to do before it waits properly: for some
  // microseconds, or only once if there are more processes than cores.
  int num_looks() const { return spin_s_.load(std::memory_order_relaxed) > 0 ? kLooks : 1; }

  // The operations that have waited long, and for which ranks. Any thread; does not disturb the driver.
  std::vector<LongWait> long_waits();
  // Driver, while it inspects.
  void note_long_wait(LongWait wait) { noted_waits_.push_back(std::move(wait)); }

  // Notifies the neighbours that this process exits cleanly, and waits for lingering ports to end.
  void say_goodbye();
  void receive_links();
  // A forked child must not keep the parent's sockets open: the peers would not detect the parent's death.
  // The child must not use the rest of the engine, and does not destroy it: the engine's threads do not exist there.
  void close_after_fork();
  bool in_forked_child() const { return in_forked_child_; }

 private:
  static constexpr int kLooks = 200;
  static constexpr int kFewOnSockets = 8;  // for so many, reading each socket costs no more than to ask epoll first
  static constexpr size_t kFewLinks = 16;
  // What a thread waits for: one of the operations, or a completion.
  // What an event is about: the even number of a pollable or a link, plus kProcess for the end of a link's process.
  static constexpr uint64_t kNobody = 0, kProcess = 1, kFirstNumber = 2;
  struct Goal {
    std::span<Operation* const> operations;
    const Completions* completions;
    int finished() const;  // the index of the first operation that has; -1: none
    bool is_reached() const { return finished() >= 0 || (completions && completions->has_any()); }
  };
  bool poll_all();
  void take_events(int timeout_ms);
  void add_to_epoll(int fd, uint64_t about);
  bool awaits_rest() const;
  void drive(const Goal* goal, double deadline_s);
  bool try_become_driver();
  bool watch_driver(const Goal& goal, double deadline_s);
  void wake_watchers();
  void sleep();
  void inspect_all(double now);
  void become_driver();
  template <class F>
  void run_as_driver(F f) {
    {
      std::unique_lock lock(drive_mu_, std::adopt_lock);
      f();
    }
    wake_watchers();
  }
  void run_progress_thread();
  void beat();
  std::vector<std::shared_ptr<LocalLink>> links();
  bool drop_ended_ports();
  void await_ended_ports();

  EngineConfig config_;
  Traffic traffic_;
  std::optional<EmulatedLinks> emulated_links_;
  Arena arena_;
  Segment presence_segment_;
  Presence* presence_;
  Fd doorbell_, epoll_;
  std::atomic<double> spin_s_{0};

  std::mutex drive_mu_;                                // held by the driver
  std::atomic<int> contenders_{0};                     // threads that want to drive
  std::atomic<bool> in_background_{false};             // the progress thread drives
  std::vector<Pollable*> pollables_;                   // driver only
  std::unordered_map<uint64_t, Pollable*> by_number_;  // driver only
  int num_on_sockets_ = 0;                             // driver only: pollables
  std::atomic<uint64_t> next_number_{kFirstNumber};
  double inspected_s_ = 0;             // driver only
  std::vector<LongWait> noted_waits_;  // driver only: of the current inspection
  std::atomic<int> pending_{0};        // operations that have not finished
  std::atomic<int> background_{0};     // the part of them in the background
  std::atomic<int> watchers_{0};       // threads that wait while another one drives
  std::atomic<uint32_t> events_{0};    // incremented on each event that watchers wait for

  std::mutex waits_mu_;
  std::vector<LongWait> waits_;  // guarded by waits_mu_: of the last inspection
  double waits_s_ = 0;           // guarded by waits_mu_: time of the last inspection

  std::mutex links_mu_;
  std::map<int, std::shared_ptr<LocalLink>> links_;                        // guarded by links_mu_
  std::unordered_map<uint64_t, std::weak_ptr<LocalLink>> link_by_number_;  // guarded by links_mu_
  bool has_many_links();
  void note_news(uint64_t number);
  struct ReceivedDescriptor {
    int rank;
    LinkMessage message;
    Fd fd;
  };
  std::mutex received_mu_;
  std::vector<ReceivedDescriptor> received_;    // guarded by received_mu_
  std::vector<ReceivedDescriptor> introduced_;  // guarded by received_mu_: sockets to neighbours; `id` is the rank
  struct LingeringPort {
    double until_s;
    std::unique_ptr<Port> port;
  };
  std::mutex lingering_mu_;
  std::vector<LingeringPort> lingering_;  // guarded by lingering_mu_

  Fd requests_bell_;
  std::mutex requests_mu_;
  std::vector<ChannelRequest> requests_;  // guarded by requests_mu_

  std::mutex thread_mu_;
  std::condition_variable thread_cv_;
  bool stopping_ = false;  // guarded by thread_mu_
  bool wanted_ = false;    // guarded by thread_mu_: operations are pending and no thread drives
  std::thread thread_;
  bool in_forked_child_ = false;
};

}  // namespace paceline
