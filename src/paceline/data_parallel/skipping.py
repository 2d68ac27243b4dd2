"""Steps that a GradScaler leaves out because a gradient is infinite: decided alike by all workers.

How they come to the same decision depends on what they have in common at the end of backward:

    averages      all have the same ones, to the bit, and so see the same; where an exchange hides
                  infinities (a vote on signs has none), the roll call has told of them
    ASKED         each has gradients of its own, but all take the same steps (local steps, gossip):
                  one number for each step says whether anybody found something
    nothing       nobody waits for anybody (async, ssp, hogwild), rounds have other members each
                  time (backup), or members come and go between local steps: there is no step that
                  all take. Each worker decides about its own update, for all servers at once; and
                  an update that is left out still COUNTS, as a step in which nothing changes, so
                  that clocks and meetings stay where the others expect them.

Gradients carry no scale by then (weighting.py), so that workers may differ in it without harm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.collectives.group import Group
from paceline.data_parallel.reducer import Reducer
from paceline.errors import UsageError


class Skipping:
    """Decides about the steps of one training."""

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
        self._is_free = is_free  # nothing in common
        self._asks = asks  # averages may differ: they were rounded on the way to some
        self._found = torch.zeros(1)

    @property
    def counts(self) -> bool:
        """Whether a step that is left out is one, as far as the pace is concerned."""
        return self._is_free

    def is_due(self, found: bool) -> bool:
        """Say whether the step is left out, given what this worker found. Perhaps collective."""
        if self._reducer.weighting.is_in_loss:
            raise UsageError(
                f"rank {self._group.ranks[self._group.rank]}: GradScaler takes the scale off"
                " gradients as they arrive at their parameters, which those of stages (pp) and"
                " shards (fsdp) do not; compute in bf16, which needs no scale"
            )
        # All parts of a model leave out the same steps.
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
    """Take a step in which no parameter has a gradient; afterwards they are as they were."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        optimizer.step()
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
