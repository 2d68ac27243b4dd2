"""Bytes from strangers on every listening port, while a job runs undisturbed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

import paceline as pl
from fuzz.mutation import mutate
from fuzz.target import read_corpus
from paceline.comm.group import Group
from paceline.control.messages import COORDINATOR
from paceline.control.transport.acceptor import introduce
from paceline.control.transport.auth import CallerHandshake, load_secret
from paceline.control.transport.sockets import connect_tcp, frame
from paceline.runtime import job
from support import receive, report, started

# What a stranger may say at once; a length prefix comes first in our own protocol.
SPEECHES = {
    "nothing": b"",
    "one byte": b"\x00",
    "web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "noise": os.urandom(4096),
    "much noise": os.urandom(1 << 20),
    "huge length": struct.pack("<I", 0xFFFFFFFF) + b"x" * 100,
    "huge length, big-endian": struct.pack(">I", 0x7FFFFFFF) + b"x" * 100,
    "no length": struct.pack("<I", 0) * 50,
    "truncated": struct.pack("<I", 200) + b"x" * 50,
    "right length, wrong bytes": struct.pack("<I", 64) + os.urandom(64),
    "magic of a data frame": b"PCL1" + bytes(60),
}


def work_undisturbed(group: Group) -> tuple[int, int]:
    """Compute, and form new groups, until told to stop; return rounds and growth in KiB."""
    here = job.current()
    listener = here.fabric.listener
    report((here.env.coordinator, listener.tcp_address, listener.unix_name))
    stop, rounds, before = torch.zeros(1), 0, resident_kib()
    while stop.item() == 0:
        for count in (10, 50_000):
            assert group.all_reduce(torch.ones(count)).sum().item() == count * group.size
        if rounds % 200 == 100:
            other = pl.new_group(range(group.size))
            assert other.all_reduce(torch.ones(1)).item() == group.size
        rounds += 1
        if group.rank == 0:
            from support import body

            stop[0] = float(body._to_test.poll())
        group.broadcast(stop)
    if group.rank == 0:
        receive()
    return rounds, resident_kib() - before


def resident_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def addresses(told: list[tuple[str, str, str]]) -> Iterator[tuple[int, object]]:
    """Yield (family, address) of everything that the job listens on."""
    for coordinator, tcp, unix in told:
        for address in {coordinator, tcp} - {""}:
            host, _, port = address.rpartition(":")
            yield socket.AF_INET, (host, int(port))
        yield socket.AF_UNIX, f"\0{unix}"


@contextlib.contextmanager
def call(family: int, address: object) -> Iterator[socket.socket]:
    with socket.socket(family) as sock:
        sock.settimeout(60)
        sock.connect(address)
        yield sock


@pytest.mark.parametrize("hosts", [1, 3], ids=["one host", "a host each"])
def test_garbage_on_every_port(hosts: int) -> None:
    with started(3, work_undisturbed, hosts=hosts) as ranks:
        where = list(addresses(ranks.receive_all()))
        assert len(where) == (6 if hosts == 1 else 9)  # the coordinator's is among them thrice
        for family, address in where:
            for speech in SPEECHES.values():
                with call(family, address) as sock, contextlib.suppress(OSError):
                    sock.sendall(speech)
                    sock.shutdown(socket.SHUT_WR)
                    sock.settimeout(0.05)
                    answer = sock.recv(1 << 16)
                    assert len(answer) < 4096  # a greeting at most, nothing of the job
        ranks.send(0, "stop")
        for rounds, growth_kib in ranks.values(60):
            assert rounds > 0 and growth_kib < 100 << 10


@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "a host each"])
def test_slow_and_silent_strangers(hosts: int) -> None:
    with started(2, work_undisturbed, hosts=hosts) as ranks, contextlib.ExitStack() as stack:
        where = list(addresses(ranks.receive_all()))
        # More than are admitted unauthenticated; most of them are refused.
        silent = [stack.enter_context(call(*address)) for address in where for _ in range(80)]
        dripping = [stack.enter_context(call(*address)) for address in where]
        for _ in range(15):
            for sock in dripping:
                with contextlib.suppress(OSError):
                    sock.send(b"\x40")
            time.sleep(0.1)
        assert silent
        ranks.send(0, "stop")
        for rounds, growth_kib in ranks.values(60):
            assert rounds > 0 and growth_kib < 100 << 10


def test_the_kernel_shows_nothing_on_public_interfaces() -> None:
    def body(group: Group) -> list[str]:
        inodes = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        found = []
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(FileNotFoundError), open(table, encoding="ascii") as lines:
                for line in list(lines)[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                        found.append(fields[1])
        group.barrier()
        return found

    for hosts in (1, 2):
        with started(2, body, hosts=hosts) as ranks:
            for listening in ranks.values():
                assert len(listening) == (0 if hosts == 1 else 1)
                assert all(address.startswith("0100007F:") for address in listening)  # 127.0.0.1


def _work_and_report_the_secret(group: Group) -> tuple[int, int]:
    env = job.current().env
    report((env.coordinator, env.secret_file, env.job_id))
    return work_undisturbed(group)


def _stories(name: str) -> Iterator[bytes]:
    """Yield messages of real jobs, each changed in some ways, one by one."""
    for story in read_corpus(name):
        for seed in range(6):
            changed = mutate(story, "msgpack", seed)
            with contextlib.suppress(ValueError, RecursionError):
                messages = msgspec.msgpack.decode(
                    changed or b"", type=list[tuple[int, msgspec.Raw]]
                )
                yield from (bytes(message) for _, message in messages)


async def _say(address: str, handshake: CallerHandshake, messages: list[bytes]) -> None:
    """Send messages over an authenticated connection, as far as they are read."""
    sock = await connect_tcp(address)
    session = await introduce(sock, handshake, what="the coordinator")
    reader, writer = await asyncio.open_connection(sock=sock)
    with contextlib.suppress(OSError):
        for message in messages:
            writer.write(frame(session.seal(message)))
        await writer.drain()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
    writer.close()


def test_changed_messages_with_and_without_the_secret() -> None:
    """A mutating client: a stranger's handshakes, then control messages of one that is let in."""
    with started(2, _work_and_report_the_secret, hosts=2) as ranks:
        coordinator, secret_file, job_id = ranks.receive_all()[0]
        for family, address in addresses(ranks.receive_all()):
            for hello in read_corpus("listener_handshake"):
                for seed in range(20):
                    changed = mutate(hello, "msgpack", seed) or hello[seed:]
                    with call(family, address) as sock, contextlib.suppress(OSError):
                        sock.sendall(frame(changed) * 2)
                        sock.settimeout(0.02)
                        assert len(sock.recv(1 << 16)) < 4096
        # That an operator can end processes is documented; a worker outside of the job can not.
        messages = [one for one in _stories("coordinator") if b"Ended" not in one]
        for start in range(0, len(messages), 4):
            role = "operator" if start % 8 else "worker"
            handshake = CallerHandshake(
                load_secret(secret_file),
                job_id=job_id,
                listener=COORDINATOR,
                role=role,
                rank=7,
                purpose="control",
            )
            asyncio.run(_say(coordinator, handshake, messages[start : start + 4]))
        assert len(messages) > 100
        ranks.send(0, "stop")
        for rounds, growth_kib in ranks.values(60):
            assert rounds > 0 and growth_kib < 100 << 10
