// Named operations (collectives/named.h): the rules alone, and groups that run operations in any order.
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "paceline/collectives/named.h"
#include "ranks.h"

using namespace paceline;
using test::error_of;
using test::on_ranks;

namespace {

Descriptor call(Kind kind, const std::string& name, std::vector<int64_t> shape = {4}) {
  Descriptor d;
  d.kind = kind;
  d.dtype = DType::float32;
  d.name = kind == Kind::join ? 0 : hash_of(name);
  d.ndim = uint8_t(shape.size());
  d.count = 1;
  for (size_t i = 0; i < shape.size(); ++i) d.shape[i] = shape[i], d.count *= uint64_t(shape[i]);
  return d;
}

std::vector<uint64_t> names_of(const std::vector<Descriptor>& calls) {
  std::vector<uint64_t> names;
  for (auto& d : calls) names.push_back(d.name);
  return names;
}

using Names = std::vector<uint64_t>;

OperationPtr start(Group& g, std::string name, Request request, uint32_t detail = 0) {
  auto call = std::make_shared<NamedCall>();
  call->request = std::move(request);
  call->label = std::move(name);
  call->detail = detail;
  call->takes_any_size = call->request.kind == Kind::all_gather;
  return g.submit_named(call, false);
}

OperationPtr start_sum(Group& g, const std::string& name, std::vector<float>& values) {
  return start(g, name, test::all_reduce(values, ReduceOp::sum));
}

Request of_kind(Kind kind) {
  Request request;
  request.kind = kind;
  return request;
}

int last_joined(OperationPtr& operation) { return static_cast<NamedOperation&>(*operation).call->last_joined; }

std::string refusal(Group& g, OperationPtr operation) {
  auto error = error_of([&] { g.wait(*operation, 30); });
  CHECK(error.kind == ErrorKind::collective_mismatch);
  return error.what();
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Each rank starts the same operations in another order; then all wait for them in another order again.
void check_any_order(Engine&, Group& g) {
  constexpr int kNames = 7;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<float>> values(kNames, std::vector<float>(round % 2 ? 3000 : 3));
    std::vector<OperationPtr> started(kNames);
    for (int i = 0; i < kNames; ++i) {
      size_t name = size_t((i * (g.rank() + 1) + round) % kNames);  // kNames is prime
      std::fill(values[name].begin(), values[name].end(), float(name + 1));
      started[name] = start_sum(g, "name " + std::to_string(name), values[name]);
    }
    for (int i = kNames - 1; i >= 0; --i) g.wait(*started[size_t(i)], 60);
    for (size_t name = 0; name < kNames; ++name)
      for (float x : values[name]) CHECK(x == float(name + 1) * float(g.size()));
  }
}

// Rank 0 starts an operation, passes a barrier, and then the other ranks start it.
void check_late_start(Engine&, Group& g) {
  std::vector<float> values(10, 1);
  OperationPtr early = g.rank() == 0 ? start_sum(g, "late", values) : nullptr;
  g.wait(*start(g, "barrier", of_kind(Kind::barrier)), 60);
  if (g.rank() != 0) {
    usleep(20000);
    early = start_sum(g, "late", values);
  }
  g.wait(*early, 60);
  for (float x : values) CHECK(x == float(g.size()));
}

// Another shape, another factor, another kind: one operation ends, on all ranks, and the next ones run.
void check_mismatches(Engine&, Group& g) {
  const bool is_odd = g.rank() == 1;
  std::vector<float> values(is_odd ? 5 : 4, 1), alike(4, 1), good(6, 1);
  auto wrong = start_sum(g, "wrong", values);
  auto right = start_sum(g, "right", good);
  std::string said = refusal(g, wrong);
  CHECK(has(said, "disagree about 'wrong'") && has(said, "float32[5]") && has(said, "Only this operation"));
  g.wait(*right, 60);
  CHECK(good[0] == float(g.size()));
  auto scaled = start(g, "scaled", test::all_reduce(alike, ReduceOp::sum), is_odd ? 7 : 8);
  CHECK(has(refusal(g, scaled), "with other scale factors"));
  Request other = test::all_reduce(alike, ReduceOp::sum);
  if (is_odd) other = {Kind::broadcast, DType::float32, ReduceOp::sum, 1, {{alike.data(), 4}}, {}, {4}};
  CHECK(has(refusal(g, start(g, "kinds", other)), "broadcast"));
  g.wait(*start_sum(g, "after", good), 60);
}

// Members give any number of rows, also none; every member learns how many.
void check_any_size(Engine&, Group& g) {
  std::vector<float> mine(size_t(g.rank()) * 2, float(g.rank()));
  Request request{Kind::all_gather, DType::float32, ReduceOp::sum, 0, {{mine.data(), mine.size()}}, {}, {g.rank(), 2}};
  auto operation = start(g, "rows", request);
  g.wait(*operation, 60);
  auto& done = *static_cast<NamedOperation&>(*operation).call;
  auto* at = reinterpret_cast<const float*>(done.output.get());
  for (int m = 0; m < g.size(); ++m) {
    CHECK(done.counts[size_t(m)] == uint64_t(m) * 2);
    for (int i = 0; i < m * 2; ++i) CHECK(*at++ == float(m));
  }
  Request wide{Kind::all_gather, DType::float32, ReduceOp::sum, 0, {{mine.data(), mine.size()}}, {}, {g.rank(), 2}};
  if (g.rank() == 1) wide.shape = {2, 1};
  if (g.size() > 2) CHECK(has(refusal(g, start(g, "widths", wide)), "float32[2,1]"));
}

// Rank r has r + 1 steps; then it joins. Members that have joined contribute zeros, and the last one is named.
void check_join(Engine&, Group& g) {
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (int step = 0; step <= g.rank(); ++step) {
      std::vector<float> values(5, 1);
      g.wait(*start_sum(g, "step", values), 60);
      for (float x : values) CHECK(x == float(g.size() - step));
    }
    const bool is_last = g.rank() == g.size() - 1;
    if (is_last && g.size() > 1) {
      std::vector<float> rows(2, 1);
      Request gather{Kind::all_gather, DType::float32, ReduceOp::sum, 0, {{rows.data(), 2}}, {}, {2}};
      CHECK(has(refusal(g, start(g, "rows", gather)), "a rank has joined"));
    }
    auto joined = start(g, "join", of_kind(Kind::join));
    g.wait(*joined, 60);
    CHECK(last_joined(joined) == g.size() - 1);
  }
}

void check_all(Engine& engine, Group& g) {
  check_any_order(engine, g);
  check_late_start(engine, g);
  if (g.size() > 1) check_mismatches(engine, g);
  check_any_size(engine, g);
  check_join(engine, g);
  check_any_order(engine, g);
}

}  // namespace

TEST(calls_are_judged) {
  std::vector<int> ranks = {0, 3};
  auto sum = call(Kind::all_reduce, "a");
  CHECK(judge({sum, sum}, ranks, "a") == Turn::agreed);
  CHECK(judge({sum, call(Kind::all_reduce, "b")}, ranks, "a") == Turn::names_differ);
  CHECK(judge({sum, call(Kind::broadcast, "a")}, ranks, "a") == Turn::names_differ);
  auto join = call(Kind::join, "");
  CHECK(judge({join, sum}, ranks, "a") == Turn::some_joined);
  CHECK(judge({join, join}, ranks, "a") == Turn::all_joined);
  for (auto change : std::vector<void (*)(Descriptor&)>{[](Descriptor& d) { d.dtype = DType::int32; },
                                                        [](Descriptor& d) { d.op = ReduceOp::max; },
                                                        [](Descriptor& d) { d.detail = 1; },
                                                        [](Descriptor& d) {
                                                          d.shape[0] = d.shape[1] = 2;
                                                          d.ndim = 2;
                                                        }}) {
    auto other = sum;
    change(other);
    auto error = error_of([&] { judge({sum, other}, ranks, "a"); });
    CHECK(error.kind == ErrorKind::collective_mismatch && has(error.what(), "rank 3 called"));
  }
  // A root counts only where there is one, a reduction only where values are reduced.
  auto one = call(Kind::all_reduce, "a"), two = one;
  two.root = 1;
  CHECK(judge({one, two}, ranks, "a") == Turn::agreed);
  one = call(Kind::broadcast, "a"), two = one;
  two.op = ReduceOp::max;
  CHECK(judge({one, two}, ranks, "a") == Turn::agreed);
  two.root = 1;
  CHECK(error_of([&] { judge({one, two}, ranks, "a"); }).kind == ErrorKind::collective_mismatch);
  // Rows may differ in number, not in width; a member without rows has no width.
  one = call(Kind::all_gather, "a", {3, 2});
  CHECK(judge({one, call(Kind::all_gather, "a", {0, 2})}, ranks, "a") == Turn::agreed);
  CHECK(judge({one, call(Kind::all_gather, "a", {5, 2})}, ranks, "a") == Turn::agreed);
  CHECK(error_of([&] { judge({one, call(Kind::all_gather, "a", {3, 3})}, ranks, "a"); }).kind ==
        ErrorKind::collective_mismatch);
}

TEST(common_calls_are_found_in_one_order) {
  auto a = call(Kind::all_reduce, "a"), b = call(Kind::all_reduce, "b"), c = call(Kind::all_reduce, "c");
  auto join = call(Kind::join, "");
  CHECK(names_of(common_calls({{a, b, c}, {c, b, a}})) == (Names{a.name, b.name, c.name}));
  CHECK(names_of(common_calls({{a, b}, {c, b}})) == Names{b.name});
  CHECK(common_calls({{a}, {b}}).empty());
  CHECK(common_calls({{a}, {call(Kind::broadcast, "a")}}).empty());  // another kind is another call
  // A member that has joined has every call, but then only one runs at a time.
  CHECK(names_of(common_calls({{join}, {b, a}})) == Names{b.name});
  CHECK(names_of(common_calls({{join}, {b, a}, {a}})) == Names{a.name});
  auto all_done = common_calls({{join}, {join}});
  CHECK(all_done.size() == 1 && all_done[0].kind == Kind::join);
  CHECK(common_calls({{join}, {a}, {b}}).empty());
}

TEST(names_have_hashes) { CHECK(hash_of("loss") != hash_of("Loss") && hash_of("") != 0); }

TEST(one_host) {
  for (int n : {1, 2, 3}) on_ranks(n, n, check_all);
}

TEST(several_hosts) {
  on_ranks(2, 1, check_all);
  on_ranks(4, 2, check_all);
}

TEST(a_group_has_names_or_an_order) {
  on_ranks(2, 2, [](Engine&, Group& g) {
    std::vector<float> values(3, 1);
    g.wait(*start_sum(g, "named", values), 60);
    CHECK(error_of([&] { test::run(g, {}); }).kind == ErrorKind::usage);
  });
}

int main() { return test::run_all(); }
