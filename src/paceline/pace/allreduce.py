"""Lockstep: the mean over all workers, every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from paceline.collectives.group import Group
from paceline.pace.exchange import Bucket, Exchange, ExchangeTraits
from paceline.work import Work

# Of an average that takes several operations for each bucket.
COMPOUND = ExchangeTraits(verb="all_reduce", is_collective=True)


class AllReduce(Exchange):
    """Averages gradients among all workers: shared memory on one host, a ring between hosts.

    The engine divides by the number of workers, in the same pass that adds.
    """

    traits = replace(COMPOUND, work_is_whole=True, may_wait_singly=True)

    def __init__(self, group: Group) -> None:
        self._group = group

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:  # noqa: ARG002
        work = self._group.all_reduce(bucket.grads, "mean", out=bucket.averaged, async_op=True)
        assert isinstance(work, Work)
        return work

    def call_roll(self, here: torch.Tensor) -> torch.Tensor:
        return roll_of(self._group, here)


def roll_of(group: Group, here: torch.Tensor) -> torch.Tensor:
    """Return the mean of all workers' rolls. Collective."""
    shares = torch.empty_like(here)
    group.all_reduce(here, "mean", out=shares)
    return shares
