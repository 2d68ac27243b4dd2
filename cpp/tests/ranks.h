// Ranks for tests of whole groups: forked processes, linked by socket pairs, on one pretended host or on several (then
// over TCP on loopback).
#pragma once
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "check.h"
#include "paceline/collectives/group.h"

namespace test {

using namespace paceline;

// sockets[a][b] is a's end of its connection to b.
using Sockets = std::vector<std::vector<int>>;

inline void tcp_pair(int out[2]) {
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(listener, 1) == 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  out[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(connect(out[0], reinterpret_cast<sockaddr*>(&address), length) == 0);
  out[1] = accept(listener, nullptr, nullptr);
  close(listener);
}

inline Sockets make(int n, bool tcp) {
  std::vector<int> none(static_cast<size_t>(n), -1);
  Sockets s(static_cast<size_t>(n), none);
  for (int a = 0; a < n; ++a)
    for (int b = a + 1; b < n; ++b) {
      int pair[2];
      if (tcp) tcp_pair(pair);
      else CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
      s[size_t(a)][size_t(b)] = pair[0];
      s[size_t(b)][size_t(a)] = pair[1];
    }
  return s;
}

inline void close_others(const Sockets& sockets, int rank) {
  for (size_t a = 0; a < sockets.size(); ++a)
    for (int fd : sockets[a])
      if (int(a) != rank && fd >= 0) close(fd);
}

// Runs `body` on n ranks, `per_host` of them on each pretended host; fails when any of them does.
template <class Body>
void on_ranks(int n, int per_host, Body body, int expect_killed = -1) {
  Sockets unix_sockets = make(n, false), collective = make(n, true), direct = make(n, true);
  std::fflush(stdout);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < n; ++rank) {
    pid_t pid = fork();
    if (pid) {
      pids.push_back(pid);
      continue;
    }
    int code = 0;
    try {
      close_others(unix_sockets, rank);
      close_others(collective, rank);
      close_others(direct, rank);
      auto engine = std::make_shared<Engine>(EngineConfig{rank, per_host, 30, 3, 2});
      std::vector<int> ranks, hosts;
      for (int r = 0; r < n; ++r) ranks.push_back(r), hosts.push_back(r / per_host);
      for (int r = 0; r < n; ++r)
        if (r != rank && r / per_host == rank / per_host)
          engine->add_local_peer(r, Fd(unix_sockets[size_t(rank)][size_t(r)]));
      engine->await_local_peers(10);
      auto group = std::make_shared<Group>(engine, GroupConfig{1, 1, ranks, hosts, 30});
      for (int r = 0; r < n; ++r)
        if (r / per_host != rank / per_host) {
          group->add_channel(r, Lane::collective, Fd(collective[size_t(rank)][size_t(r)]));
          group->add_channel(r, Lane::point_to_point, Fd(direct[size_t(rank)][size_t(r)]));
        }
      body(*engine, *group);
    } catch (const test::Failure& f) {
      std::printf("rank %d: %s\n", rank, f.what.c_str());
      code = 1;
    } catch (const std::exception& e) {
      std::printf("rank %d: %s\n", rank, e.what());
      code = 1;
    }
    std::fflush(stdout);
    _exit(code);
  }
  for (auto& sockets : {unix_sockets, collective, direct}) close_others(sockets, -1);
  for (int rank = 0; rank < n; ++rank) {
    int status = 0;
    waitpid(pids[size_t(rank)], &status, 0);
    if (rank == expect_killed) CHECK(WIFSIGNALED(status));
    else CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

inline void run(Group& g, Request r) {
  auto operation = g.submit(std::move(r), false);
  g.wait(*operation, 60);
}

inline Request all_reduce(std::vector<float>& v, ReduceOp op) {
  return {Kind::all_reduce, DType::float32, op, 0, {{v.data(), v.size()}}, {{v.data(), v.size()}}, {int64_t(v.size())}};
}

}  // namespace test
