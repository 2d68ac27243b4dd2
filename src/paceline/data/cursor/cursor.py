"""The cursor of one pass over a loader whose order is fixed: how far it is, and whose the rest is.

Global batches are taken from the order one after the other and cut among the workers. A STAGE is a
stretch of global batches with the same workers; a change begins a new one, at the first batch that
nobody has taken yet:

    batches      0 1 2 3 4 | 5 6 7 | 8 9 ...
    stages       workers 0 1 2 | 0 2   | 0 2 7

TAKEN is the number of global batches that some worker has been given (a worker may be behind: the
batches in between are still cut for it as they were for the others), COMMITTED the number of those
that an optimizer step has counted, POSITION the next batch of this worker. Workers that tell the
same changes to the same cursor get the same parts of the same batches.

What is left when a stage begins is known in one of three ways: places in an order (indices.py),
positions of a stream (positions.py), or not at all: the cursor here, of data that cannot be cut
anew, counts batches. Where workers take what they can get, the coordinator knows: leased.py.

A cursor is told as plain data: by `state()` to a checkpoint, and to a peer, which is in the same
pass, by `live()` as well; `load()` goes on from there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.data.randomness import State
from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline.data.split.order import KeptOrder

Ranks = tuple[int, ...]
Facts = Mapping[str, Any]  # what the ranks agreed on about a loader
Plain = Mapping[str, Any]

_PASSING = ("epoch", "the epoch of this pass", "resize")  # may be others when it is continued


@dataclass(frozen=True)
class Arrival:
    """How a worker comes by a state: told by a peer, or by a checkpoint."""

    is_new: bool = False  # a newcomer, which begins where the others are
    is_resumed: bool = False  # from a checkpoint, made between two steps
    is_same: bool = True  # then: with as many workers as made it
    is_alone: bool = False  # then: the workers were at different batches


PEER, NEWCOMER = Arrival(), Arrival(is_new=True)


@dataclass(frozen=True)
class Turn:
    """A change of the workers, as cursors hear of it."""

    after: Ranks
    uncounted: bool  # what the lost were given since the last commit is used again
    replaced: Mapping[int, int]  # those who leave their parts to others, and to whom


@dataclass
class Tally:
    """What was handed out in one pass: counted batch by batch, of all workers as far as this one
    knows, and not worked out from lengths."""

    next: int = 0  # the first batch that has not been counted
    samples: int = 0  # in batches that count
    padded: int = 0  # parts that repeat something with weight 0
    largest: int = 0  # samples of this worker's largest batch
    repeated: int = 0  # samples that may come again because a checkpoint was behind, at most

    def note(self, batch: int, here: int, total: int, padded: int) -> None:
        """Count a batch with so many samples here and of all; once, if it is handed out again."""
        if batch >= self.next:
            self.next = batch + 1
            self.samples += total
            self.padded += padded
        if here > self.largest:
            self.largest = here


@dataclass(frozen=True)
class Stage:
    """Global batches with the same workers."""

    first: int  # batch
    members: Ranks  # ordered by number
    left: Any  # when it began: as the kind of cursor knows it


class Cursor:
    """How far a pass is; by itself, over data that each worker has of its own."""

    order: KeptOrder | None = None  # of a sampler of the user

    def __init__(self, members: Ranks = ()) -> None:
        self.index = 0  # among the passes over this loader
        self.epoch = 0
        self.counts = True  # batches count when a step commits; else (pad=False) at the end
        self.facts: Facts = {}
        self.position = self.taken = self.committed = 0
        self.stages = [Stage(0, members, self._everything())]
        self.version = 0  # grows when batches that were not taken yet may have changed
        self.told: dict[
            int, list[int]
        ] = {}  # by batch that has not counted: see data/sources/synchronized_stream.py
        self.carried: dict[int, list[Any]] = {}  # by rank: of the pass before, not committed yet
        self.tally = Tally()
        self.draws: State | None = None  # of the generators when it began, if it is read again
        self.is_left = False  # by those who are further: nothing of it changes any more
        self.is_resumed = False  # it was under way when a checkpoint was made

    @property
    def members(self) -> Ranks:
        """The workers that there are now."""
        return self.stages[-1].members

    @property
    def reissued(self) -> int:
        """How many samples were handed out a second time."""
        return 0

    def dropped(self, samples: int) -> int:  # noqa: ARG002
        """Return how many samples were left out, at the end of a pass in which so many were not."""
        return 0

    def stage(self, batch: int) -> Stage:
        """Return the stage to which a batch belongs."""
        return self._stage(batch)[0]

    def _stage(self, batch: int) -> tuple[Stage, Stage | None]:
        """Return the stage of a batch and the one after it."""
        if len(self.stages) == 1 and batch >= self.stages[0].first:  # nearly always
            return self.stages[0], None
        found = max(0, bisect_right(self.stages, batch, key=lambda stage: stage.first) - 1)
        following = self.stages[found + 1] if found + 1 < len(self.stages) else None
        return self.stages[found], following

    # -- on the way ---------------------------------------------------------------------------

    def take(self, batch: int, source: int = 0) -> None:  # noqa: ARG002
        """Note that a batch has been given out, and of which source of a stream it is."""
        self.taken = max(self.taken, batch + 1)

    def use(self, batch: int, source: int = 0) -> None:  # noqa: ARG002
        """The same where workers stay: nothing of it comes again."""
        self.taken = self.committed = batch + 1

    def commit(self, batches: int) -> None:
        """Note that so many batches have counted."""
        self.committed = max(self.committed, batches)
        self.carried = {}
        self.told = {b: counts for b, counts in self.told.items() if b >= self.committed}

    def change(
        self, after: Ranks, *, uncounted: bool, replaced: Mapping[int, int] | None = None
    ) -> None:
        """Go on with other workers. With `uncounted`, what the lost ones were given since the last
        commit is used again. Those who are `replaced` (by whom) leave their parts to others."""
        lost = [rank for rank in (*self.members, *self.carried) if rank not in after]
        left, is_more = self._left(list(dict.fromkeys(lost)) if uncounted else [])
        if replaced:
            names = [tuple(replaced.get(r, r) for r in stage.members) for stage in self.stages]
            renamed = zip(self.stages, names, strict=True)
            self.stages = [replace(stage, members=members) for stage, members in renamed]
        is_other = self.members != after
        if is_other:
            kept = [stage for stage in self.stages if stage.first < self.taken]
            needed = bisect_right(kept, self.committed, key=lambda stage: stage.first) - 1
            self.stages = [*kept[max(0, needed) :], Stage(self.taken, after, left)]
            self._begin_stage()
        self.version += is_more or is_other

    def turn(self, turn: Turn) -> None:
        """Go on with other workers. What does not count in steps (an evaluation) is lost with the
        worker that computed it, so all of that is used again."""
        if self.counts:
            self.change(turn.after, uncounted=turn.uncounted, replaced=turn.replaced)
        else:
            self.change(turn.after, uncounted=True)

    def uncommitted(self) -> dict[int, list[Any]]:
        """Return by rank what has been given out and has not counted."""
        return {}

    # -- what a kind of cursor knows about the rest -------------------------------------------

    def _everything(self) -> Any:
        """Return what is left at the beginning."""

    def _left(self, lost: list[int]) -> tuple[Any, bool]:  # noqa: ARG002
        """Return what nobody has taken, and what the lost were given since the last commit; and
        whether that is anything."""
        return None, False

    def _begin_stage(self) -> None:
        """Note that the last stage is new."""

    def _rest(self) -> dict[str, Any]:
        """Return what is left from the position on, for a run that begins there with any number of
        workers, as plain data. All that lies before it must have counted."""
        return {}

    def _begin_at(self, batch: int, rest: Plain, *, is_same: bool) -> None:  # noqa: ARG002
        """Begin there; `is_same`: with as many workers as then."""
        self.stages = [Stage(batch, self.members, self._everything())]

    def _under_way(self) -> dict[str, Any]:
        """Return what a peer must know besides, as plain data."""
        return {}

    def _take_over(self, live: Plain) -> None:
        """Go on from what another worker's `_under_way` returned."""

    # -- as plain data ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the place of this worker, and what is left from there on."""
        return {
            "epoch": self.epoch,
            "batch": self.position,
            "facts": {k: v for k, v in self.facts.items() if k not in _PASSING},
            "course": self._rest(),
            "order": None if self.order is None else self.order.state(),
            "draws": self.draws,
            "counts": asdict(self.tally),
        }

    def live(self) -> dict[str, Any]:
        """Return what all workers in the pass have alike, as long as it is under way."""
        return {
            "stages": [[s.first, list(s.members), self._plain(s.left)] for s in self.stages],
            "taken": self.taken,
            "committed": self.committed,
            "told": [[batch, counts] for batch, counts in self.told.items()],
            **self._under_way(),
        }

    def load(self, state: Plain, live: Plain | None, how: Arrival) -> None:
        """Go on from what `state` and `live` returned on a peer, or `state` in a run before."""
        if self.order is not None and state["order"] is not None:
            self.order.load(state["order"], how)
        self.tally = Tally(**state["counts"])
        if live is None:
            self._begin_at(state["batch"], state["course"], is_same=how.is_same)
            self.position = self.taken = self.committed = state["batch"]
            self.draws, self.is_resumed = state["draws"], True
            self.version += 1
            return
        self.load_live(live)
        if how.is_new:
            # Who takes the place of a lost worker computes its batches of this step again.
            self.position = self.committed if self.counts else self.taken

    def load_live(self, live: Plain) -> None:
        """Take over what all workers in the pass have alike."""
        stages = live["stages"]
        self.stages = [Stage(first, tuple(m), self._read(left)) for first, m, left in stages]
        self.taken, self.committed = live["taken"], live["committed"]
        self.told = {batch: counts for batch, counts in live["told"]}
        self._take_over(live)
        self.version += 1

    def _plain(self, left: Any) -> Any:
        """Return what is left of a stage as plain data."""
        return left

    def _read(self, left: Any) -> Any:
        """Return it again."""
        return left


def require_same_data(state: Plain, facts: Facts, epoch: int, *, is_same: bool) -> None:
    """Raise DataError if this is not the data that a pass in a checkpoint was over."""
    if epoch != state["epoch"]:
        raise DataError(
            f"epoch is {epoch}, expected {state['epoch']}: the checkpoint was made in the middle of"
            " that one"
        )
    expected: Facts = state["facts"]
    for name in expected:
        are_given = None not in (expected[name], facts.get(name))
        if name == "batch_size" and not is_same and are_given:
            continue  # of each worker: with another number of them it may have to be another
        if facts.get(name) != expected[name]:
            raise DataError(
                f"{name} is {facts.get(name)!r}, expected {expected[name]!r} as in the"
                f" checkpoint, which was made in the middle of epoch {epoch}; make the loader"
                " as it was then, or go on from a checkpoint between two epochs"
            )
