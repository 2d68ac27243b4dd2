#include "paceline/collectives/named.h"

#include <algorithm>
#include <cstring>

#include "paceline/base/clock.h"
#include "paceline/collectives/group.h"

namespace paceline {
namespace {
constexpr uint64_t kMaxCalls = 1 << 20;                          // in the queue of one member
constexpr uint64_t kMaxBytes = 1ull << 46;                       // of a result
constexpr double kFirstPause_s = 0.001, kLongestPause_s = 0.05;  // between two exchanges of queues, between hosts

bool has_free_rows(Kind kind) { return kind == Kind::all_gather || kind == Kind::all_to_all; }

uint64_t row_elements(const Descriptor& d) {
  uint64_t rows = d.ndim ? uint64_t(d.shape[0]) : 1;
  return rows ? d.count / rows : 0;
}

// Whether two calls of one name and kind can run as one operation.
bool are_alike(const Descriptor& a, const Descriptor& b) {
  if (a.kind == Kind::barrier || a.kind == Kind::join) return true;
  if (a.dtype != b.dtype || a.ndim != b.ndim || a.detail != b.detail) return false;
  if (is_reducing(a.kind) && a.op != b.op) return false;
  if (is_rooted(a.kind) && a.root != b.root) return false;
  if (!has_free_rows(a.kind)) return a.count == b.count && std::equal(a.shape, a.shape + kMaxShownDims, b.shape);
  bool has_rows = a.count && b.count;
  return std::equal(a.shape + 1, a.shape + kMaxShownDims, b.shape + 1) &&
         (!has_rows || row_elements(a) == row_elements(b));
}

bool is_same_call(const Descriptor& a, const Descriptor& b) { return a.name == b.name && a.kind == b.kind; }

bool has_joined(const std::vector<Descriptor>& list) {
  return std::any_of(list.begin(), list.end(), [](auto& d) { return d.kind == Kind::join; });
}

const Descriptor* find_name(const std::vector<Descriptor>& list, uint64_t name) {
  for (auto& d : list)
    if (d.name == name && d.kind != Kind::join) return &d;
  return nullptr;
}

std::string bytes_of(const std::vector<Descriptor>& calls) {
  return std::string(reinterpret_cast<const char*>(calls.data()), calls.size() * sizeof(Descriptor));
}
}  // namespace

uint64_t hash_of(const std::string& name) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3;
  return hash ? hash : 1;
}

NamedOperation::NamedOperation(Start start, std::shared_ptr<NamedCall> call)
    : Operation(std::move(start), [call] { return to_text(*call); }), call(call) {}

std::string to_text(const NamedCall& call) {
  if (call.shown.kind == Kind::join) return "join";
  return to_text(call.shown) + " named '" + call.label + "'";
}

OperationError named_mismatch(const std::string& label, const Descriptor& a, int rank_a, const Descriptor& b,
                              int rank_b) {
  auto show = [](Descriptor d) {
    std::string text = to_text(d);
    size_t number = text.find(" #"), end = text.find(' ', number + 1);
    return text.substr(0, number) + (end == std::string::npos ? "" : text.substr(end));
  };
  std::string why = show(a) == show(b) ? ", with other scale factors" : "";
  return OperationError(ErrorKind::collective_mismatch,
                        "ranks disagree about '" + label + "': rank " + std::to_string(rank_a) + " called " + show(a) +
                            ", rank " + std::to_string(rank_b) + " called " + show(b) + why +
                            ". Every rank must pass a tensor of the same shape and dtype under one name. Only this "
                            "operation has ended.");
}

Turn judge(const std::vector<Descriptor>& calls, const std::vector<int>& ranks, const std::string& label) {
  size_t first = calls.size();
  bool any_joined = false;
  for (size_t m = 0; m < calls.size(); ++m) {
    if (calls[m].kind == Kind::join) any_joined = true;
    else if (first == calls.size()) first = m;
    else if (!is_same_call(calls[first], calls[m])) return Turn::names_differ;
  }
  if (first == calls.size()) return Turn::all_joined;
  for (size_t m = first + 1; m < calls.size(); ++m)
    if (calls[m].kind != Kind::join && !are_alike(calls[first], calls[m]))
      throw named_mismatch(label, calls[first], ranks[first], calls[m], ranks[m]);
  return any_joined ? Turn::some_joined : Turn::agreed;
}

std::vector<Descriptor> common_calls(const CallLists& lists) {
  std::vector<Descriptor> common;
  bool any_joined = std::any_of(lists.begin(), lists.end(), has_joined);
  for (size_t m = 0; m < lists.size(); ++m)
    for (auto& d : lists[m]) {
      if (d.kind == Kind::join) continue;
      bool in_all = std::all_of(lists.begin(), lists.end(), [&](auto& list) {
        return has_joined(list) || std::any_of(list.begin(), list.end(), [&](auto& e) { return is_same_call(d, e); });
      });
      bool is_known = std::any_of(common.begin(), common.end(), [&](auto& e) { return is_same_call(d, e); });
      if (!in_all || is_known) continue;
      common.push_back(d);
      if (any_joined) return common;
    }
  if (!common.empty() || !std::all_of(lists.begin(), lists.end(), has_joined)) return common;
  Descriptor join;
  join.kind = Kind::join;
  return {join};
}

// Waits until the operation is the first in the group's queue.
class Group::FirstInQueue final : public Wait {
 public:
  FirstInQueue(Group& group, const NamedCall& call) : group_(group), call_(call) {}
  bool ready() override { return group_.collectives_.front().get() == call_.operation; }
  void blockers(std::vector<int>&) const override {}

 private:
  Group& group_;
  const NamedCall& call_;
};

// Waits until a member may have submitted an operation since the queues were exchanged.
class Group::NewSubmission final : public Wait {
 public:
  NewSubmission(Group& group, const std::vector<uint64_t>& seen, std::vector<int> waits_for, double pause_s)
      : group_(group), seen_(seen), waits_for_(std::move(waits_for)), until_s_(now_s() + pause_s) {}
  bool ready() override {
    if (group_.num_submitted_ > seen_[size_t(group_.me_)]) {
      if (group_.team_) group_.team_->post(&Block::submitted, group_.num_submitted_);
      return true;
    }
    for (size_t i = 0; group_.team_ && i < group_.local_.size(); ++i)
      if (group_.team_->block(int(i)).submitted.value.load(std::memory_order_acquire) > seen_[size_t(group_.local_[i])])
        return true;
    return group_.spans_hosts() && now_s() > until_s_;
  }
  void blockers(std::vector<int>& ranks) const override {
    ranks.insert(ranks.end(), waits_for_.begin(), waits_for_.end());
  }

 private:
  Group& group_;
  const std::vector<uint64_t>& seen_;
  const std::vector<int> waits_for_;
  const double until_s_;
};

NamedCall& Group::named_call(size_t index) const { return *static_cast<NamedOperation&>(*collectives_[index]).call; }

OperationPtr Group::submit_named(std::shared_ptr<NamedCall> call, bool background) {
  if (order_.exchange(2) == 1) throw Error(ErrorKind::usage, "this group runs operations in order, not by name");
  call->shown = describe(call->request, 0);
  call->shown.detail = call->detail;
  if (call->request.kind == Kind::join) call->shown.count = uint64_t(now_s() * 1e6);  // the last one is found by it
  else call->shown.name = hash_of(call->label);
  auto operation = std::make_shared<NamedOperation>([this, call] { return run_named(call); }, call);
  call->operation = operation.get();
  return enqueue(operation, OperationKind::collective, background);
}

Task Group::run_named(std::shared_ptr<NamedCall> call) {
  const bool joins = call->request.kind == Kind::join;
  for (;;) {
    if (call->refusal) std::rethrow_exception(call->refusal);
    call->shown.number = ++number_;
    std::vector<Descriptor> calls;
    std::vector<uint64_t> sizes;
    Team::Context c{call->request, call->shown, call->request.op == ReduceOp::mean ? size_t(size()) : 1};
    c.takes_any_size = call->takes_any_size;
    const bool in_team = team_ && !spans_hosts();
    if (in_team) co_await team_->meet(c, calls);
    else co_await gather_calls(*call, calls, sizes);
    Turn turn = judge(calls, config_.ranks, call->label);
    if (turn == Turn::agreed) co_return co_await run_agreed(*call, in_team ? &c : nullptr, sizes);
    if (turn == Turn::all_joined) {
      auto last = std::max_element(calls.begin(), calls.end(), [](auto& a, auto& b) { return a.count < b.count; });
      call->last_joined = int(last - calls.begin());
      co_return;
    }
    if (turn == Turn::some_joined) {
      auto active = std::find_if(calls.begin(), calls.end(), [](auto& d) { return d.kind != Kind::join; });
      co_await run_with_joined(*call, *active);
      if (!joins) co_return;
      // Operations that were submitted before the join go first.
      std::rotate(collectives_.begin(), collectives_.begin() + 1, collectives_.end());
    } else {
      co_await negotiate(*call);
    }
    FirstInQueue is_first(*this, *call);
    co_await park(is_first);
    call->operation->restart_clock();
  }
}

// Runs an operation that all members have posted alike.
Task Group::run_agreed(NamedCall& call, Team::Context* c, const std::vector<uint64_t>& sizes) {
  Request& r = call.request;
  if (call.takes_any_size) {
    uint64_t total = 0;
    for (int m = 0; m < size(); ++m) {
      call.counts.push_back(c ? team_->given_by(*c, m) : sizes[size_t(m)]);
      total += call.counts.back();
      if (total > kMaxBytes / r.element_bytes())
        throw Error(ErrorKind::bad_frame, "rank " + std::to_string(global_rank(m)) + " gives more than fits in memory");
    }
    call.output.reset(new std::byte[std::max<uint64_t>(1, total * r.element_bytes())]);
    std::byte* at = call.output.get();
    for (uint64_t count : call.counts) r.outputs.push_back({at, count}), at += count * r.element_bytes();
  }
  if (c) {
    team_->resolve(*c);
    co_return co_await team_->run_resolved(*c);
  }
  call.shown.number = ++number_;
  co_await run(std::shared_ptr<Request>(std::shared_ptr<void>(), &r), call.shown);
}

// Runs an operation of the members that have not joined; the others take part with zeros.
Task Group::run_with_joined(NamedCall& call, const Descriptor& active) {
  const bool joins = call.request.kind == Kind::join;
  if (active.kind != Kind::all_reduce && active.kind != Kind::barrier) {
    if (joins) co_return;
    throw OperationError(ErrorKind::collective_mismatch,
                         "'" + call.label + "' (" + name_of(active.kind) +
                             ") cannot run: a rank has joined, and only all-reduce and barrier are "
                             "defined for ranks without data. Only this operation has ended.");
  }
  auto request = std::make_shared<Request>();
  std::vector<std::byte> zeros;
  if (joins) {
    request->kind = active.kind;
    request->dtype = active.dtype;
    request->op = active.op;
    if (active.count > kMaxBytes / size_of(active.dtype)) throw Error(ErrorKind::bad_frame, "a tensor is too large");
    zeros.resize(active.count * size_of(active.dtype));
    request->shape.assign(active.shape, active.shape + std::min<int>(active.ndim, kMaxShownDims));
    request->shape.resize(active.ndim);
    if (active.kind == Kind::all_reduce) {
      request->inputs.push_back({zeros.data(), active.count});
      request->outputs = request->inputs;
    }
  } else {
    *request = call.request;
  }
  Descriptor shown = describe(*request, ++number_);
  co_await run(request, shown);
}

// Between hosts: the calls of all members, and the sizes that they give to this one.
Task Group::gather_calls(NamedCall& call, std::vector<Descriptor>& calls, std::vector<uint64_t>& sizes) {
  const size_t n = size_t(size());
  std::string mine(reinterpret_cast<const char*>(&call.shown), sizeof(Descriptor));
  for (size_t m = 0; m < n; ++m) {
    auto& inputs = call.request.inputs;
    uint64_t gives = inputs.empty() ? 0 : inputs[inputs.size() == n ? m : 0].count;
    mine.append(reinterpret_cast<const char*>(&gives), sizeof gives);
  }
  std::vector<std::string> all(n, std::string(mine.size(), 0));
  co_await gather_bytes(mine, all);
  for (auto& one : all) {
    std::memcpy(&calls.emplace_back(), one.data(), sizeof(Descriptor));
    std::memcpy(&sizes.emplace_back(), one.data() + sizeof(Descriptor) + size_t(me_) * sizeof(uint64_t),
                sizeof(uint64_t));
  }
}

// An all-gather of bytes; `all` has strings of the right sizes.
Task Group::gather_bytes(const std::string& mine, std::vector<std::string>& all) {
  auto request = std::make_shared<Request>();
  request->kind = Kind::all_gather;
  request->inputs.push_back({const_cast<char*>(mine.data()), mine.size()});
  for (auto& one : all) request->outputs.push_back({one.data(), one.size()});
  Descriptor shown = describe(*request, ++number_);
  co_await run(request, shown);
}

// The members exchange their queues until they find operations that all of them have; these move to the front.
Task Group::negotiate(NamedCall& front) {
  for (double pause_s = kFirstPause_s;; pause_s = std::min(2 * pause_s, kLongestPause_s)) {
    std::vector<Descriptor> mine;
    for (size_t i = 0; i < collectives_.size(); ++i) mine.push_back(named_call(i).shown);
    uint64_t head[2] = {mine.size(), num_submitted_};
    std::string mine_head(reinterpret_cast<const char*>(head), sizeof head);
    std::vector<std::string> heads(size_t(size()), std::string(sizeof head, 0)), bodies;
    co_await gather_bytes(mine_head, heads);
    std::vector<uint64_t> seen;
    for (int m = 0; m < size(); ++m) {
      std::memcpy(head, heads[size_t(m)].data(), sizeof head);
      if (head[0] > kMaxCalls)
        throw Error(ErrorKind::bad_frame, "rank " + std::to_string(global_rank(m)) + " names too many operations");
      bodies.emplace_back(head[0] * sizeof(Descriptor), 0);
      seen.push_back(head[1]);
    }
    std::string mine_body = bytes_of(mine);
    co_await gather_bytes(mine_body, bodies);
    CallLists lists;
    for (auto& body : bodies) {
      auto& list = lists.emplace_back(body.size() / sizeof(Descriptor));
      std::memcpy(static_cast<void*>(list.data()), body.data(), body.size());
    }
    auto common = common_calls(lists);
    if (!common.empty()) {
      for (auto one = common.rbegin(); one != common.rend(); ++one) move_to_front(*one);
      co_return;
    }
    if (end_differing(lists)) co_return;
    std::vector<int> lacking;
    for (int m = 0; m < size(); ++m)
      if (!find_name(lists[size_t(m)], front.shown.name) && !has_joined(lists[size_t(m)]))
        lacking.push_back(global_rank(m));
    NewSubmission is_new(*this, seen, std::move(lacking), pause_s);
    co_await park(is_new);
  }
}

// Ends operations that have one name on all members, but not one kind. Returns whether there was one.
bool Group::end_differing(const CallLists& lists) {
  for (auto& d : lists[0]) {
    std::vector<const Descriptor*> same;
    for (auto& list : lists) same.push_back(find_name(list, d.name));
    if (d.kind == Kind::join || std::count(same.begin(), same.end(), nullptr)) continue;
    size_t other = 1;
    while (other < same.size() && same[other]->kind == same[0]->kind) ++other;
    if (other == same.size()) continue;
    for (size_t i = 0; i < collectives_.size(); ++i) {
      NamedCall& call = named_call(i);
      if (call.shown.name != d.name) continue;
      auto error = named_mismatch(call.label, *same[0], config_.ranks[0], *same[other], config_.ranks[other]);
      call.refusal = std::make_exception_ptr(error);
      std::rotate(collectives_.begin(), collectives_.begin() + long(i), collectives_.begin() + long(i) + 1);
      return true;
    }
  }
  return false;
}

void Group::move_to_front(const Descriptor& chosen) {
  auto move = [&](auto wanted) {
    for (size_t i = 0; i < collectives_.size(); ++i)
      if (wanted(named_call(i).shown)) {
        std::rotate(collectives_.begin(), collectives_.begin() + long(i), collectives_.begin() + long(i) + 1);
        return true;
      }
    return false;
  };
  if (!move([&](const Descriptor& d) { return is_same_call(d, chosen); }))
    move([](const Descriptor& d) { return d.kind == Kind::join; });
}

}  // namespace paceline
