"""This worker's part of a DataLoader whose samples have indices.

The user's loader is never iterated. A shallow copy of it is, with the same dataset, workers and
settings (and class, if that is one of the user's), in which only the sampler is another: it yields
this worker's part of every global batch. The copy lives as long as the user's loader, so that
persistent workers survive from epoch to epoch.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from paceline.contribution import Announcer
from paceline.data.order import Order
from paceline.data.plan import Plan
from paceline.data.repeatable import Reseeding
from paceline.data.samples import Named
from paceline.data.split import Units, spread_one
from paceline.job import joined


class AnyParts(Protocol):
    """One worker's parts of one pass, however they were found."""

    @property
    def weights(self) -> deque[float]:
        """Of parts that were asked for and not yet handed out."""

    def prepare(self, steps: int) -> None:
        """See to it that the parts of so many steps since the beginning can be asked for."""

    def __iter__(self) -> Iterator[Any]: ...


class Parts:
    """One worker's parts of one pass, and their weights in the same order."""

    def __init__(
        self,
        plan: Plan,
        order: Order,
        world_size: int,
        rank: int,
        *,
        pad: bool,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._order = plan, order
        self._world_size, self._rank = world_size, rank
        self._pad, self._say = pad, say
        self.steps = 0  # global batches so far
        self.weights: deque[float] = deque()  # of parts that were asked for and not yet handed out

    def prepare(self, steps: int) -> None:
        """See to it that the units of so many steps since the beginning are here. Collective."""
        if not self._pad and self._plan.cut is spread_one:
            steps = sys.maxsize  # who is left out of a batch needs the next one at once
        self._order.prepare(steps * self._plan.per_step)

    def __iter__(self) -> Iterator[Any]:
        plan = self._plan
        while len(units := self._order.take(plan.per_step)):
            if len(units) < plan.per_step and plan.drop_short:
                return
            self.steps += 1
            part, weight = self._cut(units)
            if self._pad:
                self._mention_padding(units)
            elif weight == 0.0:
                continue
            self.weights.append(weight)
            yield plain(part)

    def _cut(self, units: Units) -> tuple[Any, float]:
        """Return this worker's part of a global batch, whose number is `steps` - 1."""
        return self._plan.cut(units, self._world_size, self._rank)

    def _mention_padding(self, units: Units) -> None:
        # Where anybody goes without, the last rank does.
        if self._plan.cut(units, self._world_size, self._world_size - 1)[1] == 0.0:
            self._say(
                f"shard: a global batch has too few samples for {self._world_size} workers; those"
                " that get none repeat one with weight 0 (drop_last=True leaves such batches out)"
            )


def plain(part: Any) -> Any:
    """Indices as Python's own: datasets may be lists, and dicts with numbers as keys."""
    if isinstance(part, (np.ndarray, np.generic)):
        return part.tolist()
    return list(part) if isinstance(part, range) else part


class Slot:
    """The sampler of the copied loader: yields what the pass that begins has put into it."""

    def __init__(self) -> None:
        self.parts: Iterable[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        assert self.parts is not None, "a pass puts its parts here first"
        return iter(self.parts)  # a DataLoader may call this twice before it takes anything


class IndexedLoader:
    """The copy of one loader, with a slot for the parts of each pass."""

    def __init__(self, loader: DataLoader[Any], *, reseeds: bool = False) -> None:
        self._slot = Slot()
        self.reseeds = reseeds  # before each batch is made: its parts come with a seed
        place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        job = joined()
        who = "this rank" if job is None else f"rank {job.env.rank}"
        dataset = Reseeding(loader.dataset, who) if reseeds else Named(loader.dataset, who)
        self._copy = copied(loader, **{place: self._slot}, dataset=dataset)

    def begin(self, parts: Iterable[Any], worker_seed: int) -> Iterator[Any]:
        """Return an iterator over the batches that these parts make."""
        self._slot.parts = parts
        self._copy.generator.manual_seed(worker_seed)
        return iter(self._copy)

    def run(
        self, parts: AnyParts, announcer: Announcer, lookahead: int, worker_seed: int
    ) -> Iterator[Any]:
        """Yield this worker's batches, each with its weight announced."""
        parts.prepare(1 + lookahead)
        for step, batch in enumerate(self.begin(parts, worker_seed)):
            announcer.set(parts.weights.popleft())
            yield batch
            parts.prepare(step + 2 + lookahead)


def lookahead_of(loader: DataLoader[Any]) -> int:
    """Return how many batches a loader may ask for before they are needed."""
    return loader.num_workers * (loader.prefetch_factor or 0)


def settings_of(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return what tells whether a copy is still like its loader, some of whose attributes may be
    assigned at any time. Identities hold, because the copy keeps the objects alive."""
    passing = ("_iterator", "_IterableDataset_len_called", "generator")
    return tuple((name, id(value)) for name, value in vars(loader).items() if name not in passing)


def copied(loader: DataLoader[Any], **changes: Any) -> Any:
    """Copy a loader with some attributes changed. DataLoader forbids to assign them, because its
    iterator may be under way; the copy has none yet. Batches come in order: only so do the
    workers have parts of the same global batch at the same time."""
    made = copy.copy(loader)
    vars(made).update(changes, generator=torch.Generator(), in_order=True, _iterator=None)
    return made
