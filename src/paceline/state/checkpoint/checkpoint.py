"""pl.Checkpoint: save a running job now and then, and resume from a checkpoint.

    save      every worker copies its state (the STALL) and continues; a thread writes the copy
    resume    at construction: from the newest complete checkpoint of the directory
    stop      SIGTERM leads to an agreed last step, a save, and exit code 75

contents.py defines what a checkpoint holds, background_writer.py and state/files/ how it is
written.
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
from paceline.state.checkpoint.background_writer import SavePlan, Writer
from paceline.state.checkpoint.contents import (
    WorkerState,
    departure_state,
    gather,
    is_lockstep,
    restore,
    restore_weights,
    saved_models,
    saved_objects,
    steps_of,
)
from paceline.state.checkpoint.directory_check import (
    RESUME_MODES,
    check_directory,
    choose_checkpoint,
)
from paceline.state.checkpoint.interval import SaveSchedule
from paceline.state.checkpoint.log_lines import CheckpointLog
from paceline.state.checkpoint.quiesce import QuiescePoint, SaveRequest
from paceline.state.files import load as reading
from paceline.state.protocol import Change, Part, State


class Preempted(SystemExit):
    """All workers were asked to stop, have saved, and exit."""


class Checkpoint:
    """Save model, optimizer and everything else in a directory, and resume from it. Collective.

    every      save after so many steps, or about every so often: 100, "30s", "10min"; None: only
               when `save()` is called
    keep       number of checkpoints to keep in the directory
    resume     "auto": resume from the newest complete checkpoint, if there is one; "always": raise
               if there is none; "never": start from scratch; "weights": load only the models'
               values
    objects    by name: distributed models, if only these are to be saved; any other object with
               `state_dict()` and `load_state_dict()`: a scheduler, a GradScaler, an average of
               weights, a model that is not distributed; objects given to `pl.carry` are saved too

    Create it after `pl.distribute`, as the last thing before the loop, and call `step()` at the end
    of each step. It contains distributed models and optimizers, the random generators of all
    workers, the state of the pace, and the positions of `pl.shard`, `pl.steps` and `pl.epochs`. All
    workers must see the same directory.

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
        self._schedule = SaveSchedule(every)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise UsageError(f"Checkpoint(keep={keep!r}): expected a whole number, 1 or more")
        if resume not in RESUME_MODES:
            raise UsageError(
                f"Checkpoint(resume={resume!r}): expected one of {', '.join(RESUME_MODES)}"
            )
        self._keep, self._root = keep, Path(directory).absolute()
        self._calls = 0  # of step(), where no model is distributed
        self.path: Path | None = None  # the checkpoint that this run resumed from
        self._models: list[PaceSwitcher] = []
        if (
            not self._job.env.is_data_worker
        ):  # a data worker has nothing to save, and serves in the loop
            self._set_up(resume, objects)

    def _set_up(self, resume: str, objects: Mapping[str, Any]) -> None:
        self._models = saved_models(objects)
        self._objects = saved_objects(self._job, objects)
        self._name = f"checkpoint {self._job.num_checkpoints}"  # a script may make several
        self._job.num_checkpoints += 1
        self._group = self._job.worker_group(self._name)
        self._log = CheckpointLog(self._job, self._root)
        self._writer = Writer(self._log.on_end)
        self._num_saves = 0  # of this job, the same on all workers
        self._saved_at = -1
        self._is_wanted = False  # a save waits until no values are in flight between the workers
        self._job.stopping.should_stop(alone=False)  # from now on SIGTERM is a request
        if not self._job.elastic.is_joining:
            self._begin(resume)
        self._quiesce: QuiescePoint | None = None  # only at free-running paces
        self._schedule.begin(self.steps)
        if self._job.elastic.is_on:
            self._job.elastic.register(self._name, _Counts(self))
        # Not this object, which references the script's objects: a job may train several models.
        self._job.closers += [self._writer.close, self._log.close]

    @property
    def steps(self) -> int:
        """Number of steps so far, including those of earlier runs; with several models, those of
        the first model's optimizer."""
        return self._models[0].steps if self._models else self._calls

    def step(self) -> None:
        """Count a step, after everything that belongs to it; save if it is time.

        If the job was asked to stop, all workers save after the same step and exit with code 75.
        """
        self._calls += 1
        stops = self._job.stopping.should_stop(alone=self._job.world.size == 1)
        if not is_lockstep(self._models):
            self._step_freely(self._quiesce_point(), stops=stops)
            return
        is_due = self._schedule.is_due(self.steps, self._agree)
        self._is_wanted = self._is_wanted or is_due or stops
        if self._is_wanted and not self._is_busy:
            self._is_wanted = False
            self._save_together()
            if stops:
                self._leave()

    def save(self) -> None:
        """Save now; all workers must call it after the same step. Writing continues in the
        background (see `wait`)."""
        if not is_lockstep(self._models):
            quiesce = self._quiesce_point()
            self._save_quiesced(
                quiesce, quiesce.pending or quiesce.request(self.steps, stops=False)
            )
            return
        if self._is_busy:
            raise UsageError(
                f"rank {self._job.env.rank}: cannot save now: the pace has a delay, and values are"
                " in flight between the workers; call save() in another step, or let step() choose"
                " one"
            )
        self._save_together()

    def wait(self) -> None:
        """Wait until this worker's part of the last save is on the disk, and, on the first worker,
        until the checkpoint can be loaded; raise the error if it failed."""
        outcome = self._writer.wait()
        if outcome is not None and outcome.error is not None:
            raise outcome.error

    # -- saving -------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return any(switcher.training.is_busy for switcher in self._models)

    def _save_together(self) -> None:
        """Save after a step that all workers have done."""
        if self._saved_at == self.steps:
            return
        started_s, states = time.perf_counter(), list[WorkerState]()
        self._job.elastic.run_step(lambda: states.__setitem__(slice(None), [self._gather()]))
        if states:  # else a worker was lost after the others saved: their save has this step
            members = list(self._job.world.ranks)
            self._write(states[0], self.steps, members, started_s, {})
        self._note_save(self.steps)

    def _gather(self) -> WorkerState:
        return gather(self._job, self._models, self._objects, self.steps)

    def _write(
        self,
        state: WorkerState,
        step: int,
        members: Sequence[int],
        started_s: float,
        departed: Mapping[int, Any],
    ) -> None:
        ranks = self._job.world.ranks
        plan = SavePlan(
            root=self._root,
            step=step,
            nonce=f"{self._job.rendezvous.job_id[:24]}-{self._num_saves}",
            number=members.index(self._job.env.rank),
            positions=[ranks.index(rank) for rank in members],
            departed={ranks.index(rank): state for rank, state in departed.items()},
            num_workers=len(ranks),
            keep=self._keep,
        )
        self._log.on_stall(self._writer.start(plan, state, started_s))

    def _note_save(self, step: int) -> None:
        self._num_saves += 1
        self._saved_at = step
        self._schedule.begin(self.steps)

    def _quiesce_point(self) -> QuiescePoint:
        if self._quiesce is None:
            self._quiesce = QuiescePoint(self._job, self._name)
            self._job.closers.append(self._leave_quiesce(self._quiesce))
        return self._quiesce

    def _step_freely(self, quiesce: QuiescePoint, *, stops: bool) -> None:
        """Save at a free-running pace, if it is time or another worker requests it."""
        is_due = self._schedule.is_due(self.steps, lambda own: own)
        if quiesce.pending is None and is_due and (self._is_bound or self._job.world.rank == 0):
            quiesce.request(self.steps, stops=stops)
        elif quiesce.pending is None and stops:
            quiesce.request(self._reachable, stops=True)
        request = quiesce.pending
        if request is None or (self._is_bound and self.steps < request.step):
            return
        self._save_quiesced(quiesce, request)
        if request.stops:
            self._leave()

    @property
    def _is_bound(self) -> bool:
        return any(switcher.training.is_bound for switcher in self._models)

    @property
    def _reachable(self) -> int:
        """A step that all workers can reach."""
        if not self._is_bound:
            return self.steps
        return self.steps + max(one.limit - one.steps for one in self._models)

    def _save_quiesced(self, quiesce: QuiescePoint, request: SaveRequest) -> None:
        started_s, states = time.perf_counter(), list[WorkerState]()
        members = quiesce.join(request, lambda: states.append(self._gather()))
        if self._job.env.rank in members:  # else it arrived after the others had continued
            number = members.index(self._job.env.rank)
            gone = [rank for rank in self._job.world.ranks if rank not in members]
            departed = quiesce.departed_states(gone) if number == 0 else {}
            self._write(states[0], request.step, members, started_s, departed)
        self._note_save(request.step)

    def _leave_quiesce(self, quiesce: QuiescePoint) -> Callable[[], None]:
        """Return what a worker does when it exits, without a reference to this object."""
        job, me = self._job, weakref.ref(self)

        def leave() -> None:
            quiesce.close()
            checkpoint = me()
            if checkpoint is not None and job.world.rank != 0:
                quiesce.publish_departure(
                    departure_state(job, checkpoint._models, checkpoint.steps)
                )

        return leave

    def _leave(self) -> None:
        self.wait()
        self._log.on_preemption(self.steps)
        raise Preempted(PREEMPTED)

    def _agree(self, own: float) -> float:
        largest = torch.tensor([own], dtype=torch.float64)
        self._job.elastic.run_step(lambda: self._group.all_reduce(largest, "max") is None)
        return float(largest)

    # -- resuming -----------------------------------------------------------------------------

    def _begin(self, resume: str) -> None:
        """Check that all workers share the directory; resume from the newest checkpoint."""
        check_directory(self._root, self._job, self._group)
        newest = choose_checkpoint(self._root, resume, self._group)
        if newest.loaded is not None:
            self._restore(newest.loaded, resume, newest.notices)

    def _restore(
        self, loaded: reading.LoadedCheckpoint, resume: str, notices: Sequence[str]
    ) -> None:
        self.path = loaded.path
        if resume == "weights":
            restore_weights(loaded, self._models)
            self._log.on_resume(loaded, 0, [*notices, "only the models' values"])
            return
        mapped = restore(self._job, loaded, self._models, self._objects)
        self._calls = steps_of(loaded, self._job.world.rank)
        self._saved_at = self.steps
        self._log.on_resume(loaded, self.steps, [*notices, *mapped])


class _Counts(Part):
    """The counters of a Checkpoint, for joining workers."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def state(self) -> State:
        one = self._checkpoint
        return State([one._calls, one._num_saves, one._saved_at, one._schedule.counts()])

    def load(self, state: State, change: Change | None) -> None:  # noqa: ARG002
        one = self._checkpoint
        one._calls, one._num_saves, one._saved_at, due = state.counts
        one._schedule.load(due)
