"""pl.GradScaler: torch's GradScaler, in every pace.

It is used like torch's own. Three things differ for an optimizer whose model is distributed:

    the scale    is removed from gradients as they arrive at their parameters, during backward, and
                 not in `unscale_`: what is sent, what servers apply and what a pace keeps (momentum
                 of signs, gradients carried over) is unscaled
    `unscale_`   only checks whether gradients are finite; so an optimizer that unscales in its own
                 kernel (fused=True) has nothing to do either
    skipping     is decided by all workers together

TorchScaler handles torch's own GradScaler where servers or a method run the step.

SKIPPING. How workers come to the same decision about a step depends on what they have in common at
the end of backward:

    averages      all have the same ones, to the bit, and so decide alike; where an exchange hides
                  infinities (a vote on signs has none), the used-parameter mask reports them
    same steps    each has gradients of its own, but all take the same steps (local steps, gossip):
                  they exchange one number for each step
    nothing       workers do not wait for each other (async, ssp, hogwild), rounds have other
                  members each time (backup), or members change between local steps: there is no
                  common step. Each worker decides about its own update, for all servers at once. A
                  skipped update still COUNTS, as a step in which nothing changes, so that clocks
                  and rounds stay where the others expect them.

Gradients are unscaled by then (weighting.py), so that workers may have different scales.

ON A DEVICE the scale and what was found stay there. Where all workers have the same averages,
`unscale_` does not wait for the device; `step` waits once, as torch's does, and not at all for an
optimizer that skips by itself (fused=True).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import OptState

from paceline.comm.devices import devices_of
from paceline.comm.group import Group
from paceline.data_parallel.checks.gradients import all_finite
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.setup import TrainingSetup
from paceline.data_parallel.weighting import expect_scaled_losses, scaled
from paceline.errors import UsageError
from paceline.runtime.job import joined


class Bound(Protocol):
    """What an optimizer is bound to: the pace switcher of its model."""

    @property
    def skipping(self) -> Skipping: ...


# Weak, as a switcher refers to its optimizer; the optimizer and the model keep it.
_bound = weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Bound]]()


def bind(optimizer: torch.optim.Optimizer, to: Bound) -> None:
    """Register the pace switcher of an optimizer, for scalers."""
    _bound[optimizer] = weakref.ref(to)


def _bound_to(optimizer: torch.optim.Optimizer) -> Bound | None:
    to = _bound.get(optimizer)
    return None if to is None else to()


class GradScaler(torch.amp.GradScaler):
    """Scale the loss so that gradients do not vanish in float16; skip steps that overflow.

    Used like torch.amp.GradScaler, with the same arguments; correct at every pace. All workers call
    `step`. With local steps they exchange one number for it; where gradients are averaged, or where
    workers do not wait for each other, nothing.

    >>> scaler = pl.GradScaler()
    >>> scaler.scale(torch.ones(1, requires_grad=True).sum()).item()
    65536.0
    """

    def __init__(self, device: str | None = None, **settings: Any) -> None:
        mine = joined()
        super().__init__(device or ("cpu" if mine is None else mine.device.type), **settings)
        if self.is_enabled():
            expect_scaled_losses()

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or several."""
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            assert self._scale is not None
            return scaled(outputs, self._scale.to(outputs.device))
        if isinstance(outputs, list | tuple):
            return type(outputs)(map(self.scale, outputs))
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        bound = _bound_to(optimizer)
        if bound is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        grads, skipping = _grads_of(optimizer), bound.skipping
        if devices_of(grads) and skipping.decides_alike:
            return _find_on_devices(grads, inv_scale.new_ones(()), found_inf)
        found_inf.fill_(float(skipping.is_due(not all_finite(grads))))
        return {found_inf.device: found_inf}

    def step(self, optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
        """Take the optimizer's step, or skip it on all workers."""
        bound = _bound_to(optimizer)
        if bound is None or not self.is_enabled():
            return super().step(optimizer, *arguments, **options)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        state["stage"] = OptState.STEPPED
        if bound.skipping.optimizer_skips and devices_of(state["found_inf_per_device"].values()):
            return _step_unless_found(optimizer, state["found_inf_per_device"], arguments, options)
        if not any(found.item() for found in state["found_inf_per_device"].values()):
            return optimizer.step(*arguments, **options)
        if bound.skipping.counts:
            step_with_nothing(optimizer)
        return None


class TorchScaler:
    """Detects a GradScaler of torch's on an optimizer, and unscales for it or raises an error.

    torch asks an optimizer whether it unscales by itself. Of one that does, torch always calls the
    step, and puts the scale and whether anything was infinite into its attributes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, why_not: str) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._why_not = why_not
        self._is_ours = not getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def close(self) -> None:
        """Restore the optimizer."""
        optimizer = self._optimizer()
        if self._is_ours and optimizer is not None:
            del optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]

    def finds_nothing(self, optimizer: torch.optim.Optimizer) -> bool:
        """Unscale gradients if a scaler requests it; return False if some are infinite."""
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return True
        if self._why_not:
            raise UsageError(
                f"torch.amp.GradScaler: {self._why_not}; use pl.GradScaler in its place, which is"
                " called in the same way"
            )
        scale = optimizer.grad_scale  # type: ignore[attr-defined]
        optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
        if scale is not None and not found.item():
            inverse = scale.double().reciprocal().float()  # as torch does it
            torch._foreach_mul_(_grads_of(optimizer), inverse.item())
        return not found.item()


def _find_on_devices(
    grads: list[torch.Tensor], one: torch.Tensor, found_inf: torch.Tensor
) -> dict[torch.device, torch.Tensor]:
    """Return for each device whether its gradients are finite: 0 there if they are."""
    found: dict[torch.device, torch.Tensor] = {}
    kinds = {(grad.device, grad.dtype) for grad in grads}
    for device, dtype in sorted(kinds, key=str):
        there = [grad for grad in grads if (grad.device, grad.dtype) == (device, dtype)]
        flag = found.setdefault(
            device, found_inf if device == found_inf.device else torch.zeros((), device=device)
        )
        # As torch's scaler does it, with a scale of one: it has been removed already.
        torch._amp_foreach_non_finite_check_and_unscale_(there, flag, one.to(device))
    return found


def _step_unless_found(
    optimizer: torch.optim.Optimizer,
    found: dict[torch.device, torch.Tensor],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Let the optimizer skip the step on the device, as torch's scaler does."""
    first, *others = found.values()
    for other in others:
        first = first + other.to(first.device, non_blocking=True)
    optimizer.grad_scale, optimizer.found_inf = None, first  # type: ignore[attr-defined]
    try:
        return optimizer.step(*arguments, **options)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def _grads_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param.grad for param in params if param.grad is not None]


def choose_skipping(
    setup: TrainingSetup, reducer: Reducer, optimizer: torch.optim.Optimizer
) -> tuple[Skipping, TorchScaler | None]:
    """Return how the workers agree about skipped steps, and what handles torch's own GradScaler:
    None if torch's decisions, from the same averages, are the same everywhere."""
    traits = setup.exchange.traits
    rule = setup.serving.rule if setup.serving is not None else None
    rounds = rule is not None and rule.backup > 0
    narrows = rule is not None and rule.aggregate and setup.options.wire == "fp16"
    # In an elastic job a worker may join between two numbers that the others exchange.
    comes_and_goes = setup.job.elastic.is_on and (traits.may_be_local or narrows)
    is_free = setup.is_free or setup.is_common or rounds or comes_and_goes
    skipping = Skipping(setup.group, reducer, setup.job.ask_unit, is_free=is_free, asks=narrows)
    skipping.has_unit = bool(setup.job.part_suffix)
    why_not = ""
    if setup.method is not None:
        why_not = "workers have gradients of their own, and would not skip the same steps"
    elif rounds or narrows:
        why_not = "not all workers see the same averages, so that their scales would diverge"
    elif setup.job.part_suffix:
        why_not = "each process sees the gradients of its local shards only"
    elif traits.keeps_residual:
        why_not = "what a codec leaves out would be sent with the scale of another step"
    elif rule is None:
        skipping.optimizer_skips = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        return skipping, None
    return skipping, TorchScaler(optimizer, why_not)


class Skipping:
    """Decides which steps of one training are skipped."""

    def __init__(
        self,
        group: Group,
        reducer: Reducer,
        ask_unit: Callable[[list[bool]], list[bool]],
        *,
        is_free: bool,
        asks: bool,
    ) -> None:
        self._group = group
        self._reducer = reducer
        self._ask_unit = ask_unit
        self._is_free = is_free  # the workers have nothing in common
        self._asks = asks  # averages may differ: some workers received rounded ones
        self._found = torch.zeros(1)
        self.has_unit = False  # other processes have other shards
        self.optimizer_skips = False  # by what a scaler has found on the device

    @property
    def counts(self) -> bool:
        """Whether a skipped step counts as a step of the pace."""
        return self._is_free

    @property
    def decides_alike(self) -> bool:
        """Whether all workers have the same averages, and nothing else to consider."""
        result = self._reducer.result
        considers = self._is_free or self._asks or self.has_unit or result.is_own
        return not (considers or result.has_hidden_nonfinite or self._reducer.weighting.is_in_loss)

    def is_due(self, found: bool) -> bool:
        """Return whether to skip the step, given what this worker found. May be collective."""
        if self._reducer.weighting.is_in_loss:
            raise UsageError(
                f"rank {self._group.ranks[self._group.rank]}: GradScaler unscales gradients as they"
                " arrive at their parameters, which is not possible for stages (pp) and shards"
                " (fsdp); compute in bf16, which needs no scale"
            )
        # All processes of a unit skip the same steps.
        return any(self._ask_unit([self._is_due_here(found)]))

    def _is_due_here(self, found: bool) -> bool:
        if self._is_free:
            return found
        result = self._reducer.result
        if not (self._asks or result.is_own):
            return found or result.has_hidden_nonfinite
        self._found.fill_(float(found))
        self._group.all_reduce(self._found, "max")
        return bool(self._found.item())


def step_with_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Take a step in which no parameter has a gradient; restore the gradients afterwards."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        optimizer.step()
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
