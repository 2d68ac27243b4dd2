"""Models, batches and the one process that sharded training is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from paceline.model_parallel.fsdp.fully_sharded import FullyShardedModel
from paceline.model_parallel.sharding.layout import SliceSpec

ROWS = 12  # of a global batch; divides by 2, 3 and 4


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 6)
    )


def uneven() -> nn.Module:
    """No dimension divides; one is smaller than the number of shards."""
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1), nn.Tanh(), nn.Linear(1, 6))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.mlp(x))


class Transformer(nn.Module):
    """With one table for the words that come in and those that go out."""

    def __init__(
        self, width: int = 12, depth: int = 2, words: int = 11, dropout: float = 0
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def made(maker: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return maker().to(dtype)


def batch(model: nn.Module, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    if isinstance(model, Transformer):
        ids = torch.randint(11, (ROWS, 6), generator=generator)
        return ids[:, :-1], ids[:, 1:]
    x = torch.randn(ROWS, 6, generator=generator, dtype=next(model.parameters()).dtype)
    return x, x.flip(1)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if isinstance(model, Transformer):
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    return nn.functional.mse_loss(model(x), y)


def sharded(model: nn.Module) -> FullyShardedModel:
    if not dist.is_initialized():
        dist.init_process_group("paceline")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    parts = {name: SliceSpec(tuple(param.shape)) for name, param in model.named_parameters()}
    return FullyShardedModel(model, mesh, parts)


def move_to_bucket(shards: FullyShardedModel) -> torch.Tensor:
    """Put the plain parameters behind each other into one memory, as data parallelism does."""
    plain = [held.tensor for _, held in shards.shards.items()]
    bucket = torch.cat([param.detach().flatten() for param in plain])
    pieces = bucket.split([param.numel() for param in plain])
    for param, piece in zip(plain, pieces, strict=True):
        param.data = piece.view(param.shape)
    shards.refresh()
    return bucket


def assert_holds(
    shards: FullyShardedModel, whole: dict[str, torch.Tensor], **tolerance: float
) -> None:
    """Compare what this process holds with the same parts of a whole model."""
    for name, held in shards.shards.items():
        torch.testing.assert_close(
            held.tensor.detach(), held.spec.of(whole[name].detach()), **tolerance
        )
