"""pl.Checkpoint: save a running job now and then, and go on from what was saved.

    save      every worker copies what it has (the STALL), and goes on; a thread writes it
    resume    when it is made: the newest checkpoint of the directory that is whole
    stop      SIGTERM becomes an agreed last step, a save, and exit code 75

What is in one is in contents.py, how it gets to the disk in writer.py and checkpoint/.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.errors import UsageError
from paceline.runtime.job import current
from paceline.runtime.preemption import PREEMPTED
from paceline.state.checkpoint.contents import (
    Said,
    farewell,
    gather,
    is_lockstep,
    restore,
    restore_weights,
    saved_models,
    saved_objects,
    steps_of,
)
from paceline.state.checkpoint.directory_check import RESUME, choose, meet_in
from paceline.state.checkpoint.interval import Due
from paceline.state.checkpoint.log_lines import Teller
from paceline.state.checkpoint.quiesce import Call, Cut
from paceline.state.checkpoint.writer import Plan, Writer
from paceline.state.files import reading
from paceline.state.protocol import Change, Part, State


class Preempted(SystemExit):
    """All workers were asked to stop, have saved, and end."""


class Checkpoint:
    """Save model, optimizer and everything else in a directory, and go on from there. Collective.

    every      save behind so many steps, or about every so often: 100, "30s", "10min"; None: only
               when `save()` is called
    keep       how many checkpoints stay in the directory
    resume     "auto": go on from the newest checkpoint that is whole, if there is one; "always":
               raise if there is none; "never": begin anew; "weights": load the models' values only
    objects    by name: distributed models, if only these are to be saved; whatever else has
               `state_dict()` and `load_state_dict()`: a scheduler, a GradScaler, an average of
               weights, a model that is not distributed; those given to `pl.carry` are saved too

    Make it behind `pl.distribute`, as the last thing before the loop, and call `step()` at the end
    of each step. Models and optimizers that are distributed are in it, random generators of all
    workers, what the pace keeps, and where `pl.shard`, `pl.steps` and `pl.epochs` are. All workers
    see the same directory.

    >>> checkpoint = pl.Checkpoint(directory, every=100)
    >>> checkpoint.step()
    """

    def __init__(
        self,
        directory: str | Path,
        every: int | str | None = None,
        keep: int = 3,
        *,
        resume: str = "auto",
        **objects: Any,
    ) -> None:
        self._job = current()
        self._due = Due(every)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UsageError(f"Checkpoint(keep={keep!r}): expected a whole number, 1 or more")
        if resume not in RESUME:
            raise UsageError(f"Checkpoint(resume={resume!r}): expected one of {', '.join(RESUME)}")
        self._keep, self._root = keep, Path(directory).absolute()
        self._calls = 0  # of step(), where no model is distributed
        self.path: Path | None = None  # what this run went on from
        self._models: list[PaceSwitcher] = []
        if not self._job.env.is_data_worker:  # which has nothing to save, and serves in the loop
            self._set_up(resume, objects)

    def _set_up(self, resume: str, objects: Mapping[str, Any]) -> None:
        self._models = saved_models(objects)
        self._objects = saved_objects(self._job, objects)
        self._name = f"checkpoint {self._job.num_checkpoints}"  # a script may make several
        self._job.num_checkpoints += 1
        self._group = self._job.worker_group(self._name)
        self._teller = Teller(self._job, self._root)
        self._writer = Writer(self._teller.on_end)
        self._num_saves = 0  # of this job, alike on all workers
        self._saved_at = -1
        self._is_wanted = False  # a save waits until nothing is between the workers
        self._job.stopping.should_stop(alone=False)  # from now on SIGTERM asks
        if not self._job.elastic.is_joining:
            self._begin(resume)
        self._cut: Cut | None = None  # where, at the pace of the moment, nobody waits for anybody
        self._due.begin(self.steps)
        if self._job.elastic.is_on:
            self._job.elastic.register(self._name, _Counts(self))
        # Without this object, which holds on to the script's: a job may train several models.
        self._job.closers += [self._writer.close, self._teller.close]

    @property
    def steps(self) -> int:
        """How many steps were done so far, those of earlier runs among them; of several models, by
        the first one's optimizer."""
        return self._models[0].steps if self._models else self._calls

    def step(self) -> None:
        """Count a step, behind everything that belongs to it; save if it is time.

        If the job was asked to stop, all workers save behind the same step and end with code 75.
        """
        self._calls += 1
        stops = self._job.stopping.should_stop(alone=self._job.world.size == 1)
        if not is_lockstep(self._models):
            self._step_freely(self._cut_of_job(), stops=stops)
            return
        is_due = self._due.is_due(self.steps, self._agree)
        self._is_wanted = self._is_wanted or is_due or stops
        if self._is_wanted and not self._is_busy:
            self._is_wanted = False
            self._save_together()
            if stops:
                self._leave()

    def save(self) -> None:
        """Save now, whatever the time; called by all workers behind the same step. The writing goes
        on in the background (`wait`)."""
        if not is_lockstep(self._models):
            cut = self._cut_of_job()
            self._save_at_cut(cut, cut.heard or cut.call(self.steps, stops=False))
            return
        if self._is_busy:
            raise UsageError(
                f"rank {self._job.env.rank}: values are on their way between the workers (the pace"
                " has a delay): save() in another step, or let step() find one"
            )
        self._save_together()

    def wait(self) -> None:
        """Wait until this worker's part of the last save is on the disk, and, on the first worker,
        until the whole of it can be loaded; raise what went wrong with it."""
        outcome = self._writer.wait()
        if outcome is not None and outcome.error is not None:
            raise outcome.error

    # -- saving -------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return any(switcher.training.is_busy for switcher in self._models)

    def _save_together(self) -> None:
        """Save behind a step that all have done."""
        if self._saved_at == self.steps:
            return
        started_s, said = time.perf_counter(), list[Said]()
        self._job.elastic.run_step(lambda: said.__setitem__(slice(None), [self._gather()]))
        if said:  # else others were through before somebody was lost: theirs has this step
            members = list(self._job.world.ranks)
            self._write(said[0], self.steps, members, started_s, {})
        self._note_save(self.steps)

    def _gather(self) -> Said:
        return gather(self._job, self._models, self._objects, self.steps)

    def _write(
        self,
        said: Said,
        step: int,
        members: Sequence[int],
        started_s: float,
        left: Mapping[int, Any],
    ) -> None:
        ranks = self._job.world.ranks
        plan = Plan(
            root=self._root,
            step=step,
            nonce=f"{self._job.rendezvous.job_id[:24]}-{self._num_saves}",
            number=members.index(self._job.env.rank),
            places=[ranks.index(rank) for rank in members],
            others={ranks.index(rank): own for rank, own in left.items()},
            num_workers=len(ranks),
            keep=self._keep,
        )
        self._teller.on_stall(self._writer.start(plan, said, started_s))

    def _note_save(self, step: int) -> None:
        self._num_saves += 1
        self._saved_at = step
        self._due.begin(self.steps)

    def _cut_of_job(self) -> Cut:
        if self._cut is None:
            self._cut = Cut(self._job, self._name)
            self._job.closers.append(self._say_farewell(self._cut))
        return self._cut

    def _step_freely(self, cut: Cut, *, stops: bool) -> None:
        """Save where nobody waits for anybody, if it is time or somebody calls."""
        is_due = self._due.is_due(self.steps, lambda own: own)
        if cut.heard is None and is_due and (self._is_bound or self._job.world.rank == 0):
            cut.call(self.steps, stops=stops)
        elif cut.heard is None and stops:
            cut.call(self._reachable, stops=True)
        call = cut.heard
        if call is None or (self._is_bound and self.steps < call.step):
            return
        self._save_at_cut(cut, call)
        if call.stops:
            self._leave()

    @property
    def _is_bound(self) -> bool:
        return any(switcher.training.is_bound for switcher in self._models)

    @property
    def _reachable(self) -> int:
        """A step that all workers can arrive behind."""
        if not self._is_bound:
            return self.steps
        return self.steps + max(one.limit - one.steps for one in self._models)

    def _save_at_cut(self, cut: Cut, call: Call) -> None:
        started_s, said = time.perf_counter(), list[Said]()
        members = cut.take(call, lambda: said.append(self._gather()))
        if self._job.env.rank in members:  # else it came after the others had gone on
            number = members.index(self._job.env.rank)
            gone = [rank for rank in self._job.world.ranks if rank not in members]
            left = cut.farewells(gone) if number == 0 else {}
            self._write(said[0], call.step, members, started_s, left)
        self._note_save(call.step)

    def _say_farewell(self, cut: Cut) -> Callable[[], None]:
        """Return what a worker does at its end, without holding on to this object."""
        job, me = self._job, weakref.ref(self)

        def say() -> None:
            cut.close()
            checkpoint = me()
            if checkpoint is not None and job.world.rank != 0:
                cut.say_farewell(farewell(job, checkpoint._models, checkpoint.steps))

        return say

    def _leave(self) -> None:
        self.wait()
        self._teller.on_preemption(self.steps)
        raise Preempted(PREEMPTED)

    def _agree(self, own: float) -> float:
        told = torch.tensor([own], dtype=torch.float64)
        self._job.elastic.run_step(lambda: self._group.all_reduce(told, "max") is None)
        return float(told)

    # -- going on -----------------------------------------------------------------------------

    def _begin(self, resume: str) -> None:
        """See that all workers share the directory; go on from the newest checkpoint."""
        meet_in(self._root, self._job, self._group)
        newest = choose(self._root, resume, self._group)
        if newest.loaded is not None:
            self._restore(newest.loaded, resume, newest.notices)

    def _restore(self, loaded: reading.Loaded, resume: str, notices: Sequence[str]) -> None:
        self.path = loaded.path
        if resume == "weights":
            restore_weights(loaded, self._models)
            self._teller.on_resume(loaded, 0, [*notices, "only the models' values"])
            return
        mapped = restore(self._job, loaded, self._models, self._objects)
        self._calls = steps_of(loaded, self._job.world.rank)
        self._saved_at = self.steps
        self._teller.on_resume(loaded, self.steps, [*notices, *mapped])


class _Counts(Part):
    """How far a Checkpoint is, for newcomers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def state(self) -> State:
        one = self._checkpoint
        return State([one._calls, one._num_saves, one._saved_at, one._due.counts()])

    def load(self, state: State, change: Change | None) -> None:  # noqa: ARG002
        one = self._checkpoint
        one._calls, one._num_saves, one._saved_at, due = state.counts
        one._due.load(due)
