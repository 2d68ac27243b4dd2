"""The models to split: GPTs as people write them, and a stack of uneven layers.

Nothing in them knows of any parallelism. by_hand.py changes them from outside for the contenders
that are split by hand; Paceline gets them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
CONTEXT = 128
VOCABULARY = 256


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, self.heads, self.head_width)
        q = self.q(x).view(shape).transpose(1, 2)
        k = self.k(x).view(shape).transpose(1, 2)
        v = self.v(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each after a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A decoder with a head of its own."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Uneven(nn.Module):
    """A stack whose early layers take 10 × as long as the later ones."""

    def __init__(self, layers: int, width: int, heavy: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Mlp10(width, 10 if number < heavy else 1) for number in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Mlp10(nn.Module):
    """Two matrices with a way around them; `times` as wide inside."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width * times), nn.Linear(width * times, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.down(F.relu(self.up(x)))


def text_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def texts(batch: int, seed: int) -> Batch:
    """Return random texts and, for each token, the next one."""
    random = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCABULARY, (batch, CONTEXT + 1), generator=random)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass(frozen=True)
class Size:
    """A GPT that is measured."""

    title: str
    make: Callable[[], Gpt]


SIZES = {
    "tiny": Size("GPT d 64, 4 layers", lambda: Gpt(64, 4, 4)),  # for smoke tests
    "small": Size("GPT d 384, 6 layers, context 128", lambda: Gpt(384, 6, 6)),
    "large": Size("GPT d 640, 10 layers, context 128", lambda: Gpt(640, 10, 10)),
}


def title_of(name: str) -> str:
    """Name a model, with its number of parameters."""
    with torch.device("meta"):
        count = sum(p.numel() for p in SIZES[name].make().parameters())
    return f"{SIZES[name].title}, {count / 1e6:.1f} M parameters"
