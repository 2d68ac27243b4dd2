"""What no worker would say: the server refuses it, or stops listening to that worker; others do not
notice, and the server's memory stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from ps_tables import Books, remote_table, wait_for

from paceline.comm.group import Group
from paceline.errors import ProtocolError, SharedMemoryError, UsageError
from paceline.ps import connection as framed
from paceline.ps import messages as m
from paceline.ps.client.remote_table import RemoteTable
from paceline.ps.spec import OptimizerSpec, Rule, TableSpec
from paceline.runtime import job
from support import report, run_ranks, started

Make = Callable[[int], m.AnyRequest]
changed = msgspec.structs.replace


def count_alone(table: RemoteTable, books: Books) -> None:
    """Be the bystander: count until the test ends it, and see every count."""
    table.items[0].grads[0] = -1.0
    while not books.is_over:
        table.push(0).wait()
        table.commit(None).wait()
        books.rows[0, Books.ACKED] += 1
        assert table.items[0].params[0] == books.acked(0)


def places(mine: m.Where) -> Iterator[m.Where]:
    """Places that are not this worker's, or nobody's."""
    yield changed(mine, offset=1 << 40)
    yield changed(mine, offset=(1 << 64) - 8)
    yield changed(mine, offset=mine.offset + 3)
    yield changed(mine, segment=1 << 40)
    yield changed(mine, rank=0)  # another worker's
    yield changed(mine, rank=2)  # the server's own
    yield changed(mine, rank=1_000_000)


def misplaced(spec: TableSpec, where: m.Where) -> Iterator[Make]:
    yield lambda seq: m.Assign(seq, 0, 0, where)
    yield lambda seq: m.Pull(seq, 0, into=(where,))
    yield lambda seq: m.Peek(seq, 0, into=(where,))
    yield lambda seq: m.Open(seq, spec, (m.WorkerBuffer(where),))
    yield lambda seq: m.Open(seq, spec, (m.WorkerBuffer(None, where),))
    yield lambda seq: m.Open(
        seq,
        changed(spec, name=f"homes {where}"),
        (m.WorkerBuffer(),),
        (m.SharedMemory(where, where),),
    )


def wrong_tables(spec: TableSpec) -> Iterator[TableSpec]:
    [shard] = spec.shards
    [piece] = shard.pieces
    for dtype in ("complex64", "__class__", "int64"):
        yield changed(spec, shards=(changed(shard, dtype=dtype),))
    yield changed(spec, shards=(changed(shard, count=1 << 47),))  # memory that nobody has
    yield changed(spec, shards=(changed(shard, pieces=(changed(piece, shape=(3, 3)),)),))
    yield changed(spec, shards=(changed(shard, pieces=(changed(piece, group=7),)),))
    yield changed(spec, shards=(changed(shard, pieces=(piece, piece)),))
    for rule in (
        Rule(bound=-1),
        Rule(bound=0, unit="x"),
        Rule(bound=None, softsync=-1),
        Rule(bound=None, dc_lambda=float("nan")),
        Rule(bound=None, push="x"),
        Rule(bound=None, server_dtype="eval"),
    ):
        yield changed(spec, rule=rule)
    for name in ("LBFGS", "Optimizer", "__builtins__", "lr_scheduler", "torch", ""):
        yield changed(spec, optimizer=OptimizerSpec(name, ({"lr": 1.0},)))
    for groups in ((), ({"lr": "x"},), ({"lr": [1]},), ({"lr": 1.0, "momentum": None},)):
        yield changed(spec, optimizer=OptimizerSpec("SGD", groups))
    for workers in ((), (7,), (-1,), (0, 0), tuple(range(100_000))):
        yield changed(spec, workers=workers)


def wrong_requests(spec: TableSpec, mine: m.Where) -> Iterator[Make]:
    """Requests that can be read, and make no sense."""
    for table, shard in ((-1, 0), (99, 0), (1 << 63, 0), (0, -1), (0, 5)):
        yield lambda seq, t=table, s=shard: m.Assign(seq, t, s, mine)
        yield lambda seq, t=table, s=shard: m.FetchState(seq, t, s)
        yield lambda seq, t=table, s=shard: m.LoadState(
            seq, t, s, (m.EncodedStateEntry(0, "x", 1.0),)
        )
    for where in places(mine):
        yield from misplaced(spec, where)
    yield lambda seq: m.Pull(seq, 0, into=(mine, mine))
    yield lambda seq: m.Open(seq, spec)
    yield lambda seq: m.Open(seq, spec, (m.WorkerBuffer(),), wire="eval")
    yield lambda seq: m.Replace(seq, 0, 0, mine, tuple(range(300_000)))  # nothing to replace
    for number, table in enumerate(wrong_tables(spec)):
        name = f"wrong {number}"
        yield lambda seq, t=table, n=name: m.Open(seq, changed(t, name=n), (m.WorkerBuffer(),))
    for entry in (
        m.EncodedStateEntry(0, "x"),
        m.EncodedStateEntry(9, "x", 1.0),
        m.EncodedStateEntry(0, "x", None, "float32", (1 << 40,)),
        m.EncodedStateEntry(0, "x", None, "eval", (2,)),
    ):
        yield lambda seq, e=entry: m.LoadState(seq, 0, 0, (e,))
    for clock in (0, 2, -1, 1 << 60):
        yield lambda seq, c=clock: m.Commit(seq, 0, c)
    yield lambda seq: m.Commit(seq, 0, 1, ())
    yield lambda seq: m.Find(seq, "x" * 3000)


def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    def body(group: Group, path: str) -> int:
        books = Books(path)
        abused, counted = remote_table("abused", 8), remote_table("counted", 8)
        if group.rank == 0:
            count_alone(counted, books)
            return 0
        [link] = job.current().servers
        mine, num_refused = link.locate(abused.items[0].params), 0
        for make in wrong_requests(abused.specs[0], mine):
            before = books.acked(0)
            with pytest.raises((UsageError, SharedMemoryError)):
                link.ask(make).wait(60)
            num_refused += 1
            wait_for(lambda b=before: books.acked(0) > b)  # the other one goes on
        books.end()
        return num_refused

    Books(tmp_path / "books", 2)
    assert run_ranks(2, body, str(tmp_path / "books"), servers=1)[1] > 80


def send_raw(link, frame: bytes) -> None:
    """Send a frame as it is; it counts as a request."""
    padded = np.frombuffer(frame.ljust(framed.FRAME_BYTES, b"\0"), dtype=np.uint8)
    with link._lock:
        link._seq += 1
        link._fixed._pair.send(padded, framed.REQUEST).wait()


BAD_FRAMES = {
    "noise": bytes(range(256)) * 4,
    "of another version": (100).to_bytes(4, "little") + b"\7",
    "too long": (1 << 30).to_bytes(4, "little") + b"\1",
    "no msgpack": (4).to_bytes(4, "little") + b"\1\0\0\0" + b"\xc1\xc1\xc1\xc1",
    "of no kind": (7).to_bytes(4, "little") + b"\1\0\0\0" + msgspec.msgpack.encode({"type": "x"}),
}


@pytest.mark.parametrize("hosts", [1, [0, 1, 0]], ids=["one host", "two hosts"])
@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_a_worker_whose_frames_cannot_be_read_is_muted(tmp_path: Path, hosts, frame: bytes) -> None:
    def body(group: Group, path: str, frame: bytes) -> str:
        books = Books(path)
        table = remote_table("counted", 8, Rule(bound=2))  # who is muted is not waited for
        if group.rank == 0:
            count_alone(table, books)
            return ""
        [link] = job.current().servers
        send_raw(link, frame)
        for _ in range(3):
            with pytest.raises(ProtocolError, match="server 0 has stopped listening to worker 1"):
                link.ask(m.Stats).wait(60)
        before = books.acked(0)
        wait_for(lambda: books.acked(0) > before + 10)
        books.end()
        return "muted"

    Books(tmp_path / "books", 2)
    values = run_ranks(2, body, str(tmp_path / "books"), frame, hosts=hosts, servers=1)
    assert values == ["", "muted"]


def test_a_message_that_does_not_come_to_its_end_holds_up_nobody(tmp_path: Path) -> None:
    def body(group: Group, path: str) -> None:
        books = Books(path)
        table = remote_table("counted", 8)
        if group.rank == 0:
            count_alone(table, books)
            return
        [link] = job.current().servers
        send_raw(link, (100_000).to_bytes(4, "little") + b"\1")  # and no rest
        before = books.acked(0)
        wait_for(lambda: books.acked(0) > before + 10)
        books.end()

    Books(tmp_path / "books", 2)
    run_ranks(2, body, str(tmp_path / "books"), servers=1)


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=["one host", "two hosts"])
def test_pushes_without_a_commit_take_no_memory(tmp_path: Path, hosts: list[int]) -> None:
    def body(_group: Group, path: str) -> None:
        books = Books(path)
        table = remote_table("pushed", 50_000)
        for number in range(1000):  # 400 MB
            table.push(0).wait()
            if number == 20:
                job.current().servers[0].ask(m.Stats).wait()
                report("warm")
                wait_for(lambda: books.is_over)
        job.current().servers[0].ask(m.Stats).wait()
        report("done")
        wait_for(lambda: not books.is_over)

    books = Books(tmp_path / "books", 1)
    with started(1, body, str(tmp_path / "books"), hosts=hosts, servers=1) as ranks:
        ranks.receive(0)
        before_mb = resident_mb(ranks.pids[1])
        books.end()
        ranks.receive(0)
        assert resident_mb(ranks.pids[1]) < before_mb + 20
        books.rows[-1, Books.DONE] = 0
        ranks.values()


@pytest.mark.parametrize("hosts", [1, [0, 1, 0]], ids=["one host", "two hosts"])
def test_a_worker_that_never_reads_does_not_fill_the_server(tmp_path: Path, hosts) -> None:
    def body(group: Group, path: str) -> None:
        books = Books(path)
        table = remote_table("counted", 8)
        if group.rank == 0:
            count_alone(table, books)
            return
        [link] = job.current().servers
        report("asking")
        for _ in range(30_000):
            if books.is_over:
                break
            link.tell(m.Keys)  # and nobody takes the answers
        books.rows[1, Books.DONE] = 1
        wait_for(lambda: books.is_over)

    books = Books(tmp_path / "books", 2)
    with started(2, body, str(tmp_path / "books"), hosts=hosts, servers=1) as ranks:
        ranks.receive(1)
        before_mb = resident_mb(ranks.pids[2])
        wait_for(lambda: books.rows[1, Books.DONE], 60)
        before = books.acked(0)
        wait_for(lambda: books.acked(0) > before + 10)
        assert resident_mb(ranks.pids[2]) < before_mb + 30
        books.end()
        ranks.wait()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_a_state_of_another_shape_is_refused(fused: bool) -> None:
    def body(_group: Group, fused: bool) -> float:
        adam = OptimizerSpec("Adam", ({"lr": 1.0, "fused": fused},))
        table = remote_table("adam", 100_000, optimizer=adam)
        [link] = job.current().servers
        entries = (
            m.EncodedStateEntry(0, "step", None, "float32", ()),
            m.EncodedStateEntry(0, "exp_avg", None, "float64", (1,)),
            m.EncodedStateEntry(0, "exp_avg_sq", None, "float64", (1,)),
        )
        tensors = [torch.ones(1), *torch.ones(2, 1, dtype=torch.float64)]
        with pytest.raises(UsageError, match="exp_avg"):
            link.ask(lambda seq: m.LoadState(seq, 0, 0, entries), payload=lambda: tensors).wait()
        table.items[0].grads.fill_(1.0)
        table.push(0).wait()
        table.commit(None).wait()
        return table.items[0].params.mean().item()

    assert run_ranks(1, body, fused, servers=1) == [pytest.approx(-1.0)]
