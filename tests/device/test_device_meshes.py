"""Meshes on the test device: a model that is divided over devices trains as it does on the CPU.

The axes exchange tensors with the device's own backend. Waits are counted after the first steps, in
which the batches of a unit are compared.
"""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.errors import UsageError
from support.devices import load_device, require_no_wait_of_the_script, run_on_device
from support.ranks import run_ranks

STEPS, COMPARED = 6, 3  # steps, which end with a round of local:2; in so many batches are compared
CLASSES, LENGTH, WIDTH = 10, 4, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    """The head is the embedding: with pp two stages hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.tokens.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    mesh: str
    pace: str = "allreduce"
    by_hand: bool = False  # the ordinary loop, without train_step
    free: bool = False  # workers do not wait for each other: parameters of all are sent around
    options: tuple[tuple[str, Any], ...] = ()


def batch_of(part: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(CLASSES, (8, LENGTH + 1), generator=generator)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def train(case: Case, device: str) -> list[torch.Tensor]:
    """Train for some steps; return losses, the full model and an evaluation."""
    torch.manual_seed(7)
    model = Transformer().double().to(device)
    model.tie()  # moved to this device, not even parameters of one module stay the same objects
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.0 if case.free else 0.9)
    example = batch_of(0, 0)[:, :-1].to(device)
    options = dict(case.options) if device != "cpu" else _without_via(case)
    if "pp" in case.mesh:
        options["microbatches"] = 4
    settings = {"mesh": case.mesh, "loss": loss_of, "example": example, "max_norm": 0.5}
    pl.distribute(model, optimizer, case.pace, **{**settings, **options})
    laggard = load_device() if device != "cpu" else None
    losses = []
    for step in range(STEPS):
        batch = batch_of(pl.data_rank(), step).to(device)
        x, y = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        if laggard is not None:
            torch.accelerator.synchronize()
            laggard.take_synchronizations()
        losses.append(take_step(case, model, optimizer, x, y))
        if laggard is not None and step >= COMPARED and not case.free:
            require_no_wait_of_the_script(laggard)
    pl.check_consistency(model, optimizer if case.pace == "allreduce" else None)
    state = model.state_dict()
    assert all(value.is_cpu for value in state.values())
    model.load_state_dict(state)
    with torch.no_grad():
        shown = model(batch_of(0, STEPS)[:3, :-1].contiguous().to(device))
    return [*(one.cpu() for one in losses), *state.values(), shown.cpu()]


def _without_via(case: Case) -> dict[str, Any]:
    return {name: value for name, value in case.options if name != "via"}


def take_step(case: Case, model: Any, optimizer: Any, x: Any, y: Any) -> torch.Tensor:
    if not case.by_hand:
        return model.train_step(x, y).clone()
    optimizer.zero_grad()
    loss = loss_of(model(x), y)
    loss.backward()
    pl.clip_grad_norm_(model, 0.5)
    optimizer.step()
    return loss.detach().clone()


def train_all(world, cases: list[Case], device: str | None) -> list[Any]:
    return [train(case, device or str(pl.device())) for case in cases]


def require_equal(cases: list[Case], schedule: str, num_workers: int, **options: Any) -> None:
    found = run_on_device(
        num_workers, train_all, cases, None, schedule=schedule, timeout_s=400, **options
    )
    expected = on_cpu(tuple(cases), num_workers, options.get("servers", 0))
    for on_device, right_ones in zip(found, expected, strict=True):
        for case, one, right in zip(cases, on_device, right_ones, strict=True):
            torch.testing.assert_close(
                one, right, rtol=1e-9, atol=1e-9, msg=lambda m, case=case: f"{case}: {m}"
            )


@functools.cache
def on_cpu(cases: tuple[Case, ...], num_workers: int, servers: int) -> list[Any]:
    return run_ranks(num_workers, train_all, list(cases), "cpu", timeout_s=200, servers=servers)


MESHES = {
    "tp=2": [Case("tp=2"), Case("tp=2", by_hand=True), Case("tp=2", "async", free=True)],
    "fsdp=2": [Case("fsdp=2"), Case("fsdp=2", by_hand=True)],
    "pp=2": [
        Case("pp=2"),
        Case("pp=2", options=(("schedule", "zero-bubble"),)),
        Case("pp=2", options=(("schedule", "interleaved:2"),)),
    ],
}
OF_FOUR = {
    "dp=2,tp=2": [Case("dp=2,tp=2"), Case("dp=2,tp=2", "local:2"), Case("dp=2,tp=2", by_hand=True)],
    "dp=2,fsdp=2": [Case("dp=2,fsdp=2"), Case("dp=2,fsdp=2", options=(("via", "host"),))],
    "dp=2,pp=2": [Case("dp=2,pp=2"), Case("dp=2,pp=2", "local:2")],
    "fsdp=2,tp=2": [
        Case("fsdp=2,tp=2"),
        Case("fsdp=2,tp=2", options=(("activations", "recompute"),)),
    ],
    "pp=2,tp=2": [Case("pp=2,tp=2")],
}
SHARED = {"PACELINE_DEVICES": "laggard:0,0,1,1"}  # two workers on each of the two devices


@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_train_as_on_the_cpu(mesh, schedule):
    require_equal(MESHES[mesh], schedule, 2, servers=int(mesh == "tp=2"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", OF_FOUR)
def test_larger_meshes_train_as_on_the_cpu(mesh, schedule):
    require_equal(OF_FOUR[mesh], schedule, 4, env=SHARED)


# -- checkpoints, models without values, refusals -------------------------------------------------

SAVED, LAST = 2, 4


def train_with_dropout(world, mesh: str, directory: str) -> list[float]:
    """Train to the last step; return its losses. Stages have random numbers of their own."""
    here = pl.device()
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)]
    model = nn.Sequential(*layers).to(here)
    optimizer = torch.optim.AdamW(model.parameters())
    x, module = torch.ones(4, 8, device=here), torch.get_device_module(here)
    # Where stages begin decides which numbers a layer draws; measured, that may differ.
    splits = {"splits": ["2"]} if "pp" in mesh else {}
    pl.distribute(model, optimizer, mesh=mesh, loss=F.mse_loss, example=x, **splits)
    checkpoint = pl.Checkpoint(directory, every=SAVED, keep=4)
    losses = []
    for _ in range(checkpoint.steps, LAST):
        before = module.get_rng_state(here)
        losses.append(model.train_step(x, x).item())
        assert torch.equal(before, module.get_rng_state(here)) is ("pp" in mesh)
        checkpoint.step()
    checkpoint.wait()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_of_a_mesh_resumes(mesh, schedule, tmp_path):
    def trained(directory: Path) -> list[float]:
        both = run_on_device(
            2, train_with_dropout, mesh, str(directory), schedule=schedule, timeout_s=200
        )
        assert both[0] == both[1]
        return both[0]

    whole = trained(tmp_path / "whole")
    name = f"step-{SAVED:09d}"
    shutil.copytree(tmp_path / "whole" / name, tmp_path / "again" / name)
    assert len(whole) == LAST and trained(tmp_path / "again") == whole[SAVED:]


def others(world, mesh: str) -> None:
    here = pl.device()
    models_on_meta_get_values_on_the_device(mesh, here)
    refusals(mesh, here)


def models_on_meta_get_values_on_the_device(mesh: str, here: torch.device) -> None:
    if mesh == "tp=2":  # it needs values to test its sharding with
        return
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(4, 8, device=here)
    pl.distribute(model, optimizer, mesh=mesh, loss=F.mse_loss, example=x)
    assert all(p.device == here for group in optimizer.param_groups for p in group["params"])
    losses = [model.train_step(x, x).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


def refusals(mesh: str, here: torch.device) -> None:
    half = Transformer().to(here)
    half.positions.to("cpu")
    optimizer = torch.optim.SGD(half.parameters(), 0.1)
    with pytest.raises(UsageError, match=r"the model is on laggard:., but positions.weight on the"):
        pl.distribute(half, optimizer, mesh=mesh, loss=loss_of)
    known = torch.distributed.Backend.default_device_backend_map
    backend = known.pop("laggard")
    try:
        model = Transformer().to(here)
        with pytest.raises(UsageError, match=f"mesh {mesh}: laggard has no collective backend"):
            pl.distribute(model, torch.optim.SGD(model.parameters(), 0.1), mesh=mesh)
    finally:
        known["laggard"] = backend


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_models_on_meta_and_refusals(mesh, schedule):
    run_on_device(2, others, mesh, schedule=schedule, timeout_s=200)
