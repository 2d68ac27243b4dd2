"""The ledger of a job's data: where every pass and loop is, for newcomers, those who are behind
after a change of the membership, and checkpoints.

One for each job, made when the script first uses pl.shard, pl.steps or pl.epochs; in elastic jobs
it takes part in changes as "data". It has a line for every loader, by the order in which the script
gave them to pl.shard (one line for all things together that cannot be told from one another later,
such as lists), and the loops of pl.steps and pl.epochs that are under way.

A newcomer's script begins at the top. Where it comes to a loop or a pass that the others have open,
it goes on from there, and from then on counts as they do. So does the script of a run that is
resumed: there all workers are new, and a file tells what the others would (resumption.py).

A step COUNTS once it is behind all workers: its gradients were exchanged between them, at a point
of training (runtime/elastic/session.py), before it was committed; or (with servers, which exchange
nothing between workers) they have met since.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.cursor.cursor import NEWCOMER, PEER, Arrival, Cursor, Turn
from paceline.data.cursor.loader_state import Before, Line, Waiting
from paceline.data.sources.loaders import Memory
from paceline.runtime.job import Job
from paceline.state.protocol import Change, Part, State

if TYPE_CHECKING:
    from paceline.data.loops import Loop

OTHERS = "others"  # the line of whatever cannot be remembered

_MANY = 256  # loaders
_ALL = 1 << 60  # more passes than anybody makes


class Ledger(Part):
    """The data of one job. Main thread only."""

    def __init__(self, job: Job) -> None:
        self._job = weakref.ref(job)
        self._is_elastic = job.elastic.is_on
        self._is_new = job.env.is_newcomer  # and has not heard from the others yet
        self._lines: dict[str, Line] = {}
        self._told_lines: dict[str, Waiting] = {}  # of loaders that this script has not given yet
        self.is_resumed = False  # from a checkpoint
        self.said: dict[str, Any] = {}  # by line: see epoch_summary.py
        self._loops: dict[int, Loop] = {}
        self._told_loops: dict[int, tuple[int, Any]] = {}
        self._num_loaders = self._num_loops = 0  # of this script
        self._memories: dict[str, weakref.ref[Memory]] = {}  # of the loaders given here, by line
        self._expected: list[str] = []  # loaders that come next, where a newcomer has skipped some
        self._living: list[str] = []  # lines of loaders that the others still had then
        self._others = [0, 0]  # loaders and loops of those who have told
        self._told_living: list[str] = []
        self._taken_at = -1  # points that had been passed when this worker last began to compute
        self._committed_at: int | None = None  # the same at a commit that does not count yet
        self._workers = _workers(job)
        self.script_seed = torch.initial_seed()  # before anybody has seeded anew
        job.contribution.watch_commits(self.on_commit)
        self._has_heard = False
        job.elastic.register("data", self)
        if self._has_heard:  # of a change that was over before this worker's script came here
            self._is_new = False
            self._turn(job, uncounted=job.env.on_loss == "shrink")

    # -- lines --------------------------------------------------------------------------------

    def line_of(self, memory: Memory, *, is_remembered: bool) -> Line:
        """Return the line of something that is given to pl.shard."""
        if not is_remembered:
            return self._line(OTHERS)
        known = None if memory.line is None else self._memories.get(memory.line)
        if memory.line is None or known is None or known() is not memory:
            memory.line = self._name_loader()  # also if another job had a name for it
            self._memories[memory.line] = weakref.ref(memory)
        key = memory.line
        self._expected = [other for other in self._expected if other != key]
        for loop in self._loops.values():
            loop.give(key)
        return self._line(key)

    def _name_loader(self) -> str:
        """Return the line of a loader that comes for the first time. Where a newcomer has skipped
        rounds of a loop, it is one that the others gave in this round, or had before it."""
        for key in (*self._expected, *self._living):
            if key not in self._memories:
                return key
        self._num_loaders += 1
        if self._num_loaders % _MANY == 0 and not self._is_elastic:
            self._forget_loaders()
        return f"loader {self._num_loaders - 1}"

    def _forget_loaders(self) -> None:
        """Let go of the lines of loaders that are gone: a script may make many."""
        gone = {key for key, memory in self._memories.items() if memory() is None}
        for key in gone:
            del self._memories[key]
            if key in self._lines and not self._lines[key].open:
                del self._lines[key]
        for names in (self._expected, self._living, self._told_living):  # no other gets its name
            names[:] = [key for key in names if key not in gone]

    def _line(self, key: str) -> Line:
        if key not in self._lines:
            line = self._lines[key] = Line()
            told = self._told_lines.pop(key, None)
            if told is not None:
                line.load(told.state, told.live, told.how)
                for turn in told.turns:
                    line.turn(turn)
            elif self.is_resumed and _is_one_of(key, self._others[0]):
                # Of a loader that was gone when the checkpoint was made.
                line.before = Before(_ALL, is_resumed=True)
        return self._lines[key]

    def begin(self, line: Line, cursor: Cursor) -> None:
        """Begin a pass, or come into one that the others have begun."""
        is_newcomers = line.is_pass_known
        line.begin(cursor)
        if is_newcomers or cursor.is_resumed:
            self.catch_up()

    def note_take(self) -> None:
        """This worker begins to compute something for the next step."""
        for loop in self._loops.values():
            loop.has_taken = True
        if self._is_elastic:
            self._settle()
            self._taken_at = self._passed

    def on_commit(self) -> None:
        """This worker has done a step."""
        if not self._is_elastic or self._passed > self._taken_at:
            self._count_step()
        else:
            self._committed_at = self._passed

    def _settle(self) -> None:
        """Let the last step count, if it is behind all by now."""
        if self._committed_at is not None and self._passed > self._committed_at:
            self._count_step()

    def _count_step(self) -> None:
        self._committed_at = None
        for line in self._lines.values():
            line.commit()
        for loop in self._loops.values():
            loop.commit()

    @property
    def _passed(self) -> int:
        job = self._job()
        return 0 if job is None else job.elastic.passed

    # -- loops --------------------------------------------------------------------------------

    def open_loop(self, loop: Loop, count: int) -> int:
        """Begin a loop; return the item that comes first: `count` when all are over."""
        number = loop.number = self._num_loops
        self._num_loops += 1
        self._loops[number] = loop
        if number >= self._others[1]:
            return 0
        if number not in self._told_loops:
            return count
        first, place = self._told_loops.pop(number)
        self._go_to(place)
        return first

    def begin_item(self, loop: Loop, index: int) -> None:
        """Note that an item of a loop begins."""
        if self._is_elastic:
            self.note_take()
        place = {key: line.place for key, line in self._lines.items()}
        loop.begin(index, {"lines": place, "loops": self._num_loops})

    def close_loop(self, loop: Loop) -> None:
        """End a loop."""
        del self._loops[loop.number]

    def _go_to(self, place: dict[str, Any] | None) -> None:
        """As a newcomer: continue where the others were then."""
        if place is None:
            self.catch_up()
            return
        self._num_loops, self._num_loaders = place["loops"], self._others[0]
        self._expected, self._living = place["given"], self._told_living
        for key, where in place["lines"].items():
            self._line(key).go_to(where)

    def catch_up(self) -> None:
        """As a newcomer: continue where the others are now."""
        self._num_loaders = max(self._num_loaders, self._others[0])
        self._living = self._told_living
        self._num_loops = max(self._num_loops, self._others[1])
        for key in [*self._lines, *self._told_lines]:
            self._line(key).catch_up()

    # -- as a part of the job's state ---------------------------------------------------------

    def state(self) -> State:
        """Return where this worker's script is. A checkpoint has it as it is between two steps; a
        peer is told besides what all workers have alike at this moment."""
        self._settle()
        for key in [key for key, told in self._told_lines.items() if told.live is None]:
            self._line(key)
        is_in_pass = any(line.is_under_way for line in self._lines.values())
        told_loops = [[number, *told] for number, told in self._told_loops.items()]
        counts = {
            "lines": {key: line.state() for key, line in self._lines.items()},
            "loops": [
                *(loop.state(is_in_pass=is_in_pass) for loop in self._loops.values()),
                *told_loops,
            ],
            "made": [
                max(self._num_loaders, self._others[0]),
                max(self._num_loops, self._others[1]),
            ],
            "living": [key for key, memory in self._memories.items() if memory() is not None],
        }
        job = self._job()
        # Where everybody runs free, each goes on from a place of its own.
        goes_on = self.is_resumed and job is not None and job.elastic.is_lockstep
        passing = {
            "is_resumed": goes_on,
            "lines": {k: line.live(goes_on=goes_on) for k, line in self._lines.items()},
            "loops": [*(loop.under_way() for loop in self._loops.values()), *told_loops],
            "workers": [[number, rank] for number, rank in self._workers.items()],
        }
        return State(counts, passing=passing, what="the data")

    def is_gone(self, key: str) -> bool:
        """Say whether nothing can be continued on a line: its loader is gone."""
        memory = self._memories.get(key)
        return memory is not None and memory() is None and not self._lines[key].open

    def load(self, state: State, change: Change | None) -> None:
        """Go on from where a peer is; again, if somebody was lost before all had theirs. Without a
        change: let the script, which is at its top, go on from a checkpoint (resumption.py)."""
        counts, live = state.counts, state.passing
        if change is None:
            self.is_resumed = True
            how = Arrival(is_resumed=True, is_same=counts["is_same"], is_alone=counts["is_alone"])
            self._follow(counts["loops"], counts["made"], counts["living"])
        else:
            self._has_heard = True
            how = NEWCOMER if self._is_new else PEER
            self._workers = dict(live["workers"])
            if self._is_new:
                self.is_resumed = live["is_resumed"]
                self._follow(live["loops"], counts["made"], counts["living"])
        for key, told in counts["lines"].items():
            line, known = live.get("lines", {}).get(key), self._told_lines.get(key)
            if key in self._lines or (known is not None and known.live is None):
                self._line(key).load(told, line, how)
            else:  # its loader comes here for the first time: as if this worker were new
                self._told_lines[key] = Waiting(told, line, how if how.is_resumed else NEWCOMER)

    def _follow(self, loops: list[Any], made: list[int], living: list[str]) -> None:
        """Go on in loops where the others are, and name loaders as they do."""
        self._others, self._told_living = list(made), list(living)
        self._told_loops = {number: (item, place) for number, item, place in loops}

    def resume(self, change: Change) -> None:
        """Go on with other members."""
        self._is_new = False
        job = self._job()
        assert job is not None, "a job that changes is there"
        if not job.elastic.is_lockstep:
            return  # each goes on with its own part
        self._turn(job, uncounted=change.uncounted)

    def _turn(self, job: Job, *, uncounted: bool) -> None:
        self._settle()
        before, now = self._workers, _workers(job)
        replaced = {}
        if not uncounted:
            replaced = {r: now[n] for n, r in before.items() if n in now and now[n] != r}
        self._workers = now
        turn = Turn(job.fabric.membership.workers, uncounted, replaced)
        for line in self._lines.values():
            line.turn(turn)
        for told in self._told_lines.values():
            told.turn(turn)


def _is_one_of(key: str, count: int) -> bool:
    """Say whether this names one of the first so many loaders."""
    kind, _, number = key.partition(" ")
    return kind == "loader" and int(number) < count


def _workers(job: Job) -> dict[int, int]:
    """Return the ranks of the workers by their numbers."""
    membership = job.fabric.membership
    return {membership.member(rank).number: rank for rank in membership.workers}


@dataclass(frozen=True)
class _Owned:
    job: weakref.ref[Job]
    ledger: Ledger


_owned: _Owned | None = None


def ledger_of(job: Job) -> Ledger:
    """Return the ledger of a job."""
    global _owned
    if _owned is None or _owned.job() is not job:
        _owned = _Owned(weakref.ref(job), Ledger(job))
    return _owned.ledger
