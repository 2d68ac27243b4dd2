"""Part and State: one protocol for what joining workers receive and what checkpoints hold.

A PART is anything that has state between two steps: the training of a model, its pace, its codec,
the data, a learning-rate schedule. Its name is the same on all workers.

    pause()               the members change: finish what is under way, by itself
    state()               return its state
    load(state, change)   load the state of a peer (`change` describes the membership change), or of
                          a checkpoint (`change` is None)
    resume(change)        continue with other members; unfinished work is repeated afterwards

A State is carried to a peer (transfer.py), or to a file and back
(data_parallel/model_state/model_snapshot.py). The kind of an entry decides how it is carried:

                sent to a peer   in a checkpoint
    shared      yes              once           the same on all workers
    copied      yes              per worker     each worker has its own; a joining worker copies one
    own         no               per worker     each worker has its own; a joining worker has none
    passing     yes              no             useful only while the job runs
    served      no               once           on servers: a function that fetches it

At a change, only the source worker is asked for the state of a part. `load` is called on joining
workers and on workers that lag, and does not communicate; `resume` is called on all workers.
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
    """The state of a part at one moment. Its tensors are live: copy or send them at once.

    Entries have names; those of `own` and `copied` share one set of names. Entries of `shared`,
    `own` and `copied` must be tensors to be in a checkpoint; a peer also receives nested values.
    """

    counts: Any = ()  # numbers, strings, lists, dicts with string keys: for peers and checkpoints
    shared: Mapping[str, Any] = field(default_factory=dict)
    copied: Mapping[str, Any] = field(default_factory=dict)
    own: Tensors = field(default_factory=dict)
    passing: Mapping[str, Any] = field(default_factory=dict)
    served: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    what: str = ""  # the owner's name, for errors

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
    """A change of the workers. Workers are ranks, ordered by number."""

    generation: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    lost: tuple[Loss, ...]  # workers that no earlier change has named as lost
    joined: tuple[int, ...]
    uncounted: bool  # the current step continues without the batches of lost workers

    def is_new(self, rank: int) -> bool:
        """Return whether a worker joins with this change."""
        return rank in self.joined


class Part:
    """Has state between two steps. Called on the main thread. By default it has none."""

    def pause(self) -> None:
        """Finish what is under way, so that `state` and `load` find a whole step. All workers that
        live have stopped. Does not communicate, and may be called several times for one change."""

    def state(self) -> State:
        """Return its state."""
        return State()

    def load(self, state: State, change: Change | None) -> None:
        """Load the state of a peer or of a checkpoint; its tensors belong to this worker now."""

    def resume(self, change: Change) -> None:
        """Continue with other members. May communicate: all workers call it."""


class UserObject(Part):
    """An object of the script as a part: `pl.carry(ema=ema)`, `pl.Checkpoint(..., ema=ema)`."""

    def __init__(self, name: str, thing: Any, caller: str = "carry") -> None:
        self.what = f"{caller}({name}=...)"
        lacking = [m for m in ("state_dict", "load_state_dict") if not hasattr(thing, m)]
        if lacking:
            raise UsageError(
                f"{self.what}: a {type(thing).__name__} has no {' and no '.join(lacking)}()"
            )
        self.thing = thing

    def state(self) -> State:
        return State(shared={"state": self.thing.state_dict()}, what=self.what)

    def load(self, state: State, change: Change | None) -> None:  # noqa: ARG002
        self.thing.load_state_dict(state.shared["state"])
