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

A checkpoint has what `common()` returns and, for as many workers again, the tensors of `own()`;
`begin_here()` is for values that come from another pace.

A method takes part in changes of the membership (elastic/protocol.py): `pack` and `unpack` carry
what a newcomer must have, which by default are the tensors of `kept()`, and how many steps and
meetings there were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.collectives.group import Group
from paceline.elastic.protocol import Change, Parcel
from paceline.pace.centre import Centre
from paceline.pace.exchange import Bucket, Exchange
from paceline.pace.parse import PaceSpec
from paceline.telemetry.compression import Account


@dataclass(frozen=True)
class Setting:
    """What a method is given to work with."""

    pace: PaceSpec
    workers: Group  # all of them, in order; its operations are the method's own
    options: Mapping[str, str] = field(default_factory=dict)  # as text; those that were chosen
    optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
    allocate: Callable[[int, torch.dtype], torch.Tensor] = lambda n, d: torch.empty(n, dtype=d)
    # Makes another group of all workers, whose operations run beside those of `workers`.
    another: Callable[[str], Group] | None = None
    centre: Centre | None = None  # on the servers, if the job has some and the pace can use them
    is_elastic: bool = False  # workers come and go
    open_books: Callable[[str, Sequence[Account]], None] = lambda codec, accounts: None  # noqa: ARG005

    def number(self, name: str, default: float) -> float:
        """Return an option that is a number."""
        return float(self.options.get(name, default))

    def is_on(self, name: str, default: bool = False) -> bool:
        """Return an option that is yes or no."""
        return self.options.get(name, "yes" if default else "no") == "yes"


class Method:
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

    # -- checkpoints --------------------------------------------------------------------------

    def common(self) -> dict[str, torch.Tensor]:
        """Return what the method keeps for all workers, by name, wherever it is; one worker calls,
        and servers may be asked. Blocks."""
        return {}

    def load_common(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take it over, as far as it is kept here; on all workers, before `recount`."""

    def send_common(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Let servers have what they keep of it; one worker calls, behind `recount`. Blocks."""

    def own(self) -> Iterator[torch.Tensor]:
        """Yield what is this worker's alone, in order: a newcomer begins with zeros there."""
        return iter(())

    def counts(self) -> Any:
        """Return what numbers a worker needs besides, to go on in a new job: plain data."""
        return [self.steps, self.rounds]

    def recount(self, counts: Any) -> None:
        """Take them over. Collective."""
        self.steps, self.rounds = counts

    def begin_here(self) -> None:
        """Let what stands for all workers be the parameters, which are the same on all of them
        now: they were loaded. Collective."""

    # -- changes of the membership ------------------------------------------------------------

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield what this worker keeps between two steps and a newcomer must have, in order."""
        return iter(())

    def tell(self) -> None:
        """Nothing has to be known before a change is decided."""

    def pack(self) -> Parcel:
        """Return how far this worker is, and what it keeps."""
        centre = self.setting.centre
        settled = [] if centre is None else centre.settled()
        return [self.steps, self.rounds, settled], list(self.kept())

    def unpack(self, plain: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Take them over."""
        self.steps, self.rounds, settled = plain
        for mine, theirs in zip(self.kept(), tensors, strict=True):
            mine.copy_(theirs)
        if self.setting.centre is not None:
            self.setting.centre.follow(settled)

    def resume(self, change: Change) -> None:
        """Go on with other members; `workers` has followed already."""
        if self.setting.centre is not None:
            self.setting.centre.resume(change)
