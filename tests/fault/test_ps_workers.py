"""Workers that die, stop, fail or end early while they train through servers: the others go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ps_tables import Books, wait_for
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.observe.telemetry.events import Event, Note
from support import outcomes_of, report, run_ranks, started

WORKERS = 3
ONE_HOST, TWO_HOSTS = [0, 0, 0, 0], [0, 0, 1, 1]


def make_model(pace: str, lr: float = 0.01, norm: bool = False):
    torch.manual_seed(0)
    between = nn.BatchNorm1d(200) if norm else nn.ReLU()
    model = nn.Sequential(nn.Linear(50, 200), between, nn.Linear(200, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return pl.distribute(model, optimizer, pace=pace, bucket_mb=0.01)


def train(group: Group, path: str, pace: str, kind: str = "") -> float:
    """Train until the test ends it; return the longest step that the parameters made."""
    books, longest = Books(path), 0.0
    model, optimizer = make_model(pace, lr=1.0 if kind == "clip" else 0.01, norm=kind == "buffers")
    report("training")
    while not books.is_over:
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        model(torch.randn(8, 50)).pow(2).mean().backward()
        if kind == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        if kind == "edit":
            with torch.no_grad():
                for param in model.parameters():
                    param.clamp_(-0.01, 0.01)
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        longest = max(longest, (after - before).norm().item())
        books.rows[group.rank, Books.ACKED] += 1
    return longest


def require_progress(books: Books, workers: list[int], steps: int = 20) -> None:
    """Wait until each of these workers has made steps from now on."""
    for worker in workers:
        before = books.acked(worker)
        wait_for(lambda w=worker, b=before: books.acked(w) >= b + steps)


def survivors_of(
    path: Path, pace: str, victim: int, hosts: list[int], kind: str = ""
) -> list[float]:
    """Kill a worker; return what the others return when they have gone on and ended."""
    books = Books(path, WORKERS)
    survivors = [worker for worker in range(WORKERS) if worker != victim]
    with started(WORKERS, train, str(path), pace, kind, hosts=hosts, servers=1) as ranks:
        for worker in range(WORKERS):
            ranks.receive(worker)
        require_progress(books, survivors, 5)
        ranks.kill(victim)
        require_progress(books, survivors)
        books.end()
        outcomes = ranks.wait()
    assert outcomes.pop(victim).status == -signal.SIGKILL
    assert all(outcome.status == 0 for outcome in outcomes), [str(one) for one in outcomes]
    return [outcome.value for outcome in outcomes[:-1]]


@pytest.mark.parametrize(
    ("pace", "victim", "hosts"),
    [
        ("ps", 0, ONE_HOST),  # the parameters are in its memory
        ("ps", 2, TWO_HOSTS),
        ("ssp:2", 0, TWO_HOSTS),
        ("ssp:1[unit=version]", 2, ONE_HOST),
        ("async", 1, ONE_HOST),
    ],
)
def test_the_others_go_on_after_a_kill(tmp_path: Path, pace: str, victim: int, hosts) -> None:
    survivors_of(tmp_path / "books", pace, victim, hosts)


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS], ids=["one host", "two hosts"])
def test_clipping_outlives_the_worker_that_speaks_for_all(tmp_path: Path, hosts) -> None:
    for longest in survivors_of(tmp_path / "books", "ps", 0, hosts, "clip"):
        assert longest < 1.01e-3


def test_edits_of_parameters_outlive_the_worker_whose_memory_they_are_in(tmp_path: Path) -> None:
    survivors_of(tmp_path / "books", "ps", 0, ONE_HOST, "edit")


def test_buffers_become_local_when_a_worker_is_lost(tmp_path: Path) -> None:
    survivors_of(tmp_path / "books", "ps", 0, ONE_HOST, "buffers")


def notes_of(events: list[Event]) -> Callable[[str], bool]:
    return lambda text: any(isinstance(e, Note) and text in e.text for e in list(events))


@pytest.mark.parametrize(
    "pace", ["ps", *(pytest.param(p, marks=pytest.mark.slow) for p in ("ssp:1", "async"))]
)
def test_a_worker_that_is_stopped_for_a_while(tmp_path: Path, pace: str) -> None:
    books, events = Books(tmp_path / "books", WORKERS), list[Event]()
    arguments = (str(tmp_path / "books"), pace)
    # It may be stopped for longer than planned: on a busy machine the server says it later, or says
    # first that only one of the others waits.
    limits = {"PACELINE_LIVENESS_S": "100"}
    with started(
        WORKERS, train, *arguments, servers=1, on_event=events.append, env=limits
    ) as ranks:
        for worker in range(WORKERS):
            ranks.receive(worker)
        require_progress(books, [0, 1, 2], 5)
        ranks.kill(1, signal.SIGSTOP)
        try:
            if pace == "async":
                require_progress(books, [0, 2], 200)  # they never pause
                time.sleep(2.5)
            else:
                wait_for(lambda: notes_of(events)("workers 0, 2 wait for worker 1"))
                time.sleep(1)
        finally:
            ranks.kill(1, signal.SIGCONT)
        require_progress(books, [0, 1, 2], 5)
        books.end()
        ranks.values()


@pytest.mark.parametrize("pace", ["ps", "async", "ssp:1"])
def test_a_worker_that_fails_in_the_middle_of_backward(pace: str) -> None:
    def body(group: Group, pace: str) -> int:
        model, optimizer = make_model(pace)

        def fail(*_: object) -> None:
            raise RuntimeError("bad batch")

        if group.rank == 1:  # the last layer's gradients are pushed by then, the first's are not
            model[1].register_full_backward_hook(fail)
        for _ in range(30):
            model(torch.randn(8, 50)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return 30

    first, failed, third, server = outcomes_of(WORKERS, body, pace, servers=1)
    assert "bad batch" in str(failed.error)
    assert (first.value, third.value) == (30, 30), (first, third)
    assert server.status == 0, server


@pytest.mark.parametrize("pace", ["ps", "ssp:0", "ssp:1", "ssp:1[unit=version]"])
def test_workers_that_end_early(pace: str) -> None:
    def body(group: Group, pace: str) -> int:
        model, optimizer = make_model(pace)
        steps = 10 * (1 + group.rank)
        for _ in range(steps):
            model(torch.randn(8, 50)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return steps

    outcomes = outcomes_of(WORKERS, body, pace, servers=1)
    assert [outcome.value for outcome in outcomes] == [10, 20, 30, None], outcomes


@pytest.mark.parametrize(("pace", "hosts"), [("ps", ONE_HOST), ("ssp:1", TWO_HOSTS)])
def test_waiting_for_a_slow_worker_is_no_error(pace: str, hosts) -> None:
    """The server has nothing to say for longer than a dead one would be silent."""

    def body(group: Group, pace: str) -> str:
        model, optimizer = make_model(pace)
        for step in range(4):
            if step == 2 and group.rank == 1:
                time.sleep(4.5)
            model(torch.randn(8, 50)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return "trained"

    limits = {"PACELINE_LIVENESS_S": "2"}
    assert run_ranks(3, body, pace, hosts=hosts, servers=1, env=limits) == ["trained"] * 3
