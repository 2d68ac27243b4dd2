"""The interface between training and a pace that is more than an average of gradients.

A METHOD decides what happens to gradients during backward, and to parameters after the optimizer's
own step. It sees flat buckets (exchange.py), never the model. Every hook has a default that does
nothing, so a pace is the few lines in which it differs; CONTRIBUTING.md has the recipe.

    exchange()     how gradients are averaged; None: each worker steps with its own
    take()         more buckets to manage
    before_step()  the optimizer is about to run
    after_step()   it has run: start transfers that can overlap with the next step
    is_due         whether a round of all workers is due now, after the step
    run_round()    the exchange of a round; repeated if a worker is lost, so it only prepares
    apply_round()  apply its result; not repeated, does not communicate

What it keeps between two steps is its state (state/protocol.py), for newcomers and for checkpoints:

    state()        its state, without the number of steps and rounds
    load()         load the state of a peer or a checkpoint; by default tensors, by their names
    resume()       the membership has changed; the workers continue
    begin()        values were loaded from elsewhere (another pace, a checkpoint): start from there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.errors import UsageError
from paceline.observe.telemetry.traffic import CodecStats
from paceline.pace.center import Centre
from paceline.pace.exchange import Bucket, Exchange
from paceline.pace.parse import PaceSpec
from paceline.pace.registry import find
from paceline.runtime.deprecation import RenamedMethods
from paceline.state.protocol import Change, Part, State


@dataclass(frozen=True)
class Setting:
    """What a method gets to work with."""

    pace: PaceSpec
    workers: Group  # all of them, in order; its operations are the method's own
    options: Mapping[str, str] = field(default_factory=dict)  # as text, chosen or by default
    optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
    allocate: Callable[[int, torch.dtype], torch.Tensor] = lambda n, d: torch.empty(n, dtype=d)
    # Creates another group of all workers, whose operations run beside those of `workers`.
    another: Callable[[str], Group] | None = None
    centre: Centre | None = None  # on the servers, if the job has some and the pace can use them
    is_elastic: bool = False  # workers may join and be lost
    open_books: Callable[[str, Sequence[CodecStats]], None] = lambda codec, accounts: None  # noqa: ARG005

    def number(self, name: str, default: float = 0.0) -> float:
        """Return an option that is a number; `default` if the pace declares no value for it."""
        return float(self.options.get(name, default))

    def is_on(self, name: str) -> bool:
        """Return an option that is yes or no."""
        return self.options.get(name) == "yes"


class Method(Part, RenamedMethods, renamed={"meet": "run_round", "conclude": "apply_round"}):
    """Base of all methods. Main thread only."""

    # Steps from one agreement on stopping to the next, if rounds do not include all workers. In an
    # elastic job the workers agree in every round.
    agrees_every = 1
    # The parameters are one memory for all workers, which are on one host.
    shares_params = False
    is_free = False  # there are no rounds: workers do not wait for each other

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.workers = setting.workers
        self.buckets: list[Bucket] = []
        self.steps = 0  # optimizer steps of this worker
        self.rounds = 0  # rounds that have been applied
        self.is_last = False  # another pace follows: a last round is due, if it is needed

    def describe(self) -> str:
        """Return a short description, for the line at the start."""
        return str(self.setting.pace)

    def exchange(self) -> Exchange | None:
        """Return how gradients are averaged during backward, or None."""
        return None

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Manage more buckets, whose parameters are the same on all workers."""
        self.buckets += buckets

    @property
    def skips_backward(self) -> bool:
        """Whether this worker need not compute gradients in this step."""
        return False

    def before_step(self) -> None:
        """Prepare: the optimizer is about to run."""

    def after_step(self) -> None:
        """Continue: the optimizer has run; `steps` counts it already."""

    @property
    def is_due(self) -> bool:
        """Whether a round of all workers is due after the last step; the same on all workers."""
        return False

    @property
    def is_under_way(self) -> bool:
        """Whether data of the next round is in transit; the same on all workers."""
        return False

    def run_round(self) -> None:
        """Exchange the data of a round; no state may change before all of it has succeeded."""

    def apply_round(self) -> None:
        """Apply what was exchanged; `rounds` counts it afterwards."""

    def agreed(self, bucket: Bucket) -> torch.Tensor:
        """Return the values that all workers agree on. Collective."""
        mean = torch.empty_like(bucket.params)
        self.workers.all_reduce(bucket.params, "mean", out=mean)
        return mean

    # -- state --------------------------------------------------------------------------------

    def state(self) -> State:
        """Return what this worker keeps between two steps, by kind (state/protocol.py)."""
        return State()

    def load(self, state: State, change: Change | None) -> None:
        """Load the state of a peer, or (`change` is None) that of a checkpoint.

        From a peer: must not communicate. From a checkpoint: collective, and `own` and `copied` are
        present only if there are as many workers as there were.
        """
        del change
        self.state().fill(state)

    def resume(self, change: Change) -> None:
        """Continue with other members; `workers` has followed already."""

    def begin(self) -> None:
        """Start from the parameters, which were loaded and are the same on all workers.
        Collective."""


class PaceState(Part):
    """A method as a part of the state: with its counts, and the clocks of its center variable."""

    def __init__(self, method: Method) -> None:
        self._method = method

    def state(self) -> State:
        method, centre = self._method, self._method.setting.centre
        found = method.state()
        return replace(
            found,
            counts=[method.steps, method.rounds, *found.counts],
            passing={"clocks": [] if centre is None else centre.finished_steps(), **found.passing},
        )

    def load(self, state: State, change: Change | None) -> None:
        method, centre = self._method, self._method.setting.centre
        steps, rounds, *counts = state.counts
        if centre is not None and change is not None:
            centre.follow(state.passing["clocks"])
        method.load(replace(state, counts=counts), change)
        method.steps, method.rounds = steps, rounds

    def resume(self, change: Change) -> None:
        if self._method.setting.centre is not None:
            self._method.setting.centre.resume(change)
        self._method.resume(change)


def make_method(setting: Setting) -> Method | None:
    """Create the method of a pace; None for a pace that training itself runs."""
    row = find(setting.pace.name)
    if row is None or not row.method:
        return None
    kind: Any = row.method
    if isinstance(kind, str):
        module, _, name = kind.partition(":")
        kind = getattr(import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UsageError(f"pace {setting.pace}: {row.method} is not a Method; see CONTRIBUTING.md")
    return kind(setting)
