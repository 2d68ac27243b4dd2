"""A model that one process has no memory for is trained by several, under real limits.

A limit holds for what a process takes from then on: the model, not the interpreter and torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import memory_cgroup
from sharded_models import sharded
from torch import nn

import paceline as pl
from paceline.model_parallel.fsdp.materialize import MetaModel, materialize
from paceline.model_parallel.sharding.layout import LocalShard, SliceSpec
from support import receive, report, started

MB = 1 << 20
WIDTH, DEPTH = 724, 32  # 64 MB of parameters, in blocks of 2 MB


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh() / DEPTH


def train(width: int, depth: int, is_sharded: bool, optimizer_class: Any) -> list[float]:
    """Build a model on meta, make this process's part of it real, and train it for two steps."""
    with torch.device("meta"):
        model = nn.Sequential(*(Residual(width) for _ in range(depth)))
    recipes, shards = MetaModel.of(model), sharded(model) if is_sharded else None
    whole = {n: LocalShard(p, SliceSpec(tuple(p.shape))) for n, p in model.named_parameters()}
    holding = whole if shards is None else shards.shards
    materialize(holding, recipes, seed=0)
    if shards is not None:
        shards.refresh()
    optimizer = optimizer_class([held.tensor for held in holding.values()], lr=1e-3)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, width)).square().mean()
        loss.backward()
        if shards is not None:
            shards.collect_gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_in_stages(width: int, depth: int, is_piped: bool, optimizer_class: Any) -> list[float]:
    """Do the same through pl.distribute, with half of the layers in each process."""
    with torch.device("meta" if is_piped else "cpu"):
        model = nn.Sequential(*(Residual(width) for _ in range(depth)))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    x = torch.ones(2, width)
    if is_piped:
        model, optimizer = pl.distribute(
            model, optimizer, mesh="pp=2", loss=mean_square, example=x, microbatches=1
        )
        return [float(model.train_step(x, x)) for _ in range(2)]
    losses = []
    for _ in range(2):
        loss = mean_square(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mean_square(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def trained(
    num_ranks: int, optimizer_class: Any, limit_bytes: int, train: Any = train
) -> tuple[list[Any], list[float]]:
    """Return what became of ranks with so much memory each, and their peaks in MB."""

    def body(_, optimizer_class, train):
        torch.set_num_threads(1)
        train(4, 2, num_ranks > 1, optimizer_class)  # what is loaded on first use is there now
        report("ready")
        receive()
        return train(WIDTH, DEPTH, num_ranks > 1, optimizer_class)

    with limits(num_ranks, limit_bytes) as groups:
        with started(num_ranks, body, optimizer_class, train) as ranks:
            ranks.receive_all()
            for rank, group in enumerate(groups):
                (group / "cgroup.procs").write_text(str(ranks.pids[rank]))
                ranks.send(rank, "go")
            outcomes = ranks.wait()
        return outcomes, [peak_bytes(group) / MB for group in groups]


@contextlib.contextmanager
def limits(num: int, limit_bytes: int) -> Iterator[list[Path]]:
    groups: list[Path] = []
    try:
        for number in range(num):
            group = memory_cgroup(limit_bytes, f"fsdp{number}")
            if group is None:
                pytest.skip("no writable memory control group here")
            groups.append(group)
        yield groups
    finally:
        for group in groups:
            group.rmdir()


def peak_bytes(group: Path) -> int:
    names = ("memory.peak", "memory.max_usage_in_bytes")  # of versions 2 and 1
    return int(next(group / name for name in names if (group / name).exists()).read_text())


def is_out_of_memory(outcome: Any, peak_mb: float, limit_mb: float) -> bool:
    return outcome.status == -9 and peak_mb == limit_mb


@pytest.mark.root
@pytest.mark.serial
def test_two_processes_train_what_one_cannot():
    # Parameters, gradients and AdamW's two averages: 256 MB in one, 128 MB in each of two.
    limit_mb = 200
    (alone,), (peak_mb,) = trained(1, torch.optim.AdamW, limit_mb * MB)
    assert is_out_of_memory(alone, peak_mb, limit_mb), (alone, peak_mb)
    (enough,), _ = trained(1, torch.optim.AdamW, 1000 * MB)
    both, peaks = trained(2, torch.optim.AdamW, limit_mb * MB)
    assert [one.value for one in both] == [enough.value] * 2, peaks
    assert enough.value[1] < enough.value[0]


@pytest.mark.root
@pytest.mark.serial
def test_two_stages_train_what_one_process_cannot():
    limit_mb = 200
    (alone,), (peak_mb,) = trained(1, torch.optim.AdamW, limit_mb * MB, train_in_stages)
    assert is_out_of_memory(alone, peak_mb, limit_mb), (alone, peak_mb)
    both, peaks = trained(2, torch.optim.AdamW, limit_mb * MB, train_in_stages)
    values = [one.value for one in both]
    assert values[0] is not None and values[0] == values[1], (both, peaks)
    assert values[0][1] < values[0][0]


@pytest.mark.root
@pytest.mark.serial
def test_four_processes_train_what_has_more_parameters_than_one_has_memory():
    limit_mb = 60
    (alone,), (peak_mb,) = trained(1, torch.optim.SGD, limit_mb * MB)
    assert is_out_of_memory(alone, peak_mb, limit_mb), (alone, peak_mb)
    every, peaks = trained(4, torch.optim.SGD, limit_mb * MB)
    values = [one.value for one in every]
    assert values[0] is not None and values == values[:1] * 4, (every, peaks)
    assert values[0][1] < values[0][0]
