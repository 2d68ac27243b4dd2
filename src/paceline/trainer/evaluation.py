"""Evaluation: of the model that all workers agree on, with each sample once.

    pace                              which model is evaluated
    allreduce, ps, partial, bitmap    the same on all workers
    local, diloco, easgd, gossip ...  that of model.agreed(): the mean, the outer model, the centre
    async, ssp, backup                the newest of the servers, after the last step of all workers

Each worker evaluates its part of the samples, and the sums are added up. In an elastic job at a
free-running pace no worker can wait for all others: there each worker evaluates all samples.

Every value is the mean over a batch. Batches have different sizes, and workers different numbers of
batches, even 0. So sums are kept, each value times its samples, and divided at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from paceline.comm.devices import is_on_device
from paceline.data.shard import shard
from paceline.data.sources.samples import samples_in
from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.errors import UsageError
from paceline.runtime.job import Job
from paceline.trainer.device_values import LateNumbers, device_of, moved
from paceline.trainer.stepping import BatchResult, Objective


class Averages:
    """Sums of values by name, weighted by samples."""

    def __init__(self, names: Sequence[str], device: torch.device | None = None) -> None:
        """`device`: where the values are computed; they are added when they have arrived."""
        self._sums = dict.fromkeys(names, 0.0)
        self._samples = 0.0
        self._late = None if device is None else LateNumbers(device)
        self.newest: Mapping[str, float] = {}  # the values of the newest batch that is known

    def add(self, values: Mapping[str, float | torch.Tensor], samples: int) -> None:
        """Add the means over a batch of so many samples; 0 for a batch that does not count. Never
        waits for a device."""
        if self._late is None:
            self._add({name: float(value) for name, value in values.items()}, samples)
            return
        there = {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and is_on_device(v)}
        here = {name: float(value) for name, value in values.items() if name not in there}
        self._late.send(list(there.values()), (list(there), here, samples))
        self._collect(everything=False)

    def _collect(self, *, everything: bool) -> None:
        if self._late is not None:
            for numbers, (names, here, samples) in self._late.arrived(everything=everything):
                self._add({**here, **dict(zip(names, numbers, strict=True))}, samples)

    def _add(self, values: Mapping[str, float], samples: int) -> None:
        self.newest = values
        if samples:
            self._samples += samples
            for name, value in values.items():
                self._sums[name] += value * samples

    @property
    def numbers(self) -> list[float]:
        """The sums, followed by the number of samples: a list that can be summed over workers.

        Waits for values that a device has yet to compute.
        """
        self._collect(everything=True)
        return [*self._sums.values(), self._samples]

    @numbers.setter
    def numbers(self, numbers: Sequence[float]) -> None:
        *sums, self._samples = numbers
        self._sums = dict(zip(self._sums, sums, strict=True))

    def means_of(self, numbers: Sequence[float]) -> dict[str, float]:
        """Return the means of such numbers; NaN if there was no sample."""
        *sums, samples = numbers
        pairs = zip(self._sums, sums, strict=True)
        return {name: total / samples if samples else math.nan for name, total in pairs}


class TrainerCollectives:
    """Collectives between the workers of a Trainer. All methods are collective."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._group = job, job.worker_group(name)

    @property
    def is_alone(self) -> bool:
        """Whether there is one worker, and no other can join."""
        return self._group.size == 1 and not self._job.elastic.is_on

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums over all workers; if one is lost, over the remaining workers."""

        def attempt() -> list[float]:
            summed = torch.tensor(numbers, dtype=torch.float64)
            self._group.all_reduce(summed)
            return summed.tolist()

        return self._job.elastic.run_step(attempt)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any worker."""
        return self.sum([float(flag)])[0] > 0


Metric = Callable[[Any, Any], Any]


class Evaluation:
    """Evaluates one model. Collective, except at a free-running pace in an elastic job."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        switcher: PaceSwitcher,
        collectives: TrainerCollectives,
        objective: Objective,
        metrics: Mapping[str, Metric],
    ) -> None:
        self._job, self._model, self._switcher = job, model, switcher
        self._collectives, self._objective, self._metrics = collectives, objective, metrics

    @property
    def is_each_alone(self) -> bool:
        """Whether each worker evaluates alone, because workers never wait for each other."""
        return self._job.elastic.is_on and self._switcher.training.is_free

    def run(self, loader: Any, *, is_over: bool = False) -> dict[str, float]:
        """Return loss and metrics: means over all samples. `is_over`: the other workers, or the
        resumed run, have done this evaluation. The loader is passed to pl.shard all the same,
        because loaders are identified by their order."""
        # With fsdp the processes of a unit gather parameters for each batch: all need as many.
        is_padded = self._job.mesh is not None and self._job.mesh.fsdp > 1
        batches = loader if self.is_each_alone else shard(loader, pad=is_padded)
        device = device_of(self._model.parameters())
        averages = Averages(["loss", *self._metrics], device)
        if is_over or self._job.elastic.is_joining:
            return averages.means_of(averages.numbers)
        with self._agreed_model(), _evaluating(self._model), torch.no_grad():
            for batch in batches:
                placed = batch if device is None else moved(batch, device)
                values = self._values(self._objective.measure(self._model, placed))
                counts = not is_padded or self._job.contribution.weight > 0
                averages.add(values, samples_in(batch) if counts else 0)
        numbers = averages.numbers
        return averages.means_of(numbers if self.is_each_alone else self._collectives.sum(numbers))

    def _values(self, result: BatchResult) -> dict[str, float | torch.Tensor]:
        if self._metrics and not result.has_outputs:
            raise UsageError(
                f"rank {self._job.env.rank}: metrics {', '.join(self._metrics)} need outputs and"
                " targets: let step_fn return (loss, outputs, targets)"
            )
        found: dict[str, float | torch.Tensor] = {"loss": result.loss}
        for name, metric in self._metrics.items():
            found[name] = self._number(name, metric(result.outputs, result.targets))
        return found

    def _number(self, name: str, value: Any) -> float | torch.Tensor:
        if isinstance(value, torch.Tensor) and is_on_device(value) and value.numel() == 1:
            return value  # is read later
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            found = f"a {type(value).__name__}"
            if isinstance(value, torch.Tensor):
                found = f"a tensor of shape {list(value.shape)}"
            raise UsageError(
                f"rank {self._job.env.rank}: metric {name} returned {found}, expected one number,"
                " the mean over the batch"
            ) from None

    @contextmanager
    def _agreed_model(self) -> Iterator[None]:
        """Set the model to the values that all workers agree on."""
        model, training = self._model, self._switcher.training
        if self.is_each_alone:
            model.pull()  # type: ignore[operator]
            yield
            return
        if training.is_free:
            self._collectives.sum([0.0])  # wait until all workers have made their last step
        model.pull()  # type: ignore[operator]
        with ExitStack() as stack:
            if self._job.elastic.is_on and training.is_apart:
                self._agree_with_retries(stack)
            else:
                stack.enter_context(model.agreed())  # type: ignore[operator]
            yield

    def _agree_with_retries(self, stack: ExitStack) -> None:
        """Agree on a model. If a worker is lost meanwhile, start again from this worker's
        values."""
        own = [(param, param.detach().clone()) for param in self._model.parameters()]

        def attempt() -> None:
            with torch.no_grad():
                for param, value in own:
                    param.copy_(value)
            stack.enter_context(self._model.agreed())  # type: ignore[operator]

        self._job.elastic.run_step(attempt)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode; afterwards restore the mode of each of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
