"""Every pace on the dp axis of a mesh whose units cut the model: it learns, and stays together.

Lockstep paces without a lossy codec give the losses of the same pace with dp alone, up to the
rounding of float32 (1e-7 for each sum, carried on through the steps). What travels of a cut model
is packed differently, so codecs lose other digits: with them training must work, no more.
"""

from __future__ import annotations

import functools
import math
import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mesh_models import MICROBATCHES, OPTIMIZERS, Shares, batch_of, loss_of, make_model
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

STEPS, SAMPLES = 24, 2  # two batches again and again: they can be learned by heart
TOLERANCE = 1e-4
MESHES = ("dp=2,tp=2", "dp=2,pp=2", "dp=2,fsdp=2")
EXACT = ("allreduce", "ps", "local:4", "diloco:4")
LOSSY = ("allreduce[compress=int8]", "allreduce[compress=topk:0.1]")
FREE = ("ssp:1",)


@dataclass
class Trained:
    """What one worker saw."""

    losses: list[float]
    state: dict[str, torch.Tensor]  # of the whole model
    whole: dict[str, torch.Tensor]  # parameters that this worker has all of


def train(group: Group, mesh: str, pace: str) -> Trained:
    shares = Shares.of(mesh)
    mine = functools.partial(shares.mine, number=group.rank)
    model = make_model("transformer", torch.float32)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    optimizer = OPTIMIZERS["adamw"](model)
    options: dict[str, Any] = {}
    if shares.is_pipelined:
        example = mine(batch_of("transformer", 0, torch.float32)[0])
        options = {"example": (example,), "microbatches": MICROBATCHES}
    model, optimizer = pl.distribute(
        model, optimizer, mesh=mesh, pace=pace, loss=loss_of, **options
    )
    losses = []
    for step in range(STEPS):
        x, y = (mine(whole) for whole in batch_of("transformer", step % SAMPLES, torch.float32))
        losses.append(float(model.train_step(x, y)))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    whole = {
        name: param.detach().clone()
        for name, param in model.named_parameters()
        if type(param) is nn.Parameter and not param.is_meta and shapes.get(name) == param.shape
    }
    return Trained(losses, state, whole)


def train_all(group: Group, mesh: str, paces: tuple[str, ...]) -> list[Any]:
    torch.set_num_threads(1)

    def attempt(pace: str) -> Any:
        try:
            return train(group, mesh, pace)
        except Exception:
            return traceback.format_exc(limit=-4)

    return [attempt(pace) for pace in paces]


@functools.cache
def with_dp_alone(paces: tuple[str, ...]) -> dict[str, list[Trained]]:
    by_rank = run_ranks(2, train_all, "dp=2", paces, servers=1)
    return {pace: [found[n] for found in by_rank] for n, pace in enumerate(paces)}


def losses_of_units(mesh: str, of_workers: list[Trained]) -> list[list[float]]:
    return [one.losses for one in of_workers[:: Shares.of(mesh).unit_size]]


@pytest.mark.parametrize("mesh", MESHES)
def test_paces_learn_and_stay_together(mesh: str) -> None:
    paces = (*EXACT, *LOSSY, *FREE)
    by_rank = run_ranks(4, train_all, mesh, paces, servers=1, timeout_s=100)
    problems = []
    for number, pace in enumerate(paces):
        of_workers = [found[number] for found in by_rank]
        if errors := [found for found in of_workers if isinstance(found, str)]:
            problems.append(f"{pace}: {len(errors)} workers failed, the first with\n{errors[0]}")
        else:
            problems += [f"{pace}: {line}" for line in problems_of(mesh, pace, of_workers)]
    assert not problems, "\n".join([f"{mesh}:", *problems])


def problems_of(mesh: str, pace: str, of_workers: list[Trained]) -> list[str]:
    lines, units = [], losses_of_units(mesh, of_workers)
    for unit, losses in enumerate(units):
        if not all(map(math.isfinite, losses)):
            lines.append(f"unit {unit}: losses are not finite: {losses}")
        elif not losses[-1] < 0.6 * losses[0]:
            lines.append(f"unit {unit}: does not learn: {losses[0]} to {losses[-1]}")
    size = Shares.of(mesh).unit_size
    for number, one in enumerate(of_workers):
        first = of_workers[number - number % size]
        if different := unequal(one.state, first.state):
            lines.append(f"worker {number} and its unit's first see other values in {different}")
        if different := unequal(
            one.whole, {n: first.whole.get(n, v) for n, v in one.whole.items()}
        ):
            lines.append(f"worker {number} and its unit's first have other copies of {different}")
    if pace not in FREE and (different := unequal(of_workers[0].state, of_workers[size].state)):
        lines.append(f"the units hold other values in {different}")
    if pace in EXACT:
        expected = losses_of_units("dp=2", with_dp_alone(EXACT)[pace])
        for unit, (found, alone) in enumerate(zip(units, expected, strict=True)):
            if found != pytest.approx(alone, rel=TOLERANCE):
                lines.append(f"unit {unit}: losses {found}, with dp alone {alone}")
    return lines


def unequal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors whose bits differ."""
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]
