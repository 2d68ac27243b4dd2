"""Copies of a partition in this process, connected by loopback: equal to the bit, also when new.

Requests are made by hand; payloads follow them, as if all servers were on hosts of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.control.member import Member, Membership
from paceline.ps import connection as framed
from paceline.ps import messages as m
from paceline.ps.replication import messages as p
from paceline.ps.replication import snapshot
from paceline.ps.replication.partition import Partition
from paceline.ps.server.server import ServerRequest
from paceline.ps.spec import OptimizerSpec, Rule, ShardPiece, ShardSpec, TableSpec
from paceline.runtime import job

WORKERS = (0, 1)
SIZES = (300, 77)


class House:
    """A server process without a loop: connections to other servers are queues."""

    is_elastic, on_loss = True, "shrink"

    def __init__(self, net: Net, rank: int) -> None:
        self.rank, self.net = rank, net
        self.engine = pl.init().fabric.engine
        self.synced: list[int] = []
        self.partition = Partition(self, 0)

    def is_here(self, _rank: int) -> bool:
        return False

    def sees(self, _peer: int, _rank: int) -> bool:
        return False

    def log(self, _text: str) -> None: ...

    def post(self, peer: int, message: Any, tensors: Sequence[torch.Tensor]) -> None:
        frames = framed.to_frames(message)
        sent = [tensor.clone() for tensor in tensors]
        self.net.connections.setdefault((self.rank, peer), deque()).append((frames, sent))

    def backlog(self, _peer: int) -> int:
        return 0

    def report_in_sync(self, _partition: int, generation: int) -> None:
        self.synced.append(generation)

    def departed(self, _rank: int) -> None:
        return None

    def take(self, sender: int) -> None:
        frames, sent = self.net.connections[sender, self.rank].popleft()
        message = p.read(*frames)
        landing = self.partition.find_peer_landing(message)
        assert [one.numel() for one in landing] == [one.numel() for one in sent]
        for target, source in zip(landing, sent, strict=True):
            target.copy_(source)
        self.partition.receive(sender, message, landing)


class Net:
    """Some servers, and the workers' side."""

    def __init__(self, count: int) -> None:
        self.connections: dict[tuple[int, int], deque[Any]] = {}
        self.houses = {100 + number: House(self, 100 + number) for number in range(count)}
        self.generation = 0
        self.seqs = dict.fromkeys(WORKERS, 0)
        for one in self.houses.values():
            for other in self.houses:
                if other != one.rank:
                    one.partition.replica.connected(other)

    def adopt(self, holders: tuple[int, ...], *filling: int) -> None:
        self.generation += 1
        members = [_member(rank, "worker") for rank in WORKERS]
        members += [_member(rank, "server") for rank in self.houses]
        membership = Membership(
            self.generation, tuple(members), (holders,), filling=(tuple(filling),)
        )
        for context in self.houses.values():
            context.partition.adopt(membership)
        for context in self.houses.values():
            context.partition.see(membership)
        self.primary = self.houses[holders[0]].partition

    def run(self, turns: int = 10_000) -> None:
        for _ in range(turns):
            busy = [key for key, line in self.connections.items() if line]
            for sender, target in busy:
                self.houses[target].take(sender)
            for context in self.houses.values():
                context.partition.flush()
            if not busy and not any(
                one.partition.is_sending_snapshot for one in self.houses.values()
            ):
                return

    def ask(self, worker: int, make: Any, *tensors: torch.Tensor) -> None:
        self.seqs[worker] += 1
        asked = ServerRequest(make(self.seqs[worker]), [tensor.clone() for tensor in tensors])
        self.primary.server.take(worker, asked)

    def answers(self, rank: int) -> dict[tuple[int, int], m.Reply]:
        return self.houses[rank].partition.replica.applied.answers()


def _member(rank: int, role: str) -> Member:
    return Member(rank, role, f"host {rank}", "host", 1, 0, "", "", rank % 100)


def spec(rule: Rule, optimizer: str, **settings: Any) -> TableSpec:
    shards = []
    for number, size in enumerate(SIZES):
        half = size // 3
        pieces = (
            ShardPiece("a", 0, 0, 0, half, (half,)),
            ShardPiece("b", 1, 0, half, size - half, (size - half,)),
        )
        shards.append(ShardSpec(f"part {number}", "float32", size, pieces))
    chosen = OptimizerSpec(optimizer, ({"lr": 0.1, **settings},))
    return TableSpec("model", WORKERS, tuple(shards), chosen, rule)


def noise(seed: int, number: int) -> torch.Tensor:
    return torch.randn(SIZES[number], generator=torch.Generator().manual_seed(97 * seed + number))


CASES = {
    "ps": (Rule(bound=0, aggregate=True, nonfinite="skip"), "Adam", {"weight_decay": 0.01}),
    "ps, bf16": (Rule(bound=0, aggregate=True, server_dtype="bf16"), "SGD", {"momentum": 0.9}),
    "backup": (Rule(bound=None, aggregate=True, backup=1, is_elastic=True), "Adam", {}),
    "async": (Rule(bound=None), "SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    "ssp": (Rule(bound=2), "AdamW", {}),
    "versions": (Rule(bound=3, unit="version"), "Adagrad", {}),
    "softsync": (Rule(bound=None, softsync=1, lr="staleness"), "RMSprop", {}),
    "dc": (Rule(bound=None, compensate="dc"), "SGD", {"momentum": 0.5}),
    "delta": (Rule(bound=None, push="delta"), "SGD", {}),
    "params": (Rule(bound=1, push="params"), "SGD", {}),
    "bf16": (Rule(bound=None, server_dtype="bf16"), "Adam", {}),
}


class Script:
    """Two workers that go on, one request at a time."""

    def __init__(self, net: Net, case: str) -> None:
        rule, optimizer, settings = CASES[case]
        self.net, self.rule = net, rule
        self.spec = spec(rule, optimizer, **settings)
        self.steps = dict.fromkeys(WORKERS, 0)
        self.seed = 1

    def open(self) -> None:
        for worker in WORKERS:
            self.net.ask(
                worker, lambda seq: m.Open(seq, self.spec, (m.WorkerBuffer(),) * len(SIZES))
            )
        for number in range(len(SIZES)):
            values = noise(0, number)
            self.net.ask(0, lambda seq, n=number: m.Assign(seq, 0, n, None), values)
        for worker in WORKERS:
            self.net.ask(worker, lambda seq: m.Pull(seq, 0))

    def requests(self, count: int):
        """Yield after every request of so many steps."""
        for _ in range(count):
            order = WORKERS if self.rule.aggregate or self.seed % 2 else WORKERS[::-1]
            for worker in order:
                self.steps[worker] += 1
                for number in range(len(SIZES)):
                    self.seed += 1
                    clock, grad = self.steps[worker], noise(self.seed, number)
                    if self.seed % 13 == 0 and self.rule.nonfinite == "skip":
                        grad[3] = float("nan")
                    self.net.ask(
                        worker,
                        lambda seq, n=number, c=clock: m.Push(seq, 0, n, c, None, "float32"),
                        grad,
                    )
                    yield
            for worker in order:
                lr = ({**self.spec.optimizer.groups[0], "lr": 0.1 / (1 + self.steps[worker])},)
                told = None if self.steps[worker] % 2 else lr
                clock = self.steps[worker]
                self.net.ask(worker, lambda seq, c=clock, t=told: m.Commit(seq, 0, c, t))
                yield


def state_of(partition: Partition) -> dict[str, Any]:
    served = partition.server.tables[0]
    table = served.table
    numbers = [
        flat.clone() for number, size in enumerate(SIZES) for flat in table.numbers(number, 0, size)
    ]
    outline = table.outline()
    return {
        "numbers": numbers,
        "outline": {
            field: getattr(outline, field)
            for field in outline.__struct_fields__
            if field not in ("report", "settings")
        },
        "settings": {w: list(map(dict, groups)) for w, groups in outline.settings.items()},
        "optimizer": [[(e.piece, e.key) for e in table.state(n)] for n in range(len(SIZES))],
        "steps": [
            e.value.item()
            for n in range(len(SIZES))
            for e in table.state(n)
            if e.key == "step" and isinstance(e.value, torch.Tensor)
        ],
        "waits": (
            [(one.caller.rank, one.seq) for one in served.readers],
            {
                n: [(o.caller.rank, o.seq) for o in each]
                for n, each in served.pushes.items()
                if each
            },
        ),
        "index": partition.replica.index,
    }


def assert_equal(one: Partition, other: Partition) -> None:
    mine, theirs = state_of(one), state_of(other)
    for flat, copy in zip(mine.pop("numbers"), theirs.pop("numbers"), strict=True):
        assert torch.equal(flat.view(torch.uint8), copy.view(torch.uint8))
    assert mine == theirs


@pytest.fixture(autouse=True)
def alone():
    yield
    job.shutdown()


@pytest.mark.parametrize("case", CASES)
def test_a_backup_is_equal_to_the_bit_after_every_request(case: str) -> None:
    net = Net(2)
    net.adopt((100, 101))
    script = Script(net, case)
    script.open()
    net.run()
    for _ in script.requests(3):
        net.run()
        assert_equal(net.primary, net.houses[101].partition)
    assert net.answers(100) == net.answers(101)
    assert net.houses[101].partition.server.tables[0].table.version > 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("begin", [1, 6])
def test_a_copy_that_was_filled_in_between_is_equal(case: str, begin: int, monkeypatch) -> None:
    monkeypatch.setattr(snapshot, "_PART_BYTES", 200)
    monkeypatch.setattr(snapshot, "_GAP_S", 1e-9)
    monkeypatch.setattr(snapshot, "_AT_ONCE", 1)
    net = Net(2)
    net.adopt((100,))
    script = Script(net, case)
    script.open()
    for number, _ in enumerate(script.requests(6)):
        if number == begin:
            net.adopt((100,), 101)
        if number >= begin:
            net.run(turns=1)  # a part of the state, an entry, a part of the state...
    net.run()
    new = net.houses[101]
    assert new.synced
    assert_equal(net.primary, new.partition)
    assert net.answers(100) == net.answers(101)
    net.adopt((100, 101))
    net.adopt((101,))  # the first one is gone; the new one goes on where it was
    other = Net(1)
    other.adopt((100,))
    alone = Script(other, case)
    alone.open()
    for _ in alone.requests(8):
        pass
    for _ in script.requests(2):
        pass
    assert_equal_values(net.primary, other.primary)


def assert_equal_values(one: Partition, other: Partition) -> None:
    for number, size in enumerate(SIZES):
        mine, theirs = (each.server.tables[0].table.shards[number].params for each in (one, other))
        assert mine.numel() == size
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("ends", [False, True])
def test_a_copy_is_filled_after_a_script_has_clipped(ends: bool, monkeypatch) -> None:
    monkeypatch.setattr(snapshot, "_GAP_S", 1e-9)
    net = Net(2)
    net.adopt((100,))
    script = Script(net, "ps")
    script.open()
    for number, _ in enumerate(script.requests(1), 1):
        if number == 2 * len(SIZES):  # both have pushed everything
            net.ask(0, lambda seq: m.Replace(seq, 0, 1, None), 0.5 * noise(0, 1))
            if not ends:
                break
    net.adopt((100,), 101)
    net.run()
    assert net.houses[101].synced
    assert_equal(net.primary, net.houses[101].partition)


def test_a_backup_acknowledges_a_step_before_it_computes_it() -> None:
    net = Net(2)
    net.adopt((100, 101))
    script = Script(net, "ps")
    script.open()
    first, backup = net.primary, net.houses[101]
    for number, _ in enumerate(script.requests(5), 1):
        if number < 5 * 2 * (len(SIZES) + 1):
            net.run()
    shards = backup.partition.server.tables[0].table.shards
    before = [shard.params.clone() for shard in shards]
    while net.connections[100, 101]:
        backup.take(100)
    backup.partition.acknowledge()
    assert all(torch.equal(s.params, one) for s, one in zip(shards, before, strict=True))
    assert len(backup.partition.server.deferred) == len(SIZES)
    while net.connections[101, 100]:
        net.houses[100].take(101)
    assert not first.replica._deferred, "the workers have their replies"
    expected = [shard.params.clone() for shard in first.server.tables[0].table.shards]
    net.adopt((101,))  # the primary is lost
    assert not backup.partition.server.deferred
    for shard, one, old in zip(shards, expected, before, strict=True):
        assert torch.equal(shard.params, one) and not torch.equal(one, old)
