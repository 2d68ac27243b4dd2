"""Hogwild: all workers of a host update the same parameters, without locks (Niu et al. 2011).

There is one copy of the parameters, in memory that all workers map. Each computes gradients from
the values that it reads there, and its own optimizer, with a state of its own, writes the update
there at once. Nothing is averaged and no worker waits. Where two workers write the same value at
the same time, one of the updates may be lost: rare when updates are sparse, and tolerable when not.

Every `agree` steps the workers agree all the same, on buffers and on stopping; so no worker is
ahead of another by more than that many steps.
"""

from __future__ import annotations

import torch

from paceline.pace.exchange import Bucket
from paceline.pace.method import Method, Setting


class Hogwild(Method):
    """Nothing to exchange: the parameters are the same memory."""

    shares_params = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.agrees_every = int(setting.number("agree"))

    def describe(self) -> str:
        return (
            f"one copy of the parameters, updated without locks, agreement every"
            f" {self.agrees_every} steps"
        )

    @property
    def is_due(self) -> bool:
        return self.steps >= (self.rounds + 1) * self.agrees_every

    def agreed(self, bucket: Bucket) -> torch.Tensor:
        return bucket.params.clone()
