"""Models in stages, written by hand, and the same models in one process.

Every kind of thing that crosses from stage to stage is in one of them: skip connections, integers,
bools, tensors without gradients, views, tensors on which no gradient depends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, VOCABULARY, CONTEXT = 12, 20, 6


class Stage(nn.Module):
    """What splitting makes: tensors in, a tuple of tensors out."""

    def unflatten(self, outputs: Any) -> Any:
        return outputs[0]


class Layers(Stage):
    """Part of a chain."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return (x,)


def make_chain(num_stages: int) -> list[Stage]:
    """Uneven stages: of one, two, three layers."""
    counts = [1 + index % 3 for index in range(num_stages)]
    starts = [sum(counts[:index]) for index in range(num_stages)]
    pairs = zip(starts, counts, strict=True)
    return [Layers([f"layer{start + n}" for n in range(count)]) for start, count in pairs]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, length, 3, 2, WIDTH // 2).transpose(1, 3)
        q, k, v = heads.unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(Stage):
    """Part of a transformer with one matrix for its first and last layer."""

    def __init__(self, index: int, num_stages: int, embedding: nn.Embedding, dropout: float):
        super().__init__()
        self.index, self.is_last = index, index == num_stages - 1
        if index == 0 or self.is_last:
            self.embedding = embedding
        self.add_module(f"block{index}", Block(dropout))
        if self.is_last:
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        if self.index == 0:
            tokens, mask = x, mask[:, None, None, :].expand(-1, -1, x.shape[1], -1)  # a bool tensor
            x = self.embedding(tokens)
        x = self.get_submodule(f"block{self.index}")(x, mask)
        if self.is_last:
            return (F.linear(self.norm(x), self.embedding.weight),)
        return x, mask


def make_transformer(num_stages: int, dropout: float = 0.0) -> list[Stage]:
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    return [Transformer(i, num_stages, embedding, dropout) for i in range(num_stages)]


class Ladder(Stage):
    """Part of a model in which much crosses.

    Its inputs: x, a skip connection from the first to the last stage, integers, a float without
    gradient, and a tensor that is used only where gradients stop.
    """

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        self.index, self.is_last = index, index == num_stages - 1
        setattr(self, f"inner{index}", nn.Linear(WIDTH, WIDTH))
        setattr(self, f"beside{index}", nn.Linear(WIDTH, WIDTH))
        if index == 0:
            self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        inner, beside = (getattr(self, f"{name}{self.index}") for name in ("inner", "beside"))
        if self.index == 0:
            x, numbers = given
            x, skip, constant, stopped = inner(x), beside(x), x.sum(1), self.unused(x)
        else:
            x, skip, numbers, constant, stopped = given
            x = F.relu(x.t(), inplace=True)  # changes what it was given
            x = inner(x) + 0.1 * torch.sin(constant)[:, None]
            x = inner(torch.tanh(x))  # a weight twice
        if self.is_last:
            aside = beside(torch.ones_like(x))  # depends on no input
            return x + 0.1 * skip * numbers[:, None] + stopped.detach() + aside, numbers
        return x.t(), skip, numbers + 1, constant, stopped

    def unflatten(self, outputs: Any) -> Any:
        return {"x": outputs[0], "numbers": outputs[1]}


def make_ladder(num_stages: int) -> list[Stage]:
    return [Ladder(index, num_stages) for index in range(num_stages)]


# -- batches and losses ---------------------------------------------------------------------------


def chain_batch(rows: int) -> tuple[tuple[Tensor, ...], Any]:
    return (torch.randn(rows, WIDTH).double(),), torch.randn(rows, WIDTH).double()


def transformer_batch(rows: int, length: int = CONTEXT) -> tuple[tuple[Tensor, ...], Any]:
    tokens = torch.randint(VOCABULARY, (rows, length + 1))
    return (tokens[:, :-1], torch.rand(rows, length) > -0.1), tokens[:, 1:].contiguous()


def ladder_batch(rows: int) -> tuple[tuple[Tensor, ...], Any]:
    x = torch.randn(rows, WIDTH).double()
    return (x, torch.randint(5, (rows,))), {"y": torch.randn(rows, WIDTH).double(), "power": 2}


def transformer_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def ladder_loss(output: Any, target: Any) -> Tensor:
    return ((output["x"] - target["y"]) ** target["power"]).mean() + output["numbers"].sum() * 0


MODELS: dict[str, tuple[Callable[..., list[Stage]], Callable[..., Any], Callable[..., Tensor]]] = {
    "chain": (make_chain, chain_batch, F.mse_loss),
    "transformer": (make_transformer, transformer_batch, transformer_loss),
    "ladder": (make_ladder, ladder_batch, ladder_loss),
}
SHARED = {"transformer": {"embedding.weight": (0, -1)}}


def make(name: str, num_stages: int) -> list[Stage]:
    """Make all stages of a model, the same on every rank."""
    torch.manual_seed(3)
    return [stage.double() for stage in MODELS[name][0](num_stages)]


def shared_of(name: str, num_stages: int) -> dict[str, list[int]]:
    return {k: [index % num_stages for index in v] for k, v in SHARED.get(name, {}).items()}


def taken(stages: list[Stage], indices: list[int]) -> list[Stage]:
    """Copy the stages of one process out of all: what they share stays shared."""
    return list(copy.deepcopy(nn.ModuleList(stages[index] for index in indices)))  # type: ignore[arg-type]


def run_whole(stages: list[Stage], inputs: tuple[Tensor, ...]) -> Any:
    for stage in stages:
        inputs = stage(*inputs)
    return stages[-1].unflatten(inputs)
