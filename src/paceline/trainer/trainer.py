"""pl.Trainer: pl.distribute, pl.epochs, pl.shard and the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.data.loops import epochs as rounds
from paceline.data.shard import ShardedLoader, shard
from paceline.data.sources.samples import samples_in
from paceline.data.workers.source import ServedLoader
from paceline.data_parallel.amp.grad_scaler import GradScaler
from paceline.data_parallel.distribute import distributed
from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.model_parallel.distribute import distribute, mesh_models
from paceline.runtime.job import Job, carry, init, report
from paceline.runtime.mesh import Mesh
from paceline.trainer import checks
from paceline.trainer.callbacks import Callbacks
from paceline.trainer.device_values import device_of, moved
from paceline.trainer.evaluation import Averages, Evaluation, Metric, TrainerCollectives
from paceline.trainer.saving import CheckpointSaver, FitProgress, FitResult, arguments_of
from paceline.trainer.stepping import Objective, StepRunner

_AGREE_EVERY = 16  # steps between two agreements whether a callback wants to stop


class Trainer:
    """Train a model on all workers of the job, with the usual loop. Collective.

    loss_fn     `loss_fn(outputs, targets)`, the mean over a batch, for batches (inputs, targets)
    step_fn     instead of loss_fn, for any batches: `step_fn(model, batch)` returns the loss, or
                (loss, outputs, targets) if there are metrics
    pace, precision, mesh, options   as of `pl.distribute`, which is called here
    scheduler   of learning rates, created with the optimizer; it steps after every "epoch", or
                `scheduler_every="step"`
    checkpoint  a directory: saved after each epoch; or the arguments of `pl.Checkpoint`. `fit`
                resumes from the newest checkpoint there
    max_norm    clip gradients to this norm
    accumulate  number of batches whose gradients add up to one step
    metrics     for evaluation, by name: `metric(outputs, targets)`, the mean over a batch
    callbacks   objects with hooks (`pl.Callback`)

    It joins the job if `pl.init()` was not called before. Results are bit-identical to the same
    loop written by hand (docs/guides/trainer.md).

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = pl.Trainer(model, optimizer, torch.nn.functional.mse_loss)
    >>> result = trainer.fit([(torch.ones(8, 4), torch.ones(8, 2))], epochs=3)
    >>> [row["epoch"] for row in result.history], trainer.step
    ([0, 1, 2], 3)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any] | None = None,
        *,
        step_fn: Callable[..., Any] | None = None,
        pace: str = "allreduce",
        precision: str | None = None,
        mesh: str | None = None,
        scheduler: Any = None,
        scheduler_every: str = "epoch",
        checkpoint: str | Path | Mapping[str, Any] | None = None,
        max_norm: float | None = None,
        accumulate: int = 1,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        checks.require_settings(accumulate, max_norm, options)
        checks.require_scheduler(scheduler, scheduler_every, optimizer)
        checks.require_loss_for_stages(mesh, step_fn)
        objective = Objective(loss_fn, step_fn, accumulate)
        measured, arguments = checks.require_metrics(metrics), arguments_of(checkpoint)
        self._callbacks = Callbacks(callbacks)
        self._job = init()
        checks.require_plain(model)
        if precision is not None:
            options["precision"] = precision
        distribute(
            model,
            optimizer,
            pace,
            mesh=mesh,
            loss=None if loss_fn is None else objective,
            **options,
        )
        self.model, self.optimizer = model, optimizer
        self.epoch = 0  # the current or last one
        self.should_stop = False  # set by callbacks, on any worker
        self.metrics: dict[str, float] = {}  # averages of the current epoch so far
        self._scheduler, self._every = scheduler, scheduler_every
        self._fits = 0  # calls of fit in this script
        self._progress = FitProgress(keeps_sums=not self._job.elastic.is_on)
        if self._job.env.is_data_worker:  # it makes batches, and does not train
            return
        number = _number_of(self._job)
        self._switcher = _switcher_of(model)
        self._collectives = TrainerCollectives(self._job, f"trainer {number}")
        self._evaluation = Evaluation(
            self._job, model, self._switcher, self._collectives, objective, measured
        )
        mesh_used = self._job.mesh or Mesh()
        is_fp16 = self._switcher.training.options.precision == "fp16"
        scaler = GradScaler() if is_fp16 and mesh_used.pp * mesh_used.fsdp == 1 else None
        self._steps = StepRunner(
            model,
            optimizer,
            objective,
            max_norm=max_norm,
            scaler=scaler,
            has_stages=mesh_used.pp > 1,
        )
        objects = self._objects(scaler)
        if self._job.elastic.is_on:
            ending = f"_{number}" if number else ""
            carry(**{name + ending: thing for name, thing in objects.items()})
        self._saver = CheckpointSaver(self._job, self._switcher, model, objects, arguments)
        self._device = device_of(model.parameters())  # batches are copied there
        self._averages = Averages(["loss"], self._device)

    def _objects(self, scaler: GradScaler | None) -> dict[str, Any]:
        """Return by name what is saved, and sent to newcomers, besides model and optimizer."""
        found: dict[str, Any] = {"trainer": self._progress}
        if self._scheduler is not None:
            found["scheduler"] = self._scheduler
        if scaler is not None:
            found["scaler"] = scaler
        for number, callback in enumerate(self._callbacks.all):
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
                found[f"callback_{number}"] = callback
        return found

    @property
    def step(self) -> int:
        """How many steps the optimizer has done, including those of earlier runs."""
        return 0 if self._job.env.is_data_worker else self._switcher.steps

    @property
    def history(self) -> list[dict[str, float]]:
        """The averages of all epochs so far."""
        return list(self._progress.history)

    # -- training -----------------------------------------------------------------------------

    def fit(self, loader: Any, epochs: int = 1, val_loader: Any = None) -> FitResult:
        """Train for so many epochs; return the averages of each. Collective.

        `loader` is that of a single process, or the result of `pl.shard`. With `val_loader` each
        epoch is evaluated. Another fit() trains for so many further epochs, and their numbers
        continue. With a checkpoint, a restarted run resumes in the fit, the epoch and the batch in
        which it was saved; what is being saved when the last epoch ends is on the disk when this
        returns.
        """
        count = checks.whole_number("fit: epochs", epochs, least=0)
        self._fits += 1
        self.should_stop, progress = False, self._progress
        if self._job.env.is_data_worker:
            return self._serve(loader)
        self._saver.open()
        progress.begin_fit(self._fits)
        self.model.train()
        try:
            self._callbacks.call("on_fit_start", self)
            for index in rounds(count):
                if progress.stopped_fit == self._fits:  # in the resumed run
                    break
                self.epoch = progress.first_epoch + index
                self._train_epoch(loader)
                self._end_epoch(val_loader)
                if self.should_stop:
                    break
            self._callbacks.call("on_fit_end", self)
        except (Exception, KeyboardInterrupt) as error:
            self._callbacks.call("on_exception", self, error)
            raise
        self._saver.wait()
        rows = [row for row in progress.history if row["epoch"] >= progress.first_epoch]
        return FitResult(rows, self.step, progress.stopped_fit == self._fits)

    def _serve(self, loader: Any) -> FitResult:
        """As a data worker, serve the loader if it has mode "pipeline"; does not return then."""
        for _ in loader if isinstance(loader, ServedLoader) else shard(loader):
            pass
        return FitResult([], 0, has_stopped=False)

    def _train_epoch(self, loader: Any) -> None:
        self.metrics = {}
        self._callbacks.call("on_train_epoch_start", self)
        batches = loader if isinstance(loader, ShardedLoader) else shard(loader, epoch=self.epoch)
        self._begin_epoch(batches)
        for batch in batches:
            self._after_step()
            self._train_batch(batch)
            if self._steps.begins and self._wants_to_stop():
                break
        if not self._steps.begins:
            self._steps.exchange_held()
            self._update()
            self._save_step()
        self._after_step()

    def _begin_epoch(self, batches: Any) -> None:
        """Begin to count batches and sums. Continue those of an epoch that was under way in the
        resumed run, or on the other workers when this worker joined."""
        try:
            length = len(batches)
        except TypeError:
            length = None
        progress = self._progress
        self._steps.begin_epoch(progress.batches, length)
        self._averages = Averages(["loss"], self._device)
        if progress.sums:
            self._averages.numbers = progress.sums

    def _train_batch(self, batch: Any) -> None:
        steps = self._steps
        closes = steps.closes
        if self._device is not None:
            batch = moved(batch, self._device)
        self._callbacks.call("on_train_batch_start", self, batch, at_step=steps.begins)
        weight = (
            self._job.contribution.weight
        )  # 0: a repeated batch, so that all workers have as many
        loss = steps.compute(batch, closes=closes)
        self._averages.add({"loss": loss}, samples_in(batch) if weight else 0)
        report(None, **self._averages.newest)
        if closes:
            self._update()
        if self._callbacks.have("on_train_batch_end"):
            self._callbacks.call("on_train_batch_end", self, batch, float(loss), at_step=closes)
        if closes:
            self._save_step()

    def _save_step(self) -> None:
        """Save if it is due, after everything that belongs to a step."""
        if self._saver.step():
            self._callbacks.call("on_save_checkpoint", self)

    def _update(self) -> None:
        # Before the step: workers that join after it receive these numbers.
        self._progress.batches = self._steps.batches
        self._progress.averages = self._averages
        self._steps.update()
        self._after_step()

    def _after_step(self) -> None:
        """Step the scheduler after a step, unless that is done (see `FitProgress`)."""
        if self._progress.followed < self.step:
            self._progress.followed = self.step
            if self._scheduler is not None and self._every == "step":
                self._scheduler.step()

    def _wants_to_stop(self) -> bool:
        """Agree at intervals whether to stop after this step. Workers that take steps of their own
        agree at the end of the epoch."""
        if self._collectives.is_alone:
            return self.should_stop
        training = self._switcher.training
        is_apart = training.is_free or training.is_apart
        if is_apart or not self._callbacks.all or self.step % _AGREE_EVERY:
            return False
        self.should_stop = self._collectives.any(self.should_stop)
        return self.should_stop

    def _end_epoch(self, val_loader: Any) -> None:
        progress, epoch = self._progress, self.epoch
        numbers = self._averages.numbers
        if not self._evaluation.is_each_alone:
            numbers = self._collectives.sum(numbers)
        self.metrics = {"epoch": epoch, **self._averages.means_of(numbers)}
        if val_loader is not None:
            found = self._evaluation.run(val_loader)
            self.metrics.update({f"val_{name}": value for name, value in found.items()})
            report(None, **{name: v for name, v in self.metrics.items() if name.startswith("val_")})
            self._callbacks.call("on_validation_epoch_end", self)
        if progress.epochs <= epoch:  # else a peer that was ahead has done so (`FitProgress`)
            self._schedule_epoch()
            progress.record(self.metrics)
            progress.epochs, progress.batches = epoch + 1, 0
            progress.sums, progress.averages = [], None
        self._callbacks.call("on_train_epoch_end", self)
        if not self._evaluation.is_each_alone:
            self.should_stop = self._collectives.any(self.should_stop)
        if self.should_stop:
            progress.stopped_fit = self._fits
        if self._saver.save() if self.should_stop else self._saver.end_epoch():
            self._callbacks.call("on_save_checkpoint", self)

    def _schedule_epoch(self) -> None:
        if self._scheduler is None or self._every != "epoch":
            return
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(self.metrics.get("val_loss", self.metrics["loss"]))
        else:
            self._scheduler.step()

    # -- evaluation ---------------------------------------------------------------------------

    def evaluate(self, loader: Any) -> dict[str, float]:
        """Return the loss and the metrics over all samples of a loader, the same on all workers.

        Collective. Evaluates the model that all workers agree on, in eval mode and without
        gradients, and restores the model afterwards. In a resumed run, and on a newcomer of an
        elastic job, evaluations that are over return NaN.
        """
        if self._job.env.is_data_worker:
            return {}
        if self._saver.needs_weights_only:
            self._saver.open()
        return self._evaluation.run(loader, is_over=self._progress.fit > self._fits)


def _switcher_of(model: nn.Module) -> PaceSwitcher:
    """Return the pace switcher of a distributed model."""
    if model in mesh_models:
        return mesh_models[model].switcher
    return next(one for known, one in distributed() if known is model)


_counts: WeakKeyDictionary[Job, int] = WeakKeyDictionary()  # Trainers by job


def _number_of(job: Job) -> int:
    """Return how many Trainers the script has created in this job before."""
    number = _counts.get(job, 0)
    _counts[job] = number + 1
    return number
