"""Lines: what is known about each loader, here and on the other workers.

A LINE is all that is known about one loader (the k-th that the script gave to pl.shard): what the
workers agreed on when it was given, how many passes have begun, and the cursors of those under way.

Two workers may be one point apart, and a newcomer's script begins at the top. So a line counts
twice: the passes that the foremost has begun, and those of this worker's own script (`my_passes`).
A newcomer's passes that the others have behind them give no batches; one that is open with them is
continued where they are. In a run that is resumed, the checkpoint takes the place of the others.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from typing import Any

from paceline.data.cursor.cursor import (
    NEWCOMER,
    PEER,
    Arrival,
    Cursor,
    Facts,
    Plain,
    Turn,
    require_same_data,
)
from paceline.data.cursor.indices import plain_parts, read_parts


@dataclass
class Waiting:
    """A pass under way elsewhere, on other workers or in a checkpoint, and here not yet; and what
    has changed since. The ledger has lines in the same way."""

    state: Plain
    live: Plain | None
    how: Arrival
    turns: list[Turn] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        epoch: int = self.state["epoch"]
        return epoch

    def require_same_data(self, facts: Facts, epoch: int) -> None:
        """Raise DataError if this is not the data that the pass was over."""
        require_same_data(self.state, facts, epoch, is_same=self.how.is_same)

    def turn(self, turn: Turn) -> None:
        """Note that there will be other workers."""
        if self.live is None:
            self.how = replace(self.how, is_same=False)
        else:
            self.turns.append(turn)

    def enter(self, cursor: Cursor) -> None:
        """Put the cursor of a pass that begins here to where it is."""
        cursor.load(self.state, self.live, self.how)
        for turn in self.turns:
            cursor.turn(turn)


@dataclass(frozen=True)
class Before:
    """What had begun when this worker came: on the others, or in the run that is resumed."""

    passes: int = 0
    next_epoch: int = 0
    first_epoch: int | None = None
    is_resumed: bool = False


@dataclass
class Line:
    """What is known about one loader."""

    passes: int = 0
    my_passes: int = 0
    next_epoch: int = 0  # mine
    answers: list[dict[str, Any]] = field(default_factory=list)  # what the workers told about it
    open: dict[int, Cursor] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)  # until they are entered
    before: Before = field(default_factory=Before)
    carried: dict[int, list[Any]] = field(default_factory=dict)  # see Cursor.carried
    first_epoch: int | None = None  # of the first pass
    seed: int | None = None  # by default
    ended: Cursor | None = None  # just now, until that has been told
    past: list[int] | None = None  # the last one that ended: pass, batches, its largest batch

    @property
    def is_pass_known(self) -> bool:
        """Whether the others had begun this worker's next pass before it came."""
        waiting = self.waiting.get(self.my_passes)
        if waiting is not None:
            return waiting.how.is_new
        return not self.before.is_resumed and self.my_passes < self.before.passes

    @property
    def told_epoch(self) -> int | None:
        """The epoch of this worker's next pass, if others or a checkpoint had begun it."""
        waiting = self.waiting.get(self.my_passes)
        is_told = waiting is not None and (waiting.how.is_resumed or waiting.how.is_new)
        return waiting.epoch if waiting is not None and is_told else None

    @property
    def saved(self) -> Waiting | None:
        """This worker's next pass, if it is one to be continued from a checkpoint."""
        waiting = self.waiting.get(self.my_passes)
        return waiting if waiting is not None and waiting.how.is_resumed else None

    def is_over(self, *, is_lockstep: bool) -> bool:
        """Say whether this worker's next pass was over before it came. Where everybody runs free,
        what the others have done is not done here."""
        is_before = self.my_passes < self.before.passes and self.my_passes not in self.waiting
        return is_before and (self.before.is_resumed or is_lockstep)

    @property
    def is_under_way(self) -> bool:
        """Whether a pass is open here, or waits to be continued from a checkpoint."""
        return bool(self.open or self._saved)

    def find(self, epoch: int) -> bool:
        """Go to the pass of an epoch that the script names, if it goes on from a checkpoint by
        itself instead of from the top. Return whether it does."""
        before = self.before
        if self.my_passes or before.first_epoch in (None, epoch):
            return False
        for index, saved in self._saved.items():
            if saved.epoch == epoch:
                self.my_passes = index
                return True
        self.my_passes = before.passes if epoch >= before.next_epoch else 0
        return self.my_passes > 0

    def skip_pass(self, epoch: int) -> None:
        """Leave out a pass that is over."""
        self.my_passes += 1
        self.passes = max(self.passes, self.my_passes)
        self.next_epoch = epoch + 1

    def leave_others(self) -> None:
        """Forget where the others are: everybody runs free."""
        self.waiting = self._saved
        if not self.before.is_resumed:
            self.before = Before()

    def begin(self, cursor: Cursor) -> None:
        """Begin a pass, or come into one that the others have begun."""
        self.my_passes = cursor.index + 1
        self.passes = max(self.passes, self.my_passes)
        self.next_epoch = cursor.epoch + 1
        if self.first_epoch is None:
            self.first_epoch = cursor.epoch
        waiting = self.waiting.pop(cursor.index, None)
        if waiting is not None:
            waiting.enter(cursor)
        else:
            cursor.carried, self.carried = self.carried, {}
        self.open[cursor.index] = cursor

    def end(self, cursor: Cursor) -> None:
        """End a pass."""
        del self.open[cursor.index]
        self.ended = cursor
        self.past = [cursor.index, cursor.position, cursor.tally.largest]
        if cursor.counts:
            self.carried = cursor.uncommitted()

    def commit(self) -> None:
        """Note that a step has counted."""
        self.carried = {}
        for cursor in self.open.values():
            if cursor.counts:
                cursor.commit(cursor.position)

    def turn(self, turn: Turn) -> None:
        """Go on with other workers."""
        for cursor in self.open.values():
            if not cursor.is_left:
                cursor.turn(turn)
        for waiting in self.waiting.values():
            waiting.turn(turn)

    @property
    def place(self) -> list[int]:
        """Where one who comes now would continue: pass, epoch."""
        if self.open:
            first = min(self.open)
            return [first, self.open[first].epoch]
        return [self.my_passes, self.next_epoch]

    def go_to(self, place: list[int]) -> None:
        """As a newcomer: continue there."""
        self.my_passes, self.next_epoch = place

    def catch_up(self) -> None:
        """As a newcomer, or in a run that is resumed: continue where the others are."""
        if self.my_passes >= self.before.passes:
            return
        first = min(self.waiting, default=None)
        if first is not None:
            self.my_passes, self.next_epoch = first, self.waiting[first].epoch
        else:
            self.my_passes, self.next_epoch = self.before.passes, self.before.next_epoch
        self.passes = max(self.passes, self.my_passes)

    # -- as plain data ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return where this worker's script is."""
        is_before, saved = self._is_before, self._saved if self._is_before else {}
        return {
            "passes": self.before.passes if is_before else self.my_passes,
            "next_epoch": self.before.next_epoch if is_before else self.next_epoch,
            "first_epoch": self.first_epoch,
            "seed": None if self.seed is None else str(self.seed),
            "ended": self.past,
            "open": [
                *([index, dict(waiting.state)] for index, waiting in saved.items()),
                *([index, cursor.state()] for index, cursor in self.open.items()),
            ],
        }

    def live(self, *, goes_on: bool = False) -> dict[str, Any]:
        """Return what all workers have alike, as long as the job runs. `goes_on`: a newcomer also
        continues what they still have to continue from a checkpoint."""
        return {
            "before": list(astuple(self.before)) if goes_on and self._is_before else None,
            "passes": self.passes,
            "next_epoch": self.next_epoch,
            "answers": self.answers,
            "open": [[index, cursor.live()] for index, cursor in self.open.items()],
            "carried": plain_parts(self.carried),
        }

    def load(self, state: Plain, live: Plain | None, how: Arrival) -> None:
        """Go on from what `state` and `live` returned on a peer, or `state` in a run before. What
        this worker has open, it keeps open."""
        states = dict(state["open"])
        if live is None:
            self.first_epoch = state["first_epoch"]
            self.seed = None if state["seed"] is None else int(state["seed"])
            counts = state["passes"], state["next_epoch"], state["first_epoch"]
            self.before = Before(*counts, is_resumed=True)
            self.waiting = {index: Waiting(told, None, how) for index, told in states.items()}
            return
        self.passes, self.answers = live["passes"], live["answers"]
        self.carried = read_parts(live["carried"])
        theirs = {index: (states[index], under_way) for index, under_way in live["open"]}
        for index, mine in self.open.items():
            mine.is_left = index not in theirs
            if not mine.is_left:
                mine.load(*theirs.pop(index), PEER)
        saved = self._saved
        # One that has not gone on yet from a checkpoint does so where the others are.
        told = {i: Waiting(*one, NEWCOMER if i in saved else how) for i, one in theirs.items()}
        self.waiting = {**saved, **told}
        if how.is_new and live["before"] is not None:  # goes on from the checkpoint with them
            resumed = Arrival(is_resumed=True, is_same=False)
            rest = {index: one for index, one in states.items() if index not in told}
            self.load({**state, "open": list(rest.items())}, None, resumed)
            self.before = Before(*live["before"])
            self.waiting.update(told)
        elif how.is_new:
            self.before = Before(self.passes, live["next_epoch"])

    @property
    def _is_before(self) -> bool:
        """Whether this worker's script has not come yet to where a checkpoint was made."""
        return self.before.is_resumed and self.my_passes < self.before.passes

    @property
    def _saved(self) -> dict[int, Waiting]:
        return {index: one for index, one in self.waiting.items() if one.how.is_resumed}
