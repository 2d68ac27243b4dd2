"""Which samples make a step: derived from the settings of a DataLoader with indices.

the loader has             a unit is       a step takes (per worker / global)   split by
a batch size b             an index        world x b / b indices                spread
a batch sampler            its batch       world batches / one batch            deal_or_spread /
                                                                                spread_one
batch_size=None            an index        world indices / not possible         deal

Data WARM-UP: the first epochs go over a part of the data only. It is drawn from the seed of the
loader, so it is the same on all workers, in each of those epochs and in the next run. The loader
determines its order, as always.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from paceline.data.cursor.indices import Rules
from paceline.data.randomness import mix_seeds
from paceline.data.split.order import LocalOrder, draw
from paceline.data.split.weights import (
    Costs,
    Cut,
    cut_by_cost,
    deal,
    deal_or_spread,
    num_steps,
    spread,
    spread_one,
)
from paceline.errors import DataError, UsageError

_WARMUP = (0, 0, 1)  # mixed into the seed; other uses have 1 + a rank instead of the second 0


@dataclass(frozen=True)
class DataWarmup:
    """How much of the data the first epochs go over; made by `pl.data_warmup`."""

    fraction: float
    epochs: int

    def __str__(self) -> str:
        return f"data_warmup({self.fraction:g}, epochs={self.epochs})"

    def num_samples(self, samples: int, epoch: int) -> int:
        """Return how many of so many samples an epoch goes over."""
        if epoch >= self.epochs:
            return samples
        return min(samples, max(1, math.ceil(self.fraction * samples - 1e-9)))


def data_warmup(fraction: float, epochs: int = 1) -> DataWarmup:
    """Return a warm-up in which training starts with a part of the data.

    `pl.shard(loader, warmup=...)` goes over this fraction of the samples in epochs 0 to epochs - 1,
    and over all samples from then on. The samples are drawn once, the same on all workers. Each of
    them comes once in an epoch.

    >>> loader = DataLoader(range(20), batch_size=2)
    >>> warmup = pl.data_warmup(0.1, epochs=2)
    >>> [len(pl.shard(loader, epoch=epoch, warmup=warmup)) for epoch in range(4)]
    [1, 1, 10, 10]
    """
    try:
        share, count = float(fraction), operator.index(epochs)
    except (TypeError, ValueError):
        raise UsageError(
            f"data_warmup({fraction!r}, epochs={epochs!r}): expected a fraction of the data and a"
            " whole number of epochs"
        ) from None
    if not 0 < share <= 1:
        raise UsageError(
            f"data_warmup({fraction!r}): the fraction of the data must be above 0 and at most 1"
        )
    if count < 0:
        raise UsageError(f"data_warmup(..., epochs={epochs}): expected 0 or more")
    return DataWarmup(share, count)


@dataclass(frozen=True)
class BatchPlan:
    """How one loader's samples become steps of all workers."""

    units: int | None  # of one pass; None if not known
    per_step: int  # units that make a global batch
    per_worker: int | None  # units of it per worker; None: independent of their number
    cut: Cut
    drop_short: bool  # drop a last global batch that is not full
    sampler: Iterable[Any] | None  # a custom one, which rank 0 broadcasts; None: order by seed
    is_shuffled: bool
    drawn_from: int | None = None  # in a warm-up: the number of all units
    costs: Costs | None = None  # of samples, if they determine the split

    def local_order(self, seed: int, epoch: int) -> LocalOrder:
        """Return the order of a pass without a custom sampler."""
        assert self.units is not None, "without a custom sampler the length is known"
        drawn = None
        if self.drawn_from is not None:
            drawn = draw(self.units, self.drawn_from, mix_seeds(seed, *_WARMUP))
        return LocalOrder(self.units, mix_seeds(seed, epoch) if self.is_shuffled else None, drawn)

    def rules(self, resize: str) -> Rules:
        """Return how to split batches among any number of workers."""
        per_step, per_worker = self.per_step, self.per_worker
        follows = per_worker is not None and (resize == "worker" or self.cut is deal)
        return Rules(
            per_step=lambda workers: (per_worker or 0) * workers if follows else per_step,
            cut=self.cut if self.costs is None else cut_by_cost(self.costs),
            drop_short=self.drop_short,
            again=_indices if self.cut is spread else lambda part: [part],
        )

    def num_steps(self, world_size: int, rank: int, *, pad: bool) -> int | None:
        """Return how many batches this rank gets; None if that is not known."""
        if self.units is None:
            return None
        steps = num_steps(self.units, self.per_step, drop_short=self.drop_short)
        last = self.units % self.per_step
        lacks = self.cut in (spread, deal) and not self.drop_short and 0 < last <= rank
        return steps - 1 if lacks and last < world_size and not pad else steps


def plan_batches(loader: DataLoader[Any], world_size: int, batch: str, *, pad: bool) -> BatchPlan:
    """Return the plan for a loader's settings; UsageError if its samples cannot be split."""
    _refuse_sharding_samplers(loader)
    if loader.batch_size is not None:
        made = _of_samples(loader, world_size, batch)
    elif loader.batch_sampler is not None:
        made = _of_batches(loader, world_size, batch)
    else:
        made = _of_items(loader, world_size, batch)
    _refuse_too_few(made, world_size, pad)
    return made


def warmed_up(
    made: BatchPlan, warmup: DataWarmup, epoch: int, world_size: int, *, pad: bool
) -> BatchPlan:
    """Return the plan of one epoch; UsageError if no part of the data can be drawn."""
    if made.sampler is not None:
        raise UsageError(
            f"warmup={warmup}: the loader has a sampler of its own ({type(made.sampler).__name__}),"
            " which chooses the samples; let that sampler start with fewer samples, or use a plain"
            " loader (shuffle=True or not)"
        )
    assert made.units is not None, "without a custom sampler the length is known"
    units = warmup.num_samples(made.units, epoch)
    if units == made.units:
        return made
    less = replace(made, units=units, drawn_from=made.units)
    try:
        _refuse_too_few(less, world_size, pad)
    except DataError as error:
        raise DataError(f"warmup={warmup}, {units} of {made.units} samples: {error}") from None
    return less


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return every object that may determine the order of a loader."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    return [s for s in (loader.sampler, loader.batch_sampler, inner) if s is not None]


def length_of(thing: object) -> int | None:
    """Return len(thing), or None if it is not known."""
    try:
        return len(thing)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _of_samples(loader: DataLoader[Any], world_size: int, batch: str) -> BatchPlan:
    size = loader.batch_size
    assert size is not None
    if batch == "global" and size < world_size:
        raise UsageError(
            f"a global batch of {size} cannot be split among {world_size} workers; raise batch_size"
            f" to at least {world_size}, or use batch='worker'"
        )
    per_worker = None if batch == "global" else size
    return _from_sampler(loader, size * world_size if per_worker else size, per_worker, spread)


def _of_items(loader: DataLoader[Any], world_size: int, batch: str) -> BatchPlan:
    if batch == "global":
        raise UsageError(
            "batch='global' splits batches, but a loader with batch_size=None makes none; use"
            " batch='worker'"
        )
    return _from_sampler(loader, world_size, 1, deal)


def _from_sampler(
    loader: DataLoader[Any], per_step: int, per_worker: int | None, cut: Cut
) -> BatchPlan:
    sampler: Any = loader.sampler
    is_shuffled = type(sampler) is RandomSampler and _covers_all(sampler)
    is_plain = is_shuffled or type(sampler) is SequentialSampler
    return BatchPlan(
        units=length_of(sampler),
        per_step=per_step,
        per_worker=per_worker,
        cut=cut,
        drop_short=loader.drop_last,
        sampler=None if is_plain else sampler,
        is_shuffled=is_shuffled,
    )


def _indices(part: Any) -> list[Any]:
    return part.tolist() if isinstance(part, np.ndarray) else list(part)


def _covers_all(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _of_batches(loader: DataLoader[Any], world_size: int, batch: str) -> BatchPlan:
    sampler: Any = loader.batch_sampler
    return BatchPlan(
        units=length_of(sampler),
        per_step=1 if batch == "global" else world_size,
        per_worker=None if batch == "global" else 1,
        cut=spread_one if batch == "global" else deal_or_spread,
        drop_short=False,
        sampler=sampler,
        is_shuffled=False,
    )


def _refuse_sharding_samplers(loader: DataLoader[Any]) -> None:
    for sampler in samplers_of(loader):
        if hasattr(sampler, "num_replicas"):
            raise UsageError(
                f"the loader has a {type(sampler).__name__}, which already gives each worker its"
                " own samples; pass the plain loader (without it, shuffle=True if you want that),"
                " or presharded=True to keep it"
            )


def _refuse_too_few(made: BatchPlan, world_size: int, pad: bool) -> None:
    if made.units == 0:
        raise DataError("the loader is empty: its dataset or sampler has no samples")
    if made.units is None:
        return
    if made.drop_short and made.units < made.per_step:
        raise DataError(
            f"the loader has {made.units} samples, fewer than one global batch of"
            f" {made.per_step}, and drop_last=True drops them all; use a smaller batch_size, fewer"
            " workers or drop_last=False"
        )
    if pad and made.cut in (spread, deal) and made.units < world_size:
        raise DataError(
            f"the loader has {made.units} samples for {world_size} workers, fewer than one each;"
            f" start at most {made.units} workers, or pass pad=False if some may get no batch"
        )
