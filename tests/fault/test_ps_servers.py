"""Servers that die or stop: every worker is told at once which server it was and what it held."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import receive, report, started

VICTIM = 1  # of two servers
PROMISED_S = 2.0
# Then silence says nothing, and only the broken connection tells; whoever is told has to get a core
# before it can say when that was.
BUSY_S, NEVER = 20.0, {"PACELINE_LIVENESS_S": "100"}
TWO_HOSTS = [0, 1, 0, 1]


def work(group: Group, pace: str, what: str) -> tuple[float, pl.errors.PacelineError] | None:
    """Do one kind of work until it fails; return when, and how."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 200))
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = pl.distribute(model, optimizer, pace=pace, bucket_mb=0.01)
    client = pl.ps.Client()
    client.init("shared", np.zeros(100_000))
    versions = client.subscribe("shared", after=0)

    def step() -> None:
        model(torch.randn(8, 50)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    group.barrier()
    report("working")
    if what in ("idle", "exit"):
        receive()
    if what == "exit":
        return None
    doing = {
        "train": step,
        "idle": step,
        "state": optimizer.state_dict,
        "subscribe": versions.wait,
        "client": lambda: client.push_pull("shared", np.ones(100_000)).wait(),
    }
    try:
        while True:
            doing[what]()
    except pl.errors.PacelineError as error:
        return time.monotonic(), error


def outcomes_of_losing(
    what: str, number: signal.Signals, pace: str = "async", hosts: object = 1, env: object = None
):
    """Kill or stop a server; return its pid, when that was, and what became of the workers."""
    with started(2, work, pace, what, hosts=hosts, servers=2, env=env) as ranks:
        for worker in range(2):
            ranks.receive(worker)
        pid = ranks.pids[2 + VICTIM]
        time.sleep(0.2)
        ranks.kill(2 + VICTIM, number)
        lost_s = time.monotonic()
        if what in ("idle", "exit"):
            time.sleep(0.3)
            for worker in range(2):
                ranks.send(worker, "go on")
        outcomes = ranks.wait(60, [0, 1])
        [other] = ranks.wait(60, [2])
    assert other.status == 0, other  # the other server ends with the workers
    return pid, lost_s, outcomes


def require_named(error: object, worker: int, pid: int) -> None:
    assert isinstance(error, pl.errors.ServerLost), error
    assert error.rank == 2 + VICTIM
    text = str(error)
    assert text.startswith(f"rank {worker}: server {VICTIM} (rank {2 + VICTIM}, "), text
    assert f":{pid})" in text and "model 0 bucket" in text, text
    assert text.endswith("start again from a checkpoint") and text.count(f"rank {2 + VICTIM}") == 1
    assert "tag" not in text and "uint8" not in text, text


@pytest.mark.parametrize("hosts", [1, TWO_HOSTS], ids=["one host", "two hosts"])
@pytest.mark.parametrize(
    ("pace", "what"),
    [("ps", "train"), ("async", "train")]
    + [("async", what) for what in ("idle", "state", "subscribe", "client")],
)
def test_a_server_is_killed(pace: str, what: str, hosts) -> None:
    pid, lost_s, outcomes = outcomes_of_losing(what, signal.SIGKILL, pace, hosts, NEVER)
    for worker, outcome in enumerate(outcomes):
        assert outcome.error is None and outcome.status == 0, outcome
        noticed_s, error = outcome.value
        require_named(error, worker, pid)
        assert "ended or lost its connection" in str(error)
        assert noticed_s - lost_s < PROMISED_S + BUSY_S


@pytest.mark.parametrize("what", ["train", "subscribe"])
def test_a_server_is_stopped(what: str) -> None:
    pid, _, outcomes = outcomes_of_losing(
        what, signal.SIGSTOP, hosts=TWO_HOSTS, env={"PACELINE_LIVENESS_S": "3"}
    )
    for worker, outcome in enumerate(outcomes):
        _, error = outcome.value
        require_named(error, worker, pid)
        assert "has not run for" in str(error) and "PACELINE_LIVENESS_S" in str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_can_leave_without_a_server(number: signal.Signals) -> None:
    _, _, outcomes = outcomes_of_losing("exit", number)
    for outcome in outcomes:
        assert outcome.error is None and outcome.status == 0, outcome
