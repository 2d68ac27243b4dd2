"""Neighbours that join, stop, die and are forgotten during the life of one engine.

The test itself is rank 0. Each neighbour is a process that links itself to it with a Unix socket,
shares some memory, forms a group of two, and then works until it is ended.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import paceline as pl
from paceline import _core
from paceline.comm.group import Group
from support import report, started
from support.ranks import started_processes

PATIENCE_S, LIVENESS_S = 60.0, 30.0  # neither is what ends anything here
AT_ONCE_S = 5.0  # milliseconds; the rest is for a busy machine
COUNT = 50_000  # float32s: more than fits beside a request
LIMITS = (PATIENCE_S, LIVENESS_S, 2.0)
FLOAT32, SUM = _core.DTYPES.index("float32"), _core.OPS.index("sum")


def pair(engine: _core.Engine, other: int) -> _core.Group:
    return _core.Group(engine, 7, other, [0, other], [0, 0], PATIENCE_S)


def reduce(group: _core.Group, memory: np.ndarray) -> None:
    address = memory.ctypes.data
    group.all_reduce(address, address, COUNT, FLOAT32, SUM, [COUNT])


def neighbour(name: str, rank: int, rounds: int) -> None:
    """Live as a neighbour of rank 0."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + name)
        engine = _core.Engine(rank, 2, *LIMITS)
        engine.add_local_peer(0, sock.detach())
    engine.await_local_peers(PATIENCE_S)
    memory = engine.allocate(COUNT * 4).view(np.float32)
    memory[:] = rank
    group = pair(engine, rank)
    report(engine.locate(memory.ctypes.data, COUNT * 4))
    for _ in range(rounds):
        reduce(group, memory)
    time.sleep(600)


@dataclass
class Company:
    """One neighbour, from rank 0's side."""

    rank: int
    pid: int
    group: _core.Group
    where: tuple[int, int]  # its memory


class Host:
    """Rank 0: an engine and a door for newcomers."""

    def __init__(self) -> None:
        self.engine = _core.Engine(0, 2, *LIMITS)
        self.memory = self.engine.allocate(COUNT * 4).view(np.float32)
        self._door = socket.socket(socket.AF_UNIX)
        self._name = f"paceline-test-{os.getpid()}-{id(self)}"
        self._door.bind("\0" + self._name)
        self._door.listen()
        self._last = 0

    def close(self) -> None:
        self._door.close()

    @contextlib.contextmanager
    def joined_by_a_neighbour(self, rounds: int) -> Iterator[Company]:
        self._last += 1
        rank, arguments = self._last, (self._name, self._last, rounds)
        with started_processes([(neighbour, arguments)], [dict(os.environ)]) as ranks:
            sock, _ = self._door.accept()
            self.engine.add_local_peer(rank, sock.detach())
            self.engine.await_local_peers(PATIENCE_S, [rank])
            group = pair(self.engine, rank)
            yield Company(rank, ranks.pids[0], group, ranks.receive(0))
            group.close()
        self.engine.forget_peer(rank)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


def holdings() -> tuple[int, int]:
    """Count this process's descriptors and its mappings of shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("memfd:paceline" in line for line in maps)


def no_more_than(held: tuple[int, int]) -> bool:
    return all(now <= before for now, before in zip(holdings(), held, strict=True))


def is_there(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_neighbours_come_and_go_and_leave_nothing(host: Host) -> None:
    held = (0, 0)
    for cycle in range(40):
        with host.joined_by_a_neighbour(rounds=1) as company:
            host.memory[:] = 1
            theirs = host.engine.memory_of_peer(company.rank, *company.where, COUNT * 4)
            view = host.engine.private_view(company.rank, *company.where, COUNT * 4)
            reduce(company.group, host.memory)
            assert host.memory[-1] == company.rank + 1
            assert host.engine.end_peer(company.rank)
            with pytest.raises(pl.errors.PeerLost):
                reduce(company.group, host.memory)
            if cycle % 2:
                host.engine.forget_peer(company.rank)
            assert theirs.view(np.float32)[0] == company.rank + 1  # what somebody holds, stays
            del theirs, view
        if cycle == 4:
            held = holdings()
    deadline_s = time.monotonic() + 30
    while not no_more_than(held) and time.monotonic() < deadline_s:
        time.sleep(0.01)  # the last one may be on its way out
    assert no_more_than(held), (held, holdings())


def test_a_stopped_neighbour_is_ended_for_good(host: Host) -> None:
    with host.joined_by_a_neighbour(rounds=1) as company:
        reduce(company.group, host.memory)
        os.kill(company.pid, signal.SIGSTOP)
        start_s = time.monotonic()
        assert host.engine.end_peer(company.rank)
        assert time.monotonic() - start_s < AT_ONCE_S
        assert not is_there(company.pid)
        assert not host.engine.end_peer(company.rank)
        assert not host.engine.end_peer(999)  # never seen


def test_a_rank_is_never_linked_twice(host: Host) -> None:
    with host.joined_by_a_neighbour(rounds=0) as company:
        ours, theirs = socket.socketpair()
        with theirs, pytest.raises(pl.errors.UsageError, match="ranks are never reused"):
            host.engine.add_local_peer(company.rank, ours.detach())


def test_a_death_ends_a_wait_at_once(host: Host) -> None:
    with host.joined_by_a_neighbour(rounds=0) as company:
        killed_s = [0.0]

        def kill() -> None:
            time.sleep(0.2)
            killed_s[0] = time.monotonic()
            os.kill(company.pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(pl.errors.PeerLost) as caught:
            reduce(company.group, host.memory)
        took_s = time.monotonic() - killed_s[0]
        thread.join()
        assert caught.value.rank == company.rank
        assert took_s < AT_ONCE_S, f"{took_s:.3f} s"


@pytest.mark.parametrize("background", [False, True])
def test_the_control_thread_ends_what_is_in_flight(host: Host, background: bool) -> None:
    with host.joined_by_a_neighbour(rounds=0) as company:
        failed_s = [0.0]

        def fail() -> None:
            time.sleep(0.2)
            failed_s[0] = time.monotonic()
            company.group.fail("rank 3 is lost: repeat this with generation 2")

        thread = threading.Thread(target=fail)
        thread.start()
        with pytest.raises(pl.errors.GenerationChanged, match="rank 3 is lost"):
            if background:
                address = host.memory.ctypes.data
                arguments = (address, address, COUNT, FLOAT32, SUM, [COUNT])
                company.group.start_all_reduce(*arguments).wait()
            else:
                reduce(company.group, host.memory)
        assert time.monotonic() - failed_s[0] < AT_ONCE_S
        thread.join()
        with pytest.raises(pl.errors.GenerationChanged, match="rank 3 is lost"):
            reduce(company.group, host.memory)
        company.group.close()
        company.group.fail("after its end")  # the control thread may come too late


def test_a_line_without_a_timeout_notices_a_silent_host() -> None:
    """What a server waits for may take for ever, but not a worker that is gone without a word."""

    def body(group: Group) -> float:
        line = Group(group._fabric, (0, 1), timeout_s=math.inf)
        line.barrier()
        report("here")
        if line.rank == 1:
            time.sleep(600)
        with pytest.raises(pl.errors.PeerTimeout, match="rank 1 has not been heard"):
            line.recv(pl.empty(1), 1)
        return time.monotonic()

    with started(2, body, hosts=2, env={"PACELINE_LIVENESS_S": "2"}) as ranks:
        ranks.receive_all()
        stopped_s = time.monotonic()
        ranks.kill(1, signal.SIGSTOP)
        [outcome] = ranks.wait(60, [0])
    assert outcome.error is None and 0 < outcome.value - stopped_s < 2 + AT_ONCE_S, outcome
