"""MeshModel: a model of which each process of a unit holds a shard, and how it is trained.

The script's model stays the same object. It gets `train_step`, which is the same for every mesh,
and `state_dict`, which returns the full model's state. Data parallelism averages the gradients of
the local shards over the data-parallel group, at any pace: during backward if autograd accumulates
them in the parameters (tp), after it otherwise (pp, fsdp).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.comm.devices import is_on_device
from paceline.data_parallel.amp.mixed_precision import compute_in
from paceline.data_parallel.checks.model import local_models
from paceline.data_parallel.hooks import attach, replace_method
from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.data_parallel.update.step import Step, bind_step
from paceline.errors import UsageError
from paceline.model_parallel.clipping import clip
from paceline.model_parallel.same_inputs import SameInputs
from paceline.model_parallel.sharding.gather import assemble
from paceline.model_parallel.sharding.layout import LocalShard, LocalShards, SliceSpec
from paceline.model_parallel.sharding.model_shard import ModelShard
from paceline.model_parallel.sharding.replicas import Replicas, can_diverge
from paceline.model_parallel.train_step import Loss, as_inputs, backward
from paceline.model_parallel.unit import MeshUnit
from paceline.runtime.console import say
from paceline.runtime.job import Job

_HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MeshModel:
    """One model on a mesh. All methods are collective among the processes of a unit."""

    def __init__(
        self,
        job: Job,
        unit: MeshUnit,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shard: ModelShard,
        switcher: PaceSwitcher,
        loss: Loss | None,
        max_norm: float | None,
    ) -> None:
        self.job, self.unit, self.shard, self.switcher = job, unit, shard, switcher
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._loss, self._max_norm = loss, max_norm
        self._is_averaged = False  # the gradients are averaged over the group
        self._inputs, self._is_compared = SameInputs(job, unit), False
        self._keys = list(model.state_dict())
        self._replicas = Replicas(unit, shard.shards)
        self._precision = switcher.training.options.precision
        if shard.pipeline is None:
            compute_in(model, self._precision)
        if self._precision == "fp16" and job.env.rank == 0:
            say("train_step does not scale the loss, which float16 needs; bf16 does not need it")
        local_models[model] = shard.skeleton  # pl.check_consistency compares these
        self._waiting = job.reporter.waiting
        if shard.pipeline is not None:
            shard.pipeline.watch_waits(self._waiting)
        self._bind(model, optimizer)
        job.reporter.begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UsageError(
            f"rank {self.job.env.rank}: a copy of a sharded model would have this process's shard"
            " only; build the model again, and load state_dict(), which is the full model's"
        )

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__({})

    def _bind(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        attach(model, self.switcher)
        for name in ("train_step", "forward_backward", "state_dict", "load_state_dict"):
            object.__setattr__(model, name, getattr(self, name))
        if self.shard.pipeline is not None:
            object.__setattr__(model, "forward", self._evaluate)
        else:
            model.register_forward_pre_hook(self._compare_inputs, with_kwargs=True)
        if self.shard.fsdp is not None:
            model.register_forward_hook(self._scale_gradients)
        bind_step(optimizer, self._around_step)
        if not self._exchanges_in_backward:
            replace_method(optimizer, "zero_grad", self._zero_grad(optimizer.zero_grad))

    @property
    def _exchanges_in_backward(self) -> bool:
        return self.shard.pipeline is None and self.shard.fsdp is None

    # -- a step -------------------------------------------------------------------------------

    def train_step(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Train with one batch: gradients, clipping, the optimizer's step. Return the loss of the
        unit's batch, the same on all of its processes."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the script has dropped its optimizer"
        optimizer.zero_grad()
        loss = self.forward_backward(inputs, targets)
        if self._max_norm is not None:
            self.clip(self._max_norm)
        optimizer.step()
        return loss

    def forward_backward(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Compute the gradients of one batch, and return its loss; repeated calls add up."""
        model, pipeline = self._require_model(), self.shard.pipeline
        self._is_averaged = False
        self._inputs.compare(inputs=inputs, targets=targets)
        if pipeline is not None:
            self.switcher.before_forward()
            self._follow_mode()
            with self.switcher.no_sync(), self._autocast():
                return pipeline.forward_backward(as_inputs(inputs), targets, self._weight)
        self._is_compared = True
        try:
            return self._mean_loss(backward(model, self._loss, inputs, targets))
        finally:
            self._is_compared = False

    def _compare_inputs(self, _model: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        is_traced = torch.compiler.is_compiling()  # then tensors have no values
        if torch.is_grad_enabled() and not (self._is_compared or is_traced):
            self._inputs.compare(inputs=inputs, **named)

    @property
    def _weight(self) -> float:
        """The factor of this worker's loss, if autograd does not accumulate the gradients."""
        weighting = self.switcher.training.reducer.weighting
        weighting.weight_loss_instead()
        return weighting.weight

    def _scale_gradients(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        weight = self._weight
        if weight != 1.0 and torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda grad: grad * weight)

    def _mean_loss(self, loss: torch.Tensor) -> torch.Tensor:
        if isinstance(loss, torch.distributed.tensor.DTensor):
            loss = loss.full_tensor()
        if self.unit.mesh.fsdp == 1:
            return loss
        shared = loss.clone()
        if is_on_device(shared):
            dist.all_reduce(shared, group=self.unit.axis("fsdp").get_group())
            return shared.div_(self.unit.mesh.fsdp)
        with self._waiting:
            self.unit.group.all_reduce(shared, "mean")  # equal among the processes of tp
        return shared

    def exchange_gradients(self) -> None:
        """Average gradients over the data-parallel group, for the optimizer to use."""
        if self._exchanges_in_backward or self._is_averaged:
            return
        self._is_averaged = True
        if self.shard.fsdp is not None:
            self.shard.fsdp.collect_gradients()
        self.switcher.training.reducer.exchange_now()

    def clip(
        self, max_norm: float, norm_type: float = 2.0, only: Collection[str] | None = None
    ) -> torch.Tensor:
        """Scale the gradients of the full model, or of the parameters with these names, so that
        their norm is at most `max_norm`; return the norm before."""
        self.exchange_gradients()
        return clip(self.unit, self.shard.shards, max_norm, norm_type, only, self._waiting)

    def _around_step(self, optimizer: torch.optim.Optimizer, step: Step) -> Any:  # noqa: ARG002
        self.exchange_gradients()
        result = step()
        self._is_averaged = False
        training = self.switcher.training
        if self._replicas.exist and can_diverge(training):
            if training.serving is not None:
                training.serving.update.expect_edits()
            with self._waiting:
                self._replicas.synchronize()
        if self.shard.fsdp is not None:
            self.shard.fsdp.refresh()
            self._broadcast_buffers()
        return result

    def _broadcast_buffers(self) -> None:
        """Broadcast the first process's buffers along fsdp, whose processes have batches of their
        own, as along dp."""
        if self.switcher.training.buffers_are_local:
            return
        for buffer in self.shard.skeleton.buffers():
            axis = self.unit.axis if is_on_device(buffer) else self.unit.host_axis
            with self._waiting:
                dist.broadcast(buffer, group_src=0, group=axis("fsdp").get_group())

    def _zero_grad(self, old: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            old(set_to_none=set_to_none)
            self._is_averaged = False
            if self.shard.fsdp is not None:
                self.shard.fsdp.drop_gradients()

        return zero_grad

    # -- evaluation ---------------------------------------------------------------------------

    def _evaluate(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                f"rank {self.job.env.rank}: with pp={self.unit.mesh.pp} no process has the full"
                " model; train with model.train_step(x, y), and call the model itself only under"
                " torch.no_grad()"
            )
        assert self.shard.pipeline is not None
        self._follow_mode()
        with self._autocast():
            return self.shard.pipeline.evaluate(inputs)

    def _follow_mode(self) -> None:
        """Set the stages to the script's model's mode: training or evaluation."""
        assert self.shard.pipeline is not None
        for stage in self.shard.pipeline.modules:
            if stage.training != self._require_model().training:
                stage.train(self._require_model().training)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _HALF_DTYPES.get(self._precision)
        return nullcontext() if dtype is None else torch.autocast(self.unit.device.type, dtype)

    def _require_model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "the script has dropped its model"
        return model

    # -- the full model -----------------------------------------------------------------------

    def state_shards(self) -> LocalShards:
        """Return this process's shards of the model's state, by the full model's names."""
        found: LocalShards = {}
        for name, value in nn.Module.state_dict(self.shard.skeleton).items():
            known = self.shard.shards.get(self.shard.aliases.get(name, name))
            if known is not None:
                found[name] = replace(known, tensor=value)
            else:
                found[name] = self.buffer_shard(name, value)
        return found

    def buffer_shard(self, name: str, value: torch.Tensor) -> LocalShard:
        """Return a buffer with its spec; processes along fsdp have the same buffers."""
        spec = self.buffer_spec(name) or SliceSpec(tuple(value.shape))
        return LocalShard(value, spec, is_counted=self.unit.index("fsdp") == 0)

    def buffer_spec(self, name: str) -> SliceSpec | None:
        """Return the spec of a buffer; None: it is not sharded."""
        plan = self.shard.plan
        return plan.buffer_parts.get(name) if plan is not None else None

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        """Return the full model's state in host memory, on every process. Collective within the
        unit."""
        assembled = assemble(self.unit.group, self.state_shards())
        found = {key: tensor.cpu() for key, tensor in assembled.items()}
        return {key: found[key] for key in self._keys if key in found}

    def load_state_dict(self, state: dict[str, torch.Tensor], strict: bool = True) -> Any:
        """Load a full model's state: each process takes its shards."""
        local = {
            name: shard.spec.of(state[name])
            for name, shard in self.state_shards().items()
            if name in state
        }
        if strict and set(state) != set(self._keys):
            raise UsageError(
                f"load_state_dict: expected {len(self._keys)} names of the full model, found"
                f" {len(state)}; missing {sorted(set(self._keys) - set(state))[:3]}, unexpected"
                f" {sorted(set(state) - set(self._keys))[:3]}"
            )
        result = self.shard.skeleton.load_state_dict(local, strict=False)
        self.switcher.training.take_over_values()
        if self.shard.fsdp is not None:
            self.shard.fsdp.refresh()
        return result
