"""The other side: plain torch doing the same by hand, as its tutorials do.

Each function takes the whole model and gives back a step: a call with a batch that trains once and
returns the loss (NaN where this process does not see it). What a person must change in a model to
cut it by hand is here as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim import AdamW, Optimizer

from mesh_runs.models import Batch, Block, Gpt, text_loss

Step = Callable[[Batch], float]
RATE = 1e-4


def adamw(params: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer that all contenders use.

    A group of DTensors and one of the others: a fused update takes only one kind at a time.
    """
    cut = [p for p in params if isinstance(p, DTensor)]
    whole = [p for p in params if not isinstance(p, DTensor)]
    return AdamW([{"params": group} for group in (cut, whole) if group], lr=RATE, fused=True)


def plain(model: nn.Module, optimizer: Optimizer) -> Step:
    """Train in the ordinary way: also what DDP and fully_shard want."""

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        loss = text_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def tensor_parallel(model: Gpt) -> tuple[Step, Optimizer]:
    """Cut q, k, v, up, the embedding and the head by rows, out and down by columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.heads //= mesh.size()
        rows = ("attention.q", "attention.k", "attention.v", "mlp.up")
        plan = {name: ColwiseParallel() for name in rows}
        columns = {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
        parallelize_module(block, mesh, {**plan, **columns})
    parallelize_module(
        model,
        mesh,
        {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    optimizer = adamw(list(model.parameters()))
    train = plain(model, optimizer)

    def step(batch: Batch) -> float:
        with loss_parallel():
            return train(batch)

    return step, optimizer


class First(nn.Module):
    """The embeddings and the first blocks."""

    def __init__(self, model: Gpt, end: int) -> None:
        super().__init__()
        self.tokens, self.places, self.blocks = model.tokens, model.places, model.blocks[:end]

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    """The other blocks and the head."""

    def __init__(self, model: Gpt, start: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[start:], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def half(model: Gpt, index: int) -> nn.Module:
    """Return one of two stages with as many blocks each."""
    middle = len(model.blocks) // 2
    return First(model, middle) if index == 0 else Last(model, middle)


def pipeline(model: Gpt, microbatches: int) -> tuple[Step, Optimizer]:
    """Two stages, 1F1B."""
    rank = dist.get_rank()
    module = half(model, rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=text_loss)
    optimizer = adamw(list(module.parameters()))

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch[0])
        else:
            schedule.step(target=batch[1], losses=losses)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else math.nan

    return step, optimizer


def stage_alone(model: Gpt, rank: int, microbatches: int) -> tuple[Step, Optimizer]:
    """One stage's share of a pipelined step without waiting: the lower bound of a step."""
    module = half(model, rank)
    optimizer = adamw(list(module.parameters()))
    width = model.norm.normalized_shape[0]
    kept: dict[torch.Size, Tensor] = {}

    def microbatch(x: Tensor, y: Tensor) -> float:
        between = kept.setdefault(x.shape, torch.randn(*x.shape, width))
        if rank == 0:
            module(x).backward(between)
            return math.nan
        loss = text_loss(module(between.detach().requires_grad_()), y) / microbatches
        loss.backward()
        return loss.item()

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        parts = zip(batch[0].chunk(microbatches), batch[1].chunk(microbatches), strict=True)
        loss = sum(microbatch(x, y) for x, y in parts)
        optimizer.step()
        return loss

    return step, optimizer


def sharded(model: Gpt) -> tuple[Step, Optimizer]:
    """fully_shard, block by block."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(list(model.parameters()))
    return plain(model, optimizer), optimizer


def replicated(model: Gpt) -> tuple[Step, Optimizer]:
    """DDP."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(list(model.parameters()))
    return plain(wrapped, optimizer), optimizer
