"""Somebody on the way alters or injects bytes of an encrypted link: the job reports it and goes on.

The bytes are injected by the sending process itself, past its engine: what an attacker on the way
does to the connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from paceline.runtime.job import current
from support import outcomes_of, report
from support.elastic import elastic_job, pause_if_held

ENCRYPTED = {"PACELINE_ENCRYPT": "always"}


def data_sockets() -> list[int]:
    """Return this process's TCP connections, without the one to the coordinator."""
    found = []
    coordinator = int(os.environ["PACELINE_COORDINATOR"].rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
            if sock.family == socket.AF_INET and sock.getpeername()[1] != coordinator:
                found.append(int(name))
    return found


def inject(data: bytes) -> None:
    for fd in data_sockets():
        os.write(fd, data)


def test_every_rank_learns_what_happened_to_which_link() -> None:
    def body(group: Group) -> None:
        tensor = torch.ones(1000)
        group.all_reduce(tensor)
        if group.rank == 1:
            inject(b"x" * 60)
        for _ in range(1000):
            group.all_reduce(tensor)

    for outcome in outcomes_of(3, body, hosts=3, env=ENCRYPTED):
        assert isinstance(outcome.error, pl.errors.PeerLost), outcome
        assert "encrypted record" in str(outcome.error), outcome
        assert "from rank 1" in str(outcome.error), outcome
        assert "altered, replayed, reordered" in str(outcome.error), outcome


def train(_: Group, until: int) -> int:
    torch.manual_seed(0)
    model = nn.Linear(20, 1)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    job = current()
    has_attacked = Path(os.environ["TMPDIR"], "attacked")
    while job.steps_done < until:
        model(torch.randn(8, 20)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report(job.steps_done)
        if job.steps_done == 10 and pl.rank() == 1 and not has_attacked.exists():
            has_attacked.touch()
            inject(b"x" * 60)
        pause_if_held(job.steps_done)
    return pl.world_size()


def test_an_elastic_job_goes_on() -> None:
    policy = Policy(num_workers=3, is_elastic=True, min_workers=1, max_workers=8, lease_s=4.0)
    with elastic_job(policy, ENCRYPTED) as job:
        job.hosts = (0, 1, 2)
        job.start(train, 30)
        outcomes = job.ranks.wait(60)
    finished = [outcome for outcome in outcomes if outcome.status == 0 and outcome.value == 2]
    assert len(finished) == 2, "\n".join(map(str, outcomes))
