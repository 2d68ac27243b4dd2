"""Training: everything that a distributed model needs from its first step to its last.

forward       parameters that have become trainable join the buckets
backward      the reducer collects and averages gradients
step          the update runs the optimizer; buffers are synchronised meanwhile
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.comm.group import Group
from paceline.comm.host_route import broadcast_first
from paceline.data_parallel.amp.grad_scaler import TorchScaler, choose_skipping, step_with_nothing
from paceline.data_parallel.amp.mixed_precision import compute_in, compute_in_full
from paceline.data_parallel.checks.gradients import Health, all_finite
from paceline.data_parallel.direct_gradients import compute_as_usual
from paceline.data_parallel.hooks import detach_output
from paceline.data_parallel.model_state.batchnorm import use_global_statistics, use_own_statistics
from paceline.data_parallel.model_state.device_buffers import make_buffers
from paceline.data_parallel.model_state.elastic_state import register_elastic, unregister_elastic
from paceline.data_parallel.pace_switch.handover import (
    GatheredState,
    add_once,
    average_state,
    full_optimizer_state,
    make_plain,
    set_optimizer_state,
)
from paceline.data_parallel.parameter_set import ParameterSet
from paceline.data_parallel.policy import PassResult
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.setup import TrainingSetup, describe, left_out, report_figures
from paceline.data_parallel.update.coordinated_step import MethodStep
from paceline.data_parallel.update.step import Step, Update
from paceline.data_parallel.weighting import forget_scale, losses_are_scaled
from paceline.errors import DeviceMemoryError, PeerError, UsageError
from paceline.observe.telemetry.trace import tracer
from paceline.options.table import Options
from paceline.pace.exchange import Bucket as ExchangedBucket
from paceline.pace.parse import PaceSpec
from paceline.ps.client.subscription import Subscription
from paceline.runtime.console import say
from paceline.runtime.job import Job


class Training:
    """One distributed model with its optimizer, at one pace (pace_switch/switcher.py changes it).

    It is the policy of its reducer (policy.py).
    """

    _torch_scaler: TorchScaler | None

    def __init__(
        self,
        job: Job,
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pace: PaceSpec,
        options: Options,
        label: str,  # the same on all workers, and of this training alone
    ) -> None:
        self._job, self._group = job, group
        self._is_reducing, self._torch_scaler = False, None
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._is_part = bool(job.part_suffix)  # on a mesh: other processes hold other shards
        self.pace, self.options = pace, options
        self._setup = TrainingSetup(job, group, pace, options, label)
        try:
            self._set_up(model, optimizer)
        except (PeerError, DeviceMemoryError):  # the next attempt starts with a plain model
            self._take_down(model)
            raise

    def _set_up(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        job, group, setup, options = self._job, self._group, self._setup, self.options
        setup.prepare(model, optimizer)
        self.serving, self.method, self.exchange = setup.serving, setup.method, setup.exchange
        self.health = Health(
            group,
            options,
            job.elastic,
            job.ask_unit,
            on_servers=self.serving is not None,
            is_free=self.is_free,
            device=setup.on_device.device if setup.on_device is not None else None,
        )
        self.reducer = Reducer(group, self.exchange, job.elastic, self)
        self._is_reducing = True
        self.skipping, self._torch_scaler = choose_skipping(setup, self.reducer, optimizer)
        if self.serving is not None and self.serving.rule.is_lockstep:
            self.serving.update.wants_stop = lambda: self.reducer.result.unit_stops
        self._allocator = setup.make_allocator(optimizer)
        self._parameters = ParameterSet(setup, self._allocator, self.reducer)
        self._num_global_norms = (
            use_global_statistics(model, setup.form_for_statistics())
            if options.batchnorm == "global"
            else 0
        )
        notice = compute_in(model, options.precision)
        if notice and job.env.local_rank == 0:
            say(notice)
        for param in model.parameters():
            broadcast_first(group, param.detach())
        self._parameters.include_all(model)
        self.buffers = make_buffers(setup, model, survives_loss=self.serving is not None)
        self.buffers.broadcast_now()
        self.update: Update = setup.make_update(optimizer, self._allocator)
        self._method_step: MethodStep | None = None
        if self.method is not None:
            flags = setup.form("flags")
            parts = (self.reducer, self.buffers, flags, setup.hosts)
            self._method_step = MethodStep(job, self.method, *parts)
        self.steps = 0  # at this pace
        self._waited_s = 0.0
        report_figures(setup, optimizer)
        job.contribution.watch(self._set_weight)
        self._set_weight(job.contribution.weight)
        self._elastic_step = register_elastic(
            setup, model, optimizer, self.reducer, self.buffers, self._allocator
        )
        self.update.hook_modules(model)
        job.reporter.begin()
        tracer.begin(job.steps_done, job.part_suffix)

    def describe(self) -> str:
        """Return in one line what was set up."""
        method_step = self._method_step
        way = method_step.name if method_step is not None else f"update {self.update.name}"
        return describe(self._setup, self.reducer, way, self._num_global_norms)

    # -- setting up ---------------------------------------------------------------------------

    def _set_weight(self, weight: float) -> None:
        """Weight gradients by the samples of the batch, where gradients are averaged."""
        self.reducer.weighting.set(1.0 if self.reducer.is_local else weight)

    @property
    def is_free(self) -> bool:
        """Whether workers step without waiting for all of the others."""
        return self._setup.is_free

    # -- StepPolicy (policy.py) ----------------------------------------------------------------

    @property
    def keeps_sparse(self) -> bool:
        return self.options.nonfinite != "ignore"

    def skips_backward(self) -> bool:
        return self.method is not None and self.method.skips_backward

    def wants_stop(self) -> bool:
        return self._job.stopping.is_asked

    def ask_unit(self, notes: list[bool]) -> list[bool]:
        return self._job.ask_unit(notes) if self._is_part else notes

    def has_hidden_nonfinite(self, buckets: Sequence[ExchangedBucket]) -> bool:
        """Return whether a GradScaler, on any worker, has to skip this step because of them."""
        if self.exchange.traits.checks_late:
            return self.health.late is not None and self.health.late.look()
        return losses_are_scaled() and not all_finite([bucket.grads for bucket in buckets])

    def during_exchange(self) -> None:
        if self.serving is None:
            self.buffers.synchronise()

    def after_exchange(self, result: PassResult) -> None:
        if self.serving is not None:
            self.serving.update.remember_gradients()
            self.serving.update.check_finite()
        if self.health.checks_values or not result.is_complete:
            self.health.look(self.reducer, result)

    # -- forward ------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Include parameters that have been frozen or thawed since the last time."""
        if not torch.is_grad_enabled():  # perhaps on one rank alone, which must not wait
            return
        self._job.elastic.join_running_job()
        self.reducer.require_clean()
        forget_scale()
        if self.serving is not None:
            self.serving.update.before_forward()
        if self._parameters.has_changed:
            model = self._model()
            assert model is not None
            self._parameters.follow(model)

    def after_forward(self, output: Any) -> Any:
        """Register the start of the backward pass: the first gradient that reaches an output.

        Returns the output to use instead, or None.
        """
        self.settle()
        if not torch.is_grad_enabled():
            return None
        replaced = None
        if self.skips_backward():
            replaced = output = detach_output(output)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_output_grad)
        return replaced

    def _on_output_grad(self, grad: torch.Tensor) -> None:  # noqa: ARG002
        if tracer.on:
            tracer.mark("backward", time.monotonic())
        self.reducer.begin_backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally; the next backward pass outside exchanges the sum."""
        return self.reducer.no_sync()

    def agreed(self) -> AbstractContextManager[None]:
        """Give the model the values that all workers agree on, for example to evaluate it.

        Collective. In lockstep every worker has them anyway; with local steps they are the mean, or
        the outer model; with elastic averaging the center variable. After the block each worker
        continues with its own values.
        """
        if self._method_step is not None:
            return self._method_step.agreed()
        self.settle()
        return nullcontext()

    def settle(self) -> None:
        """Wait for parameters that have not arrived yet from the servers."""
        if self.serving is not None:
            self.serving.update.settle()

    def pull(self) -> None:
        """Read the newest parameters from the servers; without servers do nothing."""
        if self.serving is not None:
            self.serving.update.pull()

    def subscribe(self, after: int = -1) -> Subscription:
        """Only watch from now on (an evaluator): the other workers do not wait for this one.

        Returns an iterable of versions, the newest one each time; after each, `model.pull()` reads
        the parameters. It ends when all other workers have left.
        """
        if self.serving is None:
            raise UsageError("model.subscribe() needs parameter servers: a pace such as async")
        return self.serving.subscribe(after)

    # -- checkpoints (model_state/model_snapshot.py) -----------------------------------------------

    @property
    def is_apart(self) -> bool:
        """Whether each worker has its own values and its own optimizer state at the moment."""
        return self._method_step is not None and self.reducer.is_local

    @property
    def is_first(self) -> bool:
        """Whether this worker writes and sends what all workers have in common."""
        return self._group.rank == 0

    @property
    def is_busy(self) -> bool:
        """Whether data is in transit that no checkpoint could have; the same on all workers."""
        return self.method is not None and self.method.is_under_way

    @property
    def is_bound(self) -> bool:
        """Whether other workers have to wait, sooner or later, for a worker that pauses."""
        rule = self.serving.rule if self.serving is not None else None
        return rule is not None and (rule.bound is not None or rule.backup > 0)

    @property
    def buffers_are_local(self) -> bool:
        """Whether each worker has buffers of its own."""
        return self._setup.buffers_mode == "local"

    def agreed_values(self) -> dict[nn.Parameter | None, torch.Tensor]:
        """Return the values that all workers agree on, where they have diverged. Collective."""
        if self._method_step is None:
            return {}
        pairs = zip(self.reducer.buckets, self._method_step.gather(), strict=False)
        return {
            slot.param: slot.segment.view(values)
            for bucket, values in pairs
            for slot in bucket.slots
        }

    def take_over_values(self) -> None:
        """Continue from the parameters, which were loaded, the same on all workers. Collective."""
        if self.serving is not None:
            self.serving.update.replace_server_values(
                speaks=self.is_first, wait_for_all=lambda: self._group.barrier() and None
            )
        elif self._setup.is_common:
            self._group.barrier()  # one memory for all workers, to which each has written

    # -- the end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Run the last round of the method, after the last step. Collective."""
        if self._method_step is not None:
            self._method_step.finish()

    def gather(self) -> GatheredState:
        """Return the state that a plain script would have, the same on all workers. Collective.

        Nothing changes, so that it can be repeated.
        """
        optimizer = self._optimizer()
        assert optimizer is not None, "the script steps, so it has an optimizer"
        self._group.barrier()  # all workers have done their last step
        if self.serving is not None:
            self.serving.finish()
        values = self._method_step.gather() if self._method_step is not None else []
        state = full_optimizer_state(optimizer)
        if self.reducer.is_local or (self.serving is not None and not self.serving.optimizer_state):
            average_state(optimizer, state, self._group)
        self._group.barrier()  # all workers have read what the others hold
        return GatheredState(state, values)

    def end(self, left: GatheredState) -> None:
        """Turn model and optimizer into plain ones, with the state that was gathered."""
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None, "the script steps, so it has both"
        with torch.no_grad():
            for bucket, values in zip(self.reducer.buckets, left.values, strict=False):
                bucket.params.copy_(values)
        unsent = left_out(self.exchange, self.reducer.buckets)
        self._take_down(model)
        set_optimizer_state(optimizer, left.state)
        make_plain(model)
        add_once(unsent)

    def _take_down(self, model: nn.Module) -> None:
        """Release model and optimizer, also if only a part of the training was set up."""
        if self._is_reducing:
            self.reducer.close()
        compute_in_full(model)
        compute_as_usual(model)
        use_own_statistics(model)
        if self._torch_scaler is not None:
            self._torch_scaler.close()
        unregister_elastic(self._setup)
        self._setup.close()

    # -- step ---------------------------------------------------------------------------------

    def around_step(self, optimizer: torch.optim.Optimizer, step: Step) -> Any:
        """Run a step of the optimizer; `step` is its own."""
        if self._torch_scaler is not None and not self._torch_scaler.finds_nothing(optimizer):
            return step_with_nothing(optimizer) if self.skipping.counts else None
        self._require_averaged(optimizer)
        if self._method_step is not None:
            return self._method_step.run(step, self._count_step)
        if self._elastic_step is not None:
            return self._elastic_step.run(self.update, step, self._count_step)
        had_buffers = self.buffers.num_placed > 0
        if had_buffers:  # they are exchanged while the optimizer works
            self.buffers.start()
        result = self.update.run(step)
        start, is_traced, start_s = time.perf_counter(), tracer.on, time.monotonic()
        if not had_buffers:  # but perhaps the model has some now
            self.buffers.start()
        self.buffers.finish()
        if is_traced:
            tracer.add("wait", start_s, behind="buffers")
        self._job.contribution.commit()
        self._count_step(time.perf_counter() - start)
        self._job.stopping.note_agreement(self._is_stop_agreed)
        return result

    @property
    def _is_stop_agreed(self) -> bool:
        """Whether all workers stop after this step."""
        if self.serving is not None and self.serving.rule.is_lockstep:
            return self.serving.update.is_stop_agreed
        return self.reducer.result.is_stop_agreed

    def _require_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        self.reducer.require_finished()
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._parameters.outside or count != self._parameters.num_optimized:
            self._parameters.require_averaged(optimizer)

    def _count_step(self, waited_after_s: float) -> None:
        """Count the step, and report how long this worker waited for others: during backward and
        in the update, and (`waited_after_s`) after it."""
        waited_s = self.reducer.waited_s + self.update.waited_s
        waiting_s = waited_s - self._waited_s + waited_after_s
        self._waited_s = waited_s
        self.steps += 1
        if self._setup.on_device is not None:
            self._setup.on_device.laps.lap()
        self._job.step_done(waited_s=waiting_s)
