"""Waiting for any of several operations: the loop of a process that serves many others."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

import paceline as pl
from paceline import _core
from paceline.comm.group import Group
from paceline.errors import PeerLost, UsageError
from support import run_ranks, started
from support.body import receive, report

INT64 = _core.DTYPES.index("int64")
ROUNDS = 200


class Standing:
    """A receive from one member that is always posted; the receiver need not drive it."""

    def __init__(self, group: Group, member: int, count: int = 16) -> None:
        self.group, self.member = group, member
        self.buffer = torch.zeros(count, dtype=torch.int64)
        self.post()

    def post(self) -> None:
        place = (self.buffer.data_ptr(), self.buffer.numel(), INT64)
        self.work = self.group._core.start_receive(self.member, 1, *place, False)


def serve(group: Group, rounds: int) -> dict[int, list[int]]:
    """Answer every message with its numbers plus one; return what each member sent."""
    standing = [Standing(group, member) for member in range(1, group.size)]
    heard: dict[int, list[int]] = {each.member: [] for each in standing}
    while standing:
        each = standing[_core.wait_any([s.work for s in standing], 30.0)]
        each.work.wait()
        heard[each.member].append(int(each.buffer[0]))
        group.send(each.buffer + 1, each.member, tag=2)
        if len(heard[each.member]) < rounds:
            each.post()
        else:
            standing.remove(each)  # it may leave the job now
    return heard


def ask(group: Group, rounds: int) -> None:
    answer = torch.zeros(16, dtype=torch.int64)
    for i in range(rounds):
        group.send(torch.full((16,), 1000 * group.rank + i), 0, tag=1)
        group.recv(answer, 0, tag=2)
        assert answer.tolist() == [1000 * group.rank + i + 1] * 16, (group.rank, i)


@pytest.mark.parametrize("hosts", [1, 4, (0, 0, 1, 1)])
def test_every_member_is_served_in_its_own_order(hosts) -> None:
    def body(group: Group) -> None:
        if group.rank != 0:
            return ask(group, ROUNDS)
        heard = serve(group, ROUNDS)
        for member, numbers in heard.items():
            assert numbers == [1000 * member + i for i in range(ROUNDS)], member

    run_ranks(4, body, hosts=hosts)


def test_works_of_several_groups_and_the_lowest_of_those_that_have_finished() -> None:
    def body(world: Group) -> None:
        groups = [world, pl.new_group([0, 1]), pl.new_group([0, 1])]
        if world.rank == 1:
            for group in reversed(groups):
                world.barrier()
                group.send(torch.arange(16), 0, tag=1)
            world.barrier()
            return
        standing = [Standing(group, 1) for group in groups]
        works = [each.work for each in standing]
        assert _core.wait_any(works, 0.0) == -1 and _core.wait_any(works, 0.02) == -1
        for expected in (2, 1, 0):
            world.barrier()
            assert _core.wait_any(works[: expected + 1], 30.0) == expected
            assert _core.wait_any(works, 0.0) == expected
            assert standing[expected].buffer.tolist() == list(range(16))
            assert [w.done() for w in works] == [i >= expected for i in range(3)]
        world.barrier()

    run_ranks(2, body)


def test_a_work_that_failed_has_finished() -> None:
    def body(world: Group) -> None:
        pair = pl.new_group([0, 1]) if world.rank < 2 else None
        if pair is None or pair.rank == 1:
            return receive()
        standing = [Standing(world, 2), Standing(pair, 1)]
        works = [each.work for each in standing]
        report("waiting")
        assert _core.wait_any(works, 30.0) == 1
        with pytest.raises(PeerLost, match="rank 1"):
            works[1].wait()

    with started(3, body) as ranks:
        ranks.receive(0)
        ranks.kill(1)
        [outcome] = ranks.wait(ranks=[0])
        assert outcome.error is None and outcome.status == 0, outcome


def test_an_interrupt_raises_and_leaves_the_group_whole() -> None:
    def body(group: Group) -> None:
        if group.rank == 1:
            receive()
            return group.send(torch.arange(16), 0, tag=1)
        standing = Standing(group, 1)
        try:
            report("waiting")
            _core.wait_any([standing.work], 60.0)
        except KeyboardInterrupt:
            report("interrupted")
        else:
            raise AssertionError("no interrupt")
        assert _core.wait_any([standing.work], 30.0) == 0
        standing.work.wait()
        assert standing.buffer.tolist() == list(range(16))

    with started(2, body) as ranks:
        assert ranks.receive(0) == "waiting"
        time.sleep(0.2)  # into the wait, most likely; correct wherever the signal finds it
        ranks.kill(0, signal.SIGINT)
        assert ranks.receive(0) == "interrupted"
        ranks.send(1, "go on")
        ranks.values()


def test_several_threads_wait_at_once() -> None:
    def body(group: Group) -> None:
        errors: list[BaseException] = []

        def talk(number: int) -> None:
            buffer = torch.zeros(8, dtype=torch.int64)
            place = (buffer.data_ptr(), 8, INT64)
            try:
                for i in range(ROUNDS):
                    if group.rank == 1:
                        group.send(torch.full((8,), number * 1000 + i), 0, tag=10 + number)
                        group.recv(buffer, 0, tag=20 + number)
                    else:
                        work = group._core.start_receive(1, 10 + number, *place, False)
                        assert _core.wait_any([work], 30.0) == 0
                        work.wait()
                        group.send(buffer, 1, tag=20 + number)
                    assert buffer.tolist() == [number * 1000 + i] * 8
            except BaseException as error:
                errors.append(error)

        running = [threading.Thread(target=talk, args=(n,)) for n in range(4)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not errors, errors

    run_ranks(2, body)


def test_what_nobody_waits_for_goes_on_all_the_same() -> None:
    def body(group: Group) -> None:
        if group.rank == 1:
            return group.send(torch.arange(1 << 20), 0, tag=1)
        standing = Standing(group, 1, 1 << 20)
        while not standing.work.done():
            time.sleep(0.01)
        standing.work.wait()
        assert torch.equal(standing.buffer, torch.arange(1 << 20))

    for hosts in (1, 2):
        run_ranks(2, body, hosts=hosts)


def test_what_cannot_be_waited_for() -> None:
    def body(group: Group) -> None:
        with pytest.raises(UsageError, match="empty"):
            _core.wait_any([], 1.0)
        with pytest.raises(UsageError, match="not int"):
            _core.wait_any([3], 1.0)  # type: ignore[list-item]
        groups = []
        for rank in (0, 1):
            engine = _core.Engine(rank, 1, 10.0, 5.0, 2.0)
            groups.append(_core.Group(engine, 1, 1, [rank, 2], [rank, 2], 10.0))
        number = torch.zeros(1, dtype=torch.int64)
        works = [each.start_receive(1, 0, number.data_ptr(), 1, INT64) for each in groups]
        with pytest.raises(UsageError, match="different engines"):
            _core.wait_any(works, 1.0)
        for each in groups:
            each.close()

    run_ranks(1, body)
