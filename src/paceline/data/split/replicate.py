"""mode="replicate": each worker goes over all of the data, in an order of its own.

Nothing is cut and nothing is told: an epoch of w workers sees each sample w times, once on each of
them. All batches weigh the same. Orders follow from (seed, epoch, rank), so they are the same in
the next run; with a sampler of the user each worker iterates its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.cursor.passes import Pass
from paceline.data.randomness import mixed
from paceline.data.sources.indexed import IndexedLoader, plain, settings_of
from paceline.data.split.order import LocalOrder
from paceline.data.split.plan import length_of, plan, samplers_of
from paceline.errors import UsageError

_ORDER = 2  # beside the seed: the order, not the augmentation


def whole_parts(batches: Iterable[Any], count: int, rank: int) -> Iterator[tuple[Any, float]]:
    """Yield the batches of one worker's pass over everything, and their weights."""
    found = 0
    for batch in batches:
        found += 1
        if found > count:
            break
        yield plain(batch), 1.0
    if found != count:
        # The others count on as many steps as the sampler's length says.
        raise UsageError(
            f"pl.shard: the sampler of rank {rank} gave"
            f" {'more' if found > count else found} batches, expected {count} by its length; with"
            " mode='replicate' all workers make as many steps as that"
        )


class Replicated:
    """A loader whose samples have indices, all of them on each worker."""

    def __init__(self, loader: DataLoader[Any], batch: str) -> None:
        if batch != "worker":
            raise UsageError(
                f"mode='replicate' cuts no batches: batch_size is each worker's (batch={batch!r})"
            )
        made = plan(loader, 1, "worker", pad=True)  # as if alone
        if made.units is None:
            raise UsageError(
                f"mode='replicate' needs to know how many steps there are, but"
                f" {type(made.told).__name__} has no length; give it a __len__"
            )
        if made.told is None and not made.is_shuffled:
            raise UsageError(
                "mode='replicate' goes over the data in another order on each worker, but this"
                " loader has shuffle=False, and all would compute the same; pass shuffle=True, or a"
                " sampler that differs by pl.data_rank()"
            )
        self._loader, self._plan = loader, made
        self.length = made.num_steps(1, 0, pad=True)

    @property
    def facts(self) -> dict[str, Any]:
        """What decides on the number of steps."""
        return {
            "the length of the dataset": length_of(self._loader.dataset),
            "the length of the sampler": self._plan.units,
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
        }

    def batches(self, this: Pass) -> Iterator[Any]:
        """Yield batches of all samples, in this worker's order."""
        rank, loader = this.group.rank, self._loader
        for sampler in {id(one): one for one in samplers_of(loader)}.values():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(this.epoch)
        if self._plan.told is not None:
            this.say(
                f"shard: mode='replicate': each worker iterates its own"
                f" {type(self._plan.told).__name__}; let it differ by pl.data_rank(), or all"
                " workers compute the same"
            )
        assert self.length is not None, "the plan has a length"
        parts = whole_parts(self._grouped(self._units(this)), self.length, rank)
        copy = this.memory.copy_for(
            ("replicate", *settings_of(loader)), lambda: IndexedLoader(loader)
        )
        seed = mixed(this.seed, this.epoch, 1 + rank)
        yield from this.noted(copy.run(parts, this.announcer, seed))

    def _units(self, this: Pass) -> Iterable[Any]:
        if self._plan.told is not None:
            return self._plan.told
        assert self._plan.units is not None, "checked above"
        seed = mixed(this.seed, this.epoch, 1 + this.group.rank, _ORDER)
        return LocalOrder(self._plan.units, seed).units(0, self._plan.units)

    def _grouped(self, units: Iterable[Any]) -> Iterator[Any]:
        size = self._loader.batch_size
        if size is None:
            yield from units
            return
        batch: list[Any] = []
        for unit in units:
            batch.append(plain(unit))
            if len(batch) == size:
                yield batch
                batch = []
        if batch and not self._loader.drop_last:
            yield batch
