"""Which samples have counted, as the trained parameters themselves say.

The model has one parameter for each sample, so that behind every step the parameters show whose
gradients have come in: no worker has to be believed, least of all one that was killed.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

import paceline as pl
from paceline.control.membership.policy import Policy
from paceline.runtime.job import current
from support.body import report
from support.elastic import ElasticJob
from support.ranks import Outcome


def policy(workers: int, **changes: Any) -> Policy:
    return Policy(
        num_workers=workers, is_elastic=True, **{"min_workers": 1, "max_workers": 8, **changes}
    )


class Table(nn.Module):
    """A parameter for each sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.w[indices].mean()


class Learner:
    """Trains the table, and tells after each step which samples have counted."""

    def __init__(self, samples: int, pause_s: float = 0.01, pace: str = "allreduce") -> None:
        table = Table(samples)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        self.model, self.optimizer = pl.distribute(table, optimizer, pace=pace)
        self.pause_s = pause_s

    def train_alone(self, batch: torch.Tensor) -> None:
        """Take a step and tell nothing."""
        self.model(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        time.sleep(self.pause_s)

    def step(self, epoch: int, *batches: torch.Tensor) -> None:
        """Take a step; leaves by itself when the test asks for the end."""
        before = self.model.w.detach().clone()
        for batch in batches[:-1]:
            with self.model.no_sync():
                self.model(batch).backward()
        self.model(batches[-1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        counted = torch.nonzero(self.model.w.detach() - before).flatten().tolist()
        report((current().steps_done, epoch, counted, pl.world_size()))
        if pl.should_stop():
            raise SystemExit(0)
        time.sleep(self.pause_s)


class Log:
    """What the workers of a job have told: by step, whose gradients counted."""

    def __init__(self, job: ElasticJob) -> None:
        self.job = job
        self.steps: dict[int, tuple[int, list[int], int]] = {}
        self.heard: dict[int, tuple[int, int]] = {}  # by rank: epoch and step

    def receive(self, rank: int, *, epoch: int = 0, more: int = 1) -> None:
        """Wait until a worker is in that epoch, and has done so many steps since."""
        while self.heard.get(rank, (-1, 0))[0] < epoch:
            self._note(rank, self.job.ranks.receive(rank, 60))
        step = self.heard[rank][1] + more
        while self.heard[rank][1] < step:
            self._note(rank, self.job.ranks.receive(rank, 60))

    def stop(self, rank: int, killed: Collection[int] = ()) -> list[Outcome]:
        """Ask for the end; all workers end well, but for those that were killed."""
        self.job.ranks.kill(rank, signal.SIGTERM)
        outcomes = self.job.ranks.wait(90)
        for number, outcome in enumerate(outcomes):
            expected = -signal.SIGKILL if number in killed else 0
            assert outcome.status == expected, "\n".join(map(str, outcomes))
        self.receive_rest()
        return outcomes

    def receive_rest(self) -> None:
        """Take in what has been told and not heard yet."""
        for number, process in enumerate(self.job.processes):
            for told in process.told:
                self._note(number, told)

    def _note(self, rank: int, told: Any) -> None:
        done, epoch, counted, size = told
        self.heard[rank] = (epoch, done)
        known = self.steps.setdefault(done, (epoch, counted, size))
        assert known[:2] == (epoch, counted), f"step {done}: rank {rank} says {told}, not {known}"

    def by_epoch(self) -> dict[int, Counter[int]]:
        assert sorted(self.steps) == list(range(1, max(self.steps) + 1)), "no step is left out"
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for epoch, counted, _ in self.steps.values():
            counts[epoch].update(counted)
        return counts

    def require_once(self, samples: int) -> None:
        """All epochs but the last, which was not finished."""
        counts = self.by_epoch()
        for epoch in range(max(counts)):
            wrong = {s: counts[epoch][s] for s in range(samples) if counts[epoch][s] != 1}
            assert not wrong, f"epoch {epoch}: {wrong}"
