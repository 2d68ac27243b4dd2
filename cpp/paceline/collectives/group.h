// A group of ranks and its operations, in this process.
//
// Collectives run one after the other in the order in which they were submitted; sends and receives run concurrently,
// each on its own. Members on this host form a TEAM and use shared memory; members on other hosts are reached through
// PORTS. If something fails permanently (a peer died, ranks disagree, the membership changed), the whole group fails:
// every pending and later operation ends with that error, and the other members are notified.
#pragma once
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "paceline/collectives/named.h"
#include "paceline/collectives/request.h"
#include "paceline/collectives/team.h"
#include "paceline/engine/engine.h"
#include "paceline/transport/encrypted_channel.h"
#include "paceline/transport/port.h"

namespace paceline {

struct RingPart;

// Collectives and point-to-point traffic have separate channels: neither can block the other.
enum class Lane : uint8_t { collective, point_to_point };

struct GroupConfig {
  uint64_t id = 0;
  uint32_t generation = 0;
  std::vector<int> ranks;  // global ranks, in group order
  std::vector<int> hosts;  // for each member the number of its host
  double timeout_s = 600;  // of one operation; infinite: long waits are normal in this group, without a warning.
                           // A peer that is silent for EngineConfig.liveness_s fails the group in any case.
  double forming_s = 0;    // how long to wait for the first neighbour of the group; 0: timeout_s
  bool is_lazy = false;    // a channel to another host is requested from the engine when it is first needed
};

constexpr int kAnySource = -1;

class Group final : public Pollable {
 public:
  // Collective: every member creates the same groups in the same order. Blocks in at most one place: if other members
  // share this host, all but the first of them wait for its descriptor (Team). If that takes longer than forming_s, the
  // constructor throws peer_timeout. The caller may try again with the same config, or not, if there is a newer
  // generation: nothing is left of the attempt.
  Group(std::shared_ptr<Engine> engine, GroupConfig config);
  ~Group();

  int rank() const { return me_; }
  int size() const { return int(config_.ranks.size()); }
  int global_rank(int member) const { return config_.ranks[size_t(member)]; }
  const GroupConfig& config() const { return config_; }
  Engine& engine() const { return *engine_; }
  bool spans_hosts() const { return leaders_.size() > 1; }
  bool is_local(int member) const { return config_.hosts[size_t(member)] == config_.hosts[size_t(me_)]; }

  // A connected, authenticated socket to a member on another host; with keys, its bytes are encrypted.
  void add_channel(int member, Lane lane, Fd socket, const LinkKeys* keys = nullptr);

  OperationPtr submit(Request request, bool background);
  // An all-reduce for which the caller waits at once. If it is small or in engine memory, nothing else is in flight and
  // the other members are there, it ends here, without an operation (null); otherwise the operation is returned.
  OperationPtr all_reduce(Request request);
  // Members may submit named operations in any order (named.h). A group has either these or the ones in order.
  OperationPtr submit_named(std::shared_ptr<NamedCall> call, bool background);
  OperationPtr submit_send(int member, uint64_t tag, Part part, DType dtype, bool background);
  // member may be kAnySource; `source` receives the group rank of the sender.
  OperationPtr submit_receive(int member, uint64_t tag, Part part, DType dtype, std::shared_ptr<int> source,
                              bool background);
  void wait(Operation& operation, double timeout_s);

  // Ends all pending and later operations with this error, here and on all members. Any thread.
  void fail(ErrorKind kind, const std::string& text, int rank);
  // Ends them on this rank only: other ranks may still read what this rank has sent. Any thread.
  void close();
  bool failed();

  // Pollable, driver only.
  bool poll() override;
  void before_sleep() override;
  bool awaits_rest() const override;
  void inspect(double now) override;
  void beat(double now) override;
  void close_after_fork() override;
  bool is_on_sockets() const override { return !team_ && size() > 1; }

 private:
  friend class Exchange;
  struct PostedReceive {
    int member;
    uint64_t tag;
    DType dtype;
    Message message;
    std::shared_ptr<int> source;
    Port* port = nullptr;  // set when matched
  };
  struct Announced {
    Port* port;
    FrameHeader header;
    std::string eager_data;
  };
  using Posted = std::shared_ptr<PostedReceive>;
  class LocalPortOpen;
  class Flushed;
  class FlushedOrLost;
  class Matched;

  enum class OperationKind : uint8_t { collective, send, receive };
  OperationPtr enqueue(OperationPtr operation, OperationKind kind, bool background);
  void take_inbox();
  void rest_until_woken();                  // driver only
  bool advance_collectives();               // driver only
  bool advance_transfers();                 // driver only
  void push_out();                          // driver only: starts submitted operations, without reading what arrives
  void notify_members(const Error& error);  // driver only
  void fail_now(std::exception_ptr error);  // driver only
  void end_operations(std::exception_ptr error);  // driver only
  void check_waiting(Operation& operation, Lane lane, double now);
  void require_alive(int rank, const Operation& operation, Lane lane, double now);
  std::string peer_name(int global_rank);

  Task run(std::shared_ptr<Request> request, Descriptor shown, Started started = {});
  // named.cc
  Task run_named(std::shared_ptr<NamedCall> call);
  Task run_agreed(NamedCall& call, Team::Context* context, const std::vector<uint64_t>& sizes);
  Task run_with_joined(NamedCall& call, const Descriptor& active);
  Task gather_calls(NamedCall& call, std::vector<Descriptor>& calls, std::vector<uint64_t>& sizes);
  Task gather_bytes(const std::string& mine, std::vector<std::string>& all);
  Task negotiate(NamedCall& front);
  bool end_differing(const CallLists& lists);
  void move_to_front(const Descriptor& chosen);
  NamedCall& named_call(size_t index) const;
  class FirstInQueue;
  class NewSubmission;

  Task run_spanning(const Request& request, const Descriptor& shown);
  Task reduce_spanning(const Request& request, const Descriptor& shown);
  Task broadcast_spanning(const Request& request, const Descriptor& shown);
  Task exchange_pieces(const Request& request, const Descriptor& shown);
  Task all_reduce_in_rings(const Request& request, const Descriptor& shown);
  Task run_ring(const Request& request, const Descriptor& shown, RingPart part);
  Task doubling_all_reduce(const Request& request, const Descriptor& shown, void* data, uint64_t count);
  Task send_message(int member, std::shared_ptr<Message> message, DType dtype);
  Task receive_message(Posted posted);

  Port* port(int member, Lane lane);
  std::unique_ptr<Port> make_port(int member, std::unique_ptr<Channel> channel, std::atomic<uint64_t>* sent);
  void open_port(int member, Lane lane, std::unique_ptr<Channel> channel);
  Port& local_port(int member);
  bool open_local_port(int member);
  bool fits(const PostedReceive& posted, const Announced& announced) const;
  bool try_match(const Posted& posted);
  void accept(const Posted& posted, const Announced& announced);
  void on_announce(Port& port, const FrameHeader& header, std::string eager_data);
  int member_of(int global_rank) const;
  int team_index(int member) const;
  std::vector<int> ring(size_t index) const;

  std::shared_ptr<Engine> engine_;
  GroupConfig config_;
  int me_ = 0;
  std::vector<int> local_;      // group ranks on this host, in order
  std::vector<int> leaders_;    // first group rank of each host, in order of hosts' first appearance
  int my_host_ = 0;             // index into leaders_
  size_t num_rings_ = 0;        // members on the host that has the fewest
  std::unique_ptr<Team> team_;  // null when this host has one member

  std::mutex mu_;
  std::deque<std::pair<OperationPtr, OperationKind>> inbox_;                   // guarded by mu_
  std::exception_ptr failure_;                                                 // guarded by mu_
  std::vector<std::tuple<int, Lane, std::unique_ptr<Channel>>> new_channels_;  // guarded by mu_

  // Driver only.
  std::deque<OperationPtr> collectives_;
  std::list<OperationPtr> transfers_;
  std::map<std::pair<int, Lane>, std::unique_ptr<Port>> ports_;
  std::list<Posted> posted_;
  std::list<Announced> announced_;
  uint64_t number_ = 0;
  uint64_t num_submitted_ = 0;  // named operations
  double beat_s_ = 0;
  bool is_broken_ = false;  // failed, not just closed
  std::atomic<bool> has_inbox_{false};
  std::atomic<int> order_{0};  // of its collectives: 0 not known yet, 1 as submitted, 2 by name
};

}  // namespace paceline
