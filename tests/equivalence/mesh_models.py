"""Small models with their data for meshes, and one process that computes what a mesh must compute.

The reference takes a batch in equal parts, one after the other, and averages losses and gradients.
For models that treat samples one by one the number of parts changes nothing but the order of
adding: they are compared with the whole batch. Batch norm takes its statistics from what is
computed together, so the reference must cut the batch as the mesh does: a part for each share of
dp and fsdp, and in it one for each microbatch. Its buffers are those of the first share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS = 20
BATCH = 16  # of all workers together
MICROBATCHES = 4  # 2 samples each with two copies of a pipeline
CLASSES, LENGTH = 8, 6
AXES = ("dp", "pp", "fsdp", "tp")  # slowest first


class Block(nn.Module):
    """Attention with one matrix for q, k and v, and a feed-forward layer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        shape = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Two convolutions with batch norms and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """Four residual blocks on images of 4 x 4."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(4)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((12, 32), (32, 24), (24, 32), (32, 16), (16, CLASSES)):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "mlp": mlp,
    "resnet": ResNet,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3),
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=1.0),  # what it subtracts is the gradient
}


def make_model(kind: str, dtype: torch.dtype) -> nn.Module:
    """Make the same model wherever it is asked for."""
    torch.manual_seed(7)
    return MODELS[kind]().to(dtype)


def batch_of(kind: str, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the whole batch of one step."""
    random = torch.Generator().manual_seed(1000 + step)
    if kind == "transformer":
        text = torch.randint(CLASSES, (BATCH, LENGTH + 1), generator=random)
        return text[:, :-1], text[:, 1:]
    shape = (BATCH, 3, 4, 4) if kind == "resnet" else (BATCH, 12)
    x = torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
    return x, torch.randint(CLASSES, (BATCH,), generator=random)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over all samples, and over all tokens of a text."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Shares:
    """How a mesh cuts a batch, worked out from its text alone."""

    sizes: tuple[int, int, int, int]

    @classmethod
    def of(cls, mesh: str) -> Shares:
        given = dict(axis.split("=") for axis in mesh.split(","))
        assert set(given) <= set(AXES), mesh
        return cls(tuple(int(given.get(axis, 1)) for axis in AXES))

    @property
    def unit_size(self) -> int:
        _, pp, fsdp, tp = self.sizes
        return pp * fsdp * tp

    @property
    def num_workers(self) -> int:
        return self.sizes[0] * self.unit_size

    @property
    def is_pipelined(self) -> bool:
        return self.sizes[1] > 1

    @property
    def count(self) -> int:
        """Into how many shares a batch is cut: along dp and fsdp."""
        return self.sizes[0] * self.sizes[2]

    @property
    def parts(self) -> int:
        """How many pieces of a batch are each computed at once."""
        return self.count * (MICROBATCHES if self.is_pipelined else 1)

    def cuts(self, model: str) -> bool:
        """Tell whether no process may hold the whole model; tp need not cut convolutions."""
        _, pp, fsdp, tp = self.sizes
        return pp * fsdp * (1 if model == "resnet" else tp) > 1

    def index(self, number: int) -> int:
        """Return which share a worker has."""
        _, _, fsdp, tp = self.sizes
        copy, place = divmod(number, self.unit_size)
        return copy * fsdp + place // tp % fsdp

    def mine(self, whole: Tensor, number: int) -> Tensor:
        return whole.chunk(self.count)[self.index(number)]


@dataclass(frozen=True)
class Case:
    """What is trained."""

    model: str
    optimizer: str
    dtype: torch.dtype = torch.float64
    max_norm: float | None = None
    steps: int = STEPS
    by_hand: bool = False  # in the ordinary loop, not with train_step


@dataclass
class Result:
    """What came of it."""

    losses: list[float]
    state: dict[str, Tensor]
    output: Tensor  # in evaluation mode, of the next batch
    num_held: int = 0  # parameters that the optimizer has here


@functools.cache
def reference(case: Case, parts: int, of_first_share: int) -> Result:
    """Train in one process; the buffers are those that the first parts leave."""
    model = make_model(case.model, case.dtype)
    optimizer = OPTIMIZERS[case.optimizer](model)
    losses = []
    for step in range(case.steps):
        x, y = batch_of(case.model, step, case.dtype)
        optimizer.zero_grad()
        total = 0.0
        for number, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            if number == of_first_share:
                kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
            loss = loss_of(model(a), b) / parts
            loss.backward()
            total += loss.item()
        if parts > of_first_share:
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        if case.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            assert norm > case.max_norm, f"{case}: a norm of {norm} is not clipped"
        optimizer.step()
        losses.append(total)
    return result_of(model, optimizer, losses, case)


def result_of(model: nn.Module, optimizer: Optimizer, losses: list[float], case: Case) -> Result:
    """Collect what is compared; with a mesh, collective within its units."""
    num_held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        output = model(batch_of(case.model, case.steps, case.dtype)[0])
    model.train()
    return Result(losses, state, output.clone(), num_held)
