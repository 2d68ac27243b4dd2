"""A pace from outside the package that keeps state: elastic and resumable by `state` and `load`."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.control.membership.policy import Policy
from paceline.extend import WHOLE, Bucket, Change, Method, Pace, Setting, State, register_pace
from paceline.runtime.job import current
from support import report, run_ranks
from support.elastic import ElasticJob, elastic_job

STEPS, SAVED_AT = 11, 6


class Anchored(Method):
    """Every H steps an anchor moves towards the mean; each worker goes on near it.

    How far it moves depends on a count, and how near a worker is on what is its own: so a training
    that lacks any of the three computes something else.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.anchors: list[torch.Tensor] = []
        self.missed: list[torch.Tensor] = []
        self.turn = 0

    def take(self, buckets: Sequence[Bucket]) -> None:
        super().take(buckets)
        self.anchors += [bucket.params.clone() for bucket in buckets]
        self.missed += [torch.zeros_like(bucket.params) for bucket in buckets]

    @property
    def is_due(self) -> bool:
        return self.steps >= (self.rounds + 1) * int(self.setting.pace.value)

    def run_round(self) -> None:
        self.means = [torch.empty_like(bucket.params) for bucket in self.buckets]
        for bucket, mean in zip(self.buckets, self.means, strict=True):
            self.workers.all_reduce(bucket.params, "mean", out=mean)

    def apply_round(self) -> None:
        self.turn += 1
        kept = zip(self.buckets, self.means, self.anchors, self.missed, strict=True)
        for bucket, mean, anchor, missed in kept:
            missed.add_(bucket.params - mean)
            anchor.lerp_(mean, 1.0 / (1 + self.turn % 3))
            bucket.params.copy_(anchor + 0.1 * missed)

    def agreed(self, bucket: Bucket) -> torch.Tensor:
        return self.anchors[self.buckets.index(bucket)].clone()

    def state(self) -> State:
        return State(
            counts=[self.turn],
            shared={f"anchor.{number}": anchor for number, anchor in enumerate(self.anchors)},
            own={f"missed.{number}": missed for number, missed in enumerate(self.missed)},
        )

    def load(self, state: State, change: Change | None) -> None:
        super().load(state, change)
        (self.turn,) = state.counts


def make() -> tuple[Any, torch.optim.Optimizer]:
    register_pace("anchored", Pace(number="the steps of a block", kind=WHOLE, method=Anchored))
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(20, 32), nn.Linear(32, 1))
    return pl.distribute(net, torch.optim.SGD(net.parameters(), lr=0.01), pace="anchored:3")


def digest(net: nn.Module) -> str:
    data = b"".join(param.detach().numpy().tobytes() for param in net.parameters())
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def train_on(group: Group) -> str:
    """Train until the test stops it; return a digest of the anchor."""
    del group
    net, optimizer = make()
    job = current()
    while not pl.should_stop():
        chance = torch.Generator().manual_seed(1000 * job.env.rank + job.steps_done)
        net(torch.randn(8, 20, generator=chance)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        report((job.steps_done, pl.world_size()))
        time.sleep(0.01)
    with net.agreed():
        return digest(net)


def wait_for(job: ElasticJob, rank: int, size: int) -> None:
    """Wait until a worker has done some steps among so many."""
    done = 0
    while done < 8:
        _, found = job.ranks.receive(rank)
        done = done + 1 if found == size else 0


def test_a_newcomer_has_what_the_pace_keeps_for_all() -> None:
    policy = Policy(num_workers=3, is_elastic=True, min_workers=1, max_workers=8)
    with elastic_job(policy) as job:
        job.start(train_on)
        wait_for(job, 0, 3)
        job.ranks.kill(1)
        wait_for(job, 0, 2)
        newcomer = job.add()
        wait_for(job, newcomer, 3)
        job.ranks.kill(0, signal.SIGTERM)
        outcomes = job.ranks.wait()
        assert [o.status for o in outcomes] == [0, -9, 0, 0], "\n".join(map(str, outcomes))
        assert len({outcomes[rank].value for rank in (0, 2, newcomer)}) == 1


def train_until(group: Group, directory: str, until: int) -> tuple[str, str]:
    """Train until a step, saving behind some; return digests of this worker's values and of the
    anchor."""
    del group
    net, optimizer = make()
    checkpoint = pl.Checkpoint(directory, every=SAVED_AT)
    for step in range(checkpoint.steps, until):
        chance = torch.Generator().manual_seed(1000 * pl.rank() + step)
        net(torch.randn(8, 20, generator=chance)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.step()
    checkpoint.wait()
    pl.world().barrier()
    own = digest(net)
    with net.agreed():
        return own, digest(net)


def test_a_resumed_job_goes_on_to_the_bit(tmp_path: Path) -> None:
    def run(directory: str, until: int) -> list[Any]:
        found = run_ranks(2, train_until, str(tmp_path / directory), until)
        assert found[0][1] == found[1][1] and found[0][0] != found[1][0]
        return found

    whole = run("whole", STEPS)
    run("halves", SAVED_AT + 1)
    assert run("halves", STEPS) == whole
