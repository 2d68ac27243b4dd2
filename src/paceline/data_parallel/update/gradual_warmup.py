"""Learning rates for large batches: scaled with the number of workers, and reached gradually.

With w workers that keep their batch size the global batch is w × as large, and so may be the step
(Goyal et al. 2017); at the beginning such a step is too long. The rate therefore starts at that of
one worker and grows linearly to the scaled one.

The scaled rate becomes the optimizer's initial one, so that schedulers created afterwards start
from it: torch's own LinearLR does the rest, and composes with all of torch's schedulers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LinearLR

from paceline.errors import UsageError
from paceline.runtime.job import current

_RULES = ("linear", "sqrt")


class GradualWarmup(LinearLR):
    """A torch scheduler for the learning rates of one worker: they grow over `warmup_steps` calls
    of `step()` to those for all workers. The factor is the number of workers (rule "linear") or its
    square root ("sqrt"). `workers`: that number, by default the one that the job started with. With
    `warmup_steps=0` the rates are scaled at once.

    Create it before other schedulers of the same optimizer, which then start from the scaled rate:
    SequentialLR([GradualWarmup(...), CosineAnnealingLR(...)], milestones=[warmup_steps]).

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    >>> warmup = pl.GradualWarmup(optimizer, warmup_steps=2, workers=4)
    >>> for _ in range(4):
    ...     print(optimizer.param_groups[0]["lr"])
    ...     optimizer.step()
    ...     warmup.step()
    0.5
    1.25
    2.0
    2.0
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_steps: int,
        *,
        rule: str = "linear",
        workers: int | None = None,
        last_epoch: int = -1,
    ) -> None:
        if rule not in _RULES:
            raise UsageError(f"GradualWarmup(rule={rule!r}): expected 'linear' or 'sqrt'")
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise UsageError(
                f"GradualWarmup(warmup_steps={warmup_steps!r}): expected a whole number of steps,"
                " 0 or more"
            )
        # In an elastic job resize_lr= follows later changes, counted from this same number.
        count = current().env.world_size if workers is None else workers
        if count < 1:
            raise UsageError(f"GradualWarmup(workers={count}): expected 1 or more")
        factor = float(count) if rule == "linear" else math.sqrt(count)
        if last_epoch == -1:
            for group in optimizer.param_groups:
                _scale(group, factor)
        super().__init__(
            optimizer,
            start_factor=1.0 / factor if warmup_steps else 1.0,
            end_factor=1.0,
            total_iters=max(warmup_steps, 1),
            last_epoch=last_epoch,
        )


def _scale(group: dict[str, Any], factor: float) -> None:
    """Set a group to the scaled rate."""
    rate = group["lr"]
    if isinstance(rate, torch.Tensor):  # other objects may hold this tensor
        rate.mul_(factor)
        group["initial_lr"] = rate.clone()
    else:
        group["lr"] = group["initial_lr"] = rate * factor
