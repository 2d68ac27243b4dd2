"""The seam between the reducer and a pace: here is a full bucket, give me a Work.

The reducer collects gradients into buckets and submits each as soon as it is full, in an order that
is the same on all workers. An exchange turns it into what the workers agree on: averaged gradients,
with which every worker then runs its own optimizer, or fresh parameters, when somebody else (a
server) has run it. Compression wraps an exchange; nothing else of the reducer knows the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from paceline.cluster.member import Membership
from paceline.compress.layout import Segment
from paceline.work import Work


class Bucket(Protocol):
    """What an exchange sees of a bucket: flat tensors in engine memory, all of one size."""

    index: int
    label: str  # for messages: the range of parameters in it
    grads: torch.Tensor  # this worker's; never written by the exchange, so it can be sent again
    averaged: torch.Tensor  # where agreed-on gradients land: every param.grad is a view of it
    params: torch.Tensor  # the parameters themselves: every param.data is a view of it

    @property
    def segments(self) -> Sequence[Segment]:
        """Where each parameter is in the flat tensors, in order."""

    @property
    def absent(self) -> Sequence[int]:
        """The parameters, by their number in the bucket, that have no gradient in this pass."""


class Exchange(Protocol):
    """How a full bucket becomes agreed-on values. Called during backward; must not block."""

    def submit(self, bucket: Bucket, step: int) -> Work[Any]:
        """Start the exchange of one bucket; its flat tensors stay untouched until it is done."""

    def call_roll(self, here: torch.Tensor) -> torch.Tensor:
        """Ask who had gradients for what, behind the last bucket; may block.

        `here` has 1.0 for every parameter that had one on this worker, else 0.0; the answer has 0.0
        for those that nobody had.
        """

    def reconfigure(self, membership: Membership) -> None:
        """Go on with other members; what is in flight ends with GenerationChanged."""
