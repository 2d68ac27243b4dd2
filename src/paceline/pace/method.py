"""The seam between training and a pace that is more than an average of gradients.

A METHOD says what happens to gradients during backward, and to parameters behind the optimizer's
own step. It sees flat buckets (exchange.py), never the model. Every hook has a default that does
nothing, so a pace is the few lines in which it differs; CONTRIBUTING.md has the recipe.

    exchange()     how gradients are agreed on; None: each worker steps with its own
    take()         more buckets to look after
    before_step()  the optimizer is about to run
    after_step()   it has run: start what can travel while the next step computes
    is_due         whether all workers meet now, behind the step
    meet()         what they exchange then; repeated when a worker is lost, so it only prepares
    conclude()     make use of it; not repeated, talks to nobody

What it keeps between two steps is its state (state/protocol.py), for newcomers and for checkpoints:

    state()        what it has; how many steps and meetings there were is known without it
    load()         take it over from a peer or a checkpoint; by default tensors, by their names
    resume()       workers came or went; all that are left go on
    begin()        values come from elsewhere (another pace, a checkpoint): stand there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.comm.group import Group
from paceline.observe.telemetry.traffic import Account
from paceline.pace.centre import Centre
from paceline.pace.exchange import Bucket, Exchange
from paceline.pace.parse import PaceSpec
from paceline.state.protocol import Change, Part, State


@dataclass(frozen=True)
class Setting:
    """What a method is given to work with."""

    pace: PaceSpec
    workers: Group  # all of them, in order; its operations are the method's own
    options: Mapping[str, str] = field(default_factory=dict)  # as text, chosen or by default
    optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
    allocate: Callable[[int, torch.dtype], torch.Tensor] = lambda n, d: torch.empty(n, dtype=d)
    # Makes another group of all workers, whose operations run beside those of `workers`.
    another: Callable[[str], Group] | None = None
    centre: Centre | None = None  # on the servers, if the job has some and the pace can use them
    is_elastic: bool = False  # workers come and go
    open_books: Callable[[str, Sequence[Account]], None] = lambda codec, accounts: None  # noqa: ARG005

    def number(self, name: str, default: float = 0.0) -> float:
        """Return an option that is a number; `default` if the pace declares no value for it."""
        return float(self.options.get(name, default))

    def is_on(self, name: str) -> bool:
        """Return an option that is yes or no."""
        return self.options.get(name) == "yes"


class Method(Part):
    """Base of all methods. Main thread only."""

    # Steps from one agreement on stopping to the next, where meetings are not of all workers. In an
    # elastic job they always agree.
    agrees_every = 1
    # The parameters are one memory for all workers, who are on one host.
    shares_params = False
    is_free = False  # workers never meet: nobody waits for anybody

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.workers = setting.workers
        self.buckets: list[Bucket] = []
        self.steps = 0  # optimizer steps that this worker has done
        self.rounds = 0  # meetings that have been concluded
        self.is_last = False  # another pace follows: whoever has something to agree on is due now

    def describe(self) -> str:
        """Say in a few words what this comes to, for the line at the start."""
        return str(self.setting.pace)

    def exchange(self) -> Exchange | None:
        """Return how gradients are agreed on during backward; None: they are not."""
        return None

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Look after more buckets, whose parameters are the same on all workers."""
        self.buckets += buckets

    @property
    def skips_backward(self) -> bool:
        """Whether this worker need not compute gradients in this step."""
        return False

    def before_step(self) -> None:
        """The optimizer is about to run."""

    def after_step(self) -> None:
        """The optimizer has run; `steps` counts it already."""

    @property
    def is_due(self) -> bool:
        """Whether all workers meet behind the step that is done; alike on all of them."""
        return False

    @property
    def is_under_way(self) -> bool:
        """Whether what the next meeting needs travels already; alike on all workers."""
        return False

    def meet(self) -> None:
        """Exchange; nothing that is kept may change before all of it has succeeded."""

    def conclude(self) -> None:
        """Make use of what was exchanged; `rounds` counts it afterwards."""

    def agreed(self, bucket: Bucket) -> torch.Tensor:
        """Return the values that stand for the model of all workers. Collective."""
        mean = torch.empty_like(bucket.params)
        self.workers.all_reduce(bucket.params, "mean", out=mean)
        return mean

    # -- state --------------------------------------------------------------------------------

    def state(self) -> State:
        """Return what this worker keeps between two steps, and in what way (state/protocol.py)."""
        return State()

    def load(self, state: State, change: Change | None) -> None:
        """Take over the state of a peer, or (`change` is None) that of a checkpoint.

        From a peer: talk to nobody. From a checkpoint: collective, and `own` and `copied` are there
        only if there are as many workers as there were.
        """
        del change
        self.state().fill(state)

    def resume(self, change: Change) -> None:
        """Go on with other members; `workers` has followed already."""

    def begin(self) -> None:
        """Let what stands for all workers be the parameters, which are the same on all of them
        now: they were loaded. Collective."""


class PaceState(Part):
    """A method as a part of the training: with its counts, and the clocks of its centre."""

    def __init__(self, method: Method) -> None:
        self._method = method

    def state(self) -> State:
        method, centre = self._method, self._method.setting.centre
        found = method.state()
        return replace(
            found,
            counts=[method.steps, method.rounds, *found.counts],
            passing={"clocks": [] if centre is None else centre.settled(), **found.passing},
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
