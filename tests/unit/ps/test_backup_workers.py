"""Backup workers: a round has the first that come, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.errors import UsageError
from paceline.ps.server.table import Table
from paceline.ps.spec import Rule
from support import tables as t


def rule(backup: int, **more) -> Rule:
    return Rule(bound=None, aggregate=True, backup=backup, all_speak=True, **more)


def make(workers: int, backup: int, **more) -> Table:
    table = t.table(rule(backup, **more), workers=range(workers))
    t.assign(table, t.noise(1))
    return table


def alone() -> t.OneProcess:
    return t.OneProcess(t.noise(1), "SGD", ({"lr": 0.1}, {"lr": 0.1}))


def mean(*grads: torch.Tensor) -> torch.Tensor:
    return torch.stack(grads).mean(0)


def push(table: Table, worker: int, grad: torch.Tensor) -> bool:
    """Push all shards; say whether that counts, or is seen beside the average."""
    clock = table.clocks.clock(worker) + 1
    found = [table.push(worker, n, clock, part) for n, part in enumerate(t.parts(table, grad))]
    return found[-1]  # which is when it is complete


def end_step(table: Table, worker: int) -> torch.Tensor:
    """Commit and read, if the round is over."""
    t.commit(table, worker)
    assert table.may_read(worker)
    return t.read(table, worker)


def counts(table: Table) -> dict[int, tuple[int, int]]:
    """Return by worker: how many of its gradients were applied, and dropped."""
    return {one.worker: (one.updates, one.dropped) for one in table.report().workers}


def test_a_round_is_the_mean_of_the_first_and_the_late_one_is_dropped() -> None:
    table, expected = make(3, 1), alone()
    t.push(table, 2, t.noise(12))
    t.push(table, 0, t.noise(10))
    assert table.is_reduced(0) and table.is_reduced(1)
    t.push(table, 1, t.noise(11))  # too late for the average, but it sees it
    t.commit(table, 0)
    assert not table.may_read(0)
    t.commit(table, 2)
    assert table.may_read(0) and table.may_read(2)
    expected.step(mean(t.noise(10), t.noise(12)))
    torch.testing.assert_close(t.read(table, 0), expected.flat)
    t.read(table, 2)
    torch.testing.assert_close(end_step(table, 1), expected.flat)  # at once, with fresh values
    assert counts(table) == {0: (1, 0), 1: (0, 1), 2: (1, 0)}
    assert table.version == 1


def test_a_late_gradient_is_never_added_and_its_worker_goes_on_with_fresh_values() -> None:
    table, expected = make(3, 1), alone()
    for number in range(3):
        for worker in (0, 1):
            t.push(table, worker, t.noise(10 * number + worker))
        for worker in (0, 1):
            t.commit(table, worker)
        for worker in (0, 1):
            t.read(table, worker)
        expected.step(mean(t.noise(10 * number), t.noise(10 * number + 1)))
    assert not push(table, 2, t.noise(99))  # computed from the first values
    torch.testing.assert_close(end_step(table, 2), expected.flat)
    # It is fresh now. Two are ahead of it, so it waits for nobody, but it may complete a round.
    assert not push(table, 2, t.noise(98))
    torch.testing.assert_close(end_step(table, 2), expected.flat)
    t.push(table, 1, t.noise(51))
    assert push(table, 2, t.noise(52))
    expected.step(mean(t.noise(51), t.noise(52)))
    t.commit(table, 1)
    torch.testing.assert_close(end_step(table, 2), expected.flat)
    assert counts(table) == {0: (3, 0), 1: (4, 0), 2: (1, 2)}


def test_a_commit_that_comes_after_the_round_counts_what_was_in_it() -> None:
    table = make(2, 1)
    t.push(table, 0, t.noise(10))
    t.push(table, 1, t.noise(11))
    end_step(table, 1)  # it was too late for the average, but is the first to commit
    end_step(table, 0)
    assert counts(table) == {0: (1, 0), 1: (0, 1)}


def test_a_step_that_is_left_out_begins_anew() -> None:
    table, expected = make(3, 1), alone()
    for worker in (0, 1, 2):
        t.push(table, worker, t.noise(worker))
    for worker in (2, 0):  # the same step again: nobody has committed
        t.push(table, worker, t.noise(20 + worker))
    for worker in (2, 0):
        t.commit(table, worker)
    expected.step(mean(t.noise(20), t.noise(22)))
    torch.testing.assert_close(t.read(table, 0), expected.flat)


def test_settings_are_those_of_somebody_in_the_round() -> None:
    table, expected = make(3, 1), alone()
    for worker in (1, 2):
        t.push(table, worker, t.noise(worker))
    for worker in (1, 2):
        t.commit(table, worker, ({"lr": 0.5}, {"lr": 0.5}))
    expected.step(mean(t.noise(1), t.noise(2)), settings=({"lr": 0.5}, {"lr": 0.5}))
    torch.testing.assert_close(t.read(table, 1), expected.flat)


def test_numbers_that_cannot_be() -> None:
    for backup in (2, 3, -1):
        with pytest.raises(UsageError, match="of 2 workers: expected fewer"):
            t.table(rule(backup), workers=(0, 1))
    with pytest.raises(UsageError, match="a synchronous table without a bound"):
        t.table(Rule(bound=0, aggregate=True, backup=1), workers=(0, 1))


class Worker:
    """Takes its steps, one message after the other, and waits where a real one does."""

    def __init__(self, number: int, table: Table, steps: int) -> None:
        self.number, self.table, self.left = number, table, steps
        self.grads = [torch.full((shard.count,), 1.0) for shard in table.spec.shards]
        self.unanswered: set[int] = set()  # shards
        self.state, self.next = "pushing", 0

    @property
    def can_move(self) -> bool:
        table = self.table
        if self.state == "waiting":
            has_mean = all(table.is_reduced(shard) for shard in self.unanswered)
            return has_mean or table.has_dropped(self.number)
        return self.state == "pushing" or (self.state == "reading" and table.may_read(self.number))

    def move(self) -> None:
        table, clock = self.table, self.table.clocks.clock(self.number) + 1
        if self.state == "pushing":
            if table.push(self.number, self.next, clock, self.grads[self.next]):
                self.unanswered.add(self.next)
            self.next += 1
            if self.next == len(self.grads):
                self.state = "waiting"
        elif self.state == "waiting":
            self.unanswered.clear()
            table.commit(self.number, clock)
            self.state = "reading"
        else:
            t.read(table, self.number)
            self.left, self.next = self.left - 1, 0
            self.state = "pushing" if self.left else "through"


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_in_any_order_everybody_comes_through(seed: int, leaves: bool) -> None:
    """Whether those who are through leave, or wait for the others, which no server knows."""
    chance = random.Random(seed)
    num = chance.randint(2, 6)
    backup = chance.randint(1, num - 1)
    table = make(num, backup)
    steps, speeds = 6, [chance.choice((1, 1, 1, 5, 25)) for _ in range(num)]
    workers = [Worker(number, table, steps) for number in range(num)]
    while moves := [worker for worker in workers if worker.can_move]:
        (one,) = chance.choices(moves, [1 / speeds[worker.number] for worker in moves])
        one.move()
        if leaves and one.state == "through":
            table.leave(one.number)
    assert [worker.state for worker in workers] == ["through"] * num, (num, backup, speeds)
    assert all(sum(both) == steps for both in counts(table).values()), counts(table)
    assert table.version * (num - backup) == sum(updates for updates, _ in counts(table).values())
    moved = (t.noise(1)[0] - t.values(table)[0]).item()  # every gradient is 1
    assert moved == pytest.approx(0.1 * table.version, rel=1e-4)


def test_who_is_lost_is_not_counted_any_more() -> None:
    table = make(4, 1, is_elastic=True)
    expected = alone()
    for worker in (0, 1, 2):  # a round of three
        t.push(table, worker, t.noise(10 + worker))
    t.commit(table, 0)
    table.leave(1)  # it is in the average
    t.commit(table, 2)
    expected.step(mean(*(t.noise(10 + worker) for worker in (0, 1, 2))))
    for worker in (0, 2):
        torch.testing.assert_close(t.read(table, worker), expected.flat)
    t.read(table, 3)
    t.push(table, 0, t.noise(20))
    assert not table.is_reduced(0)
    table.leave(2)
    assert table.is_reduced(0)  # of two one is needed, and that was there
    t.push(table, 3, t.noise(23))
    assert torch.equal(end_step(table, 0), end_step(table, 3))
    expected.step(t.noise(20))
    torch.testing.assert_close(t.values(table), expected.flat)


def test_who_takes_over_a_place_begins_its_step_anew() -> None:
    table = make(3, 1, is_elastic=True)
    t.push(table, 0, t.noise(10))
    t.push(table, 1, t.noise(11))
    t.commit(table, 1)
    table.vacate(1)
    assert table.join(1) == 0
    t.read(table, 1)  # of values that the round will replace
    end_step(table, 0)
    assert table.version == 1
    assert not push(table, 1, t.noise(12))
    end_step(table, 1)
    t.push(table, 0, t.noise(13))
    t.push(table, 1, t.noise(14))
    t.commit(table, 0)
    end_step(table, 1)
    assert table.version == 2


@pytest.mark.parametrize("keeps_places", [False, True])
@pytest.mark.parametrize("seed", range(80))
def test_while_workers_come_and_go_everybody_comes_through(seed: int, keeps_places: bool) -> None:
    chance = random.Random(seed)
    num = chance.randint(2, 6)
    table = make(num, chance.randint(1, num - 1), is_elastic=True)
    speeds = [chance.choice((1, 1, 5, 25)) for _ in range(num)]
    workers, changes = [Worker(number, table, 6) for number in range(num)], 4
    gone: list[int] = []
    while gone or any(worker.can_move for worker in workers):
        under_way = [worker for worker in workers if worker.state != "through"]
        if changes and under_way and chance.random() < 0.05:
            changes -= 1
            lost = chance.choice(under_way)
            workers.remove(lost)
            gone.append(lost.number)
            table.vacate(lost.number) if keeps_places else table.leave(lost.number)
        movable = [worker for worker in workers if worker.can_move]
        if gone and (not movable or chance.random() < 0.1):
            left = 6 - table.join(gone[0])
            t.read(table, gone[0])
            workers.append(Worker(gone.pop(0), table, max(left, 1)))
        elif movable:
            (one,) = chance.choices(movable, [1 / speeds[worker.number] for worker in movable])
            one.move()
            if one.state == "through":
                table.leave(one.number)
    assert all(worker.state == "through" for worker in workers), [w.state for w in workers]
    assert table.version > 0
