"""Starting and killing jobs over and over leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from paceline.runtime import job
from support import report, run_ranks, started
from support.environs import job_environs
from support.named_memory import named_memory
from support.ranks import ForkServer, run_processes


def use_everything(group: Group) -> None:
    """Have one of each: segments, channels, links, groups; then work until killed."""
    here = job.current()
    listener = here.fabric.listener
    tensors = [torch.ones(50_000), pl.empty(50_000).fill_(1)]
    other = pl.new_group(range(group.size))
    peer = group.rank ^ 1
    work = group.send(tensors[0], peer, async_op=True)
    group.recv(tensors[0].clone(), peer)
    work.wait()
    report((listener.unix_name, listener.tcp_address))
    while True:
        for tensor in tensors:
            group.all_reduce(tensor)
            other.all_reduce(tensor, "max", async_op=True)


def links(pid: int | str) -> list[str]:
    """Return what the open descriptors of a process are; nothing when it is gone, or another's."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # the one that lists the directory
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def descriptors(pid: int | str) -> list[str]:
    """Return the kinds of all open descriptors of a process."""
    return sorted(link.partition(":")[0] for link in links(pid))


def directories() -> set[str]:
    """Return those of this session's jobs."""
    ours = f"paceline-test-{os.getpid()}-"
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith(ours)}


def is_ours(pid: int) -> bool:
    """Tell whether a process descends from this one."""
    with contextlib.suppress(OSError):
        while pid > 1 and pid != os.getpid():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def is_free(address: str) -> bool:
    """Tell whether nobody of ours listens on a TCP address; by now the port may be another's."""
    port = int(address.rpartition(":")[2])
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    here = [line for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]
    sockets = {f"socket:[{line[9]}]" for line in here}
    return not any(sockets & set(links(pid)) and is_ours(pid) for pid in processes())


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def require_nothing_left(names: list[str], addresses: list[str]) -> None:
    unix = Path("/proc/net/unix").read_text()
    assert not [name for name in names if name in unix]
    assert all(is_free(address) for address in addresses if address)
    assert ForkServer.get().children() == []
    assert not [name for name in named_memory() if "paceline" in name]


def kill_cycles(number: int, seed: int) -> None:
    chosen, server = random.Random(seed), ForkServer.get()
    run_ranks(2, only_meet)  # what is made once is made now
    before = descriptors("self"), descriptors(server.pid)
    others = directories()  # of a session that had the same pid and was killed
    names, addresses = [], []
    for cycle in range(number):
        with started(2, use_everything, hosts=1 + cycle % 2) as ranks:
            for name, address in ranks.receive_all():
                names.append(name)
                addresses.append(address)
            time.sleep(chosen.random() * 0.05)
            victims = chosen.choice([(0,), (1,), (0, 1)])
            ranks.kill_together(victims)
            for outcome in ranks.wait():
                expected = -signal.SIGKILL if outcome.rank in victims else 1
                assert outcome.status == expected, outcome
    require_nothing_left(names, addresses)
    assert (descriptors("self"), descriptors(server.pid)) == before
    assert directories() <= others


def only_meet(group: Group) -> None:
    group.barrier()


def test_a_few_kills_leave_nothing_behind() -> None:
    kill_cycles(15, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_kills_leave_nothing_behind() -> None:
    kill_cycles(1000, seed=2)


@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "a host each"])
def test_groups_that_are_closed_leave_nothing_behind(hosts: int) -> None:
    def body(group: Group) -> None:
        def use() -> None:
            other = pl.new_group([0, 1])
            other.all_reduce(torch.ones(100_000))
            work = other.send(torch.ones(3), 1 - other.rank, async_op=True)
            other.recv(torch.ones(3), 1 - other.rank)
            work.wait()
            other.close()

        use()
        group.barrier()
        before = descriptors("self")
        for _ in range(10):
            use()
        group.barrier()
        deadline_s = time.monotonic() + 30  # the last ones may be on their way out
        while len(after := descriptors("self")) > len(before) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert len(after) <= len(before), (before, after)
        group.barrier()

    run_ranks(2, body, hosts=hosts)


def own_tasks() -> list[str]:
    """Return the names of this process's threads that are Paceline's, as the kernel has them."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((task / "comm").read_text())
    return [name for name in names if name.startswith("paceline")]


def test_leaving_a_job_gives_everything_back() -> None:
    def body(_: int) -> None:
        before = descriptors("self")
        pl.init()
        tensor = pl.empty(10).fill_(1)
        assert pl.world().all_reduce(tensor).sum().item() == 20
        del tensor
        pl.shutdown()
        gc.collect()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("paceline")], names
        deadline_s = time.monotonic() + 30  # who has ended is listed a little longer
        while (left := own_tasks()) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not left, left
        assert descriptors("self") == before

    for hosts in (1, 2):
        with job_environs(2, hosts) as environs:
            for outcome in run_processes(body, environs):
                assert outcome.error is None and outcome.status == 0, outcome
