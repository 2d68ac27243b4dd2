// Whole groups without Python, on the forked ranks of ranks.h.
#include <csignal>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "ranks.h"

using namespace paceline;
using test::all_reduce;
using test::on_ranks;
using test::run;
using test::tcp_pair;

namespace {

void check_collectives(Engine& engine, Group& g) {
  int n = g.size(), me = g.rank();
  for (size_t count : {size_t(0), size_t(1), size_t(4096), size_t(4097), size_t(300000)}) {
    std::vector<float> v(count, float(me + 1));
    run(g, all_reduce(v, ReduceOp::mean));
    for (float x : v) CHECK(x == float(n + 1) / 2);
    float* shared = static_cast<float*>(engine.arena().allocate(count * 4 + 4));
    std::fill(shared, shared + count, float(me));
    run(g, {Kind::all_reduce, DType::float32, ReduceOp::max, 0, {{shared, count}}, {{shared, count}}, {}});
    for (size_t i = 0; i < count; ++i) CHECK(shared[i] == float(n - 1));
    engine.arena().free(shared);
    std::vector<int32_t> piece(count);
    std::vector<std::vector<int32_t>> in(g.config().ranks.size(), piece), out = in;
    Request r{Kind::all_to_all, DType::int32, ReduceOp::sum, 0, {}, {}, {}};
    for (int i = 0; i < n; ++i) {
      std::fill(in[size_t(i)].begin(), in[size_t(i)].end(), me * 100 + i);
      r.inputs.push_back({in[size_t(i)].data(), count});
      r.outputs.push_back({out[size_t(i)].data(), count});
    }
    run(g, r);
    for (int i = 0; i < n; ++i)
      for (int32_t x : out[size_t(i)]) CHECK(x == i * 100 + me);
    std::vector<float> b(count, float(me));
    Request bc{Kind::broadcast, DType::float32, ReduceOp::sum, n - 1, {}, {}, {}};
    (me == n - 1 ? bc.inputs : bc.outputs).push_back({b.data(), count});
    run(g, bc);
    for (float x : b) CHECK(x == float(n - 1));
    run(g, {});
  }
}

void check_point_to_point(Engine&, Group& g) {
  int n = g.size(), me = g.rank();
  std::vector<OperationPtr> operations;
  std::vector<std::vector<double>> out(8, std::vector<double>(70000, me)), in(8, std::vector<double>(70000));
  for (uint64_t tag = 0; tag < 8; ++tag)  // received in the opposite order of tags
    operations.push_back(
        g.submit_receive((me + n - 1) % n, 7 - tag, {in[tag].data(), in[tag].size()}, DType::float64, nullptr, true));
  for (uint64_t tag = 0; tag < 8; ++tag)
    operations.push_back(g.submit_send((me + 1) % n, tag, {out[tag].data(), out[tag].size()}, DType::float64, true));
  for (auto& o : operations) g.wait(*o, 30);
  for (auto& v : in)
    for (double x : v) CHECK(x == (me + n - 1) % n);
}

// Sends that begin before the channel of two neighbours exists arrive in the order in which they were submitted. Each
// group has a channel of its own.
void check_order_of_first_messages(Engine& engine, Group& g) {
  constexpr int64_t kMessages = 40;
  for (uint64_t id = 2; id < 200; ++id) {
    Group first(std::shared_ptr<Engine>(std::shared_ptr<void>(), &engine), GroupConfig{id, 1, {0, 1}, {0, 0}, 30});
    std::vector<int64_t> values(kMessages);
    std::vector<OperationPtr> operations;
    for (int64_t i = 0; i < kMessages; ++i) {
      int64_t* value = &values[size_t(i)];
      if (g.rank() == 1) {  // the lower rank creates the channel, so only the higher one waits for it
        *value = i;
        operations.push_back(first.submit_send(0, 0, {value, 1}, DType::int64, true));
      } else {
        operations.push_back(first.submit_receive(1, 0, {value, 1}, DType::int64, nullptr, true));
      }
    }
    for (auto& operation : operations) first.wait(*operation, 30);
    for (int64_t i = 0; i < kMessages; ++i) CHECK(values[size_t(i)] == i);
    run(g, {});
  }
}

// Rank 0 answers all questions; the other ranks ask one question after the other.
void check_wait_any(Engine& engine, Group& g) {
  constexpr int kRounds = 300;
  constexpr uint64_t kQuestion = 1, kAnswer = 2;
  if (g.rank() != 0) {
    for (int64_t i = 0; i < kRounds; ++i) {
      int64_t answer = -1;
      auto receive = g.submit_receive(0, kAnswer, {&answer, 1}, DType::int64, nullptr, i % 2 == 0);
      g.wait(*g.submit_send(0, kQuestion, {&i, 1}, DType::int64, i % 3 == 0), 30);
      g.wait(*receive, 30);
      CHECK(answer == i * 10 + g.rank());
    }
    return;
  }
  size_t members = size_t(g.size());
  std::vector<int64_t> question(members), asked(members);
  std::vector<OperationPtr> posted(members);
  std::vector<Operation*> waiting;
  auto post = [&](size_t m) {
    posted[m] = g.submit_receive(int(m), kQuestion, {&question[m], 1}, DType::int64, nullptr, false);
  };
  for (size_t m = 1; m < members; ++m) post(m);
  for (;;) {
    waiting.clear();
    for (auto& p : posted)
      if (p) waiting.push_back(p.get());
    if (waiting.empty()) return;
    int ready = engine.wait_any(waiting, 30);
    CHECK(ready >= 0);
    size_t m = 1;
    while (posted[m].get() != waiting[size_t(ready)]) ++m;
    g.wait(*posted[m], 0);
    CHECK(question[m] == asked[m]);
    int64_t answer = question[m] * 10 + int64_t(m);
    g.wait(*g.submit_send(int(m), kAnswer, {&answer, 1}, DType::int64, false), 30);
    posted[m] = nullptr;
    if (++asked[m] < kRounds) post(m);
  }
}

// Small all-reduces that end without an operation, between ones in the background and on other threads. Ranks are late
// in turns, so that some must wait for longer than the looks last.
void check_short_way(Engine& engine, Group& g) {
  const int n = g.size(), me = g.rank();
  constexpr size_t kShared = 10001;
  auto* shared = static_cast<float*>(engine.arena().allocate(kShared * sizeof(float)));
  for (int round = 0; round < 300; ++round) {
    if (round % 7 == 0 && round / 7 % n == me) std::this_thread::sleep_for(std::chrono::microseconds(300));
    std::vector<float> background(64, float(me)), v(256, float(me + round));
    OperationPtr other;
    if (round % 5 == 0) other = g.submit(all_reduce(background, ReduceOp::sum), true);
    if (auto rest = g.all_reduce(all_reduce(v, ReduceOp::sum))) g.wait(*rest, 30);
    for (float x : v) CHECK(x == float(n * (n - 1) / 2 + n * round));
    std::fill(shared, shared + kShared, float(me + 2 * round));
    Request large{Kind::all_reduce, DType::float32, ReduceOp::mean, 0, {{shared, kShared}}, {{shared, kShared}}, {}};
    if (auto rest = g.all_reduce(std::move(large))) g.wait(*rest, 30);
    for (size_t i = 0; i < kShared; ++i) CHECK(shared[i] == float(n - 1) / 2 + float(2 * round));
    if (other) {
      g.wait(*other, 30);
      for (float x : background) CHECK(x == float(n * (n - 1) / 2));
    }
  }
  // Several threads: the calls pair up in any order, but each rank makes as many, with the same values.
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        std::vector<float> v(16, float(me));
        if (auto rest = g.all_reduce(all_reduce(v, ReduceOp::max))) g.wait(*rest, 30);
        right += v[15] == float(n - 1);
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(right == 3 * 200);
  std::vector<float> v(me == 0 ? 4 : 5);
  auto error = test::error_of([&] {
    if (auto rest = g.all_reduce(all_reduce(v, ReduceOp::sum))) g.wait(*rest, 30);
  });
  CHECK(error.kind == ErrorKind::collective_mismatch);
  engine.arena().free(shared);
}

// Several threads of one process wait at once; one drives, the others watch.
void check_threads(Engine&, Group& g) {
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (uint64_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int64_t i = 0; i < 200; ++i) {
        int64_t out = i * 10 + int64_t(t), in = -1;
        int peer = 1 - g.rank();
        auto receive = g.submit_receive(peer, t, {&in, 1}, DType::int64, nullptr, false);
        g.wait(*g.submit_send(peer, t, {&out, 1}, DType::int64, false), 30);
        g.wait(*receive, 30);
        right += in == out;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(right == 4 * 200);
}

}  // namespace

TEST(one_host) {
  for (int n : {1, 2, 3, 4}) on_ranks(n, n, check_collectives);
}

TEST(several_hosts) {
  on_ranks(2, 1, check_collectives);
  on_ranks(3, 1, check_collectives);
  on_ranks(4, 2, check_collectives);
  on_ranks(5, 2, check_collectives);
}

TEST(point_to_point) {
  on_ranks(2, 2, check_point_to_point);
  on_ranks(3, 1, check_point_to_point);
  on_ranks(4, 2, check_point_to_point);
}

TEST(first_messages_arrive_in_order) { on_ranks(2, 2, check_order_of_first_messages); }

TEST(wait_any_finds_every_question) {
  on_ranks(2, 2, check_wait_any);
  on_ranks(4, 4, check_wait_any);
  on_ranks(3, 1, check_wait_any);
}

TEST(several_threads_wait) {
  on_ranks(2, 2, check_threads);
  on_ranks(2, 1, check_threads);
}

TEST(small_all_reduces_take_the_short_way) {
  on_ranks(2, 2, check_short_way);
  on_ranks(3, 3, check_short_way);
  on_ranks(2, 1, check_short_way);
}

TEST(mismatch_reaches_all_ranks) {
  for (int per_host : {4, 2, 1})
    on_ranks(4, per_host, [](Engine&, Group& g) {
      std::vector<float> v(g.rank() == 2 ? 5 : 4);
      auto error = test::error_of([&] { run(g, all_reduce(v, ReduceOp::sum)); });
      CHECK(error.kind == ErrorKind::collective_mismatch);
      CHECK(std::string(error.what()).find("rank 2 called all_reduce") != std::string::npos);
      CHECK(test::error_of([&] { run(g, {}); }).kind == ErrorKind::collective_mismatch);
    });
}

TEST(death_is_detected_and_named) {
  for (int per_host : {3, 1})
    on_ranks(
        3, per_host,
        [](Engine&, Group& g) {
          std::vector<float> v(500000);
          auto error = test::error_of([&] {
            for (int i = 0; i < 1000; ++i) {
              if (g.rank() == 1 && i == 5) raise(SIGKILL);
              run(g, all_reduce(v, ReduceOp::sum));
            }
          });
          CHECK(error.kind == ErrorKind::peer_lost && error.rank == 1);
        },
        1);
}

// A rank that has finished closes both lanes. What it sent on one of them may arrive after the end of the other: only the
// end of the lane that an operation waits for makes the rank lost. Rank 1 is a pair of plain sockets here.
TEST(only_the_end_of_the_awaited_lane_is_a_loss) {
  for (Lane awaited : {Lane::collective, Lane::point_to_point}) {
    auto engine = std::make_shared<Engine>(EngineConfig{0, 1, 30, 20, 20});
    Group group(engine, GroupConfig{1, 1, {0, 1}, {0, 1}, 30});
    int sockets[2][2];
    for (Lane lane : {Lane::collective, Lane::point_to_point}) {
      tcp_pair(sockets[int(lane)]);
      group.add_channel(1, lane, Fd(sockets[int(lane)][0]));
    }
    int64_t value = 0;
    bool is_barrier = awaited == Lane::collective;
    auto operation =
        is_barrier ? group.submit({}, false) : group.submit_receive(1, 0, {&value, 1}, DType::int64, nullptr, false);
    close(sockets[1 - int(awaited)][1]);
    CHECK(!engine->wait(*operation, 0.3));  // several inspections
    CHECK(!group.failed());
    close(sockets[int(awaited)][1]);
    auto error = test::error_of([&] { group.wait(*operation, 10); });
    CHECK(error.kind == ErrorKind::peer_lost && error.rank == 1);
  }
}

// The loop of a server closes connections while other workers wait for it. Rank 1 is plain sockets that stay open.
TEST(closing_a_group_does_not_wait_for_the_other_ends) {
  auto engine = std::make_shared<Engine>(EngineConfig{0, 1, 30, 20, 20});
  std::vector<int> others;
  double began = now_s();
  for (uint64_t id = 1; id <= 20; ++id) {
    auto group = std::make_shared<Group>(engine, GroupConfig{id, 1, {0, 1}, {0, 1}, 30});
    int sockets[2];
    tcp_pair(sockets);
    group->add_channel(1, Lane::point_to_point, Fd(sockets[0]));
    others.push_back(sockets[1]);
    int64_t value = int64_t(id);
    group->submit_send(1, 0, {&value, 1}, DType::int64, false);
    group->close();
  }
  CHECK(now_s() - began < 10);  // a second for each of them would be twice as long
  for (int other : others) {    // what was sent arrives all the same, and then the end
    char frame[kFrameHeaderBytes + sizeof(int64_t)];
    CHECK(recv(other, frame, sizeof frame, MSG_WAITALL) == ssize_t(sizeof frame));
    CHECK(recv(other, frame, 1, 0) == 0);
    close(other);
  }
}

int main() { return test::run_all(); }
