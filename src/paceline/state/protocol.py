"""Part and State: one protocol for what newcomers receive and what checkpoints hold.

A PART is anything that has state between two steps: the training of a model, its pace, its codec,
the data, a learning-rate schedule. Its name is the same on all workers.

    state()               return what it has
    load(state, change)   take over the state of a peer (`change` says how the workers changed), or
                          that of a checkpoint (`change` is None)
    resume(change)        go on with other members; half-done work is repeated afterwards

Two carriers bring a State to where it is loaded: to a peer (transfer.py), and to a file and back
(data_parallel/model_state/checkpoint.py). What an entry is decides what they do with it:

                a peer receives it   a checkpoint has it
    shared      yes                  once           the same on all workers
    copied      yes                  by worker      each has its own; a newcomer begins with a copy
    own         no                   by worker      each has its own; a newcomer begins with none
    passing     yes                  no             of use only as long as the job runs
    served      no                   once           on servers: a function that fetches it

At a change the part is asked for its state only on the worker that sends. `load` is called on
newcomers and on workers that are behind, and talks to nobody; `resume` is called on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.control.messages import Loss
from paceline.errors import UsageError

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class State:
    """What a part has at one moment. Its tensors are live: a carrier copies or sends them at once.

    Entries have names. Those of `own` and `copied` share one set of names, and are tensors if
    checkpoints are to have them, as are those of `shared`; a peer also receives nested values.
    """

    counts: Any = ()  # numbers, texts, lists, dicts of texts: a peer and a checkpoint have them
    shared: Mapping[str, Any] = field(default_factory=dict)
    copied: Mapping[str, Any] = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)
    passing: Mapping[str, Any] = field(default_factory=dict)
    served: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    what: str = ""  # whose it is, for errors

    def fill(self, found: State) -> None:
        """Copy each tensor of `found` into the one of the same name here."""
        pairs = (
            (self.shared, found.shared),
            ({**self.copied, **self.own}, {**found.copied, **found.own}),
            (self.passing, found.passing),
        )
        with torch.no_grad():
            for mine, theirs in pairs:
                for name in mine.keys() & theirs.keys():
                    _copy(name, mine[name], theirs[name])


def _copy(name: str, mine: Any, theirs: Any) -> None:
    if not isinstance(mine, torch.Tensor):
        return
    if mine.shape != theirs.shape:
        raise UsageError(
            f"state {name!r} has the shape {list(theirs.shape)}, expected {list(mine.shape)} as"
            " here; state() must return the same names and shapes on all workers"
        )
    mine.copy_(theirs)


@dataclass(frozen=True)
class Change:
    """How the workers changed. Workers are ranks, ordered by number."""

    generation: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    lost: tuple[Loss, ...]  # workers that are gone and have not been named in a change before
    joined: tuple[int, ...]
    uncounted: bool  # the step under way goes on without the batches of lost workers

    def is_new(self, rank: int) -> bool:
        """Return whether a worker comes with this change."""
        return rank in self.joined


class Part:
    """Has state between two steps. Called on the main thread. By default it has none."""

    def state(self) -> State:
        """Return what it has."""
        return State()

    def load(self, state: State, change: Change | None) -> None:
        """Take over what a peer has, or a checkpoint; its tensors are this worker's own now."""

    def resume(self, change: Change) -> None:
        """Go on with other members. May talk to them: all workers call it."""
