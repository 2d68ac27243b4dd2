"""Lockstep: the mean over all workers, every step."""

from __future__ import annotations

from typing import Any

import torch

from paceline.cluster.member import Membership
from paceline.collectives.group import Group
from paceline.pace.exchange import Bucket
from paceline.work import Work


class AllReduce:
    """Averages gradients among all workers: shared memory on one host, a ring between hosts.

    The engine divides by the number of workers, in the same pass that adds; nobody else divides.
    """

    verb = "all_reduce"  # in a trace

    def __init__(self, group: Group) -> None:
        self._group = group

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:  # noqa: ARG002
        work = self._group.all_reduce(bucket.grads, "mean", out=bucket.averaged, async_op=True)
        assert isinstance(work, Work)
        return work

    def call_roll(self, here: torch.Tensor) -> torch.Tensor:
        shares = torch.empty_like(here)
        self._group.all_reduce(here, "mean", out=shares)
        return shares

    def reconfigure(self, membership: Membership) -> None:
        self._group.reconfigure(membership)
