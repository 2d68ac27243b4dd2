"""The interface between the reducer and the training.

The reducer gets a STEP POLICY when it is created, and calls it during every backward pass. It
returns a PASS RESULT, an immutable value that the training reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.pace.exchange import Bucket


@dataclass(frozen=True, slots=True)
class PassResult:
    """The result of the last backward pass with an exchange."""

    is_own: bool = False  # nothing was exchanged: the gradients are this worker's own
    has_caught_up: bool = False  # this worker received the others' state, which has this step
    unit_stops: bool = False  # this process, or another of its unit on a mesh, was asked to stop
    is_stop_agreed: bool = False  # some worker was, and all know it
    is_change_agreed: bool = False  # all workers know that a membership change is due
    has_hidden_nonfinite: bool = False  # some worker had NaN or infinity that averages do not show
    is_complete: bool = True  # every parameter had a gradient on every worker
    shares: Sequence[float] = ()  # by parameter, in the reducer's order: 0.0 if no worker had one
    absent: frozenset[str] = frozenset()  # parameters that had no gradient on this worker


class StepPolicy(Protocol):
    """Decisions of a training about each backward pass."""

    @property
    def keeps_sparse(self) -> bool:
        """Whether to keep this worker's own sparse gradients for checks after the exchange."""

    def skips_backward(self) -> bool:
        """Return whether this worker exchanges without having computed gradients."""

    def wants_stop(self) -> bool:
        """Return whether this process was asked to stop."""

    def ask_unit(self, notes: list[bool]) -> list[bool]:
        """Return for each note whether any process of this worker's unit has it. Collective."""

    def has_hidden_nonfinite(self, buckets: Sequence[Bucket]) -> bool:
        """Return whether to report NaN or infinity in this worker's gradients to the others."""

    def during_exchange(self) -> None:
        """Exchange what an elastic job exchanges together with the gradients. Collective."""

    def after_exchange(self, result: PassResult) -> None:
        """Check the gradients that the workers agreed on."""
