#include "paceline/collectives/group.h"

#include <algorithm>

#include "paceline/base/error.h"
#include "paceline/emulation/paced_channel.h"
#include "paceline/reduce/kernels.h"

namespace paceline {
namespace {
std::exception_ptr make_error(ErrorKind kind, const std::string& text, int rank) {
  return std::make_exception_ptr(Error(kind, text, rank));
}

// The error that the other members get for a failure on this rank.
Error as_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return e;
  } catch (const std::exception& e) {
    return Error(ErrorKind::usage, e.what());
  }
}

[[noreturn]] void raise_abort(const FrameHeader& h, std::string text) {
  uint64_t known = uint64_t(ErrorKind::shared_memory);
  throw Error(h.offset <= known ? ErrorKind(h.offset) : ErrorKind::bad_frame, text, int(int64_t(h.tag)));
}
}  // namespace

Group::Group(std::shared_ptr<Engine> engine, GroupConfig config)
    : engine_(std::move(engine)), config_(std::move(config)) {
  me_ = member_of(engine_->config().rank);
  if (me_ < 0) throw Error(ErrorKind::usage, "rank " + std::to_string(engine_->config().rank) + " is not a member");
  std::vector<int> local_ranks;
  for (int m = 0; m < size(); ++m) {
    bool first = true;
    for (int leader : leaders_) first &= config_.hosts[size_t(leader)] != config_.hosts[size_t(m)];
    if (first) leaders_.push_back(m);
    if (is_local(m)) local_.push_back(m), local_ranks.push_back(global_rank(m));
  }
  for (size_t h = 0; h < leaders_.size(); ++h)
    if (is_local(leaders_[h])) my_host_ = int(h);
  while (ring(num_rings_).size() == leaders_.size()) ++num_rings_;
  if (local_.size() > 1)
    team_ = std::make_unique<Team>(*engine_, config_.id, config_.generation, local_ranks,
                                   config_.forming_s > 0 ? config_.forming_s : config_.timeout_s);
  engine_->drop_descriptors_before(config_.id, config_.generation);
  engine_->attach(this);
}

Group::~Group() {
  if (engine_->in_forked_child()) return;
  close();
  engine_->detach(this);
  // Channels that neighbours have opened and that this rank never used.
  engine_->drop_descriptors_before(config_.id, config_.generation + 1);
  // The engine keeps the channels to other hosts until their other ends are closed, too, so this does not wait.
  std::vector<std::unique_ptr<Port>> ports;
  for (auto& [key, port] : ports_)
    if (!is_local(key.first)) ports.push_back(std::move(port));
  engine_->linger(std::move(ports));
}

int Group::member_of(int global) const {
  auto it = std::find(config_.ranks.begin(), config_.ranks.end(), global);
  return it == config_.ranks.end() ? -1 : int(it - config_.ranks.begin());
}

int Group::team_index(int member) const {
  return int(std::find(local_.begin(), local_.end(), member) - local_.begin());
}

// The members that are number `index` on their host, in the order of the hosts; fewer, if a host has no such member.
std::vector<int> Group::ring(size_t index) const {
  std::vector<int> found;
  for (int leader : leaders_) {
    size_t number = 0;
    for (int m = leader; m < size(); ++m)
      if (config_.hosts[size_t(m)] == config_.hosts[size_t(leader)] && number++ == index) found.push_back(m);
  }
  return found;
}

// ---- submission ------------------------------------------------------------------------------------

OperationPtr Group::enqueue(OperationPtr operation, OperationKind kind, bool background) {
  operation->in_background = background;
  if (engine_->in_forked_child())
    throw Error(ErrorKind::usage, "this process was forked from rank " + std::to_string(engine_->config().rank) +
                                      " and cannot use its groups. Use them in the rank itself, or start ranks.");
  std::exception_ptr failure;
  {
    std::lock_guard lock(mu_);
    failure = failure_;
    if (!failure) {
      inbox_.emplace_back(operation, kind);
      has_inbox_.store(true, std::memory_order_seq_cst);
      wake();
    }
  }
  if (failure) std::rethrow_exception(failure);
  engine_->announce_work(*operation);
  // Send a small message at once: no thread has to wake up for it.
  if (kind == OperationKind::send) engine_->as_driver_if_free([this] { push_out(); });
  if (background && !operation->finished()) engine_->call_progress_thread();
  return operation;
}

OperationPtr Group::submit(Request request, bool background) {
  if (order_.exchange(1) == 2) throw Error(ErrorKind::usage, "this group runs operations by name: each needs one");
  auto r = std::make_shared<Request>(std::move(request));
  if (spans_hosts())  // on the caller's thread: the progress thread must send heartbeats in the meantime
    for (const auto* parts : {&r->inputs, &r->outputs})
      for (const Part& part : *parts) engine_->arena().use_large_pages(part.data, part.count * r->element_bytes());
  auto shown = std::make_shared<Descriptor>(describe(*r, 0));
  auto operation = std::make_shared<Operation>(
      [this, r, shown] {
        shown->number = ++number_;
        return run(r, *shown);
      },
      [shown] { return to_text(*shown); });
  return enqueue(operation, OperationKind::collective, background);
}

OperationPtr Group::all_reduce(Request request) {
  if (!team_ || spans_hosts() || engine_->in_forked_child()) return submit(std::move(request), false);
  if (order_.exchange(1) == 2) throw Error(ErrorKind::usage, "this group runs operations by name: each needs one");
  bool has_run = false;
  OperationPtr rest;
  std::exception_ptr error;
  engine_->as_driver_if_free([&] {
    take_inbox();
    if (failure_ || !collectives_.empty()) return;
    has_run = true;
    const Descriptor shown = describe(request, ++number_);
    try {
      Team::Context c{request, shown, request.op == ReduceOp::mean ? size_t(size()) : 1};
      Started started;
      if (team_->try_reduce(c, engine_->num_looks(), started)) return;
      // Before any operation that another thread submits from now on.
      auto r = std::make_shared<Request>(std::move(request));
      rest = std::make_shared<Operation>([this, r, shown, started] { return run(r, shown, started); },
                                         [shown] { return to_text(shown); });
      collectives_.push_back(rest);
      ++num_submitted_;
      engine_->announce_work(*rest);
    } catch (const std::exception&) {
      fail_now(error = std::current_exception());
    }
  });
  if (has_run) engine_->return_background();
  if (error) std::rethrow_exception(error);
  return has_run ? rest : submit(std::move(request), false);
}

void Group::wait(Operation& operation, double timeout_s) {
  if (!engine_->wait(operation, timeout_s))
    throw Error(ErrorKind::peer_timeout,
                operation.describe() + " has not finished after " + std::to_string(timeout_s) + " s");
  operation.rethrow();
}

Task Group::run(std::shared_ptr<Request> request, Descriptor shown, Started started) {
  const Request& r = *request;
  size_t divisor = r.op == ReduceOp::mean ? size_t(size()) : 1;
  if (spans_hosts()) {
    co_await run_spanning(r, shown);
  } else if (team_) {
    co_await team_->run(r, shown, divisor, started);
  } else {  // alone: every collective copies this rank's own part
    for (size_t i = 0; i < std::min(r.inputs.size(), r.outputs.size()); ++i)
      if (r.outputs[i].data != r.inputs[i].data)
        copy(r.outputs[i].data, r.inputs[i].data, r.inputs[i].count * r.element_bytes(), false);
  }
}

// ---- driving ---------------------------------------------------------------------------------------

void Group::take_inbox() {
  if (!has_inbox_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(mu_);
  has_inbox_.store(false, std::memory_order_relaxed);
  for (auto& [operation, kind] : inbox_) {
    if (kind == OperationKind::collective) collectives_.push_back(operation), ++num_submitted_;
    else transfers_.push_back(operation);
  }
  inbox_.clear();
  for (auto& [member, lane, channel] : new_channels_) open_port(member, lane, std::move(channel));
  new_channels_.clear();
}

bool Group::poll() {
  take_inbox();
  if (failure_) {
    bool moved = false;
    for (auto& [key, port] : ports_) moved |= port->flush();
    return moved;
  }
  if (collectives_.empty() && transfers_.empty()) {
    rest_until_woken();
    return false;
  }
  bool moved = false;
  try {
    for (auto& [key, port] : ports_) moved |= port->pump();
    moved |= advance_collectives();
    moved |= advance_transfers();
    // Another member's failure ends the operations that can no longer complete; the others were completed above.
    if (!moved && team_ && team_->has_failure()) std::rethrow_exception(team_->published_failure());
  } catch (const std::exception&) {
    fail_now(std::current_exception());
    moved = true;
  }
  if (!moved) rest_until_woken();
  return moved;
}

// Its sockets are drained: the next event of one of them wakes the group, or a submission.
void Group::rest_until_woken() {
  if (!is_on_sockets() || !engine_->lets_rest()) return;
  before_sleep();
  rest();
  if (has_inbox_.load(std::memory_order_seq_cst)) wake();  // it was submitted before the group rested
}

void Group::before_sleep() {
  for (auto& [key, port] : ports_) port->before_sleep();
}

bool Group::awaits_rest() const {
  return std::any_of(ports_.begin(), ports_.end(), [](auto& entry) { return entry.second->awaits_rest(); });
}

bool Group::advance_collectives() {
  bool moved = false;
  while (!collectives_.empty()) {
    OperationPtr operation = collectives_.front();
    if (!operation->advance()) break;
    moved = true;
    if (!operation->finished()) continue;
    // A named operation may have moved others to the front.
    collectives_.erase(std::find(collectives_.begin(), collectives_.end(), operation));
    engine_->work_finished(*operation);
    if (!operation->error()) continue;
    try {
      operation->rethrow();
    } catch (const OperationError&) {  // the same on all members: only this operation has ended
    }
  }
  return moved;
}

bool Group::advance_transfers() {
  bool moved = false;
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    moved |= (*it)->advance();
    if (!(*it)->finished()) {
      ++it;
      continue;
    }
    OperationPtr operation = *it;
    it = transfers_.erase(it);
    engine_->work_finished(*operation);
    operation->rethrow();
  }
  return moved;
}

void Group::push_out() {
  take_inbox();
  if (failure_) return;
  try {
    advance_transfers();
  } catch (const std::exception&) {
    fail_now(std::current_exception());
  }
}

void Group::fail_now(std::exception_ptr error) {
  if (failure_) return;
  is_broken_ = true;
  notify_members(as_error(error));
  end_operations(error);
}

void Group::notify_members(const Error& e) {
  if (team_) team_->publish_failure(e.kind, e.rank, e.what());
  for (auto& [key, port] : ports_) {
    port->forget();
    port->abort(uint64_t(e.kind), e.rank, e.what());
    port->flush();
  }
}

void Group::end_operations(std::exception_ptr error) {
  {
    std::lock_guard lock(mu_);
    if (failure_) return;
    failure_ = error;
  }
  take_inbox();
  for (auto& [key, port] : ports_) port->forget();
  posted_.clear();
  announced_.clear();
  auto end = [&](OperationPtr operation) {
    if (operation->finished()) return;
    operation->fail(error);
    engine_->work_finished(*operation);
  };
  while (!collectives_.empty()) {
    auto operation = collectives_.front();
    collectives_.pop_front();
    end(operation);
  }
  auto transfers = std::move(transfers_);
  transfers_.clear();
  for (auto& operation : transfers) end(operation);
}

void Group::fail(ErrorKind kind, const std::string& text, int rank) {
  engine_->as_driver([&] { fail_now(make_error(kind, text, rank)); });
}

void Group::close() {
  if (engine_->in_forked_child()) return;
  engine_->as_driver([&] { end_operations(make_error(ErrorKind::generation_changed, "the group was closed", -1)); });
}

bool Group::failed() {
  std::lock_guard lock(mu_);
  return failure_ != nullptr;
}

// ---- channels --------------------------------------------------------------------------------------

void Group::add_channel(int member, Lane lane, Fd socket, const LinkKeys* keys) {
  int fd = socket.get();
  std::unique_ptr<Channel> channel;
  if (keys) channel = std::make_unique<EncryptedChannel>(std::move(socket), *keys, global_rank(member));
  else channel = std::make_unique<TcpChannel>(std::move(socket));
  engine_->watch(fd, this);
  if (EmulatedLinks* links = engine_->emulated_links()) {
    auto paced =
        std::make_unique<PacedChannel>(std::move(channel), *links, engine_->config().rank, global_rank(member));
    engine_->watch(paced->timer(), this);
    channel = std::move(paced);
  }
  std::lock_guard lock(mu_);
  new_channels_.emplace_back(member, lane, std::move(channel));
  has_inbox_.store(true, std::memory_order_seq_cst);
  wake();
}

std::unique_ptr<Port> Group::make_port(int member, std::unique_ptr<Channel> channel, std::atomic<uint64_t>* sent) {
  return std::make_unique<Port>(
      global_rank(member), std::move(channel), config_.generation,
      [this](Port& p, const FrameHeader& h, std::string data) { on_announce(p, h, std::move(data)); }, raise_abort,
      sent);
}

void Group::open_port(int member, Lane lane, std::unique_ptr<Channel> channel) {
  auto& known = ports_[{member, lane}];
  if (known && !known->is_open()) known->open(std::move(channel));
  else known = make_port(member, std::move(channel), &engine_->traffic().over_network);
  if (!failure_ || !is_broken_) return;
  // The member has not heard of the failure: it was not connected then.
  Error e = as_error(failure_);
  known->abort(uint64_t(e.kind), e.rank, e.what());
}

Port* Group::port(int member, Lane lane) {
  auto it = ports_.find({member, lane});
  if (it != ports_.end()) return it->second.get();
  if (!config_.is_lazy || is_local(member)) return nullptr;
  engine_->request_channel({config_.id, config_.generation, global_rank(member), int(lane)});
  return (ports_[{member, lane}] = make_port(member, nullptr, &engine_->traffic().over_network)).get();
}

// The port to a neighbour for point-to-point traffic. It exists from the first message on, so that messages leave in the
// order in which they were announced; its channel comes later.
Port& Group::local_port(int member) {
  auto& known = ports_[{member, Lane::point_to_point}];
  if (!known) known = make_port(member, nullptr, &engine_->traffic().on_host);
  return *known;
}

// Opens that port; false while the channel is missing. The lower rank creates its segment when either side first needs
// it: each side calls this for every send and receive, until both have it.
bool Group::open_local_port(int member) {
  Port& port = local_port(member);
  if (port.is_open()) return true;
  int peer = global_rank(member);
  auto link = engine_->link(peer);
  if (!link) throw Error(ErrorKind::peer_lost, "rank " + std::to_string(peer) + " is gone", peer);
  bool first = engine_->config().rank < peer;
  Segment segment;
  if (first) {
    segment = Segment::create("paceline-channel", ShmChannel::segment_bytes());
    link->send({0, LinkKind::channel, config_.id, segment.bytes(), config_.generation}, {segment.fd()});
    link->ring_if_sleeping();
  } else {
    uint64_t bytes = 0;
    Fd fd;
    if (!engine_->try_expect(peer, LinkKind::channel, config_.id, config_.generation, bytes, fd)) return false;
    segment = Segment::map(std::move(fd), ShmChannel::segment_bytes());
  }
  port.open(std::make_unique<ShmChannel>(std::move(segment), first, link));
  return true;
}

}  // namespace paceline
