"""A custom pace: workers take turns, and all workers copy the one whose turn it is.

    paceline run -n 3 examples/own_pace.py

Every H steps the next worker sends its parameters to all other workers. (This is not a good pace:
a worker's steps between its turns are discarded. But it is short, and differs from all built-in
paces.) Its state is a mean of the sent parameters: newcomers receive it, checkpoints contain it.
To make a pace available on the command line, `--pace turns:4`, put it into a package that names it
in an entry point:

    [project.entry-points."paceline.paces"]
    turns = "my_package.turns:TURNS"
"""

from __future__ import annotations

from collections.abc import Sequence

import paceline as pl
import torch
from paceline.extend import (
    SHARE,
    WHOLE,
    Bucket,
    Method,
    Option,
    Pace,
    Setting,
    State,
    register_pace,
)
from torch import nn


class Turns(Method):
    """After every H-th step all workers copy the parameters of one worker."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.weight = setting.number("weight")
        self.means: dict[str, torch.Tensor] = {}  # of the sent parameters, by bucket

    def take(self, buckets: Sequence[Bucket]) -> None:
        super().take(buckets)
        self.means |= {str(bucket.index): bucket.params.clone() for bucket in buckets}

    @property
    def is_due(self) -> bool:
        return self.steps >= (self.rounds + 1) * int(self.setting.pace.value)

    def run_round(self) -> None:
        """Receive into separate memory: if a worker is lost meanwhile, this is called again."""
        giver = self.rounds % self.workers.size
        self.received = [bucket.params.clone() for bucket in self.buckets]
        for values in self.received:
            self.workers.broadcast(values, giver)

    def apply_round(self) -> None:
        for bucket, values in zip(self.buckets, self.received, strict=True):
            bucket.params.copy_(values)
            self.means[str(bucket.index)].lerp_(values, self.weight)

    def agreed(self, bucket: Bucket) -> torch.Tensor:
        """Return the values that `with model.agreed():` uses."""
        return self.means[str(bucket.index)]

    def state(self) -> State:
        return State(shared=self.means)


WEIGHT = Option("weight", SHARE, "of what was given last, in the mean of it all", 0.5)
TURNS = Pace((WEIGHT,), number="the number of local steps", kind=WHOLE, default="4", method=Turns)


def main() -> None:
    register_pace("turns", TURNS)
    pl.init()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pl.distribute(model, optimizer, pace="turns:5[weight=0.9]")
    chance = torch.Generator().manual_seed(pl.rank())
    loss = torch.zeros(())
    for _ in range(40):
        x = torch.randn(32, 8, generator=chance)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pl.check_consistency(model)  # 40 is a multiple of 5: all workers are equal now
    print(f"worker {pl.rank()}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
