"""The interface between the reducer and a pace: exchange a full bucket.

The reducer collects gradients into buckets and submits each as soon as it is full, in an order that
is the same on all workers. An EXCHANGE turns it into values that the workers agree on: averaged
gradients, with which every worker then runs its own optimizer, or fresh parameters, if a server has
run it. Compression wraps an exchange. An exchange declares in its TRAITS what training has to know
about it; code outside of a pace never asks which class it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.compress.codec import Segment
from paceline.compress.reduction import CompressedReduction
from paceline.runtime.deprecation import RenamedMethods
from paceline.runtime.work import Handle, Together
from paceline.state.protocol import Part


class Bucket(Protocol):
    """What an exchange sees of a bucket: flat tensors in engine memory, all of one size."""

    index: int
    label: str  # for messages: the range of parameters in it

    @property
    def size(self) -> int:
        """The number of elements of each flat tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the flat tensors."""

    @property
    def grads(self) -> torch.Tensor:
        """This worker's gradients; never written by the exchange, so they can be sent again."""

    @property
    def averaged(self) -> torch.Tensor:
        """Receives the agreed gradients: every param.grad is a view of it."""

    @property
    def params(self) -> torch.Tensor:
        """The parameters: every param.data is a view of it."""

    @property
    def segments(self) -> Sequence[Segment]:
        """The segment of each parameter in the flat tensors, in order."""

    @property
    def absent(self) -> Sequence[int]:
        """The numbers, in the bucket, of parameters that have no gradient in this pass."""


@dataclass(frozen=True)
class ExchangeTraits:
    """What training may ask about an exchange; valid for the next backward pass."""

    verb: str = "exchange"  # in a trace
    # All workers call it together. After a loss the workers that are left repeat it.
    is_collective: bool = False
    is_local: bool = False  # nothing is exchanged: every worker steps with its own gradients
    may_be_local: bool = False  # local now, or in later steps
    is_weighted: bool = True  # each worker is weighted by the samples of its batch
    hides_nonfinite: bool = False  # NaN and infinity of one worker do not show in the result
    checks_late: bool = False  # on a device: whether gradients were finite is known in a later step
    keeps_residual: bool = False  # what a codec leaves out of gradients is sent in a later step
    # For a trace. A bucket's Work ends when its complete exchange has ended.
    work_is_whole: bool = False
    may_wait_singly: bool = False  # and a wait for one bucket delays no other


class Exchange(RenamedMethods, renamed={"call_roll": "reduce_used_mask"}):
    """How a full bucket becomes agreed values. Base of all exchanges. Main thread only."""

    traits = ExchangeTraits()

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Manage more buckets, before they are submitted for the first time."""

    def submit(self, bucket: Bucket, step: int) -> Handle:
        """Start the exchange of one bucket; its flat tensors do not change until it is done.

        Called during backward; must not block.
        """
        raise NotImplementedError

    def reduce_used_mask(self, here: torch.Tensor) -> torch.Tensor:
        """Return the used-parameter mask of all workers; called after the last bucket.

        `here` has 1.0 for every parameter that had a gradient on this worker, else 0.0. The result
        has 0.0 for parameters that had none on any worker. May block.
        """
        return here

    def left_out(self, bucket: Bucket) -> torch.Tensor | None:
        """Return the part of a bucket's gradients that has not been sent yet, or None."""
        del bucket
        return None

    def reduction_of(self, bucket: Bucket) -> CompressedReduction | None:
        """Return how a bucket is compressed, if it may be encoded before it is submitted.

        Of a bucket for which there is a reduction, `grads` and `averaged` are not used then.
        """
        del bucket
        return None

    @property
    def residuals(self) -> Part | None:
        """What this worker keeps of gradients that were left out, or None."""
        return None


class OwnGradients(Exchange):
    """Every worker keeps its own gradients; the workers agree later."""

    traits = ExchangeTraits(is_local=True, may_be_local=True)

    def submit(self, bucket: Bucket, step: int) -> Handle:  # noqa: ARG002
        return Together(()).work()
