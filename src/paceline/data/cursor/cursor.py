"""The cursor of one pass over a loader with a fixed order: its progress, and how the rest is split.

Global batches are taken from the order one after the other and split among the workers. A BATCH
RANGE is a run of global batches with the same workers. A change of the workers begins a new range
at the first batch that no worker has taken yet:

    batches      0 1 2 3 4 | 5 6 7 | 8 9 ...
    workers      0 1 2     | 0 2   | 0 2 7

TAKEN is the number of global batches that some worker has received. A worker may lag behind; the
batches in between are still split for it as they were for the other workers. COMMITTED is the
number of batches that an optimizer step has counted. POSITION is the next batch of this worker.
Cursors that see the same changes give the same parts of the same batches.

A subclass knows what remains when a range begins: an index in an order (indices.py) or positions of
a stream (positions.py). The base class only counts batches, for data that cannot be split again.
leased.py asks the coordinator, for workers that take as many batches as they can.

A cursor is written as plain data. `state()` is for checkpoints. A peer in the same pass also
receives `live()`. `load()` continues from either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.data.randomness import State
from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline.data.split.order import SamplerOrder

Ranks = tuple[int, ...]
Facts = Mapping[str, Any]  # what the ranks agreed on about a loader
Plain = Mapping[str, Any]

_MAY_DIFFER = ("epoch", "the epoch of this pass", "resize")  # from the run that is resumed


@dataclass(frozen=True)
class StateOrigin:
    """Where a state comes from: a peer, or a checkpoint."""

    is_new: bool = False  # a newcomer, which starts where the other workers are
    is_resumed: bool = False  # a checkpoint, saved between two steps
    has_same_world_size: bool = True  # of a checkpoint: as many workers as now saved it
    are_workers_apart: bool = False  # of a checkpoint: its workers were at different batches


PEER, NEWCOMER = StateOrigin(), StateOrigin(is_new=True)


@dataclass(frozen=True)
class WorkerChange:
    """A change of the workers, as cursors see it."""

    after: Ranks
    requeues_lost: bool  # what lost workers received since the last commit is used again
    replaced: Mapping[int, int]  # lost ranks, and the ranks that take over their parts


@dataclass
class Tally:
    """What one pass handed out: counted batch by batch, for all workers as far as this worker
    knows them, and not derived from lengths."""

    next: int = 0  # the first batch that has not been counted
    samples: int = 0  # in batches that count
    padded: int = 0  # parts that repeat a sample with weight 0
    largest: int = 0  # samples in this worker's largest batch
    repeated: int = 0  # upper bound of samples that a resumed run uses twice

    def note(self, batch: int, here: int, total: int, padded: int) -> None:
        """Count a batch by its samples on this worker and in total. Counts each batch once."""
        if batch >= self.next:
            self.next = batch + 1
            self.samples += total
            self.padded += padded
        if here > self.largest:
            self.largest = here


@dataclass(frozen=True)
class BatchRange:
    """Global batches with the same workers."""

    first: int  # batch
    members: Ranks  # ordered by number
    remaining: Any  # when the range began, in the form of the cursor's class


class Cursor:
    """Progress of a pass. The base class is for data that each worker has of its own."""

    order: SamplerOrder | None = None  # of the user's own sampler

    def __init__(self, members: Ranks = ()) -> None:
        self.index = 0  # among the passes over this loader
        self.epoch = 0
        self.counts = True  # batches count when a step commits; else (pad=False) at the end
        self.facts: Facts = {}
        self.position = self.taken = self.committed = 0
        self.ranges = [BatchRange(0, members, self._all_remaining())]
        self.version = 0  # grows when batches that were not taken yet may have changed
        self.sample_counts: dict[int, list[int]] = {}  # by uncommitted batch, of each worker
        self.carried: dict[int, list[Any]] = {}  # by rank: uncommitted units of the pass before
        self.tally = Tally()
        self.draws: State | None = None  # generator states at the start, for reading data again
        self.is_abandoned = False  # other workers have ended this pass: nothing changes any more
        self.is_resumed = False  # continued from a checkpoint

    @property
    def members(self) -> Ranks:
        """The current workers."""
        return self.ranges[-1].members

    @property
    def reassigned(self) -> int:
        """How many samples were handed out again after a loss."""
        return 0

    def dropped(self, samples: int) -> int:  # noqa: ARG002
        """Return how many samples a finished pass left out, given how many it handed out."""
        return 0

    def range_of(self, batch: int) -> BatchRange:
        """Return the range that a batch belongs to."""
        return self._find_range(batch)[0]

    def _find_range(self, batch: int) -> tuple[BatchRange, BatchRange | None]:
        """Return the range of a batch, and the next range."""
        if len(self.ranges) == 1 and batch >= self.ranges[0].first:  # nearly always
            return self.ranges[0], None
        found = max(0, bisect_right(self.ranges, batch, key=lambda one: one.first) - 1)
        following = self.ranges[found + 1] if found + 1 < len(self.ranges) else None
        return self.ranges[found], following

    # -- progress -----------------------------------------------------------------------------

    def take(self, batch: int, source: int = 0) -> None:  # noqa: ARG002
        """Note that a batch was handed out, and from which source of a stream."""
        self.taken = max(self.taken, batch + 1)

    def use(self, batch: int, source: int = 0) -> None:  # noqa: ARG002
        """Note that a batch was handed out and counts, because no worker can be lost."""
        self.taken = self.committed = batch + 1

    def commit(self, batches: int) -> None:
        """Note that so many batches have counted."""
        self.committed = max(self.committed, batches)
        self.carried = {}
        self.sample_counts = {b: c for b, c in self.sample_counts.items() if b >= self.committed}

    def change(
        self, after: Ranks, *, requeues_lost: bool, replaced: Mapping[int, int] | None = None
    ) -> None:
        """Continue with other workers. With `requeues_lost`, what lost workers received since the
        last commit is used again. A `replaced` worker passes its parts on to its replacement."""
        lost = [rank for rank in (*self.members, *self.carried) if rank not in after]
        remaining, is_more = self._remaining_after(
            list(dict.fromkeys(lost)) if requeues_lost else []
        )
        if replaced:
            names = [tuple(replaced.get(r, r) for r in one.members) for one in self.ranges]
            renamed = zip(self.ranges, names, strict=True)
            self.ranges = [replace(one, members=members) for one, members in renamed]
        is_other = self.members != after
        if is_other:
            kept = [one for one in self.ranges if one.first < self.taken]
            needed = bisect_right(kept, self.committed, key=lambda one: one.first) - 1
            self.ranges = [*kept[max(0, needed) :], BatchRange(self.taken, after, remaining)]
            self._begin_range()
        self.version += is_more or is_other

    def on_worker_change(self, change: WorkerChange) -> None:
        """Continue with other workers. An evaluation does not count by steps: its results are lost
        with the worker that computed them, so all of them are computed again."""
        if self.counts:
            self.change(change.after, requeues_lost=change.requeues_lost, replaced=change.replaced)
        else:
            self.change(change.after, requeues_lost=True)

    def uncommitted(self) -> dict[int, list[Any]]:
        """Return by rank the units that were handed out and have not counted."""
        return {}

    def requeue(self, units: list[Any]) -> None:
        """Use units again that lost workers had received at the end of the pass before."""

    # -- what remains, by subclass ------------------------------------------------------------

    def _all_remaining(self) -> Any:
        """Return what remains at the start of a pass."""

    def _remaining_after(self, lost: list[int]) -> tuple[Any, bool]:  # noqa: ARG002
        """Return what no worker has taken, plus what the lost workers received since the last
        commit; and whether they had received anything."""
        return None, False

    def _begin_range(self) -> None:
        """Note that the last range is new."""

    def _remaining_state(self) -> dict[str, Any]:
        """Return what remains from the position on as plain data, for a run that starts there with
        any number of workers. All batches before the position must have counted."""
        return {}

    def _load_remaining(self, batch: int, rest: Plain, *, has_same_world_size: bool) -> None:  # noqa: ARG002
        """Start at a batch with what `_remaining_state` returned."""
        self.ranges = [BatchRange(batch, self.members, self._all_remaining())]

    def _live_details(self) -> dict[str, Any]:
        """Return what else a peer needs, as plain data."""
        return {}

    def _load_live_details(self, live: Plain) -> None:
        """Continue from what `_live_details` returned on a peer."""

    def _encode_remaining(self, remaining: Any) -> Any:
        """Return `BatchRange.remaining` as plain data."""
        return remaining

    def _decode_remaining(self, remaining: Any) -> Any:
        """Undo `_encode_remaining`."""
        return remaining

    # -- as plain data ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position of this worker, and what remains from there on."""
        return {
            "epoch": self.epoch,
            "batch": self.position,
            "facts": {k: v for k, v in self.facts.items() if k not in _MAY_DIFFER},
            "course": self._remaining_state(),
            "order": None if self.order is None else self.order.state(),
            "draws": self.draws,
            "counts": asdict(self.tally),
        }

    def live(self) -> dict[str, Any]:
        """Return what is the same on all workers while the pass is under way."""
        encode = self._encode_remaining
        return {
            "stages": [[r.first, list(r.members), encode(r.remaining)] for r in self.ranges],
            "taken": self.taken,
            "committed": self.committed,
            "told": [[batch, counts] for batch, counts in self.sample_counts.items()],
            **self._live_details(),
        }

    def load(self, state: Plain, live: Plain | None, origin: StateOrigin) -> None:
        """Continue from a peer's `state` and `live`, or from the `state` of an earlier run."""
        if self.order is not None and state["order"] is not None:
            self.order.load(state["order"], origin)
        self.tally = Tally(**state["counts"])
        if live is None:
            is_same = origin.has_same_world_size
            self._load_remaining(state["batch"], state["course"], has_same_world_size=is_same)
            self.position = self.taken = self.committed = state["batch"]
            self.draws, self.is_resumed = state["draws"], True
            self.version += 1
            return
        self.load_live(live)
        if origin.is_new:
            # The replacement of a lost worker computes the batches of this step again.
            self.position = self.committed if self.counts else self.taken

    def load_live(self, live: Plain) -> None:
        """Load what is the same on all workers in the pass."""
        decode = self._decode_remaining
        self.ranges = [BatchRange(first, tuple(m), decode(r)) for first, m, r in live["stages"]]
        self.taken, self.committed = live["taken"], live["committed"]
        self.sample_counts = {batch: counts for batch, counts in live["told"]}
        self._load_live_details(live)
        self.version += 1


def require_same_data(state: Plain, facts: Facts, epoch: int, *, has_same_world_size: bool) -> None:
    """Raise DataError unless the loader is the one that a pass in a checkpoint was over."""
    if epoch != state["epoch"]:
        raise DataError(
            f"epoch is {epoch}, expected {state['epoch']}: the checkpoint was saved in the middle"
            " of that epoch"
        )
    expected: Facts = state["facts"]
    for name in expected:
        are_given = None not in (expected[name], facts.get(name))
        if name == "batch_size" and not has_same_world_size and are_given:
            continue  # each worker's batch size may follow the number of workers
        if facts.get(name) != expected[name]:
            raise DataError(
                f"{name} is {facts.get(name)!r}, expected {expected[name]!r} as in the checkpoint,"
                f" which was saved in the middle of epoch {epoch}; create the loader with the same"
                " settings, or resume from a checkpoint between two epochs"
            )
