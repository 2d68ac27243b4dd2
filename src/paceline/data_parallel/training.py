"""Training: everything that a distributed model needs from its first step to its last.

forward       are other parameters trainable than before? then they join
backward      the reducer collects and averages gradients
step          the update runs the optimizer; buffers are brought together meanwhile
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
from paceline.data_parallel import summary
from paceline.data_parallel.amp.grad_scaler import TorchScaler, choose_skipping, step_with_nothing
from paceline.data_parallel.amp.mixed_precision import compute_in, compute_in_full
from paceline.data_parallel.checks.non_finite import Health, all_finite
from paceline.data_parallel.direct_gradients import compute_as_usual
from paceline.data_parallel.hooks import cut_off
from paceline.data_parallel.model_state.batchnorm import use_global_statistics, use_own_statistics
from paceline.data_parallel.model_state.buffers import Buffers
from paceline.data_parallel.model_state.parts import leave, take_part
from paceline.data_parallel.pace_switch.handover import (
    Gathered,
    add_once,
    average_state,
    give_state,
    make_plain,
    whole_state,
)
from paceline.data_parallel.parameter_set import Intake
from paceline.data_parallel.policy import PassResult
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.setup import Groundwork, left_out
from paceline.data_parallel.update.layerwise import LayerwiseUpdate
from paceline.data_parallel.update.model_averaging import Paced
from paceline.data_parallel.update.step import Step, Update
from paceline.data_parallel.weighting import forget_scale, losses_are_scaled
from paceline.errors import PeerError, UsageError
from paceline.observe.telemetry.trace import tracer
from paceline.options.table import Options
from paceline.pace.exchange import Bucket as ExchangedBucket
from paceline.pace.parse import PaceSpec
from paceline.ps.client.subscription import Subscription
from paceline.runtime.console import say
from paceline.runtime.job import Job


class Training:
    """One distributed model with its optimizer, at one pace (data_parallel/pace_switch/switcher.py
    changes it).

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
        label: str,  # alike on all workers, and of this training alone
    ) -> None:
        self._job, self._group = job, group
        self._is_reducing, self._torch_scaler = False, None
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._is_part = bool(job.place)  # on a mesh others hold other parts of the same model
        self.pace, self.options = pace, options
        self._ground = Groundwork(job, group, pace, options, label)
        try:
            self._set_up(model, optimizer)
        except PeerError:  # the next attempt begins with a plain model
            self._take_down(model)
            raise

    def _set_up(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        job, group, ground, options = self._job, self._group, self._ground, self.options
        ground.lay(optimizer)
        self.serving, self.method, self.exchange = ground.serving, ground.method, ground.exchange
        self.health = Health(
            group,
            options,
            job.elastic,
            job.ask_unit,
            on_servers=self.serving is not None,
            is_free=self.is_free,
        )
        self.reducer = Reducer(group, self.exchange, job.elastic, self)
        self._is_reducing = True
        self.skipping, self._torch_scaler = choose_skipping(ground, self.reducer, optimizer)
        if self.serving is not None and self.serving.rule.is_lockstep:
            self.serving.update.wants_stop = lambda: self.reducer.result.unit_stops
        self._housing = ground.make_housing(optimizer)
        self._intake = Intake(ground, self._housing, self.reducer)
        self._num_global_norms = (
            use_global_statistics(model, ground.form("statistics"))
            if options.batchnorm == "global"
            else 0
        )
        notice = compute_in(model, options.precision)
        if notice and job.env.local_rank == 0:
            say(notice)
        for param in model.parameters():
            group.broadcast(param.detach())
        self._intake.take_all(model)
        self.buffers = Buffers(
            model,
            ground.form("buffers"),
            job.fabric.engine,
            ground.buffers_mode,
            goes_on=self.serving is not None,
        )
        self.buffers.broadcast_now()
        self.update: Update = ground.make_update(optimizer, self._housing)
        self._paced: Paced | None = None
        if self.method is not None:
            flags = ground.form("flags")
            self._paced = Paced(job, self.method, self.reducer, self.buffers, flags)
        self.steps = 0  # at this pace
        self._waited_s = 0.0
        summary.watch(ground, optimizer)
        job.contribution.watch(self._set_weight)
        self._set_weight(job.contribution.weight)
        self._elastic_step = take_part(
            ground, model, optimizer, self.reducer, self.buffers, self._housing
        )
        if isinstance(self.update, LayerwiseUpdate):
            self.update.watch(model)
        job.reporter.begin()
        tracer.begin(job.steps_done, job.place)

    def describe(self) -> str:
        """Say in one line what was set up."""
        paced = self._paced
        way = paced.name if paced is not None else f"update {self.update.name}"
        return summary.describe(self._ground, self.reducer, way, self._num_global_norms)

    # -- setting up ---------------------------------------------------------------------------

    def _set_weight(self, weight: float) -> None:
        """Let a batch weigh by its samples, where gradients are averaged."""
        self.reducer.weighting.set(1.0 if self.reducer.rests else weight)

    @property
    def is_free(self) -> bool:
        """Whether workers take their steps without all of the others."""
        return self._ground.is_free

    # -- what the reducer asks (policy.py) -----------------------------------------------------

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
        """A GradScaler leaves out steps with such gradients; nobody else asks for them."""
        return losses_are_scaled() and not all_finite([bucket.grads for bucket in buckets])

    def beside_exchange(self) -> None:
        if self.serving is None:
            self.buffers.synchronise()

    def after_exchange(self, result: PassResult) -> None:
        if self.serving is not None:
            self.serving.update.remember_gradients()
            self.serving.update.heed_verdict()
        if self.health.checks_values or not result.is_complete:
            self.health.look(self.reducer, result)

    # -- forward ------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Notice parameters that have been frozen or thawed since the last time."""
        if not torch.is_grad_enabled():  # perhaps one rank alone, which must not wait for others
            return
        self._job.elastic.enter()
        self.reducer.require_clean()
        forget_scale()
        if self.serving is not None:
            self.serving.update.before_forward()
        if self._intake.is_changed:
            model = self._model()
            assert model is not None
            self._intake.follow(model)

    def after_forward(self, output: Any) -> Any:
        """Learn of the backward pass from the first gradient that reaches an output.

        Returns what takes the output's place; None: nothing does.
        """
        self.settle()
        if not torch.is_grad_enabled():
            return None
        replaced = None
        if self.skips_backward():
            replaced = output = cut_off(output)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_output_grad)
        return replaced

    def _on_output_grad(self, grad: torch.Tensor) -> None:  # noqa: ARG002
        self.reducer.begin_backward()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let gradients add up locally; the next backward pass outside exchanges the sum."""
        return self.reducer.no_sync()

    def agreed(self) -> AbstractContextManager[None]:
        """Let the model have the values that stand for all workers, for example to evaluate it.

        Collective. In lockstep they are what every worker has anyway; with local steps they are the
        mean, or the outer model; with elastic averaging the centre. Afterwards each worker goes on
        with its own.
        """
        return nullcontext() if self._paced is None else self._paced.agreed()

    def settle(self) -> None:
        """Wait for parameters that are still on their way from the servers."""
        if self.serving is not None:
            self.serving.update.settle()

    def pull(self) -> None:
        """Read the newest parameters from the servers; without servers there is nothing to do."""
        if self.serving is not None:
            self.serving.update.pull()

    def subscribe(self, after: int = -1) -> Subscription:
        """Only watch from now on (an evaluator): nobody waits for this worker any more.

        Returns an iterable of versions, the newest one each time; after each, `model.pull()` reads
        the parameters. It ends when all other workers have left.
        """
        if self.serving is None:
            raise UsageError("model.subscribe() needs parameter servers: a pace such as async")
        return self.serving.subscribe(after)

    # -- checkpoints (data_parallel/model_state/checkpoint.py) -------------------------------------

    @property
    def is_apart(self) -> bool:
        """Whether each worker has values, and an optimizer, of its own at the moment."""
        return self._paced is not None and self.reducer.rests

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for all."""
        return self._group.rank == 0

    @property
    def is_busy(self) -> bool:
        """Whether something is between the workers that no checkpoint could have; alike on all."""
        return self.method is not None and self.method.is_under_way

    @property
    def is_bound(self) -> bool:
        """Whether a worker that stands still makes others wait, sooner or later."""
        rule = self.serving.rule if self.serving is not None else None
        return rule is not None and (rule.bound is not None or rule.backup > 0)

    @property
    def buffers_are_local(self) -> bool:
        """Whether each worker has buffers of its own."""
        return self._ground.buffers_mode == "local"

    def agreed_values(self) -> dict[nn.Parameter | None, torch.Tensor]:
        """Return the values that stand for all workers, where they have gone apart. Collective."""
        if self._paced is None:
            return {}
        pairs = zip(self.reducer.buckets, self._paced.gather(), strict=False)
        return {
            slot.param: slot.place.view(values) for bucket, values in pairs for slot in bucket.slots
        }

    def take_over_values(self) -> None:
        """Let everybody who keeps values begin with the parameters: they were loaded, the same on
        all workers. Collective."""
        if self.serving is not None:
            self.serving.update.hand_over(
                speaks=self.is_first, meet=lambda: self._group.barrier() and None
            )
        elif self._ground.is_common:
            self._group.barrier()  # one memory for all, to which each has written

    # -- the end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Agree for the last time, behind the last step. Collective."""
        if self._paced is not None:
            self._paced.finish()

    def gather(self) -> Gathered:
        """Return what a plain script would have, the same on all workers. Collective.

        Nothing changes, so that it can be repeated.
        """
        optimizer = self._optimizer()
        assert optimizer is not None, "who steps is there"
        self._group.barrier()  # everybody has done its last step
        if self.serving is not None:
            self.serving.finish()
        values = self._paced.gather() if self._paced is not None else []
        state = whole_state(optimizer)
        if self.reducer.rests or (self.serving is not None and not self.serving.optimizer_state):
            average_state(optimizer, state, self._group)
        self._group.barrier()  # everybody has read what others hold
        return Gathered(state, values)

    def end(self, left: Gathered) -> None:
        """Leave a plain model and optimizer behind, with what was gathered."""
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and optimizer is not None, "who steps is there"
        with torch.no_grad():
            for bucket, values in zip(self.reducer.buckets, left.values, strict=False):
                bucket.params.copy_(values)
        unsent = left_out(self.exchange, self.reducer.buckets)
        self._take_down(model)
        give_state(optimizer, left.state)
        make_plain(model)
        add_once(unsent)

    def _take_down(self, model: nn.Module) -> None:
        """Let go of model and optimizer, also if only a part of it has been set up."""
        if self._is_reducing:
            self.reducer.close()
        compute_in_full(model)
        compute_as_usual(model)
        use_own_statistics(model)
        if self._torch_scaler is not None:
            self._torch_scaler.close()
        leave(self._ground)
        self._ground.close()

    # -- step ---------------------------------------------------------------------------------

    def around_step(self, optimizer: torch.optim.Optimizer, step: Step) -> Any:
        """Run a step of the optimizer: `step` is its own."""
        if self._torch_scaler is not None and not self._torch_scaler.finds_nothing(optimizer):
            return step_with_nothing(optimizer) if self.skipping.counts else None
        self._refuse_stray_gradients(optimizer)
        if self._paced is not None:
            return self._paced.run(step, self._count_step)
        if self._elastic_step is not None:
            return self._elastic_step.run(self.update, step, self._count_step)
        had_buffers = self.buffers.num_placed > 0
        if had_buffers:  # they travel while the optimizer works
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
        self._job.stopping.hear(self._is_stop_agreed)
        return result

    @property
    def _is_stop_agreed(self) -> bool:
        """Whether all workers stop behind this step."""
        if self.serving is not None and self.serving.rule.is_lockstep:
            return self.serving.update.is_stop_agreed
        return self.reducer.result.is_stop_agreed

    def _refuse_stray_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self.reducer.require_finished()
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._intake.outside or count != self._intake.num_optimized:
            self._intake.refuse_strays(optimizer)

    def _count_step(self, waited_behind_s: float) -> None:
        """Report for how long this worker waited for others in the step: during backward and in the
        update, and (`waited_behind_s`) behind it."""
        waited_s = self.reducer.waited_s + self.update.waited_s
        waiting_s = waited_s - self._waited_s + waited_behind_s
        self._waited_s = waited_s
        self.steps += 1
        self._job.step_done(waited_s=waiting_s)
