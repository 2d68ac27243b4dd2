"""What a table knows about its workers: clocks, settings, accounts, and how their steps ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.ps.accounts import Accounts
from paceline.ps.clock import Clocks
from paceline.ps.optimizer import Settings


@dataclass(frozen=True)
class Push:
    """A gradient in memory that stays as it is until the worker reads, and what it lacks."""

    grad: torch.Tensor
    absent: frozenset[int]  # parameters (Piece.param) without a gradient


@dataclass(frozen=True)
class Outcome:
    """How a worker's last step ended."""

    version: int
    staleness: int = 0
    notice: str = ""  # something that the user should hear about
    error: str = ""  # name of a class in paceline.errors
    text: str = ""  # what that error says
    stops: bool = False  # a worker that took part in it was asked to stop


@dataclass
class Ledger:
    """Shared by a table and its way of applying updates."""

    clocks: Clocks
    accounts: Accounts
    settings: dict[int, Settings]  # by worker: of the param groups, as it last said
    now: Callable[[], float]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    stopping: set[int] = field(default_factory=set)  # who was asked to stop, in the step under way
    _waits: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def end_step(
        self,
        worker: int,
        *,
        staleness: int = 0,
        notice: str = "",
        error: str = "",
        text: str = "",
        stops: bool = False,
    ) -> None:
        """Count a step of a worker as finished, whatever became of its update."""
        self.clocks.advance(worker)
        self.outcomes[worker] = Outcome(self.clocks.version, staleness, notice, error, text, stops)

    def note_wait(self, worker: int, blockers: tuple[int, ...]) -> None:
        """Note whom a worker waits for from now on; nobody means that it goes on."""
        if blockers != self._waits.get(worker, ()):
            self.accounts.began_waiting(worker, blockers, self.now())
            self._waits[worker] = blockers
