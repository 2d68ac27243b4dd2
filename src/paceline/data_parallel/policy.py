"""The seam between the reducer and the training: what the reducer asks, and what it tells.

The reducer is given a STEP POLICY when it is made, and asks it during every backward pass. What a
pass came to is a PASS RESULT, a value that the training reads and nobody changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.pace.exchange import Bucket


@dataclass(frozen=True, slots=True)
class PassResult:
    """What the last backward pass with an exchange came to."""

    is_own: bool = False  # nothing was exchanged: the gradients are this worker's
    has_caught_up: bool = False  # this worker received the others' state: its step is done already
    unit_stops: bool = False  # this worker, or another of its unit on a mesh, was asked to stop
    is_stop_agreed: bool = False  # some worker was, and all know it
    is_change_agreed: bool = False  # all workers know of a change of the membership
    has_hidden_nonfinite: bool = False  # some worker had NaN or infinity that averages do not show
    is_complete: bool = True  # every parameter had a gradient on every worker
    shares: Sequence[float] = ()  # by parameter, in the reducer's order: 0.0 if no worker had one
    absent: frozenset[str] = frozenset()  # parameters that had no gradient on this worker


class StepPolicy(Protocol):
    """What a training decides about each backward pass."""

    @property
    def keeps_sparse(self) -> bool:
        """Whether this worker's own sparse gradients are looked at after the exchange."""

    def skips_backward(self) -> bool:
        """Return whether this worker exchanges without having computed gradients."""

    def wants_stop(self) -> bool:
        """Return whether this process was asked to stop."""

    def ask_unit(self, notes: list[bool]) -> list[bool]:
        """Return for each note whether any process of this worker's unit has it. Collective."""

    def has_hidden_nonfinite(self, buckets: Sequence[Bucket]) -> bool:
        """Return whether others must hear of NaN or infinity in the gradients of this worker."""

    def beside_exchange(self) -> None:
        """Exchange, in an elastic job, what is repeated with the gradients. Collective."""

    def after_exchange(self, result: PassResult) -> None:
        """Look at the gradients that the workers agreed on, on every worker."""
