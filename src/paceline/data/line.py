"""Lines: what is known about each loader, here and on the other workers.

A LINE is all that is known about one loader (the k-th that the script gave to pl.shard): what the
workers agreed on when it was given, how many passes have begun, and the passages that are open.

Two workers may be one point apart, and a newcomer's script begins at the top. So a line counts
twice: the passes that the foremost has begun, and those of this worker's own script (`my_passes`).
A newcomer's passes that the others have behind them give no batches; one that is open with them is
continued where they are. In a run that is resumed, the checkpoint takes the place of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.data.passage import Passage, ToldPassage, Turn
from paceline.data.portable import portable, restored
from paceline.data.saved import SavedPassage, state_of


@dataclass
class Resumed:
    """What a checkpoint says about one loader."""

    passes: int = 0  # that had begun
    next_epoch: int = 0
    first_epoch: int | None = None
    open: dict[int, SavedPassage] = field(default_factory=dict)  # until they are entered

    @property
    def place(self) -> tuple[int, int]:
        """Where the script was: pass, epoch."""
        if self.open:
            first = min(self.open)
            return first, self.open[first].epoch
        return self.passes, self.next_epoch


@dataclass
class Line:
    """What is known about one loader."""

    passes: int = 0
    my_passes: int = 0
    next_epoch: int = 0  # mine
    answers: list[dict[str, Any]] = field(default_factory=list)  # what the workers told about it
    open: dict[int, Passage] = field(default_factory=dict)
    told: dict[int, ToldPassage] = field(default_factory=dict)
    replayed: int = 0  # passes that had begun when this worker came
    told_epoch: int = 0  # the next one of those who have told
    carried: dict[int, list[Any]] = field(default_factory=dict)  # see Course.carried
    first_epoch: int | None = None  # of the first pass
    seed: int | None = None  # by default
    resumed: Resumed = field(default_factory=Resumed)  # what a checkpoint says
    ended: Passage | None = None  # just now, until that has been told
    past: list[int] | None = None  # the last one that ended: pass, batches, its largest batch

    @property
    def is_pass_known(self) -> bool:
        """Whether the others had begun this worker's next pass before it came."""
        return self.my_passes < self.replayed

    @property
    def is_pass_over(self) -> bool:
        """Whether they had also ended it."""
        return self.is_pass_known and self.my_passes not in self.told

    @property
    def saved(self) -> SavedPassage | None:
        """This worker's next pass, if it is one to be continued from a checkpoint."""
        return self.resumed.open.get(self.my_passes)

    @property
    def is_pass_done(self) -> bool:
        """Whether this worker's next pass was over when a checkpoint was made."""
        return self.my_passes < self.resumed.passes and self.saved is None

    @property
    def is_under_way(self) -> bool:
        """Whether a pass is open here, or waits to be continued from a checkpoint."""
        return bool(self.open or self.resumed.open)

    def find(self, epoch: int) -> bool:
        """Go to the pass of an epoch that the script names, if it goes on from a checkpoint by
        itself instead of from the top. Return whether it does."""
        resumed = self.resumed
        if self.my_passes or resumed.first_epoch in (None, epoch):
            return False
        for index, saved in resumed.open.items():
            if saved.epoch == epoch:
                self.my_passes = index
                return True
        self.my_passes = resumed.passes if epoch >= resumed.next_epoch else 0
        return self.my_passes > 0

    def skip_pass(self, epoch: int) -> None:
        """Leave out a pass that is over."""
        self.my_passes += 1
        self.passes = max(self.passes, self.my_passes)
        self.next_epoch = epoch + 1

    def begin(self, passage: Passage) -> None:
        """Begin a pass, or come into one that the others have begun."""
        self.my_passes = passage.index + 1
        self.passes = max(self.passes, self.my_passes)
        self.next_epoch = passage.epoch + 1
        if self.first_epoch is None:
            self.first_epoch = passage.epoch
        told = self.told.pop(passage.index, None)
        saved = self.resumed.open.pop(passage.index, None)
        if told is not None:
            told.enter(passage)
        elif saved is not None:
            saved.enter(passage)
            passage.is_resumed = True
        elif hasattr(passage.course, "carried"):
            passage.course.carried, self.carried = self.carried, {}
        self.open[passage.index] = passage

    def end(self, passage: Passage) -> None:
        """End a pass."""
        del self.open[passage.index]
        self.ended, course = passage, passage.course
        self.past = [passage.index, passage.cursor, passage.tally.largest]
        if passage.counts and hasattr(course, "uncommitted"):
            self.carried = course.uncommitted()

    def commit(self) -> None:
        """Note that a step has counted."""
        self.carried = {}
        for passage in self.open.values():
            if passage.counts:
                passage.course.commit(passage.cursor)

    def turn(self, turn: Turn) -> None:
        """Go on with other workers."""
        for passage in self.open.values():
            if not passage.is_left:
                turn.apply(passage.course, counts=passage.counts)
        for told in self.told.values():
            told.turns.append(turn)

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
        """As a newcomer: continue where the others are now."""
        if self.told:
            self.my_passes = min(self.told)
            self.next_epoch = self.told[self.my_passes].told["epoch"]
        elif self.my_passes < self.passes:
            self.my_passes, self.next_epoch = self.passes, self.told_epoch
        elif self.my_passes < self.resumed.passes:
            self.my_passes, self.next_epoch = self.resumed.place
            self.passes = max(self.passes, self.my_passes)

    def state(self) -> dict[str, Any]:
        """Return where this worker's script is, as plain data for a checkpoint."""
        resumed, is_before = self.resumed, self.my_passes < self.resumed.passes
        opened = {**resumed.open} if is_before else {}
        return {
            "passes": resumed.passes if is_before else self.my_passes,
            "next_epoch": resumed.next_epoch if is_before else self.next_epoch,
            "first_epoch": self.first_epoch,
            "seed": None if self.seed is None else str(self.seed),
            "ended": self.past,
            "open": [
                *([index, dict(saved.state)] for index, saved in opened.items()),
                *([index, state_of(passage)] for index, passage in self.open.items()),
            ],
        }

    def resume(self, state: Mapping[str, Any], *, is_same: bool, is_alone: bool) -> None:
        """Go on from what a worker's `state` was when a checkpoint was made."""
        self.resumed = Resumed(
            passes=state["passes"],
            next_epoch=state["next_epoch"],
            first_epoch=state["first_epoch"],
            open={i: SavedPassage(told, is_same, is_alone) for i, told in state["open"]},
        )
        self.first_epoch = state["first_epoch"]
        self.seed = None if state["seed"] is None else int(state["seed"])

    def pack(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "passes": self.passes,
            "next_epoch": self.next_epoch,
            "answers": self.answers,
            "open": [[index, passage.pack()] for index, passage in self.open.items()],
            "carried": [[r, list(map(portable, units))] for r, units in self.carried.items()],
        }

    def load(self, told: Mapping[str, Any], *, is_replay: bool) -> None:
        """Take over what another worker packed; what this one has open, it keeps open."""
        self.passes, self.answers = told["passes"], told["answers"]
        self.carried = {rank: list(map(restored, units)) for rank, units in told["carried"]}
        self.told_epoch = told["next_epoch"]
        theirs = dict(told["open"])
        for index, mine in self.open.items():
            passage = theirs.pop(index, None)
            mine.is_left = passage is None
            if passage is not None:
                mine.take_over(passage)
        self.told = {i: ToldPassage(passage, is_replay) for i, passage in theirs.items()}
        self.replayed = self.passes if is_replay else self.replayed
