"""The copies of a partition, step by step; tests/simulation tries every order of events."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from paceline.ps.replication.applied import EMPTY
from paceline.ps.replication.chain import Ack, Forward, LogEntry, Message, Role
from paceline.ps.replication.replication import Replica

CLIENT = 7


class Copy:
    """A server that counts what it has applied, and answers with the count."""

    def __init__(self, net: Net, me: int) -> None:
        self.me, self.net = me, net
        self.state: list[Any] = []
        self.replica = Replica(me, self)
        self.delivered: list[tuple[int, Any]] = []
        self.filling: list[int] = []
        self.synced: list[int] = []

    def send(self, peer: int, message: Message) -> None:
        self.net.lines.setdefault((self.me, peer), deque()).append(message)

    def apply(self, entry: LogEntry) -> None:
        if entry.again:
            known = self.replica.applied.answer(entry.rank, entry.seq)
            self.replica.answer(entry.rank, entry.seq, known)
            return
        self.state.append(entry.op)
        self.replica.answer(entry.rank, entry.seq, len(self.state))

    def deliver(self, _rank: int, seq: int, answer: Any, _extra: Any) -> None:
        self.delivered.append((seq, answer))

    def fill(self, peer: int) -> None:
        self.replica.send_part(peer, list(self.state))
        self.filling.append(peer)

    def restore(self, content: Any) -> None:
        self.state = content

    def in_sync(self, generation: int) -> None:
        self.synced.append(generation)

    def ask(self, seq: int, op: str) -> bool:
        """Ask as a server does: what is new is applied at once by a copy that is alone."""
        applied = self.replica.applied
        client = applied.clients.get(CLIENT)
        if not self.replica.is_alone or client is None or seq <= client.last:
            return self.replica.submit(CLIENT, seq, op)
        client.last = seq
        applied.index += 1
        self.state.append(op)
        applied.keep(CLIENT, seq, len(self.state))
        self.deliver(CLIENT, seq, len(self.state), None)
        return True


class Net:
    """Lines between copies, which carry what is sent when they are told to."""

    def __init__(self, count: int) -> None:
        self.lines: dict[tuple[int, int], deque[Any]] = {}
        self.copies = [Copy(self, me) for me in range(count)]
        for one in self.copies:
            for other in self.copies:
                if one is not other:
                    one.replica.connected(other.me)

    def adopt(self, generation: int, holders: tuple[int, ...], *filling: int) -> None:
        for copy in self.copies:
            copy.replica.adopt(generation, holders, filling)

    def run(self, *deaf: int) -> None:
        """Carry everything, except to those who hear nothing."""
        while True:
            busy = [key for key, line in self.lines.items() if line and key[1] not in deaf]
            if not busy:
                return
            for sender, target in busy:
                copy, message = self.copies[target], self.lines[sender, target].popleft()
                copy.replica.receive(sender, message)
                copy.replica.flush()


def test_alone_it_answers_at_once() -> None:
    (one,) = Net(1).copies
    one.replica.adopt(1, (0,))
    assert one.ask(1, "a")
    assert one.delivered == [(1, 1)]


def test_what_one_applied_alone_is_not_applied_again_when_it_has_a_backup() -> None:
    net = Net(2)
    primary, backup = net.copies
    primary.replica.adopt(1, (0,))
    primary.ask(1, "a")
    assert primary.replica.is_alone and primary.state == ["a"]
    net.adopt(2, (0,), 1)
    assert not primary.replica.is_alone
    net.run()
    primary.replica.filled(1)
    net.adopt(3, (0, 1))
    primary.ask(1, "a")
    primary.ask(2, "b")
    net.run()
    assert primary.state == backup.state == ["a", "b"]
    assert primary.delivered == [(1, 1), (1, 1), (2, 2)]
    net.adopt(4, (1,))
    backup.ask(1, "a")
    assert backup.replica.is_alone and backup.delivered == [(1, 1)]


def test_a_copy_that_missed_what_one_applied_alone_does_not_count_as_complete() -> None:
    net = Net(2)
    primary, backup = net.copies
    net.adopt(1, (0, 1))
    primary.ask(1, "a")
    net.run()
    primary.replica.adopt(2, (0,))  # the other one does not hear of this generation
    primary.ask(2, "b")
    net.adopt(3, (0,), 1)
    net.run()
    primary.replica.filled(1)
    net.run()
    assert backup.state == ["a", "b"]


def test_an_answer_waits_for_the_backup() -> None:
    net = Net(2)
    primary, backup = net.copies
    net.adopt(1, (0, 1))
    primary.ask(1, "a")
    net.run(1)
    assert primary.delivered == []
    net.run()
    assert primary.delivered == [(1, 1)]
    assert backup.state == ["a"]
    assert backup.delivered == []


def test_a_promoted_backup_answers_what_it_has_applied_and_does_not_apply_it_again() -> None:
    net = Net(2)
    primary, backup = net.copies
    net.adopt(1, (0, 1))
    primary.ask(1, "a")
    net.run(0)  # the acknowledgement does not come: the client knows nothing
    assert primary.delivered == []
    backup.replica.adopt(2, (1,))
    assert backup.ask(1, "a")
    assert backup.ask(2, "b")
    assert backup.delivered == [(1, 1), (2, 2)]
    assert backup.state == ["a", "b"]


def test_a_request_that_will_be_answered_anyhow_is_not_taken_again() -> None:
    net = Net(2)
    primary, _ = net.copies
    net.adopt(1, (0, 1))
    primary.ask(1, "a")
    assert not primary.ask(1, "a")
    net.run()
    assert primary.delivered == [(1, 1)]


def test_a_deposed_primary_can_answer_nothing() -> None:
    net = Net(2)
    primary, backup = net.copies
    net.adopt(1, (0, 1))
    net.run()
    backup.replica.adopt(2, (1,))
    primary.ask(1, "a")
    net.run()
    assert primary.delivered == []
    assert backup.state == []
    assert backup.replica.refused == 1


def test_what_a_newer_generation_says_waits_until_it_is_adopted() -> None:
    net = Net(3)
    first, second, third = net.copies
    net.adopt(1, (0, 1, 2))
    net.run()
    first.replica.adopt(2, (0, 2))  # the second is gone, which the third does not know yet
    first.ask(1, "a")
    net.run()
    assert third.state == []
    third.replica.adopt(2, (0, 2))
    third.replica.flush()
    net.run()
    assert third.state == ["a"]
    assert first.delivered == [(1, 1)]
    assert second.state == []


def test_a_new_copy_gets_the_state_then_entries_and_counts_from_the_beginning() -> None:
    net = Net(2)
    primary, new = net.copies
    primary.replica.adopt(1, (0,))
    primary.ask(1, "a")
    net.adopt(2, (0,), 1)
    net.run()
    assert new.state == ["a"]
    primary.ask(2, "b")
    assert primary.delivered == [(1, 1)]  # the new copy does not have "b" yet
    net.run()
    assert primary.delivered == [(1, 1), (2, 2)]
    assert new.synced == []
    primary.replica.filled(1)
    net.run()
    assert new.synced == [2]
    net.adopt(3, (0, 1))
    new.replica.adopt(4, (1,))
    assert new.ask(2, "b")
    assert new.delivered == [(2, 2)]
    assert new.state == ["a", "b"]


def test_whoever_was_fed_by_a_lost_copy_counts_for_the_next_one_too() -> None:
    net = Net(3)
    first, _, new = net.copies
    net.adopt(1, (0, 1), 2)
    net.run()
    net.copies[1].replica.filled(2)
    net.run()
    assert new.synced == [1]
    net.lines.clear()
    for copy in (first, new):  # the second is lost; the coordinator may list the third any moment
        copy.replica.disconnected(1)
        copy.replica.adopt(2, (0,), (2,))
    first.ask(1, "a")
    assert first.delivered == []
    net.run(1)
    assert first.delivered == [(1, 1)]
    assert new.state == ["a"]
    assert new.synced == [1, 2]


def test_a_filling_copy_that_is_gone_holds_up_nobody() -> None:
    net = Net(2)
    primary, _ = net.copies
    net.adopt(1, (0,), 1)
    net.run()
    primary.ask(1, "a")
    assert primary.delivered == []
    primary.replica.disconnected(1)
    assert primary.delivered == [(1, 1)]


def test_a_copy_that_has_only_half_of_everything_does_not_serve() -> None:
    net = Net(2)
    net.adopt(1, (0,), 1)
    net.run()
    half = net.copies[1].replica
    half.adopt(2, (1,))
    assert half.role is Role.LOST
    assert not half.is_open


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_the_last_holder_takes_over_while_all_live_or_one_is_lost(lost: int | None) -> None:
    net = Net(3)
    first, _, last = net.copies
    net.adopt(1, (0, 1, 2))
    net.run()
    first.ask(1, "a")
    first.ask(2, "b")
    net.run(2)  # the last one has nothing of it yet
    net.adopt(2, (2, 0, 1))
    assert not last.replica.is_open
    if lost is not None:
        net.lines = {key: line for key, line in net.lines.items() if lost not in key}
        left = tuple(rank for rank in (2, 0, 1) if rank != lost)
        for copy in net.copies:
            if copy.me != lost:
                copy.replica.disconnected(lost)
                copy.replica.adopt(3, left)
    net.run(*([lost] if lost is not None else []))
    assert last.replica.is_open
    assert last.state == ["a", "b"]
    last.ask(3, "c")
    net.run(*([lost] if lost is not None else []))
    assert last.delivered == [(3, 3)]
    assert all(copy.state == ["a", "b", "c"] for copy in net.copies if copy.me != lost)
    assert all(copy.replica.is_settled for copy in net.copies if copy.me != lost)


def test_a_server_that_is_dropped_forgets() -> None:
    net = Net(2)
    net.adopt(1, (0, 1))
    net.run()
    dropped = net.copies[1].replica
    dropped.adopt(2, (0,))
    assert dropped.role is Role.NONE
    assert dropped.index == EMPTY
    dropped.receive(0, Forward(1, LogEntry(1, CLIENT, 1, "a")))
    dropped.receive(0, Ack(1, 5))
    assert dropped.refused == 2
