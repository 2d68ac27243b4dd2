"""The consistency rule holds whatever the order in which workers read, commit, come and go."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from paceline.errors import UsageError
from paceline.ps.server.staleness_bound import Clocks

picks = st.integers(0, 100)


class AnyOrder(RuleBasedStateMachine):
    """Workers that wait for a read or compute; a history of versions says what is true."""

    @initialize(
        num_workers=st.integers(1, 5),
        bound=st.one_of(st.none(), st.integers(0, 4)),
        unit=st.sampled_from(["clock", "version"]),
    )
    def start(self, num_workers: int, bound: int | None, unit: str) -> None:
        self.bound, self.unit = bound, unit
        self.clocks = Clocks(range(num_workers), bound=bound, unit=unit)
        self.history: list[int] = []  # who made each version
        self.read_at: dict[int, int] = {}  # of the outstanding workers
        self.computing: set[int] = set()
        self.next_rank = num_workers

    def waiting(self) -> list[int]:
        return [worker for worker in self.clocks.workers if worker not in self.computing]

    def slowest(self) -> int:
        return min(self.clocks.clock(worker) for worker in self.clocks.workers)

    @precondition(lambda self: self.waiting())
    @rule(pick=picks)
    def read(self, pick: int) -> None:
        waiting = self.waiting()
        worker = waiting[pick % len(waiting)]
        blockers = self.clocks.blockers(worker)
        assert self.clocks.may_read(worker) == (not blockers)
        if blockers:
            assert set(blockers) <= set(self.clocks.workers) - {worker}
            with pytest.raises(UsageError, match="may not read"):
                self.clocks.read(worker)
            return
        if self.unit == "clock" and self.bound is not None:
            assert self.clocks.clock(worker) - self.slowest() <= self.bound
        self.take(worker)

    @precondition(lambda self: self.computing)
    @rule(pick=picks)
    def read_again(self, pick: int) -> None:
        worker = sorted(self.computing)[pick % len(self.computing)]
        assert self.clocks.may_read(worker), "whoever has values may have newer ones"
        self.take(worker)

    def take(self, worker: int) -> None:
        self.clocks.read(worker)
        assert self.clocks.staleness(worker) == 0
        self.read_at[worker] = len(self.history)
        self.computing.add(worker)

    @precondition(lambda self: self.computing)
    @rule(pick=picks, advances_first=st.booleans())
    def commit(self, pick: int, advances_first: bool) -> None:
        worker = sorted(self.computing)[pick % len(self.computing)]
        expected = len(self.history) - self.read_at.pop(worker)
        assert self.clocks.staleness(worker) == expected
        if advances_first:
            self.clocks.advance(worker)
        assert self.clocks.applied([worker]) == {worker: expected}
        if not advances_first:
            self.clocks.advance(worker)
        assert self.clocks.staleness(worker) == expected, "its own version is no news to it"
        self.history.append(worker)
        self.computing.remove(worker)
        if self.unit == "version" and self.bound is not None:
            assert expected <= self.bound

    @precondition(lambda self: self.computing)
    @rule(pick=picks)
    def commit_what_is_dropped(self, pick: int) -> None:
        worker = sorted(self.computing)[pick % len(self.computing)]
        self.clocks.advance(worker)
        self.computing.remove(worker)

    @precondition(lambda self: self.clocks.workers)
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        worker = self.clocks.workers[pick % len(self.clocks.workers)]
        self.clocks.leave(worker)
        self.clocks.leave(worker)
        assert worker not in self.clocks.workers
        self.read_at.pop(worker, None)
        self.computing.discard(worker)

    @precondition(lambda self: len(self.clocks.workers) < 6)
    @rule()
    def join(self) -> None:
        could_read = {worker for worker in self.clocks.workers if self.clocks.may_read(worker)}
        self.clocks.join(self.next_rank)
        assert self.clocks.staleness(self.next_rank) == 0
        assert all(self.clocks.may_read(worker) for worker in could_read)
        self.next_rank += 1

    @invariant()
    def versions_are_counted(self) -> None:
        assert self.clocks.version == len(self.history)
        assert list(self.clocks.workers) == sorted(self.clocks.workers)

    @invariant()
    def somebody_can_always_go_on(self) -> None:
        if self.clocks.workers and not self.computing:
            assert any(map(self.clocks.may_read, self.clocks.workers))

    @invariant()
    def without_a_bound_nobody_waits(self) -> None:
        if self.bound is None:
            assert all(map(self.clocks.may_read, self.clocks.workers))

    @invariant()
    def clocks_are_together(self) -> None:
        """With bound 0: all that compute are in the same step, and nobody is behind it."""
        if self.unit == "clock" and self.bound is not None and self.clocks.workers:
            slowest = self.slowest()
            for worker in self.clocks.workers:
                gap = self.clocks.clock(worker) - slowest
                assert gap <= self.bound + (worker not in self.computing)

    @invariant()
    def whatever_comes_updates_will_be_fresh(self) -> None:
        if self.unit == "version" and self.bound is not None:
            for read_at in self.read_at.values():
                assert len(self.history) + len(self.read_at) - 1 - read_at <= self.bound


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def explore(num_workers: int, bound: int | None, unit: str, steps: int) -> tuple[int, int]:
    """Walk through every interleaving; return the largest clock gap at a read and staleness."""
    start = (Clocks(range(num_workers), bound=bound, unit=unit), frozenset())
    todo, seen, gap, staleness = [start], set(), 0, 0
    while todo:
        clocks, computing = todo.pop()
        key = tuple((clocks.clock(w), clocks.version_read(w)) for w in clocks.workers), computing
        if key in seen:
            continue
        seen.add(key)
        unfinished = [w for w in clocks.workers if clocks.clock(w) < steps]
        moves = [w for w in unfinished if w in computing or clocks.may_read(w)]
        assert moves or not unfinished, "a deadlock"
        for worker in moves:
            after = deepcopy(clocks)
            if worker in computing:
                after.advance(worker)
                staleness = max(staleness, after.applied([worker])[worker])
                todo.append((after, computing - {worker}))
            else:
                slowest = min(after.clock(w) for w in after.workers)
                gap = max(gap, after.clock(worker) - slowest)
                after.read(worker)
                todo.append((after, computing | {worker}))
    return gap, staleness


@pytest.mark.parametrize("bound", [0, 1])
def test_clock_gaps_reach_the_bound_and_staleness_what_follows_from_it(bound: int) -> None:
    assert explore(3, bound, "clock", steps=3) == (bound, (3 - 1) * (2 * bound + 1))


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_staleness_reaches_the_bound_in_versions_and_no_more(bound: int) -> None:
    assert explore(3, bound, "version", steps=3)[1] == bound


@pytest.mark.parametrize("unit", ["clock", "version"])
def test_without_a_bound_everything_can_happen(unit: str) -> None:
    assert explore(3, None, unit, steps=2) == (1, 4), "one worker reads, the others do all steps"


def test_a_synchronous_step_is_one_version_and_nothing_is_stale() -> None:
    clocks = Clocks([0, 1, 2], bound=0)
    for step in range(3):
        for worker in (2, 0, 1):
            clocks.read(worker)
        for worker in (1, 2, 0):
            assert clocks.blockers(worker) == ()
            clocks.advance(worker)
        assert clocks.applied([0, 1, 2]) == {0: 0, 1: 0, 2: 0}
        assert clocks.version == step + 1


def test_bound_zero_is_a_barrier_and_names_whom_it_waits_for() -> None:
    clocks = Clocks([0, 1, 2], bound=0)
    for worker in clocks.workers:
        clocks.read(worker)
    clocks.advance(1)
    assert clocks.blockers(1) == (0, 2)
    clocks.advance(0)
    assert clocks.blockers(0) == clocks.blockers(1) == (2,)
    clocks.leave(2)
    assert clocks.may_read(0) and clocks.may_read(1)


def test_a_bound_of_zero_versions_lets_one_worker_work_at_a_time() -> None:
    clocks = Clocks([0, 1], bound=0, unit="version")
    clocks.read(1)
    assert clocks.blockers(0) == (1,)
    clocks.applied([1])
    assert clocks.may_read(0) and clocks.may_read(1)


def test_own_updates_do_not_make_a_worker_stale() -> None:
    clocks = Clocks([0, 1], bound=None)
    for worker in (0, 1):
        clocks.read(worker)
    assert [clocks.applied([0])[0] for _ in range(3)] == [0, 0, 0]
    assert clocks.applied([1]) == {1: 3}
    assert clocks.applied([0]) == {0: 1}


def test_a_pooled_update_is_as_stale_as_what_it_was_computed_from() -> None:
    clocks = Clocks([0, 1, 2], bound=None)
    pooled_from = clocks.version_read(0)  # worker 0 commits, and reads on while it waits
    clocks.applied([1])
    clocks.read(0)
    assert clocks.version - pooled_from == 1
    assert clocks.applied([0, 2]) == {0: 0, 2: 1}
    assert clocks.staleness(0) == 1, "the version was not its own alone"


def test_a_worker_that_comes_back_with_its_clock_is_waited_for() -> None:
    clocks = Clocks([0, 1], bound=1)
    clocks.leave(1)
    for _ in range(5):
        clocks.read(0)
        clocks.advance(0)
    clocks.join(1, clock=3)
    assert (clocks.clock(1), clocks.blockers(0), clocks.may_read(1)) == (3, (1,), True)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: Clocks([0], bound=-1), "bound on staleness is -1"),
        (lambda: Clocks([0], bound=1, unit="second"), "'second'; choose from"),
        (lambda: Clocks([0, 1], bound=1).clock(7), "worker 7 has no clock.*live workers are"),
        (lambda: Clocks([0, 1], bound=1).join(1), "worker 1 joins, but has a clock already"),
        (lambda: Clocks([0], bound=1, unit="version").applied([0]), "did not read since"),
    ],
)
def test_mistakes_are_told(mistake, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        mistake()


def gets_stuck(num_workers: int, bound: int, unit: str, *, steps: int, in_order: bool) -> bool:
    """Walk through every interleaving of workers that read from two servers before each step."""
    servers = tuple(Clocks(range(num_workers), bound=bound, unit=unit) for _ in range(2))
    todo, seen = [(servers, (("ready", "ready"),) * num_workers)], set()
    while todo:
        servers, states = todo.pop()
        marks = (((s.clock(w), s.version_read(w)) for w in s.workers) for s in servers)
        key = (*map(tuple, marks), states)
        if key in seen:
            continue
        seen.add(key)
        moves = [
            (worker, server)
            for worker, state in enumerate(states)
            for server in range(2)
            if state[server] == "committing"
            or state[server] == "ready"
            and servers[server].clock(worker) < steps
            and servers[server].may_read(worker)
            and (not in_order or server == 0 or state[0] == "read")
        ]
        if not moves and any(s.clock(w) < steps for s in servers for w in s.workers):
            return True
        for worker, server in moves:
            after, state = deepcopy(servers), list(states[worker])
            if state[server] == "committing":
                after[server].applied([worker])
                after[server].advance(worker)
                state[server] = "ready"
            else:
                after[server].read(worker)
                state[server] = "read"
                state = ["committing"] * 2 if state == ["read", "read"] else state
            todo.append((after, (*states[:worker], tuple(state), *states[worker + 1 :])))
    return False


@pytest.mark.parametrize(("bound", "steps"), [(0, 2), (1, 1)])
def test_servers_are_asked_in_order_when_the_bound_is_in_versions(bound: int, steps: int) -> None:
    assert gets_stuck(3, bound, "version", steps=steps, in_order=False), "or no order is needed"
    assert not gets_stuck(3, bound, "version", steps=steps, in_order=True)
    assert not gets_stuck(3, bound, "clock", steps=1, in_order=False)
