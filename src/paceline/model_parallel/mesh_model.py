"""A model of which each process of a unit holds a part, and how it is trained.

The script's model stays the object that it was. It gets `train_step`, which is the same for every
mesh, and `state_dict`, which is the whole model's. Gradients of the part that is here are averaged
over the column by data parallelism, at any pace: during backward where autograd leaves them in the
parameters (tp), behind it where they come otherwise (stages, shards).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.data_parallel.amp.mixed_precision import compute_in
from paceline.data_parallel.checks.model import local_models
from paceline.data_parallel.hooks import attach, replace_method
from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.data_parallel.update.step import Step, bind_step
from paceline.errors import UsageError
from paceline.model_parallel.clipping import clip
from paceline.model_parallel.parts.gather import Piece, assemble
from paceline.model_parallel.parts.layout import Part
from paceline.model_parallel.parts.replicas import Replicas, can_part
from paceline.model_parallel.parts.slicing import Cut
from paceline.model_parallel.same_inputs import SameInputs
from paceline.model_parallel.train_step import Loss, as_inputs, backward
from paceline.model_parallel.unit import Unit
from paceline.runtime.console import say
from paceline.runtime.job import Job

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Meshed:
    """One model on a mesh. All methods are collective among the processes of a unit."""

    def __init__(
        self,
        job: Job,
        unit: Unit,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        cut: Cut,
        switcher: PaceSwitcher,
        loss: Loss | None,
        max_norm: float | None,
    ) -> None:
        self.job, self.unit, self.cut, self.switcher = job, unit, cut, switcher
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._loss, self._max_norm = loss, max_norm
        self._is_exchanged = False  # the gradients are those of the column
        self._inputs, self._is_compared = SameInputs(job, unit), False
        self._keys = list(model.state_dict())
        self._replicas = Replicas(unit, cut.holding)
        self._precision = switcher.training.options.precision
        if cut.pipeline is None:
            compute_in(model, self._precision)
        if self._precision == "fp16" and job.env.rank == 0:
            say("train_step does not scale the loss, which float16 needs; bf16 does without")
        local_models[model] = cut.skeleton  # pl.check_consistency compares those
        self._waiting = job.reporter.waiting
        if cut.pipeline is not None:
            cut.pipeline.watch_waits(self._waiting)
        self._bind(model, optimizer)
        job.reporter.begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UsageError(
            f"rank {self.job.env.rank}: a copy of a model in parts would have this process's part"
            " only; build the model again, and load state_dict(), which is the whole one's"
        )

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__({})

    def _bind(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        attach(model, self.switcher)
        for name in ("train_step", "forward_backward", "state_dict", "load_state_dict"):
            object.__setattr__(model, name, getattr(self, name))
        if self.cut.pipeline is not None:
            object.__setattr__(model, "forward", self._evaluate)
        else:
            model.register_forward_pre_hook(self._compare_inputs, with_kwargs=True)
        if self.cut.sharded is not None:
            model.register_forward_hook(self._weigh)
        bind_step(optimizer, self._around_step)
        if not self._exchanges_in_backward:
            replace_method(optimizer, "zero_grad", self._zero_grad(optimizer.zero_grad))

    @property
    def _exchanges_in_backward(self) -> bool:
        return self.cut.pipeline is None and self.cut.sharded is None

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
        """Compute the gradients of one batch, and return its loss; several batches add up."""
        model, pipeline = self._own(), self.cut.pipeline
        self._is_exchanged = False
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
        is_traced = torch.compiler.is_compiling()  # then these are no tensors with values
        if torch.is_grad_enabled() and not (self._is_compared or is_traced):
            self._inputs.compare(inputs=inputs, **named)

    @property
    def _weight(self) -> float:
        """What the loss of this worker's batch is multiplied with, where gradients come to their
        parameters by other ways than autograd."""
        weighting = self.switcher.training.reducer.weighting
        weighting.weight_loss_instead()
        return weighting.weight

    def _weigh(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
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
        with self._waiting:
            self.unit.group.all_reduce(shared, "mean")  # equal among the processes of tp
        return shared

    def settle(self) -> None:
        """Bring gradients to where the optimizer sees them, averaged over the column."""
        if self._exchanges_in_backward or self._is_exchanged:
            return
        self._is_exchanged = True
        if self.cut.sharded is not None:
            self.cut.sharded.collect()
        self.switcher.training.reducer.exchange_now()

    def clip(
        self, max_norm: float, norm_type: float = 2.0, only: Collection[str] | None = None
    ) -> torch.Tensor:
        """Scale the gradients of the whole model, or of the parameters with these names, so that
        their norm is at most `max_norm`; return what it was."""
        self.settle()
        return clip(self.unit.group, self.cut.holding, max_norm, norm_type, only, self._waiting)

    def _around_step(self, optimizer: torch.optim.Optimizer, step: Step) -> Any:  # noqa: ARG002
        self.settle()
        result = step()
        self._is_exchanged = False
        training = self.switcher.training
        if self._replicas.are_there and can_part(training):
            if training.serving is not None:
                training.serving.update.expect_edits()
            with self._waiting:
                self._replicas.bring_together()
        if self.cut.sharded is not None:
            self.cut.sharded.refresh()
            self._share_buffers()
        return result

    def _share_buffers(self) -> None:
        """Let the processes of fsdp, which have batches of their own, have the first one's buffers,
        as those of dp do."""
        if self.switcher.training.buffers_are_local:
            return
        axis = self.unit.axis("fsdp").get_group()
        for buffer in self.cut.skeleton.buffers():
            with self._waiting:
                dist.broadcast(buffer, group_src=0, group=axis)

    def _zero_grad(self, old: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            old(set_to_none=set_to_none)
            self._is_exchanged = False
            if self.cut.sharded is not None:
                self.cut.sharded.drop()

        return zero_grad

    # -- evaluation ---------------------------------------------------------------------------

    def _evaluate(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                f"rank {self.job.env.rank}: with pp={self.unit.mesh.pp} no process has the whole"
                " model: train with model.train_step(x, y), and call the model itself under"
                " torch.no_grad() only"
            )
        assert self.cut.pipeline is not None
        self._follow_mode()
        with self._autocast():
            return self.cut.pipeline.evaluate(inputs)

    def _follow_mode(self) -> None:
        """Let the stages train or evaluate as the script's model was told to."""
        assert self.cut.pipeline is not None
        for stage in self.cut.pipeline.modules:
            if stage.training != self._own().training:
                stage.train(self._own().training)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _HALVES.get(self._precision)
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    def _own(self) -> nn.Module:
        model = self._model()
        assert model is not None, "the script has dropped its model"
        return model

    # -- the whole model ----------------------------------------------------------------------

    def pieces(self) -> dict[str, Piece]:
        """Return what this process has of the model's state, by the names of the whole."""
        found: dict[str, Piece] = {}
        held = self.cut.holding.held
        for name, value in nn.Module.state_dict(self.cut.skeleton).items():
            known = held.get(self.cut.aliases.get(name, name))
            if known is not None:
                found[name] = Piece(value, known.part, counts=known.counts)
            else:
                found[name] = self.buffer_piece(name, value)
        return found

    def buffer_piece(self, name: str, value: torch.Tensor) -> Piece:
        """Say which part of the whole a buffer is; along fsdp all have the same."""
        part = self.buffer_part(name) or Part(tuple(value.shape))
        return Piece(value, part, counts=self.unit.index("fsdp") == 0)

    def buffer_part(self, name: str) -> Part | None:
        """Return which part of a buffer is here, if it is cut."""
        plan = self.cut.plan
        return plan.buffer_parts.get(name) if plan is not None else None

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        """Return the whole model's state, on every process. Collective within the unit."""
        found, _names = assemble(self.unit.group, self.pieces())
        return {key: found[key] for key in self._keys if key in found}

    def load_state_dict(self, state: dict[str, torch.Tensor], strict: bool = True) -> Any:
        """Load a whole model's state: each process takes its part."""
        mine = {
            name: piece.part.of(state[name])
            for name, piece in self.pieces().items()
            if name in state
        }
        if strict and set(state) != set(self._keys):
            raise UsageError(
                f"load_state_dict: expected {len(self._keys)} names of the whole model, found"
                f" {len(state)}; lacking {sorted(set(self._keys) - set(state))[:3]}, foreign"
                f" {sorted(set(state) - set(self._keys))[:3]}"
            )
        result = self.cut.skeleton.load_state_dict(mine, strict=False)
        self.switcher.training.take_over_values()
        if self.cut.sharded is not None:
            self.cut.sharded.refresh()
        return result
