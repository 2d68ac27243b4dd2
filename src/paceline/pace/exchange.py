"""The seam between the reducer and a pace: here is a full bucket, when is it exchanged?

The reducer collects gradients into buckets and submits each as soon as it is full, in an order that
is the same on all workers. An EXCHANGE turns it into what the workers agree on: averaged gradients,
with which every worker then runs its own optimizer, or fresh parameters, when a server has run it.
Compression wraps an exchange. What training has to know about an exchange, the exchange declares in
its TRAITS; nothing outside of a pace asks which class it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.compress.codec import Segment
from paceline.runtime.work import Handle, Together
from paceline.state.protocol import Part


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


@dataclass(frozen=True)
class ExchangeTraits:
    """What training may ask about an exchange. They hold for the backward pass that begins next."""

    verb: str = "exchange"  # in a trace
    # All workers call it together. After a loss those who are left repeat it among themselves.
    is_collective: bool = False
    is_local: bool = False  # nothing is exchanged: every worker steps with its own gradients
    may_be_local: bool = False  # is_local now, or in later steps
    is_weighted: bool = True  # each worker counts by the samples of its batch
    hides_nonfinite: bool = False  # NaN and infinity of one worker do not show in what is agreed on
    keeps_residual: bool = False  # what a codec leaves out of gradients is sent in a later step
    # For a trace. A bucket's Work ends when all of its exchange has ended, not a first part of it.
    work_is_whole: bool = False
    may_wait_singly: bool = False  # and a wait for one bucket holds up no other


class Exchange:
    """How a full bucket becomes agreed-on values. Base of all exchanges. Main thread only."""

    traits = ExchangeTraits()

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Look after more buckets, before they are submitted for the first time."""

    def submit(self, bucket: Bucket, step: int) -> Handle:
        """Start the exchange of one bucket; its flat tensors stay untouched until it is done.

        Called during backward; must not block.
        """
        raise NotImplementedError

    def call_roll(self, here: torch.Tensor) -> torch.Tensor:
        """Return which parameters had a gradient on any worker; called after the last bucket.

        `here` has 1.0 for every parameter that had one on this worker, else 0.0; the answer has 0.0
        for those that no worker had. May block.
        """
        return here

    def left_out(self, bucket: Bucket) -> torch.Tensor | None:
        """Return what of a bucket's gradients has not been sent yet; None: nothing."""
        del bucket
        return None

    @property
    def residuals(self) -> Part | None:
        """What this worker keeps of gradients that were left out; None: nothing."""
        return None


class OwnGradients(Exchange):
    """Leaves every worker with its own gradients; what the workers agree on comes later."""

    traits = ExchangeTraits(is_local=True, may_be_local=True)

    def submit(self, bucket: Bucket, step: int) -> Handle:  # noqa: ARG002
        return Together(()).work()
