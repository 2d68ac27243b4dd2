"""What happens to gradients and values in a step of a Keras model: Exchange and its two kinds.

    TwinExchange    TensorFlow and JAX: arrays leave the compiled step (host.py) for a twin
    TorchExchange   torch: the model itself is distributed, and gradients are averaged in backward

Both follow the same steps. `begin` is called once, when the model has its weights. `apply` stands
in for the optimizer's. UNEVEN DATA: before each exchange in lockstep the workers count those that
have a batch. A worker that is at the end of its epoch joins in with zeros, until all are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.data_parallel.distribute import begin
from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.errors import UsageError
from paceline.frameworks.averages import as_torch, group_for
from paceline.frameworks.twin import ForeignUpdate, Twin
from paceline.keras.dense_gradients import compute_in_bucket
from paceline.keras.host import Host
from paceline.keras.optimizers import server_optimizer
from paceline.keras.variables import assign, numpy_of
from paceline.pace.parse import parse_schedule
from paceline.pace.registry import needs_servers
from paceline.runtime.config import requested_pace
from paceline.runtime.job import current

Plain = Callable[..., Any]  # the optimizer's own `apply`


class Exchange:
    """What both kinds have in common."""

    switcher: PaceSwitcher

    def __init__(self, model: Any, pace: str, options: Mapping[str, Any]) -> None:
        self.model, self.pace, self.options = model, pace, dict(options)
        names = [phase.pace.name for phase in parse_schedule(requested_pace() or pace).phases]
        self.is_served = bool(current().servers) and needs_servers(names[0])
        self.has_begun = False
        self.has_prepared = False  # by the first fit
        self._is_joining = False  # this worker has no batch: it takes part with zeros
        self.error: Exception | None = None  # raised inside of a compiled step
        self._counting: tuple[Any, np.ndarray] | None = None  # the count that is under way
        if self.is_served and len(names) > 1:
            raise UsageError(
                f"pace {pace}: a Keras model at a pace with servers keeps it; use one pace"
            )

    @property
    def optimizer(self) -> Any:
        """The optimizer of the model."""
        return self.model.optimizer

    @property
    def accumulates(self) -> bool:
        """Whether gradients are exchanged once for several batches."""
        return bool(getattr(self.optimizer, "gradient_accumulation_steps", None))

    def report_rate(self, rate: float) -> None:
        """Set the learning rate that the launcher shows; servers learn it in each step."""
        optimizer = self.switcher.optimizer
        for group in optimizer.param_groups if optimizer is not None else ():
            group["lr"] = rate

    # -- uneven data --------------------------------------------------------------------------

    def start_count(self, mine: int = 1) -> None:
        """Begin to count the workers that have a batch. Collective, in lockstep only."""
        if self._is_joining:
            return  # counted already
        self.end_count()  # of a step that failed
        if self.has_begun and not self.switcher.training.is_free and current().world.size > 1:
            counted = np.array([mine], np.float32)
            work = group_for("keras batches").all_reduce(as_torch(counted), async_op=True)
            self._counting = (work, counted)

    def end_count(self) -> int | None:
        """Wait; return how many workers have a batch, None if nothing was counted.

        A worker that has a batch need not wait before it computes: only those that have none use
        the number.
        """
        if self._counting is None:
            return None
        (work, counted), self._counting = self._counting, None
        work.wait()
        return int(counted[0])

    def require_batches(self) -> None:
        """Count before a step of several batches, in which no worker can join with zeros."""
        self.start_count()
        count = self.end_count()
        if count is not None and count < current().world.size:
            raise self._uneven(count)

    def join(self) -> int:
        """Take part in the steps of workers that have more batches than this one; return their
        number."""
        joined = 0
        self.settle()
        while (count := self._count_without_batch()) > 0:
            if self.accumulates:
                raise self._uneven(count)
            self._is_joining = True
            try:
                self.step_with_zeros()
                self.settle()
            finally:
                self._is_joining = False
            joined += 1
        return joined

    def _count_without_batch(self) -> int:
        self.start_count(0)
        return self.end_count() or 0

    def _uneven(self, count: int) -> UsageError:
        return UsageError(
            f"fit: {count} of {current().world.size} workers have another batch, the others are at"
            " the end of their epoch. With gradient_accumulation_steps all workers need the same"
            " number: pass steps_per_epoch, or use paceline.keras.shard"
        )

    def step_with_zeros(self) -> None:
        """Take part in a step without a batch."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until all steps that were started are done."""


def _keeping_errors(function: Any) -> Any:
    """Keep what a function raises: a framework shows the text of an error, not the error."""

    @functools.wraps(function)
    def run(self: Exchange, arrays: Sequence[np.ndarray]) -> Any:
        try:
            return function(self, arrays)
        except Exception as error:
            self.error = error
            raise

    return run


class TwinExchange(Exchange):
    """TensorFlow and JAX."""

    def __init__(self, model: Any, pace: str, options: Mapping[str, Any], host: Host) -> None:
        super().__init__(model, pace, options)
        self._host = host
        self._twin: Twin | None = None
        self._present: tuple[int, ...] = ()  # variables with a gradient
        self._make = server_optimizer(self.optimizer, pace) if self.is_served else None

    def begin(self) -> None:
        """Start with rank 0's weights. Collective, outside of compiled code."""
        variables = self.model.trainable_variables
        names = [variable.path for variable in variables]
        self._twin = Twin(names, numpy_of(variables), self.pace, self.options, self._make)
        self.switcher, self.has_begun = self._twin.switcher, True
        assign(variables, self._twin.values())

    def apply(self, optimizer: Any, plain: Plain, grads: Any, variables: Any) -> None:
        """Exchange and update: `optimizer.apply(grads, variables)` on all workers."""
        known = list(variables or optimizer._trainable_variables)
        if not optimizer.built:
            with self._host.outside_graph():
                optimizer.build(known)
        if not self.has_begun:
            with self._host.outside_graph():
                self.begin()
        if self.is_served:
            self._serve(optimizer, list(grads), known)
            return
        plain(grads if self.accumulates else self.mean(grads), known)
        self._after(optimizer, known)

    def mean(self, grads: Sequence[Any]) -> list[Any]:
        """Return the gradients that the workers agreed on."""
        present = self._note_present(grads)
        means = self._host.call(self._mean_arrays, present, present)
        return self._spread(means, grads)

    def after(self, values: list[Any]) -> list[Any]:
        """Return the values after an update, exchanged if this pace does that."""
        assert self._twin is not None
        if not self._twin.exchanges_values:
            return values
        return self._host.call(self._exchange_values, values, values)

    def _after(self, optimizer: Any, variables: list[Any]) -> None:
        assert self._twin is not None
        if self._twin.exchanges_values:
            for variable, new in zip(
                variables, self.after([self._host.value_of(v) for v in variables]), strict=True
            ):
                optimizer.assign(variable, new)

    def _serve(self, optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
        present = self._note_present(grads)
        rate = optimizer._get_current_learning_rate()
        inputs = [_as_scalar(rate), *present]
        new = self._host.call(
            self._serve_arrays, inputs, [self._host.value_of(v) for v in variables]
        )
        for variable, value in zip(variables, new, strict=True):
            optimizer.assign(variable, value)
        optimizer._iterations.assign_add(1)

    def step_with_zeros(self) -> None:
        import keras

        variables = self.model.trainable_variables
        self.optimizer.apply([keras.ops.zeros_like(v.value) for v in variables], variables)

    def settle(self) -> None:
        self._host.settle(self.model.trainable_variables)

    def _note_present(self, grads: Sequence[Any]) -> list[Any]:
        assert self._twin is not None
        if len(grads) != self._twin.size:
            raise UsageError(
                f"the optimizer got {len(grads)} gradients, but the model has"
                f" {self._twin.size} trainable variables: pass one for each, in order, or"
                " None"
            )
        self._present = tuple(i for i, grad in enumerate(grads) if grad is not None)
        return [grads[i] for i in self._present]

    def _spread(self, means: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        by_place = dict(zip(self._present, means, strict=True))
        return [by_place.get(i) for i in range(len(grads))]

    # -- on the host, in each step --------------------------------------------------------------

    @_keeping_errors
    def _mean_arrays(self, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        assert self._twin is not None
        if self.accumulates:
            self.require_batches()
        else:
            self.start_count()
        means = self._twin.mean(self._spread(arrays, range(self._size)))
        self.end_count()
        return [_present(means[i], array) for i, array in zip(self._present, arrays, strict=True)]

    @_keeping_errors
    def _exchange_values(self, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        assert self._twin is not None
        return self._twin.after_update(arrays)

    @_keeping_errors
    def _serve_arrays(self, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        assert self._twin is not None
        self.start_count()
        self.report_rate(float(arrays[0]))
        new = self._twin.served(self._spread(arrays[1:], range(self._size)))
        self.end_count()
        return new

    @property
    def _size(self) -> int:
        assert self._twin is not None
        return self._twin.size


def _present(mean: np.ndarray | None, array: np.ndarray) -> np.ndarray:
    return np.zeros_like(array) if mean is None else mean.reshape(array.shape)


def _as_scalar(rate: Any) -> Any:
    import keras

    return keras.ops.cast(keras.ops.convert_to_tensor(rate), "float32")


class TorchExchange(Exchange):
    """torch: `pl.distribute` of the model, with Keras' update as the optimizer's step."""

    def __init__(self, model: Any, pace: str, options: Mapping[str, Any]) -> None:
        super().__init__(model, pace, options)
        self._make = server_optimizer(self.optimizer, pace) if self.is_served else ForeignUpdate

    def begin(self) -> None:
        """Start with rank 0's weights. Collective."""
        self._variables = list(self.model.trainable_variables)
        self._params = [variable.value for variable in self._variables]
        self._stepper = self._make(self._params)
        self.switcher = begin(current(), self.model, self._stepper, self.pace, self.options)
        compute_in_bucket(self.model, lambda: self.switcher.training.reducer)
        self.has_begun = True

    def renew(self, pace: str, options: Mapping[str, Any]) -> None:
        """Continue with the optimizer of another `compile`, perhaps with other trainable layers."""
        if self.is_served or (pace, dict(options)) != (self.pace, self.options):
            raise UsageError(
                f"this model was distributed at pace {self.pace} {self.options or ''} before it was"
                " compiled again; on torch it keeps that pace, and through servers its optimizer:"
                " make a new model"
            )
        self._variables = list(self.model.trainable_variables)
        self._params = [variable.value for variable in self._variables]
        known = {id(p) for group in self._stepper.param_groups for p in group["params"]}
        thawed = [param for param in self._params if id(param) not in known]
        if thawed:
            self._stepper.add_param_group({"params": thawed})

    def before_backward(self) -> None:
        """Prepare the exchange that happens in backward."""
        if not self.has_begun:
            raise UsageError(
                "paceline.keras: this model had no weights yet when distribute(model) was called,"
                " and its first step is not one of fit(); call model.build(shape) before"
            )
        self.switcher.training.reducer.is_syncing = not self.accumulates
        if not self.accumulates:
            self.start_count()

    def apply(self, optimizer: Any, plain: Plain, grads: Any, variables: Any) -> None:
        """Update with gradients that backward has averaged."""
        if not self.has_begun:
            self.before_backward()
        self.end_count()
        if self.is_served:
            self._serve(optimizer)
        elif self.accumulates:
            plain(grads, variables)
        else:
            self._step(lambda: plain(grads, variables))

    def mean(self, grads: Sequence[Any]) -> list[Any]:
        """Average accumulated gradients; called inside the update of the last batch."""
        self.require_batches()
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad
        self.switcher.training.reducer.exchange_now()
        self._step(lambda: None)
        return [param.grad for param in self._params]

    def _step(self, update: Callable[[], Any]) -> None:
        assert isinstance(self._stepper, ForeignUpdate)
        self._stepper.update = update
        self._stepper.step()

    def _serve(self, optimizer: Any) -> None:
        self.report_rate(float(optimizer._get_current_learning_rate()))
        self._stepper.step()
        with torch.enable_grad():
            self.switcher.before_forward()
        self.switcher.settle()
        optimizer._iterations.assign_add(1)

    def step_with_zeros(self) -> None:
        for param in self._params:
            param.grad = torch.zeros_like(param)
        self.switcher.training.reducer.exchange_now()
        with torch.no_grad():
            self.optimizer.apply([param.grad for param in self._params], self._variables)
