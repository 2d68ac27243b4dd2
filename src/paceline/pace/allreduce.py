"""Lockstep: the mean over all workers, every step."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.comm.engine_calls import PreparedAllReduce
from paceline.comm.group import Group
from paceline.pace.exchange import Bucket, Exchange, ExchangeTraits
from paceline.runtime.work import Handle

# For averages that take several operations for each bucket.
COMPOUND = ExchangeTraits(verb="all_reduce", is_collective=True)


class AllReduce(Exchange):
    """Averages gradients among all workers: shared memory on one host, a ring between hosts.

    The engine divides by the number of workers, in the same pass that adds.
    """

    traits = replace(COMPOUND, work_is_whole=True, may_wait_singly=True)

    def __init__(self, group: Group) -> None:
        self._group = group
        self._prepared: dict[int, PreparedAllReduce] = {}  # by bucket index
        self._mask = MaskAverage(group)

    def submit(self, bucket: Bucket, step: int) -> Handle:  # noqa: ARG002
        prepared = self._prepared.get(bucket.index)
        if prepared is None:
            prepared = PreparedAllReduce(self._group, bucket.grads, "mean", bucket.averaged)
            self._prepared[bucket.index] = prepared
        return prepared.start()

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        return self._mask.average(here)


class MaskAverage:
    """The mean of all workers' masks; as a rule these are in the same memory every time."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._here = self._shares = torch.empty(0)
        self._prepared: PreparedAllReduce | None = None

    def average(self, here: torch.Tensor) -> torch.Tensor:
        """Return the mean; valid until the next call. Collective."""
        if self._prepared is None or here is not self._here:
            self._here, self._shares = here, torch.empty_like(here)
            self._prepared = PreparedAllReduce(self._group, here, "mean", self._shares)
        self._prepared.run()
        return self._shares
