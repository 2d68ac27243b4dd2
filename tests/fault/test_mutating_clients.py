"""Changed bytes against a live job with parameter servers: from strangers, from callers that know
the secret, and from a worker of the job. Nothing crashes, hangs or grows, and the other worker
trains on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ps_tables import Books, remote_table, wait_for

from fuzz.mutation import mutate
from fuzz.target import read_corpus
from paceline.comm.group import Group
from paceline.control.messages import COORDINATOR
from paceline.control.transport.acceptor import introduce
from paceline.control.transport.auth import CallerHandshake, load_secret
from paceline.control.transport.sockets import connect_tcp, connect_unix, frame, split_address
from paceline.errors import PacelineError, ProtocolError, UnknownKey
from paceline.ps import connection as framed
from paceline.ps import messages as m
from paceline.ps.client.remote_table import RemoteTable
from paceline.ps.connection_id import connection_id
from paceline.runtime import job
from support import report, started

BYSTANDER, MUTATING = 0, 1
HOSTS = (0, 1, 0, 1)  # two workers, two servers: the mutating worker reaches them in both ways


# -- the workers -----------------------------------------------------------------------------------


def count_alone(table: RemoteTable, books: Books) -> None:
    """Train undisturbed: every update is seen."""
    table.items[0].grads[0] = -1.0
    while not books.is_over:
        table.push(0).wait()
        table.commit(None).wait()
        books.rows[BYSTANDER, Books.ACKED] += 1
        assert table.items[0].params[0] == books.acked(BYSTANDER)


def requests_of(table: RemoteTable) -> Iterator[m.AnyRequest]:
    """Yield one request of each kind."""
    memory, spec = table.items[0].params, next(spec for spec in table.specs.values() if spec.shards)
    where = m.Where(MUTATING, *job.current().fabric.engine.locate(memory.data_ptr(), memory.nbytes))
    buffer, settings = m.WorkerBuffer(where, where), ({"lr": 1.0},)
    yield m.Open(1, spec, (buffer,), (m.SharedMemory(where, where),), wire="float32")
    yield m.Open(1, msgspec.structs.replace(spec, name="another"), (buffer,))
    yield m.Find(1, "abused")
    yield m.Assign(1, 0, 0, where, (0,))
    yield m.Push(1, 0, 0, 1, where, "float64", (1,))
    yield m.Push(1, 0, 0, 1, where, "float64", (), "int8", 80)
    yield m.Replace(1, 0, 0, where, (0,))
    yield m.Commit(1, 0, 1, settings, False, (where,))
    yield m.Pull(1, 0, False, (where,))
    yield m.Peek(1, 0, (where,))
    yield m.StandAside(1, 0)
    yield m.Follow(1, 0, 3, 4)
    yield m.Unfollow(1, 0, 4)
    yield m.Keys(1)
    yield m.FetchState(1, 0, 0)
    yield m.LoadState(1, 0, 0, (m.EncodedStateEntry(0, "step", 1.0),))
    yield m.Stats(1)


def changed_requests(table: RemoteTable, num_seeds: int) -> list[m.AnyRequest]:
    """Return requests that were changed, and can still be decoded."""
    found = []
    for number, request in enumerate(requests_of(table)):
        for seed in range(20 * num_seeds):
            with contextlib.suppress(ValueError, RecursionError):
                data = msgspec.msgpack.encode(request)
                changed = mutate(data, "msgpack", 1000 * seed + number) or data
                found.append(framed._requests.decode(changed))
    random.Random(3).shuffle(found)
    return found


def parts_of(corpus: str) -> Iterator[bytes]:
    """Yield the messages of recorded stories, one by one."""
    for story in read_corpus(corpus):
        with contextlib.suppress(ValueError, RecursionError):
            for _, raw in msgspec.msgpack.decode(story, type=list[tuple[int, msgspec.Raw]]):
                yield bytes(raw)


def is_meant(request: m.AnyRequest, counted: int) -> bool:
    """Tables of any size, and another worker's values, may be changed by who has the secret. A
    worker that announces a tensor and does not send it only holds up itself."""
    if isinstance(request, m.Leave) or getattr(request, "table", -1) == counted:
        return False
    if isinstance(request, m.Open):
        return sum(shard.count for shard in request.spec.shards) < 1 << 12
    if isinstance(request, m.LoadState):
        return not any(entry.dtype for entry in request.entries)
    return getattr(request, "where", ...) is not None


def send_changed(table: RemoteTable, num_seeds: int) -> tuple[int, int]:
    """Send changed requests to both servers; return how many were sent, and how many refused."""
    sent = refused = 0
    for link in job.current().servers:
        counted = -2
        with contextlib.suppress(UnknownKey):  # it is on one of the two
            counted = link.ask(lambda seq: m.Find(seq, "counted")).wait(60).table
        chosen = (one for one in changed_requests(table, num_seeds) if is_meant(one, counted))
        while some := list(itertools.islice(chosen, 200)):
            replies = [
                link.ask(lambda seq, one=one: msgspec.structs.replace(one, seq=seq)) for one in some
            ]
            link.ask(m.Stats).wait(60)  # what came before it was handled
            for reply in replies:
                if reply.done():
                    try:
                        reply.wait(60)
                    except PacelineError:
                        refused += 1
            sent += len(some)
    return sent, refused


def send_unreadable() -> int:
    """Send frames that cannot be decoded; return how many servers have stopped listening."""
    muted, dice = 0, random.Random(1)
    for link in job.current().servers:
        for _ in range(20):
            noise = dice.randbytes(framed.FRAME_BYTES - 8)
            head = dice.randrange(1, 900).to_bytes(4, "little") + b"\1\0\0\0"
            with link._lock:
                link._seq += 1
                padded = np.frombuffer(head + noise, dtype=np.uint8)
                link._fixed._pair.send(padded, framed.REQUEST).wait()
        with pytest.raises(ProtocolError, match="has stopped listening to worker 1"):
            link.ask(m.Stats).wait(60)
        muted += 1
    return muted


def work(group: Group, path: str, num_seeds: int) -> tuple[int, int, int]:
    books, here = Books(path), job.current()
    tables = [remote_table(name, 64) for name in ("abused", "counted")]
    if group.rank == BYSTANDER:
        report(
            (here.env.coordinator, here.env.secret_file, here.env.job_id, here.fabric.membership)
        )
        count_alone(tables[1], books)
        return 0, 0, 0
    counts = send_changed(tables[0], 1)  # servers have loaded what they need
    report("warm")
    wait_for(lambda: books.rows[MUTATING, Books.DONE], 240)
    counts = send_changed(tables[0], num_seeds)
    found = (*counts, send_unreadable())
    report(found)
    wait_for(lambda: books.is_over, 240)
    return found


# -- callers from outside --------------------------------------------------------------------------


def sockets_of(membership) -> Iterator[tuple[int, object]]:
    for member in membership.members:
        yield socket.AF_INET, split_address(member.tcp)
        yield socket.AF_UNIX, f"\0{member.unix}"


def call_without_secret(membership, num_seeds: int) -> int:
    """Begin handshakes with changed bytes; return how many."""
    calls = 0
    for family, address in sockets_of(membership):
        for hello in read_corpus("listener_handshake"):
            for seed in range(num_seeds):
                with socket.socket(family) as sock, contextlib.suppress(OSError):
                    sock.settimeout(10)
                    sock.connect(address)
                    sock.sendall(frame(mutate(hello, "msgpack", seed) or hello[seed:]) * 2)
                    sock.settimeout(0.01)
                    calls += 1
                    assert len(sock.recv(1 << 16)) < 4096
    return calls


async def call_with_secret(membership, secret: bytes, job_id: str, num_calls: int) -> int:
    """Connect as members of the job, for what they connect for, and send noise."""
    dice, admitted = random.Random(2), 0
    for number in range(num_calls):
        member = dice.choice(membership.members)
        caller, other = dice.choice((0, 1, 2, 3, 7)), dice.choice((2, 3))
        lane = dice.choice(("collective", "point-to-point", "x"))
        group = dice.choice((connection_id(0, caller, other), dice.getrandbits(64)))
        purpose = f"group {group:x} generation {dice.choice((0, 1, number))} {lane}"
        handshake = CallerHandshake(
            secret,
            job_id=job_id,
            listener=f"rank {member.rank}",
            role=dice.choice(("worker", "server", "operator", "x")),
            rank=caller,
            purpose=dice.choice((purpose, purpose, "local", "control", "")),
        )
        sock = await (connect_tcp(member.tcp) if number % 2 else connect_unix(member.unix))
        with sock, contextlib.suppress(OSError, PacelineError):
            await introduce(sock, handshake, what="a member")
            admitted += 1
            sock.setblocking(False)
            sock.send(dice.randbytes(200))
    return admitted


async def talk_to_the_coordinator(
    address: str, secret: bytes, job_id: str, messages: list[bytes]
) -> None:
    for start in range(0, len(messages), 8):
        role = "operator" if start % 16 else "worker"
        handshake = CallerHandshake(
            secret, job_id=job_id, listener=COORDINATOR, role=role, rank=9, purpose="control"
        )
        sock = await connect_tcp(address)
        with sock, contextlib.suppress(OSError):
            session = await introduce(sock, handshake, what="the coordinator")
            sock.setblocking(True)
            sock.settimeout(5)
            for message in messages[start : start + 8]:
                sock.sendall(frame(session.seal(message)))
            sock.settimeout(0.02)
            sock.recv(1 << 16)


def control_messages(num_seeds: int) -> list[bytes]:
    """Return changed messages of members. That an operator can end processes is documented."""
    changed = [
        mutate(raw, "msgpack", seed) or raw
        for raw in parts_of("coordinator")
        for seed in range(num_seeds)
    ]
    return [one for one in changed if b"Ended" not in one]


# -- the job ---------------------------------------------------------------------------------------


def footprint(pid: int) -> tuple[float, int]:
    """Return the resident memory in MB, and the number of descriptors."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{pid}/fd"))


def attack(tmp_path: Path, num_seeds: int, num_calls: int) -> None:
    books = Books(tmp_path / "books", 2)

    def goes_on() -> None:
        before = books.acked(BYSTANDER)
        wait_for(lambda: books.acked(BYSTANDER) > before + 10)

    with started(2, work, str(tmp_path / "books"), num_seeds, hosts=HOSTS, servers=2) as ranks:
        address, secret_file, job_id, membership = ranks.receive(BYSTANDER)
        assert ranks.receive(MUTATING) == "warm"
        secret = load_secret(secret_file)
        before = [footprint(pid) for pid in ranks.pids]
        assert call_without_secret(membership, num_seeds) > 50
        goes_on()
        assert asyncio.run(call_with_secret(membership, secret, job_id, num_calls)) > num_calls / 3
        goes_on()
        messages = control_messages(num_seeds)
        assert len(messages) > 50 * num_seeds
        asyncio.run(talk_to_the_coordinator(address, secret, job_id, messages))
        goes_on()
        books.rows[MUTATING, Books.DONE] = 1
        sent, refused, muted = ranks.receive(MUTATING)
        assert sent > 50 * num_seeds and refused > sent / 10 and muted == 2
        goes_on()
        for (mb, fds), (mb_before, fds_before) in zip(
            map(footprint, ranks.pids), before, strict=True
        ):
            assert mb < mb_before + 40 and fds < fds_before + 5 * 256 + 20
        books.end()
        ranks.values(60)


def test_changed_bytes_against_a_job_with_servers(tmp_path: Path) -> None:
    attack(tmp_path, num_seeds=2, num_calls=300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_changed_bytes_against_a_job_with_servers(tmp_path: Path) -> None:
    attack(tmp_path, num_seeds=60, num_calls=5000)
