"""LoaderState: what a worker knows about one loader, on this worker and on the others.

A loader state has what the workers agreed on when the script passed the loader to pl.shard, how
many passes have begun, and the cursors of the passes under way.

Two workers may be one step apart, and a newcomer's script starts at the top. So a loader state
counts twice: the passes that the most advanced worker has begun, and those of this worker's own
script (`my_passes`). Passes that the other workers have ended give a newcomer no batches. A pass
that is open on them continues where they are. In a resumed run the checkpoint takes the place of
the other workers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from typing import Any

from paceline.data.cursor.cursor import (
    NEWCOMER,
    PEER,
    Cursor,
    Facts,
    Plain,
    StateOrigin,
    WorkerChange,
    require_same_data,
)
from paceline.data.cursor.indices import from_plain_parts, to_plain_parts


@dataclass
class PendingState:
    """The state of a pass that is under way on other workers or in a checkpoint, but not here yet;
    and the changes since. DataProgress keeps the states of whole loaders in the same way."""

    state: Plain
    live: Plain | None
    origin: StateOrigin
    changes: list[WorkerChange] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        epoch: int = self.state["epoch"]
        return epoch

    def require_same_data(self, facts: Facts, epoch: int) -> None:
        """Raise DataError unless this is the data that the pass was over."""
        is_same = self.origin.has_same_world_size
        require_same_data(self.state, facts, epoch, has_same_world_size=is_same)

    def on_worker_change(self, change: WorkerChange) -> None:
        """Note that the workers have changed."""
        if self.live is None:
            self.origin = replace(self.origin, has_same_world_size=False)
        else:
            self.changes.append(change)

    def load_into(self, target: Cursor | LoaderState) -> None:
        """Load the state, and apply the changes since."""
        target.load(self.state, self.live, self.origin)
        for change in self.changes:
            target.on_worker_change(change)


@dataclass(frozen=True)
class PriorPasses:
    """Passes that began before this worker joined, or in the run that is resumed."""

    passes: int = 0
    next_epoch: int = 0
    first_epoch: int | None = None
    is_resumed: bool = False


@dataclass
class LoaderState:
    """The passes over one loader."""

    passes: int = 0
    my_passes: int = 0
    next_epoch: int = 0  # of this worker
    answers: list[dict[str, Any]] = field(default_factory=list)  # of all workers about the loader
    open: dict[int, Cursor] = field(default_factory=dict)
    pending: dict[int, PendingState] = field(default_factory=dict)  # passes not entered yet
    prior: PriorPasses = field(default_factory=PriorPasses)
    carried: dict[int, list[Any]] = field(default_factory=dict)  # see Cursor.carried
    requeued: list[Any] = field(default_factory=list)  # of lost workers, for the next pass
    first_epoch: int | None = None  # of the first pass
    seed: int | None = None  # the default
    ended: Cursor | None = None  # of the pass that just ended, until it is reported
    last: list[int] | None = None  # the last pass that ended: its index, batches, largest batch

    @property
    def is_pass_known(self) -> bool:
        """Whether the other workers had begun this worker's next pass before it joined."""
        pending = self.pending.get(self.my_passes)
        if pending is not None:
            return pending.origin.is_new
        return not self.prior.is_resumed and self.my_passes < self.prior.passes

    @property
    def known_epoch(self) -> int | None:
        """The epoch of this worker's next pass, if other workers or a checkpoint had begun it."""
        pending = self.pending.get(self.my_passes)
        is_known = pending is not None and (pending.origin.is_resumed or pending.origin.is_new)
        return pending.epoch if pending is not None and is_known else None

    @property
    def saved(self) -> PendingState | None:
        """This worker's next pass, if it continues from a checkpoint."""
        return self._saved.get(self.my_passes)

    def is_over(self, *, is_lockstep: bool) -> bool:
        """Return whether this worker's next pass ended before it joined. In a free-running job the
        progress of other workers is not the progress of this one."""
        is_prior = self.my_passes < self.prior.passes and self.my_passes not in self.pending
        return is_prior and (self.prior.is_resumed or is_lockstep)

    @property
    def is_under_way(self) -> bool:
        """Whether a pass is open here, or waits to be continued from a checkpoint."""
        return bool(self.open or self._saved)

    def find(self, epoch: int) -> bool:
        """Move to the pass of an epoch that the script names. Return whether the script itself
        continues from a checkpoint, instead of starting at the top."""
        prior = self.prior
        if self.my_passes or prior.first_epoch in (None, epoch):
            return False
        for index, saved in self._saved.items():
            if saved.epoch == epoch:
                self.my_passes = index
                return True
        self.my_passes = prior.passes if epoch >= prior.next_epoch else 0
        return self.my_passes > 0

    def skip_pass(self, epoch: int) -> None:
        """Skip a pass that is over."""
        self.my_passes += 1
        self.passes = max(self.passes, self.my_passes)
        self.next_epoch = epoch + 1

    def run_independently(self) -> None:
        """Forget the progress of other workers: the pace is free-running."""
        self.pending = self._saved
        if not self.prior.is_resumed:
            self.prior = PriorPasses()

    def begin(self, cursor: Cursor) -> None:
        """Begin a pass, or enter one that other workers have begun."""
        self.my_passes = cursor.index + 1
        self.passes = max(self.passes, self.my_passes)
        self.next_epoch = cursor.epoch + 1
        if self.first_epoch is None:
            self.first_epoch = cursor.epoch
        pending = self.pending.pop(cursor.index, None)
        if pending is not None:
            pending.load_into(cursor)
        else:
            cursor.carried, self.carried = self.carried, {}
            cursor.requeue(self.requeued)
            self.requeued = []
        self.open[cursor.index] = cursor

    def end(self, cursor: Cursor) -> None:
        """End a pass."""
        del self.open[cursor.index]
        self.ended = cursor
        self.last = [cursor.index, cursor.position, cursor.tally.largest]
        if cursor.counts:
            self.carried = cursor.uncommitted()

    def commit(self) -> None:
        """Note that a step has counted."""
        self.carried = {}
        for cursor in self.open.values():
            if cursor.counts:
                cursor.commit(cursor.position)

    def on_worker_change(self, change: WorkerChange) -> None:
        """Continue with other workers."""
        # Between two passes no cursor is open to use again what lost workers had received.
        if change.requeues_lost:
            for rank in [rank for rank in self.carried if rank not in change.after]:
                self.requeued += self.carried.pop(rank)
        for cursor in self.open.values():
            if not cursor.is_abandoned:
                cursor.on_worker_change(change)
        for pending in self.pending.values():
            pending.on_worker_change(change)

    @property
    def position(self) -> list[int]:
        """Where a worker that joins now would continue: pass, epoch."""
        if self.open:
            first = min(self.open)
            return [first, self.open[first].epoch]
        return [self.my_passes, self.next_epoch]

    def move_to(self, position: list[int]) -> None:
        """As a newcomer, continue there."""
        self.my_passes, self.next_epoch = position

    def catch_up(self) -> None:
        """As a newcomer, or in a resumed run, continue where the other workers are."""
        if self.my_passes >= self.prior.passes:
            return
        first = min(self.pending, default=None)
        if first is not None:
            self.my_passes, self.next_epoch = first, self.pending[first].epoch
        else:
            self.my_passes, self.next_epoch = self.prior.passes, self.prior.next_epoch
        self.passes = max(self.passes, self.my_passes)

    # -- as plain data ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position of this worker's script."""
        is_prior, saved = self._is_prior, self._saved if self._is_prior else {}
        return {
            "passes": self.prior.passes if is_prior else self.my_passes,
            "next_epoch": self.prior.next_epoch if is_prior else self.next_epoch,
            "first_epoch": self.first_epoch,
            "seed": None if self.seed is None else str(self.seed),
            "ended": self.last,
            **({"requeued": to_plain_parts({0: self.requeued})} if self.requeued else {}),
            "open": [
                *([index, dict(pending.state)] for index, pending in saved.items()),
                *([index, cursor.state()] for index, cursor in self.open.items()),
            ],
        }

    def live(self, *, resumes: bool = False) -> dict[str, Any]:
        """Return what is the same on all workers while the job runs. `resumes`: a newcomer also
        continues the passes that the workers still have to continue from a checkpoint."""
        return {
            "before": list(astuple(self.prior)) if resumes and self._is_prior else None,
            "passes": self.passes,
            "next_epoch": self.next_epoch,
            "answers": self.answers,
            "open": [[index, cursor.live()] for index, cursor in self.open.items()],
            "carried": to_plain_parts(self.carried),
            "requeued": to_plain_parts({0: self.requeued}),
        }

    def load(self, state: Plain, live: Plain | None, origin: StateOrigin) -> None:
        """Continue from a peer's `state` and `live`, or from the `state` of an earlier run. Passes
        that are open here stay open."""
        states = dict(state["open"])
        if live is None:
            self.first_epoch = state["first_epoch"]
            self.seed = None if state["seed"] is None else int(state["seed"])
            counts = state["passes"], state["next_epoch"], state["first_epoch"]
            self.prior = PriorPasses(*counts, is_resumed=True)
            self.pending = {index: PendingState(one, None, origin) for index, one in states.items()}
            self.requeued = from_plain_parts(state.get("requeued", [[0, []]]))[0]
            return
        self.passes, self.answers = live["passes"], live["answers"]
        self.carried = from_plain_parts(live["carried"])
        self.requeued = from_plain_parts(live["requeued"])[0]
        theirs = {index: (states[index], under_way) for index, under_way in live["open"]}
        for index, mine in self.open.items():
            mine.is_abandoned = index not in theirs
            if not mine.is_abandoned:
                mine.load(*theirs.pop(index), PEER)
        saved = self._saved
        # A pass that this worker has not continued from the checkpoint yet continues where the
        # other workers are.
        known = {i: PendingState(*p, NEWCOMER if i in saved else origin) for i, p in theirs.items()}
        self.pending = {**saved, **known}
        if origin.is_new and live["before"] is not None:  # the other workers still resume as well
            resumed = StateOrigin(is_resumed=True, has_same_world_size=False)
            rest = {index: one for index, one in states.items() if index not in known}
            self.load({**state, "open": list(rest.items())}, None, resumed)
            self.prior = PriorPasses(*live["before"])
            self.pending.update(known)
        elif origin.is_new:
            self.prior = PriorPasses(self.passes, live["next_epoch"])

    @property
    def _is_prior(self) -> bool:
        """Whether this worker's script has not reached the position of the checkpoint yet."""
        return self.prior.is_resumed and self.my_passes < self.prior.passes

    @property
    def _saved(self) -> dict[int, PendingState]:
        return {index: one for index, one in self.pending.items() if one.origin.is_resumed}
