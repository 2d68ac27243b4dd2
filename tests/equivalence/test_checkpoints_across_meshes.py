"""A checkpoint of any mesh goes on, on any other, as if nothing had happened.

One process trains without stopping; it is the reference. A job on one mesh trains the first half
and saves, another one on another mesh reads that and trains the second half. In float64 the two
differ by the order of summation only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.runtime.mesh import Mesh
from support.ranks import run_ranks

STEPS, SAVED, ROWS, WIDTH, WORDS = 6, 3, 8, 8, 12
TOLERANCE = 1e-10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """With an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    shape = (STEPS, 2, ROWS, 4)
    return [(x, y) for x, y in torch.randint(WORDS, shape, generator=dice)]


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net().double()
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(
    _: pl.Group, mesh: str, pace: str, directory: Path, first: int, last: int
) -> list[Tensor]:
    """Train some steps on a mesh, going on from the directory; return the whole model's state."""
    net, optimizer = make()
    grid = Mesh.parse(mesh)
    share = ROWS // (grid.dp * grid.fsdp)
    mine = grid.index(pl.rank(), "dp") * grid.fsdp + grid.index(pl.rank(), "fsdp")
    rows = slice(mine * share, (mine + 1) * share)
    net, optimizer = pl.distribute(
        net, optimizer, pace, mesh=mesh, loss=loss_of, example=batches()[0][0][rows], max_norm=0.5
    )
    checkpoint = pl.Checkpoint(directory)
    assert checkpoint.steps == first
    for x, y in batches()[first:last]:
        net.train_step(x[rows], y[rows])
    checkpoint.save()
    checkpoint.wait()
    if pace == "allreduce":  # else workers have gone apart
        pl.check_consistency(net, optimizer)
    return [value.clone() for value in net.state_dict().values()]


def train_alone() -> list[Tensor]:
    net, optimizer = make()
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return list(net.state_dict().values())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp=2", "pp=2"),
        ("pp=2", "fsdp=2"),
        ("fsdp=2", "dp=2,tp=2"),
        ("dp=2,pp=2", "dp=1"),
        ("dp=2", "fsdp=2,tp=2"),
        ("dp=2,tp=2", "dp=2,tp=2"),
    ],
)
def test_a_checkpoint_moves_between_meshes(before: str, after: str, tmp_path: Path) -> None:
    for mesh, first, last in ((before, 0, SAVED), (after, SAVED, STEPS)):
        size = Mesh.parse(mesh).num_workers
        ends = run_ranks(size, train, mesh, "allreduce", tmp_path, first, last)
    expected = train_alone()
    for end in ends:
        for found, right in zip(end, expected, strict=True):
            assert (found - right).abs().max() < TOLERANCE


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2,pp=2"])
def test_a_pace_that_keeps_something_goes_on_to_the_bit_on_the_same_mesh(
    mesh: str, tmp_path: Path
) -> None:
    size = Mesh.parse(mesh).num_workers
    through = run_ranks(size, train, mesh, "diloco:2", tmp_path / "through", 0, STEPS)
    run_ranks(size, train, mesh, "diloco:2", tmp_path / "stopped", 0, SAVED)
    stopped = run_ranks(size, train, mesh, "diloco:2", tmp_path / "stopped", SAVED, STEPS)
    for one, other in zip(through, stopped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_pace_that_keeps_something_begins_anew_on_another_mesh(tmp_path: Path) -> None:
    run_ranks(4, train, "dp=2,tp=2", "local:2", tmp_path, 0, SAVED)
    ends = run_ranks(4, train, "dp=2,pp=2", "local:2", tmp_path, SAVED, STEPS)
    first, *others = ends[:2]  # one unit: with local steps each has its own
    assert all(torch.isfinite(value).all() for value in first)
    assert all(torch.equal(a, b) for o in others for a, b in zip(first, o, strict=True))
