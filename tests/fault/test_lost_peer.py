"""Ranks that die, leave, stop or are late in the middle of a job."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch

import paceline as pl
from paceline.comm.group import Group
from support import outcomes_of, receive, report, started

PLACES = {"one host": 1, "a host each": 3, "2 and 1": (0, 1, 1)}
everywhere = pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES.keys())
SAYS_SOON = {"PACELINE_WARN_S": "0.2"}  # whoever waits: so a test knows that it does


def reduce_for_ever(group: Group, count: int, memory: str = "torch") -> None:
    make = pl.empty if memory == "engine" else torch.empty
    tensor = make(count).fill_(0)
    for step in range(1_000_000):
        group.all_reduce(tensor)
        if step == 3:
            report("looping")


def require_lost(outcome, lost: int) -> None:
    """The outcome of a survivor: PeerLost, naming who is gone and during what."""
    assert isinstance(outcome.error, pl.errors.PeerLost), outcome
    assert outcome.error.rank == lost and f"rank {lost}" in str(outcome.error), outcome
    assert "all_reduce #" in str(outcome.error), outcome
    assert outcome.status == 1, outcome


@everywhere
@pytest.mark.parametrize("memory", ["torch", "engine"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_kill_in_the_middle_of_an_all_reduce(hosts, memory: str, victim: int) -> None:
    with started(3, reduce_for_ever, 3_000_000, memory, hosts=hosts) as ranks:
        ranks.receive_all()
        ranks.kill(victim)
        outcomes = ranks.wait()
    assert outcomes[victim].status == -signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != victim:
            require_lost(outcome, victim)


@everywhere
def test_two_are_killed_at_once(hosts) -> None:
    with started(3, reduce_for_ever, 100_000, hosts=hosts) as ranks:
        ranks.receive_all()
        ranks.kill_together([0, 1])
        [survivor] = ranks.wait(60, [2])
    assert isinstance(survivor.error, pl.errors.PeerLost) and survivor.error.rank in (0, 1), (
        survivor
    )


@everywhere
def test_a_kill_while_the_others_wait(hosts) -> None:
    def body(group: Group) -> None:
        report("here")
        if group.rank == 1:
            time.sleep(60)
        group.all_reduce(torch.ones(10))

    with started(3, body, hosts=hosts, env=SAYS_SOON) as ranks:
        ranks.receive_all()
        for rank in (0, 2):
            ranks.wait_for_output(rank, "has waited")
        ranks.kill(1)
        for outcome in ranks.wait(60, [0, 2]):
            require_lost(outcome, 1)


@everywhere
def test_a_rank_that_raises(hosts) -> None:
    def body(group: Group) -> None:
        for step in range(100):
            if step == 5 and group.rank == 1:
                raise RuntimeError("disk full")
            group.all_reduce(torch.ones(5000))

    outcomes = outcomes_of(3, body, hosts=hosts)
    assert str(outcomes[1].error) == "disk full" and outcomes[1].status == 1
    for rank in (0, 2):
        require_lost(outcomes[rank], 1)


@everywhere
@pytest.mark.parametrize("how", ["return", "sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_early(hosts, how: str) -> None:
    def body(group: Group, how: str) -> None:
        for step in range(100):
            if step == 5 and group.rank == 1:
                if how == "sys.exit(0)":
                    sys.exit(0)
                if how == "os._exit(0)":
                    os._exit(0)
                return
            group.all_reduce(torch.ones(5000))

    outcomes = outcomes_of(3, body, how, hosts=hosts)
    assert outcomes[1].status == 0
    for rank in (0, 2):
        require_lost(outcomes[rank], 1)


@everywhere
def test_sends_and_receives_notice_a_death(hosts) -> None:
    def body(group: Group) -> str:
        report("here")
        if group.rank == 1:
            time.sleep(60)
        tensor = torch.zeros(2_000_000)
        with pytest.raises(pl.errors.PeerLost) as caught:
            if group.rank == 0:
                group.send(tensor, 1, tag=9)
            else:
                group.recv(tensor, 1, tag=9)
        assert caught.value.rank == 1
        return str(caught.value)

    with started(3, body, hosts=hosts, env=SAYS_SOON) as ranks:
        ranks.receive_all()
        for rank in (0, 2):
            ranks.wait_for_output(rank, "has waited")
        ranks.kill(1)
        outcomes = ranks.wait(60, [0, 2])
    for outcome in outcomes:
        assert outcome.error is None and "with tag 9" in outcome.value, outcome


def test_an_asynchronous_operation_keeps_its_error() -> None:
    def body(group: Group) -> None:
        if group.rank == 1:
            time.sleep(60)
        works = [group.all_reduce(torch.ones(10), async_op=True) for _ in range(5)]
        report("started")
        for work in works:
            for _ in range(2):
                with pytest.raises(pl.errors.PeerLost, match="rank 1"):
                    work.wait()
            assert work.done() and isinstance(work.error(), pl.errors.PeerLost)
        with pytest.raises(pl.errors.PeerLost):
            group.barrier()

    with started(2, body) as ranks:
        ranks.receive(0)
        ranks.kill(1)
        [outcome] = ranks.wait(60, [0])
    assert outcome.error is None, outcome


@everywhere
def test_a_stopped_rank_is_named(hosts) -> None:
    env = {"PACELINE_LIVENESS_S": "3"}  # more than a busy machine takes from a rank
    with started(3, reduce_for_ever, 100_000, hosts=hosts, env=env) as ranks:
        ranks.receive_all()
        ranks.kill(1, signal.SIGSTOP)
        for outcome in ranks.wait(60, [0, 2]):
            assert isinstance(outcome.error, pl.errors.PeerTimeout), outcome
            assert outcome.error.rank == 1 and "all_reduce #" in str(outcome.error), outcome
        ranks.kill(1, signal.SIGCONT)
        [back] = ranks.wait(60, [1])
    assert isinstance(back.error, pl.errors.PeerError), (
        back
    )  # it cannot go on as if nothing happened


@everywhere
def test_a_short_stop_does_no_harm(hosts) -> None:
    def body(group: Group) -> None:
        report("here")
        for step in range(200):
            assert group.all_reduce(torch.ones(20_000))[-1].item() == 3
            time.sleep(0.002)
            if step == 150 and group.rank == 1:
                receive()  # the stop comes before the end

    with started(3, body, hosts=hosts) as ranks:
        ranks.receive_all()
        ranks.kill(1, signal.SIGSTOP)
        time.sleep(1.0)
        ranks.kill(1, signal.SIGCONT)
        ranks.send(1, "go on")
        ranks.values()


@everywhere
def test_a_rank_that_computes_is_not_declared_dead(hosts) -> None:
    def body(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            # One long call that keeps the GIL: nothing of Python runs meanwhile.
            deadline_s = time.monotonic() + 3.0
            while time.monotonic() < deadline_s:
                sum(range(40_000_000))
        assert group.all_reduce(torch.ones(10)).sum().item() == 30

    outcomes = outcomes_of(3, body, hosts=hosts, env={"PACELINE_LIVENESS_S": "1.5"})
    for outcome in outcomes:
        assert outcome.error is None and outcome.status == 0, outcome


@everywhere
def test_a_long_wait_says_on_whom(hosts) -> None:
    def body(group: Group) -> None:
        if group.rank == 1:
            receive()
        group.all_reduce(torch.ones(10))

    # Rank 1 has to wait a little as well, on a busy machine: it must not say so.
    with started(3, body, hosts=hosts, env={"PACELINE_WARN_S": "2"}) as ranks:
        for rank in (0, 2):
            ranks.wait_for_output(rank, "has waited")
        ranks.send(1, "go on")
        outcomes = ranks.wait()
    assert all(o.error is None for o in outcomes)
    for rank in (0, 2):
        output = outcomes[rank].output
        assert f"paceline: rank {rank}: all_reduce #1 sum float32[10] has waited" in output, output
    assert any("rank 1" in outcomes[r].output.partition("has waited")[2] for r in (0, 2))
    assert "has waited" not in outcomes[1].output


@everywhere
def test_an_operation_that_takes_too_long(hosts) -> None:
    def body(group: Group) -> str:
        if group.rank == 1:
            receive()
            with pytest.raises(pl.errors.PeerTimeout):
                group.barrier()
            return ""
        with pytest.raises(pl.errors.PeerTimeout) as caught:
            group.barrier()
        report("too long")
        return str(caught.value)

    with started(3, body, hosts=hosts, env={"PACELINE_TIMEOUT_S": "1"}) as ranks:
        for rank in (0, 2):
            ranks.receive(rank)
        ranks.send(1, "go on")
        outcomes = ranks.wait()
    assert all(o.error is None for o in outcomes), outcomes
    # On other hosts a rank only knows its partners: one that waits for rank 1 may be named instead.
    late = "rank 1" if hosts == 1 else "rank"
    words = f"waits for {late}"
    assert any(words in o.value and "barrier #1" in o.value for o in outcomes), outcomes


@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "a host each"])
def test_ctrl_c_ends_a_blocking_call(hosts: int) -> None:
    def body(group: Group) -> str:
        report("here")
        if group.rank == 1:
            receive()
            with pytest.raises(pl.errors.PeerError) as caught:
                group.barrier()
            return str(caught.value)
        try:
            group.all_reduce(torch.ones(10))
        except KeyboardInterrupt:
            return "interrupted"
        return "nothing happened"

    with started(2, body, hosts=hosts, env=SAYS_SOON) as ranks:
        ranks.receive_all()
        ranks.wait_for_output(0, "has waited")
        ranks.kill(0, signal.SIGINT)
        ranks.wait(60, [0])
        ranks.send(1, "go on")
        interrupted, other = ranks.values()
    assert interrupted == "interrupted"
    assert "rank 0" in other


def test_other_threads_run_during_a_blocking_call() -> None:
    def body(group: Group) -> None:
        if group.rank == 1:
            receive()
        else:
            caller, outside = threading.get_ident(), sys._getframe().f_code

            def count() -> None:
                rounds = 0
                while rounds < 100:  # never, when the GIL is held
                    rounds += sys._current_frames()[caller].f_code is not outside
                    time.sleep(0.001)
                report("counted")

            threading.Thread(target=count).start()
        group.barrier()

    with started(2, body) as ranks:
        assert ranks.receive(0) == "counted"
        ranks.send(1, "go on")
        ranks.values()


@everywhere
def test_a_group_with_a_dead_member_is_refused(hosts) -> None:
    def body(group: Group) -> str:
        group.barrier()
        report("here")
        receive()
        with pytest.raises(pl.errors.PeerLost) as caught:
            pl.new_group(range(3)).barrier()
        assert caught.value.rank == 1
        return str(caught.value)

    with started(3, body, hosts=hosts) as ranks:
        ranks.receive_all()
        ranks.kill(1)
        ranks.wait(60, [1])
        for rank in (0, 2):
            ranks.send(rank, "go on")
        for outcome in ranks.wait(60, [0, 2]):
            assert outcome.error is None and "rank 1" in outcome.value, outcome


def test_waiting_for_a_group_says_on_whom() -> None:
    def body(group: Group) -> None:
        if group.rank == 0:
            receive()
        assert pl.new_group([0, 1]).all_reduce(torch.ones(1)).item() == 2

    with started(2, body, hosts=2) as ranks:
        ranks.wait_for_output(1, "rank 1 waits for rank 0")
        ranks.send(0, "go on")
        ranks.values()
        assert "to form a group" in ranks.output(1)
