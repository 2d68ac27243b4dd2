"""What takes part in a change of the membership, and what it is told.

A PARTICIPANT is anything that has state of its own between two steps: the training of a model, the
data, a learning-rate schedule. It is registered under a name that is the same on all workers. At a
change, on every worker and in this order:

    tell()       how far it is, for all to hear
    pack()       only on the donor: what a newcomer, or one who is behind, must have
    unpack()     only on those: take it over
    resume()     on all: go on with the new members; half-done work is repeated afterwards

A pace implements the same hooks for what it keeps on workers (see CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from paceline.cluster.messages import Loss

Parcel: TypeAlias = tuple[Any, Sequence[torch.Tensor]]  # plain data that msgpack knows, and tensors


@dataclass(frozen=True)
class Change:
    """How the workers changed. Workers are ranks, ordered by number."""

    generation: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    lost: tuple[Loss, ...]  # workers that are gone and have not been told so before
    joined: tuple[int, ...]
    uncounted: bool  # the step under way goes on without the batches of those who are lost
    told: Mapping[str, Sequence[Any]]  # by participant: what each of `after` told; None: newcomer

    def is_new(self, rank: int) -> bool:
        """Say whether a worker comes with this change."""
        return rank in self.joined


class Participant(Protocol):
    """Takes part in changes of the membership. Called on the main thread."""

    def tell(self) -> Any:
        """Return plain data that everybody shall know before anything is decided."""

    def pack(self) -> Parcel:
        """Return what a worker needs that knows nothing of the training so far."""

    def unpack(self, plain: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Take over what a peer packed; the tensors are this worker's own from now on."""

    def resume(self, change: Change) -> None:
        """Go on with other members."""
