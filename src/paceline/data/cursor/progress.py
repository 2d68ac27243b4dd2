"""DataProgress: the position of every loop and pass of a job, for newcomers, for workers that lag
after a change of the membership, and for checkpoints.

There is one for each job, created when the script first uses pl.shard, pl.steps or pl.epochs. In an
elastic job it is the part "data" of the state. It has a LoaderState for every loader, by the order
in which the script passed them to pl.shard, and the loops of pl.steps and pl.epochs that are under
way. Objects that cannot be recognized later, such as lists, share one LoaderState.

A newcomer's script starts at the top. When it reaches a loop or pass that is open on the other
workers, it continues from there, and counts as they do from then on. The script of a resumed run
does the same: there all workers are new, and a file replaces the other workers (resumption.py).

A step COUNTS once all workers have it: its gradients were exchanged between workers, at a retryable
step (runtime/elastic/session.py), before it was committed. Parameter servers exchange nothing
between workers; with them, a step counts at the next retryable step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.cursor.cursor import NEWCOMER, PEER, Cursor, StateOrigin, WorkerChange
from paceline.data.cursor.loader_state import LoaderState, PendingState, PriorPasses
from paceline.data.sources.loaders import LoaderRecord
from paceline.runtime.job import Job
from paceline.state.protocol import Change, Part, State

if TYPE_CHECKING:
    from paceline.data.loops import LoopState

UNNAMED = "others"  # the key of all objects that cannot be recognized later

_MANY = 256  # loaders
_ALL = 1 << 60  # more passes than any script makes


class DataProgress(Part):
    """The loaders and loops of one job. Main thread only."""

    def __init__(self, job: Job) -> None:
        self._job = weakref.ref(job)
        self._is_elastic = job.elastic.is_on
        self._is_new = job.env.is_newcomer  # and has no state of a peer yet
        self._loaders: dict[str, LoaderState] = {}
        self._pending: dict[str, PendingState] = {}  # loaders that this script has not passed yet
        self.is_resumed = False  # from a checkpoint
        self.reported: dict[str, Any] = {}  # by loader: see pass_report.py
        self._loops: dict[int, LoopState] = {}
        self._pending_loops: dict[int, tuple[int, Any]] = {}
        self._num_loaders = self._num_loops = 0  # of this script
        self._records: dict[str, weakref.ref[LoaderRecord]] = {}  # of this script's loaders
        self._expected: list[str] = []  # next loaders, after a newcomer has skipped some
        self._living: list[str] = []  # loaders that the other workers still had then
        self._peer_counts = [0, 0]  # loaders and loops of the peer or checkpoint
        self._peer_living: list[str] = []
        self._taken_at = -1  # retryable steps passed when this worker last began to compute
        self._committed_at: int | None = None  # the same at a commit that does not count yet
        self._workers = _workers(job)
        self.script_seed = torch.initial_seed()  # before any step is seeded
        job.contribution.watch_commits(self.on_commit)
        self._has_peer_state = False
        job.elastic.register("data", self)
        if self._has_peer_state:  # from a change that ended before the script came here
            self._is_new = False
            self._change_workers(job, requeues_lost=job.env.on_loss == "shrink")

    # -- loaders ------------------------------------------------------------------------------

    def state_of(self, record: LoaderRecord, *, is_kept: bool) -> LoaderState:
        """Return the state of a loader that the script passes to pl.shard. `is_kept`: the loader
        can be recognized later."""
        if not is_kept:
            return self._loader(UNNAMED)
        known = None if record.key is None else self._records.get(record.key)
        if record.key is None or known is None or known() is not record:
            record.key = self._name_loader()  # also if the key is one of another job
            self._records[record.key] = weakref.ref(record)
        key = record.key
        self._expected = [other for other in self._expected if other != key]
        for loop in self._loops.values():
            loop.add_loader(key)
        return self._loader(key)

    def _name_loader(self) -> str:
        """Return the key of a loader that comes for the first time. After a newcomer has skipped
        items of a loop, it is a loader that its peer passed in this item, or had before."""
        for key in (*self._expected, *self._living):
            if key not in self._records:
                return key
        self._num_loaders += 1
        if self._num_loaders % _MANY == 0 and not self._is_elastic:
            self._forget_loaders()
        return f"loader {self._num_loaders - 1}"

    def _forget_loaders(self) -> None:
        """Drop the states of loaders that are gone: a script may create many loaders."""
        gone = {key for key, record in self._records.items() if record() is None}
        for key in gone:
            del self._records[key]
            if key in self._loaders and not self._loaders[key].open:
                del self._loaders[key]
        for names in (self._expected, self._living, self._peer_living):  # keys are not reused
            names[:] = [key for key in names if key not in gone]

    def _loader(self, key: str) -> LoaderState:
        if key not in self._loaders:
            loader = self._loaders[key] = LoaderState()
            pending = self._pending.pop(key, None)
            if pending is not None:
                pending.load_into(loader)
            elif self.is_resumed and _is_one_of(key, self._peer_counts[0]):
                # The loader was gone when the checkpoint was saved.
                loader.prior = PriorPasses(_ALL, is_resumed=True)
        return self._loaders[key]

    def begin(self, loader: LoaderState, cursor: Cursor) -> None:
        """Begin a pass, or enter one that the other workers have begun."""
        is_known = loader.is_pass_known
        loader.begin(cursor)
        if is_known or cursor.is_resumed:
            self.catch_up()

    def begin_batch(self) -> None:
        """Note that this worker begins to compute for the next step."""
        for loop in self._loops.values():
            loop.has_taken = True
        if self._is_elastic:
            self._count_late()
            self._taken_at = self._passed

    def on_commit(self) -> None:
        """Note that this worker has done a step."""
        if not self._is_elastic or self._passed > self._taken_at:
            self._count_step()
        else:
            self._committed_at = self._passed

    def _count_late(self) -> None:
        """Count the last step if all workers have it by now."""
        if self._committed_at is not None and self._passed > self._committed_at:
            self._count_step()

    def _count_step(self) -> None:
        self._committed_at = None
        for loader in self._loaders.values():
            loader.commit()
        for loop in self._loops.values():
            loop.commit()

    @property
    def _passed(self) -> int:
        job = self._job()
        return 0 if job is None else job.elastic.num_passed

    # -- loops --------------------------------------------------------------------------------

    def open_loop(self, loop: LoopState, count: int) -> int:
        """Begin a loop. Return its first item; `count` if all items are over."""
        number = loop.number = self._num_loops
        self._num_loops += 1
        self._loops[number] = loop
        if number >= self._peer_counts[1]:
            return 0
        if number not in self._pending_loops:
            return count
        first, position = self._pending_loops.pop(number)
        self._move_to(position)
        return first

    def begin_item(self, loop: LoopState, index: int) -> None:
        """Note that an item of a loop begins."""
        if self._is_elastic:
            self.begin_batch()
        positions = {key: loader.position for key, loader in self._loaders.items()}
        loop.begin(index, {"lines": positions, "loops": self._num_loops})

    def close_loop(self, loop: LoopState) -> None:
        """End a loop."""
        del self._loops[loop.number]

    def _move_to(self, position: dict[str, Any] | None) -> None:
        """As a newcomer, continue where the other workers were then."""
        if position is None:
            self.catch_up()
            return
        self._num_loops, self._num_loaders = position["loops"], self._peer_counts[0]
        self._expected, self._living = position["given"], self._peer_living
        for key, where in position["lines"].items():
            self._loader(key).move_to(where)

    def catch_up(self) -> None:
        """As a newcomer, continue where the other workers are now."""
        self._num_loaders = max(self._num_loaders, self._peer_counts[0])
        self._living = self._peer_living
        self._num_loops = max(self._num_loops, self._peer_counts[1])
        for key in [*self._loaders, *self._pending]:
            self._loader(key).catch_up()

    # -- as a part of the job's state ---------------------------------------------------------

    def state(self) -> State:
        """Return the position of this worker's script, as a checkpoint between two steps has it.
        A peer also receives what is the same on all workers at this moment."""
        self._count_late()
        for key in [key for key, pending in self._pending.items() if pending.live is None]:
            self._loader(key)
        is_in_pass = any(loader.is_under_way for loader in self._loaders.values())
        pending_loops = [[number, *loop] for number, loop in self._pending_loops.items()]
        counts = {
            "lines": {key: loader.state() for key, loader in self._loaders.items()},
            "loops": [
                *(loop.state(is_in_pass=is_in_pass) for loop in self._loops.values()),
                *pending_loops,
            ],
            "made": [
                max(self._num_loaders, self._peer_counts[0]),
                max(self._num_loops, self._peer_counts[1]),
            ],
            "living": [key for key, record in self._records.items() if record() is not None],
        }
        job = self._job()
        # At a free-running pace each worker resumes from its own position.
        resumes = self.is_resumed and job is not None and job.elastic.is_lockstep
        passing = {
            "is_resumed": resumes,
            "lines": {key: one.live(resumes=resumes) for key, one in self._loaders.items()},
            "loops": [*(loop.live() for loop in self._loops.values()), *pending_loops],
            "workers": [[number, rank] for number, rank in self._workers.items()],
        }
        return State(counts, passing=passing, what="the data")

    def is_gone(self, key: str) -> bool:
        """Return whether a loader is gone, and none of its passes can continue."""
        record = self._records.get(key)
        return record is not None and record() is None and not self._loaders[key].open

    def load(self, state: State, change: Change | None) -> None:
        """Continue where a peer is; again, if a worker was lost before all workers had loaded.
        Without a change, let the script, which is at its top, continue from a checkpoint."""
        counts, live = state.counts, state.passing
        if change is None:
            self.is_resumed = True
            origin = StateOrigin(
                is_resumed=True,
                has_same_world_size=counts["is_same"],
                are_workers_apart=counts["is_alone"],
            )
            self._follow(counts["loops"], counts["made"], counts["living"])
        else:
            self._has_peer_state = True
            origin = NEWCOMER if self._is_new else PEER
            self._workers = dict(live["workers"])
            if self._is_new:
                self.is_resumed = live["is_resumed"]
                self._follow(live["loops"], counts["made"], counts["living"])
        for key, saved in counts["lines"].items():
            details, known = live.get("lines", {}).get(key), self._pending.get(key)
            if key in self._loaders or (known is not None and known.live is None):
                self._loader(key).load(saved, details, origin)
            else:  # a loader that is new here is entered as by a newcomer
                entered = origin if origin.is_resumed else NEWCOMER
                self._pending[key] = PendingState(saved, details, entered)

    def _follow(self, loops: list[Any], made: list[int], living: list[str]) -> None:
        """Continue loops where the other workers are, and name loaders as they do."""
        self._peer_counts, self._peer_living = list(made), list(living)
        self._pending_loops = {number: (item, position) for number, item, position in loops}

    def resume(self, change: Change) -> None:
        """Continue with other workers."""
        self._is_new = False
        job = self._job()
        assert job is not None, "a job that changes exists"
        if job.elastic.is_lockstep:  # else each worker keeps its own part
            self._change_workers(job, requeues_lost=change.uncounted)

    def _change_workers(self, job: Job, *, requeues_lost: bool) -> None:
        self._count_late()
        before, now = self._workers, _workers(job)
        replaced = {}
        if not requeues_lost:
            replaced = {r: now[n] for n, r in before.items() if n in now and now[n] != r}
        self._workers = now
        change = WorkerChange(job.fabric.membership.workers, requeues_lost, replaced)
        for loader in self._loaders.values():
            loader.on_worker_change(change)
        for pending in self._pending.values():
            pending.on_worker_change(change)


def _is_one_of(key: str, count: int) -> bool:
    """Return whether a key names one of the first `count` loaders."""
    kind, _, number = key.partition(" ")
    return kind == "loader" and int(number) < count


def _workers(job: Job) -> dict[int, int]:
    """Return the ranks of the workers by their numbers."""
    membership = job.fabric.membership
    return {membership.member(rank).number: rank for rank in membership.workers}


_by_job: weakref.WeakKeyDictionary[Job, DataProgress] = weakref.WeakKeyDictionary()


def data_progress_of(job: Job) -> DataProgress:
    """Return the data progress of a job, created at first use."""
    if job not in _by_job:
        _by_job[job] = DataProgress(job)
    return _by_job[job]
