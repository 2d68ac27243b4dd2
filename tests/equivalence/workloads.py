"""Small models with their data, and the three ways to train them that are compared.

plain       one process, the whole batch
emulated    one process that plays all workers: each one's gradient by itself, added up in rank
            order, divided once. This is what the workers must compute, to the bit
a rank      (test files) the part of one worker, through pl.distribute
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 50
BATCH = 12  # of all workers together: 1, 2, 3 and 4 workers get equal parts


class Residual(nn.Module):
    """Two convolutions with batch norms and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a LayerNorm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class TinyGPT(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, vocabulary: int = 23, width: int = 16, length: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions)))


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make the same model wherever it is asked for."""
    torch.manual_seed(7)
    if kind == "mlp":
        model = nn.Sequential(nn.Linear(10, 33), nn.Tanh(), nn.Linear(33, 20), nn.Tanh())
        model.append(nn.Linear(20, 5))
    elif kind == "wide":  # weights so large that their gradients are computed in the bucket
        model = nn.Sequential(nn.Linear(10, 270), nn.Tanh(), nn.Linear(270, 270), nn.Tanh())
        model.extend(
            [nn.Linear(270, 270, bias=False), nn.Unflatten(1, (2, 135)), nn.Linear(135, 5)]
        )
        model.append(nn.Flatten())
    elif kind == "resnet":
        model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), Residual(6), nn.AvgPool2d(2))
        model.extend([Residual(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)])
    else:
        model = TinyGPT()
    return model.to(dtype)


def batch_of(
    kind: str, step: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole batch of one step."""
    random = torch.Generator().manual_seed(1000 + step)
    if kind == "gpt":
        text = torch.randint(23, (BATCH, 9), generator=random)
        return text[:, :-1], text[:, 1:]
    shape = (BATCH, 3, 8, 8) if kind == "resnet" else (BATCH, 10)
    x = torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
    return x, torch.randint(5, (BATCH,), generator=random)


def part_of(
    batch: tuple[torch.Tensor, torch.Tensor], rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    size = BATCH // world_size
    x, y = batch
    return x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size]


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=2e-3),
    "fused adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=2e-3, fused=True),
}

Result = tuple[list[float], dict[str, torch.Tensor]]  # loss of each step, the trained state


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_plain(
    kind: str, optimizer_name: str, dtype: torch.dtype = torch.float32, steps: int = STEPS
) -> Result:
    """Train in one process with the whole batch."""
    model = make_model(kind, dtype)
    optimizer = OPTIMIZERS[optimizer_name](model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(kind, step, dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state_of(model)


def train_emulated(kind: str, optimizer_name: str, world_size: int, steps: int = STEPS) -> Result:
    """Play all workers in one process; losses are those of rank 0, buffers too."""
    workers = [make_model(kind) for _ in range(world_size)]
    first = workers[0]
    optimizer = OPTIMIZERS[optimizer_name](first)
    losses = []
    for step in range(steps):
        all_gradients = []
        for rank, model in enumerate(workers):
            model.load_state_dict(copy.deepcopy(first.state_dict()) if rank else first.state_dict())
        for rank, model in enumerate(workers):
            model.zero_grad()
            loss = loss_of(model, part_of(batch_of(kind, step), rank, world_size))
            loss.backward()
            all_gradients.append([p.grad.clone() for p in model.parameters()])
            if rank == 0:
                losses.append(loss.item())
        for param, *gradients in zip(first.parameters(), *all_gradients, strict=True):
            total = gradients[0]
            for gradient in gradients[1:]:
                total = total + gradient
            param.grad = total / world_size
        optimizer.step()
    return losses, state_of(first)
