// Many groups that only use sockets, which rest while nothing arrives, and many neighbours, which one introduces to
// each other.
#include <thread>

#include "check.h"
#include "ranks.h"

using namespace paceline;
using namespace test;

namespace {

constexpr int kGroups = 12;  // more than an engine reads in every round
constexpr double kPatience_s = 30;

struct Pair {
  std::shared_ptr<Engine> engine;
  std::vector<std::unique_ptr<Group>> groups;
};

// Rank 0 and rank 1, each with its own engine, connected by kGroups groups of two.
void connect(Pair ends[2]) {
  for (int rank : {0, 1}) ends[rank].engine = std::make_shared<Engine>(EngineConfig{rank, 2, kPatience_s, 10, 20});
  for (int i = 0; i < kGroups; ++i) {
    int sockets[2];
    tcp_pair(sockets);
    for (int rank : {0, 1}) {
      auto group = std::make_unique<Group>(ends[rank].engine, GroupConfig{uint64_t(i), 1, {0, 1}, {0, 1}, kPatience_s});
      group->add_channel(1 - rank, Lane::point_to_point, Fd(sockets[rank]));
      ends[rank].groups.push_back(std::move(group));
    }
  }
}

Part part(std::vector<float>& data) { return {data.data(), data.size()}; }

}  // namespace

// Rank 1 answers on whichever group something arrives; small messages, and large ones that come in pieces, while all
// other groups rest.
TEST(groups_that_rest_are_woken_by_what_arrives) {
  Pair ends[2];
  connect(ends);
  std::thread echo([&] {
    auto completions = std::make_shared<Completions>();
    std::vector<std::vector<float>> in(kGroups, std::vector<float>(200000));
    std::vector<OperationPtr> received(kGroups);
    auto expect = [&](int i, size_t count) {
      received[size_t(i)] = ends[1].groups[size_t(i)]->submit_receive(0, 7, {in[size_t(i)].data(), count},
                                                                      DType::float32, nullptr, false);
      received[size_t(i)]->report_to(completions, i);
    };
    for (int i = 0; i < kGroups; ++i) expect(i, 10);
    for (int left = 2 * kGroups; left > 0;) {
      ends[1].engine->wait_any({}, completions.get(), kPatience_s);
      auto numbers = completions->take();
      if (numbers.empty()) break;
      for (int64_t number : numbers) {
        size_t i = size_t(number), count = in[i][0] == 1 ? 10 : 200000;
        auto back = ends[1].groups[i]->submit_send(0, 8, {in[i].data(), count}, DType::float32, false);
        ends[1].groups[i]->wait(*back, kPatience_s);
        if (--left >= 1 && count == 10) expect(int(number), 200000);
      }
    }
  });
  for (float round : {1.f, 2.f})
    for (int i = kGroups - 1; i >= 0; --i) {
      size_t count = round == 1 ? 10 : 200000;
      std::vector<float> out(count, float(i)), answer(count);
      out[0] = round;
      Group& group = *ends[0].groups[size_t(i)];
      auto sent = group.submit_send(1, 7, part(out), DType::float32, true);
      auto received = group.submit_receive(1, 8, part(answer), DType::float32, nullptr, false);
      group.wait(*received, kPatience_s);
      group.wait(*sent, kPatience_s);
      CHECK(answer == out);
    }
  echo.join();
}

TEST(the_end_of_a_peer_is_noticed_while_its_group_rests) {
  Pair ends[2];
  connect(ends);
  std::vector<float> data(10);
  Group& group = *ends[0].groups[3];
  auto received = group.submit_receive(1, 7, part(data), DType::float32, nullptr, false);
  CHECK(!ends[0].engine->wait(*received, 0.2));
  ends[1].groups.clear();
  ends[1].engine.reset();
  CHECK(error_of([&] { group.wait(*received, kPatience_s); }).kind == ErrorKind::peer_lost);
}

TEST(a_completion_is_noted_once_also_if_it_came_before) {
  Pair ends[2];
  connect(ends);
  auto completions = std::make_shared<Completions>();
  std::vector<float> data(10, 1.f), into(10);
  auto received = ends[1].groups[0]->submit_receive(0, 1, part(into), DType::float32, nullptr, false);
  auto sent = ends[0].groups[0]->submit_send(1, 1, part(data), DType::float32, false);
  ends[1].groups[0]->wait(*received, kPatience_s);
  CHECK(ends[1].engine->wait_any({}, completions.get(), 0.05) == -1 && !completions->has_any());
  received->report_to(completions, 5);
  CHECK(completions->has_any());
  CHECK(completions->take() == std::vector<int64_t>{5});
  CHECK(completions->take().empty());
  ends[0].groups[0]->wait(*sent, kPatience_s);
}

// Rank 0 is linked to all; the others get their links from it, and then reduce together.
TEST(the_hub_introduces_all_to_each_other) {
  constexpr int n = 5;
  Sockets to_hub = make(n, false);
  std::fflush(stdout);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < n; ++rank) {
    if (pid_t pid = fork()) {
      pids.push_back(pid);
      continue;
    }
    int code = 1;
    try {
      close_others(to_hub, rank);
      auto engine = std::make_shared<Engine>(EngineConfig{rank, n, kPatience_s, 10, 20});
      std::vector<int> all, others;
      for (int r = 0; r < n; ++r) {
        all.push_back(r);
        if (r != rank) others.push_back(r);
        if (r != rank && (rank == 0 || r == 0)) engine->add_local_peer(r, Fd(to_hub[size_t(rank)][size_t(r)]));
      }
      if (rank == 0) engine->introduce_neighbours(kPatience_s);
      else CHECK(engine->await_introductions(0, others, kPatience_s));
      engine->await_local_peers(kPatience_s);
      Group group(engine, GroupConfig{1, 1, all, std::vector<int>(n, 0), kPatience_s});
      std::vector<float> data(100000, float(rank));
      run(group, all_reduce(data, ReduceOp::sum));
      CHECK(data == std::vector<float>(data.size(), float(n * (n - 1) / 2)));
      code = 0;
    } catch (const Failure& f) {
      std::printf("rank %d: %s\n", rank, f.what.c_str());
    } catch (const std::exception& e) {
      std::printf("rank %d: %s\n", rank, e.what());
    }
    std::fflush(stdout);
    _exit(code);
  }
  close_others(to_hub, -1);
  for (pid_t pid : pids) {
    int status = 0;
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

int main() { return test::run_all(); }
