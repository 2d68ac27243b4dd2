"""The models that are trained in the benchmarks, with their batches and losses.

    python bench/models.py                 their sizes

Sizes are those of ordinary small trainings: an MLP whose 100 MB of gradients come quickly, a ResNet
that computes long on few parameters, a GPT between them, and a stack of very many small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class _Block(nn.Module):
    """Two 3x3 convolutions and a way around them, as in ResNet-18."""

    def __init__(self, wide_in: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(wide_in, wide, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or wide_in != wide:
            shrink = nn.Conv2d(wide_in, wide, 1, stride, bias=False)
            self.around = nn.Sequential(shrink, nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.around(x))


def resnet(width: int = 32) -> nn.Module:
    """ResNet-18's layout for images of 32 x 32."""
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks: list[nn.Module] = []
    wide = width
    for stage in range(4):
        to = width << stage
        blocks += [_Block(wide, to, 1 if stage == 0 else 2), _Block(to, to, 1)]
        wide = to
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 10))


class _Attention(nn.Module):
    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(wide, 3 * wide, bias=False)
        self.out = nn.Linear(wide, wide, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        many, length, wide = x.shape
        shape = (many, length, 3, self.heads, wide // self.heads)
        q, k, v = self.project(x).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(many, length, wide))


class _Layer(nn.Module):
    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.attention = _Attention(wide, heads)
        grow, shrink = nn.Linear(wide, 4 * wide, bias=False), nn.Linear(4 * wide, wide, bias=False)
        self.mlp = nn.Sequential(grow, nn.GELU(), shrink)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A decoder whose embedding is also its last layer: one tied weight."""

    def __init__(self, wide: int, layers: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, wide), nn.Embedding(context, wide)
        self.layers = nn.Sequential(*(_Layer(wide, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(wide)
        self.last = nn.Linear(wide, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.last.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        y = self.last(self.norm(self.layers(self.tokens(x) + self.places(places))))
        return y.flatten(0, 1)


class Stack(nn.Module):
    """Many small layers: what a reducer costs for each tensor shows here.

    A part of each layer's output is added to its input, because the values of a plain stack this
    deep vanish, and the smallest floats are slow.
    """

    def __init__(self, layers: int, wide: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(wide, wide) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x


def mlp() -> nn.Module:
    wide = [1024, 3072, 3072, 3072, 1024]
    layers: list[nn.Module] = []
    for before, after in zip(wide, wide[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _images(batch: int) -> Batch:
    return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def _texts(batch: int) -> Batch:
    text = torch.randint(256, (batch, 129))
    return text[:, :-1].contiguous(), text[:, 1:].flatten()


@dataclass(frozen=True)
class Task:
    """A model, how many samples each worker takes in a step, and how to make them."""

    title: str
    model: Callable[[], nn.Module]
    batch: int
    make_batch: Callable[[int], Batch]

    def batches(self, count: int) -> list[Batch]:
        return [self.make_batch(self.batch) for _ in range(count)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)


def _vectors(width: int) -> Callable[[int], Batch]:
    return lambda batch: (torch.randn(batch, width), torch.randint(width, (batch,)))


TASKS = {
    "mlp": Task("MLP 1024-3072-3072-3072-1024", mlp, 64, _vectors(1024)),
    "resnet": Task("ResNet-18 layout, width 32, 32 x 32", resnet, 32, _images),
    "gpt": Task("GPT d 384, 6 layers, context 128", lambda: Gpt(384, 6, 6, 256, 128), 4, _texts),
    "stack": Task("250 Linear layers of 64 with bias", lambda: Stack(250, 64), 64, _vectors(64)),
}


def main() -> None:
    for name, task in TASKS.items():
        tensors = list(task.model().parameters())
        millions = sum(tensor.numel() for tensor in tensors) / 1e6
        print(f"{name:8} {task.title:40} {millions:6.2f} M in {len(tensors)} tensors", end="")
        print(f", batch {task.batch}")


if __name__ == "__main__":
    main()
