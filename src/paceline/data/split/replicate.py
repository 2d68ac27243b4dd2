"""mode="replicate": each worker goes over all of the data, in an order of its own.

Nothing is split or broadcast: in an epoch of w workers each sample is used w times, once on each
worker. All batches have the same weight. Orders follow from (seed, epoch, rank), so they are the
same in the next run. If the loader has a custom sampler, each worker iterates its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.data_pass import DataPass
from paceline.data.randomness import mix_seeds
from paceline.data.sources.indexed import IndexedLoader, plain, settings_of
from paceline.data.sources.sources import set_epoch
from paceline.data.split.order import LocalOrder
from paceline.data.split.plan import length_of, plan_batches, samplers_of
from paceline.errors import UsageError

_ORDER = 2  # mixed into the seed of the order, but not of the augmentation


def whole_parts(batches: Iterable[Any], count: int, rank: int) -> Iterator[tuple[Any, float]]:
    """Yield the batches of one worker's pass over all samples, and their weights."""
    found = 0
    for batch in batches:
        found += 1
        if found > count:
            break
        yield plain(batch), 1.0
    if found != count:
        # The other workers make as many steps as the sampler's length says.
        raise UsageError(
            f"pl.shard: the sampler of rank {rank} gave"
            f" {'more' if found > count else found} batches, expected {count} by its length; with"
            " mode='replicate' all workers make as many steps as that"
        )


class ReplicatedSource:
    """A loader whose samples have indices, all of them on each worker."""

    kind = "replicated"

    def __init__(self, loader: DataLoader[Any], batch: str) -> None:
        if batch != "worker":
            raise UsageError(
                f"mode='replicate' splits no batches: batch_size is that of each worker (got"
                f" batch={batch!r}); leave out batch"
            )
        made = plan_batches(loader, 1, "worker", pad=True)  # as for one process
        if made.units is None:
            raise UsageError(
                f"mode='replicate' needs to know how many steps there are, but"
                f" {type(made.sampler).__name__} has no length; give it a __len__"
            )
        if made.sampler is None and not made.is_shuffled:
            raise UsageError(
                "mode='replicate' goes over the data in another order on each worker, but this"
                " loader has shuffle=False, so all would compute the same; pass shuffle=True, or a"
                " sampler that differs by pl.data_rank()"
            )
        self._loader, self._plan = loader, made
        self.length = made.num_steps(1, 0, pad=True)

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that determine the number of steps."""
        return {
            "the length of the dataset": length_of(self._loader.dataset),
            "the length of the sampler": self._plan.units,
            "batch_size": self._loader.batch_size,
            "drop_last": self._loader.drop_last,
        }

    def batches(self, data_pass: DataPass) -> Iterator[Any]:
        """Yield batches of all samples, in this worker's order."""
        rank, loader = data_pass.group.rank, self._loader
        set_epoch(samplers_of(loader), data_pass.epoch)
        if self._plan.sampler is not None:
            data_pass.log_once(
                f"shard: mode='replicate': each worker iterates its own"
                f" {type(self._plan.sampler).__name__}; let it differ by pl.data_rank(), or all"
                " workers compute the same"
            )
        assert self.length is not None, "the plan has a length"
        parts = whole_parts(self._grouped(self._units(data_pass)), self.length, rank)
        copy = data_pass.record.copy_for(
            ("replicate", *settings_of(loader)), lambda: IndexedLoader(loader)
        )
        seed = mix_seeds(data_pass.seed, data_pass.epoch, 1 + rank)
        yield from data_pass.track(copy.run(parts, data_pass.announcer, seed))

    def _units(self, data_pass: DataPass) -> Iterable[Any]:
        if self._plan.sampler is not None:
            return self._plan.sampler
        assert self._plan.units is not None, "checked above"
        seed = mix_seeds(data_pass.seed, data_pass.epoch, 1 + data_pass.group.rank, _ORDER)
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
