"""In an elastic job no step depends on one worker."""

from __future__ import annotations

import torch

from paceline.ps.server.table import Table
from paceline.ps.spec import OptimizerSpec, Rule, ShardPiece, ShardSpec, TableSpec


def make_table(*, all_speak: bool) -> Table:
    shard = ShardSpec("s", "float32", 4, (ShardPiece("p", 0, 0, 0, 4, (4,)),))
    optimizer = OptimizerSpec("SGD", ({"lr": 1.0},))
    rule = Rule(bound=0, aggregate=True, all_speak=all_speak)
    spec = TableSpec("t", (0, 1), (shard,), optimizer, rule)
    table = Table(spec, lambda _s, _u, count, dtype: torch.zeros(count, dtype=dtype), lambda: 0.0)
    table.assign(0, torch.zeros(4))
    return table


def step_without_the_first(table: Table, clipped: torch.Tensor | None) -> torch.Tensor:
    """The first worker dies between the average and its commit."""
    for worker in (0, 1):
        table.push(worker, 0, 1, torch.full((4,), float(worker + 1)), ())
    if clipped is not None:
        table.replace_average(0, clipped, ())
    table.leave(0)
    table.commit(1, 1, ({"lr": 1.0},), None)
    return table.shards[0].params.clone()


def test_the_step_counts_although_the_first_worker_is_gone():
    assert step_without_the_first(make_table(all_speak=True), None).tolist() == [-1.5] * 4


def test_what_the_others_made_of_the_average_counts():
    clipped = torch.full((4,), 0.5)
    assert step_without_the_first(make_table(all_speak=True), clipped).tolist() == [-0.5] * 4


def test_with_one_speaker_the_step_is_left_out():
    assert step_without_the_first(make_table(all_speak=False), None).tolist() == [0.0] * 4
