"""One process that plays all workers of a pace, in plain torch: what the real ones must compute.

Every imitation gets the initial parameters and a function that takes one step of a worker's own
optimizer on its own batch, and returns what each worker has at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

DTYPE = torch.float64  # so that only a wrong formula makes a difference


def make_model() -> nn.Module:
    torch.manual_seed(3)
    layers = (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return nn.Sequential(*layers).to(DTYPE)


def batch_of(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(5, 6, generator=chance, dtype=DTYPE)
    return x, torch.stack((x[:, 0] * x[:, 1], x.sum(1), x[:, 2].abs()), 1)


def loss_of(model: nn.Module, worker: int, step: int) -> torch.Tensor:
    x, y = batch_of(worker, step)
    return F.mse_loss(model(x), y)


Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@dataclass
class Player:
    """One worker, as it is played."""

    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def put(self, flat: torch.Tensor) -> None:
        with torch.no_grad():
            start = 0
            for param in self.model.parameters():
                param.copy_(flat[start : start + param.numel()].view_as(param))
                start += param.numel()

    def backward(self, step: int) -> torch.Tensor:
        """Compute a gradient; return it flat."""
        self.optimizer.zero_grad()
        loss_of(self.model, self.number, step).backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def step_with(self, flat: torch.Tensor) -> None:
        """Step with another gradient than the own one."""
        start = 0
        for param in self.model.parameters():
            param.grad = flat[start : start + param.numel()].view_as(param).clone()
            start += param.numel()
        self.optimizer.step()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()


def players(count: int, optimizer: Optimizer) -> list[Player]:
    first = make_model()
    models = [copy.deepcopy(first) for _ in range(count)]
    return [Player(n, model, optimizer(model)) for n, model in enumerate(models)]


def mean(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(flats)).mean(0)


def together(team: Sequence[Player], step: int) -> None:
    """Let all take one step with the mean of their gradients."""
    average = mean([player.backward(step) for player in team])
    for player in team:
        player.step_with(average)


def outer(
    team: list[Player],
    steps: int,
    every: int,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    after: int = 0,
) -> None:
    """Local steps with torch's own SGD as the outer optimizer."""
    for step in range(after):
        together(team, step)
    begin = nn.Parameter(team[0].flat.clone())
    nesterov = nesterov and momentum > 0
    optimizer = torch.optim.SGD([begin], lr=lr, momentum=momentum, nesterov=nesterov)
    for step in range(after, steps):
        for player in team:
            player.step(step)
        if (step + 1 - after) % every == 0:
            begin.grad = begin.detach() - mean([player.flat for player in team])
            optimizer.step()
            for player in team:
                player.put(begin.detach())


def fairseq_blocks(team: list[Player], steps: int, every: int, *, momentum: float) -> None:
    """Block momentum as fairseq computes it."""
    begin = team[0].flat.clone()
    change = torch.zeros_like(begin)
    for step in range(steps):
        for player in team:
            player.step(step)
        if (step + 1) % every == 0:
            block = mean([player.flat for player in team]) - begin
            change = momentum * change + (1 - momentum) * block
            begin = begin + (1 + momentum) * change
            for player in team:
                player.put(begin)


def streaming(
    team: list[Player],
    steps: int,
    every: int,
    *,
    delay: int,
    merge: float = 0.0,
    shifts: bool = False,
    outer_lr: float = 0.7,
    momentum: float = 0.9,
) -> None:
    """DiLoCo whose mean is put to use `delay` steps after it was sent."""
    begin = nn.Parameter(team[0].flat.clone())
    optimizer = torch.optim.SGD([begin], lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    sent: torch.Tensor | None = None
    from_where: list[torch.Tensor] = []
    for step in range(1, steps + 1):
        for player in team:
            player.step(step - 1)
        if step % every == 0:
            from_where = [player.flat.clone() for player in team]
            sent = mean(from_where)
        if sent is not None and step % every == delay:
            begin.grad = begin.detach() - sent
            optimizer.step()
            for player, left in zip(team, from_where, strict=True):
                mixed = merge * player.flat + (1 - merge) * begin.detach()
                player.put(begin.detach() + (player.flat - left) if shifts else mixed)
            sent = None


def elastic_averaging(
    team: list[Player], steps: int, every: int, *, alpha: float, beta: float
) -> torch.Tensor:
    """Return the centre."""
    centre = team[0].flat.clone()
    for step in range(steps):
        before = [player.flat.clone() for player in team]
        for player in team:
            player.step(step)
        if (step + 1) % every == 0:
            for player, values in zip(team, before, strict=True):
                player.put(player.flat - alpha * (values - centre))
            centre = (1 - beta) * centre + beta * mean(before)
    return centre


def partial(
    team: list[Player], chosen: Callable[[int], Sequence[int]], steps: int, *, carries: bool = False
) -> None:
    carried = [torch.zeros_like(player.flat) for player in team]
    for step in range(steps):
        members = chosen(step)
        grads = [player.backward(step) for player in team]
        for number, grad in enumerate(grads):
            if carries:
                carried[number] += grad
        sent = carried if carries else grads
        average = mean([sent[number].clone() for number in members])
        for number in members:
            carried[number].zero_()
        for player in team:
            player.step_with(average)


def gossip(team: list[Player], heard_by: Callable[[int, int], Sequence[int]], steps: int) -> None:
    for step in range(steps):
        for player in team:
            player.step(step)
        flats = [player.flat.clone() for player in team]
        for player in team:
            heard = [flats[other] for other in heard_by(player.number, step + 1)]
            player.put(mean([flats[player.number], *heard]))


def coin(seed: int, step: int, index: int) -> float:
    """+1 or -1 for an element: splitmix64 of seed and half the step, turned in odd steps."""
    key = _scatter((_scatter(seed) + step // 2) % 2**64)
    word = _scatter((key + (index // 64) * 0x9E3779B97F4A7C15) % 2**64)
    return 1.0 if (word >> index % 64 & 1) ^ (step % 2) else -1.0


def _scatter(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def vote(
    team: list[Player],
    steps: int,
    indices: Sequence[int],
    buckets: Sequence[torch.Tensor],
    *,
    momentum: float,
    feedback: bool,
    seed: int = 0,
    left: Callable[[int], int] = lambda _: 1 << 30,
) -> int:
    """The majority of signs; `indices` says which place of the coin belongs to an element,
    `buckets` which elements have a scale in common, and `left` how many of the team are left in a
    step. Return how many ties there were."""
    nothing = torch.zeros_like(team[0].flat)
    moments, errors = [nothing.clone() for _ in team], [nothing.clone() for _ in team]
    ties = 0
    for step in range(steps):
        thrown = torch.tensor([coin(seed, step, index) for index in indices], dtype=DTYPE)
        votes, scales = [], []
        for number, player in enumerate(team[: left(step)]):
            grad = player.backward(step)
            moments[number] = momentum * moments[number] + (1 - momentum) * grad
            value = moments[number] + errors[number] if feedback else moments[number]
            sign = value.sign()
            scale = torch.ones_like(value)
            if feedback:
                for bucket in buckets:
                    size = value[bucket].abs()
                    scale[bucket] = size.sum() / (size != 0).sum().clamp(min=1)
                errors[number] = value - scale * sign
            scales.append(scale)
            own = torch.tensor([coin(seed + 1 + number, step, i) for i in indices], dtype=DTYPE)
            votes.append(torch.where(sign == 0, own, sign))
        count = torch.stack(votes).sum(0)
        ties += int((count == 0).sum())
        agreed = torch.where(count == 0, thrown, count.sign()) * mean(scales)
        for player in team[: left(step)]:
            player.step_with(agreed)
    return ties
