// Neighbours that join, stop, die and are forgotten while the engine of rank 0 continues.
//
// Rank 0 runs in the process of the test. The others are forked by a NURSERY, which was forked before the first
// engine and its thread existed; each links itself to rank 0, forms a group with it and reduces until it is ended.
#include <csignal>
#include <cstring>
#include <dirent.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "check.h"
#include "paceline/collectives/group.h"

using namespace paceline;

namespace {

constexpr double kPatience_s = 20;
constexpr size_t kElements = 50000;  // more than a slot holds

std::shared_ptr<Engine> make_engine(int rank) {
  return std::make_shared<Engine>(EngineConfig{rank, 2, kPatience_s, 3, 2});
}

std::shared_ptr<Group> make_pair(std::shared_ptr<Engine> engine, int other, double forming_s = 0) {
  return std::make_shared<Group>(engine, GroupConfig{7, uint32_t(other), {0, other}, {0, 0}, kPatience_s, forming_s});
}

Request all_reduce(float* data) {
  Request r;
  r.kind = Kind::all_reduce;
  r.dtype = DType::float32;
  r.inputs = r.outputs = {{data, kElements}};
  r.shape = {int64_t(kElements)};
  return r;
}

void reduce(Group& group, float* data) { group.wait(*group.submit(all_reduce(data), false), kPatience_s); }

// ---- the nursery -----------------------------------------------------------------------------------

struct Order {
  int rank;
  int rounds;  // of reductions; then it says nothing any more
};

[[noreturn]] void live(const Order& order, Fd socket) {
  try {
    auto engine = make_engine(order.rank);
    engine->add_local_peer(0, std::move(socket));
    engine->await_local_peers(kPatience_s);
    auto* data = static_cast<float*>(engine->arena().allocate(kElements * sizeof(float)));
    auto group = make_pair(engine, order.rank);
    for (int i = 0; i < order.rounds; ++i) reduce(*group, data);
    for (;;) pause();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %d: %s\n", order.rank, e.what());
    _exit(1);
  }
}

class Nursery {
 public:
  Nursery() {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    std::fflush(stdout);
    if (fork() == 0) {
      close(pair[0]);
      serve(pair[1]);
    }
    close(pair[1]);
    control_ = Fd(pair[0]);
  }

  // Starts a neighbour; returns rank 0's end of the link and its pid.
  std::pair<Fd, pid_t> start(Order order) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    Fd ours(pair[0]), theirs(pair[1]);
    iovec part{&order, sizeof order};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &pair[1], sizeof(int));
    CHECK(sendmsg(control_.get(), &header, 0) == ssize_t(sizeof order));
    pid_t pid = -1;
    CHECK(recv(control_.get(), &pid, sizeof pid, 0) == ssize_t(sizeof pid) && pid > 0);
    return {std::move(ours), pid};
  }

 private:
  [[noreturn]] static void serve(int control) {
    signal(SIGCHLD, SIG_IGN);
    for (;;) {
      Order order;
      iovec part{&order, sizeof order};
      alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))];
      msghdr header{};
      header.msg_iov = &part;
      header.msg_iovlen = 1;
      header.msg_control = space;
      header.msg_controllen = sizeof space;
      if (recvmsg(control, &header, MSG_CMSG_CLOEXEC) != ssize_t(sizeof order)) _exit(0);
      int fd;
      std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&header)), sizeof fd);
      pid_t pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(control);
        live(order, Fd(fd));
      }
      close(fd);
      if (send(control, &pid, sizeof pid, 0) < 0) _exit(0);
    }
  }
  Fd control_;
};

Nursery& nursery() {
  static Nursery only;
  return only;
}

// A neighbour that is linked, and in a group with rank 0.
struct Company {
  Company(std::shared_ptr<Engine> engine, int rank, int rounds) : engine(engine), rank(rank) {
    auto [socket, its_pid] = nursery().start({rank, rounds});
    pid = its_pid;
    engine->add_local_peer(rank, std::move(socket));
    engine->await_local_peers(kPatience_s, {rank});
    group = make_pair(engine, rank);
  }
  ~Company() {
    kill(pid, SIGKILL);
    group.reset();
    engine->forget_peer(rank);
  }
  std::shared_ptr<Engine> engine;
  int rank;
  pid_t pid = -1;
  std::shared_ptr<Group> group;
};

// ---- what a process holds --------------------------------------------------------------------------

int open_descriptors() {
  int count = 0;
  DIR* d = opendir("/proc/self/fd");
  while (readdir(d)) ++count;
  closedir(d);
  return count;
}

int shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:paceline") != std::string::npos;
  return count;
}

template <class F>
double time_of(F f) {
  double start = now_s();
  f();
  return now_s() - start;
}

}  // namespace

TEST(a_death_is_noticed_at_once) {
  auto engine = make_engine(0);
  double slowest = 0, sum = 0;
  for (int rank = 1; rank <= 10; ++rank) {
    Company company(engine, rank, 1);
    std::vector<float> data(kElements);
    reduce(*company.group, data.data());
    double killed = 0;
    std::thread killer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(60));  // by then rank 0 is asleep
      killed = now_s();
      kill(company.pid, SIGKILL);
    });
    auto error = test::error_of([&] { reduce(*company.group, data.data()); });
    double noticed = now_s();
    killer.join();
    CHECK(error.kind == ErrorKind::peer_lost && error.rank == rank);
    slowest = std::max(slowest, noticed - killed);
    sum += noticed - killed;
  }
  std::printf("a death is noticed after %.1f ms, at most %.1f ms\n", sum * 100, slowest * 1e3);
  CHECK(sum / 10 < 0.05);
}

TEST(a_stopped_neighbour_is_ended) {
  auto engine = make_engine(0);
  Company company(engine, 1, 1);
  std::vector<float> data(kElements);
  reduce(*company.group, data.data());
  kill(company.pid, SIGSTOP);
  CHECK(engine->end_peer(1));
  CHECK(kill(company.pid, 0) != 0 || std::ifstream("/proc/" + std::to_string(company.pid) + "/maps").get() < 0);
  CHECK(!engine->end_peer(1));  // it is gone
  auto error = test::error_of([&] { reduce(*company.group, data.data()); });
  CHECK(error.kind == ErrorKind::peer_lost && error.rank == 1);
  CHECK(!engine->end_peer(2));  // never seen
}

TEST(neighbours_come_and_go_and_leave_nothing) {
  constexpr int kCycles = 200;
  auto engine = make_engine(0);
  auto* data = static_cast<float*>(engine->arena().allocate(kElements * sizeof(float)));
  int descriptors = 0, mappings = 0;
  for (int rank = 1; rank <= kCycles; ++rank) {
    {
      Company company(engine, rank, 2);
      reduce(*company.group, data);
      if (rank % 3 == 0) kill(company.pid, SIGKILL);
      else CHECK(engine->end_peer(rank));
      auto lost = test::error_of([&] {
        for (;;) reduce(*company.group, data);
      });
      CHECK(lost.kind == ErrorKind::peer_lost);
      if (rank % 2) engine->forget_peer(rank);  // while its group is still there
      CHECK(test::error_of([&] { reduce(*company.group, data); }).kind == ErrorKind::peer_lost);
    }
    if (rank == 10) descriptors = open_descriptors(), mappings = shared_mappings();
  }
  CHECK(open_descriptors() == descriptors);
  CHECK(shared_mappings() == mappings);
}

TEST(memory_of_the_dead_stays_with_who_holds_it) {
  auto engine = make_engine(0);
  std::shared_ptr<Segment> held;
  {
    Company company(engine, 1, 2);
    std::vector<float> data(kElements, 1);
    reduce(*company.group, data.data());
    held = engine->link(1)->find({1, 0}, kElements * sizeof(float));
    CHECK(held != nullptr);
    auto* theirs = reinterpret_cast<std::atomic<float>*>(held->data());
    for (double end = now_s() + kPatience_s; theirs[5] != 1 && now_s() < end;)  // its part of the work may take longer
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    engine->end_peer(1);
  }
  CHECK(reinterpret_cast<float*>(held->data())[5] == 1);
}

TEST(a_newcomer_while_others_work) {
  auto engine = make_engine(0);
  Company first(engine, 1, 1 << 30);
  std::atomic<bool> stop{false};
  std::atomic<int> rounds{0};
  std::thread worker([&] {
    std::vector<float> data(kElements);
    while (!stop) reduce(*first.group, data.data()), ++rounds;
  });
  for (int rank = 2; rank < 12; ++rank) {
    Company company(engine, rank, 3);
    engine->set_num_local(rank % 2 ? 2 : 16);
    std::vector<float> data(kElements);
    for (int i = 0; i < 3; ++i) reduce(*company.group, data.data());
    CHECK(engine->end_peer(rank));
  }
  int before = rounds;
  while (rounds < before + 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  stop = true;
  worker.join();
}

TEST(another_thread_ends_what_is_in_flight) {
  for (bool background : {false, true}) {
    auto engine = make_engine(0);
    Company company(engine, 1, 1);
    std::vector<float> data(kElements);
    reduce(*company.group, data.data());
    double failed = 0, took = 0;
    std::thread control([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(60));
      failed = now_s();
      took = time_of([&] { company.group->fail(ErrorKind::generation_changed, "rank 1 is lost", -1); });
    });
    auto operation = company.group->submit(all_reduce(data.data()), background);
    auto error = test::error_of([&] { company.group->wait(*operation, kPatience_s); });
    double noticed = now_s();
    control.join();
    CHECK(error.kind == ErrorKind::generation_changed);
    CHECK(noticed - failed < 0.2 && took < 0.2);
    took = time_of([&] {
      CHECK(test::error_of([&] { reduce(*company.group, data.data()); }).kind == ErrorKind::generation_changed);
    });
    CHECK(took < 0.1);
  }
}

TEST(many_threads_and_a_failure) {
  auto engine = make_engine(0);
  Company company(engine, 1, 0);
  std::vector<std::thread> threads;
  std::atomic<int> ended{0};
  for (uint64_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      float value = 0;
      auto receive = company.group->submit_receive(1, t, {&value, 1}, DType::float32, nullptr, t % 2);
      ended +=
          test::error_of([&] { company.group->wait(*receive, kPatience_s); }).kind == ErrorKind::generation_changed;
    });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  double start = now_s();
  company.group->fail(ErrorKind::generation_changed, "enough", -1);
  for (auto& thread : threads) thread.join();
  CHECK(ended == 4 && now_s() - start < 0.3);
}

// The first member of a group never waits; the other members wait for a time that they choose, and may try again.
TEST(forming_a_group_can_be_given_up) {
  auto engine = make_engine(5);
  auto [socket, pid] = nursery().start({9, 0});  // takes rank 0's part of this link, and forms another group
  engine->add_local_peer(9, std::move(socket));
  engine->await_local_peers(kPatience_s);
  for (int i = 0; i < 3; ++i) {
    double took = time_of([&] {
      auto error = test::error_of([&] { Group(engine, GroupConfig{3, 4, {9, 5}, {0, 0}, kPatience_s, 0.05}); });
      CHECK(error.kind == ErrorKind::peer_timeout && error.rank == 9);
    });
    CHECK(took < 0.5);
  }
  kill(pid, SIGKILL);
  double took = time_of([&] {
    auto error = test::error_of([&] { Group(engine, GroupConfig{3, 4, {9, 5}, {0, 0}, kPatience_s, kPatience_s}); });
    CHECK(error.kind == ErrorKind::peer_lost);
  });
  CHECK(took < 1);
  engine->forget_peer(9);
}

int main() {
  nursery();
  return test::run_all();
}
