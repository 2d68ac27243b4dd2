"""The processes of a unit train on one batch: other ones are refused, and names say whose it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_support import Workbench
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from paceline.comm.group import Group
from paceline.model_parallel import same_inputs
from support import run_ranks

BY_RANK = """
    import sys
    import torch
    import paceline as pl

    pl.init()
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = pl.distribute(model, optimizer, loss=torch.nn.functional.mse_loss)
    names = pl.{0}, pl.{1}
    mine = slice(names[0](), None, names[1]())
    for _ in range(2):
        loss = model.train_step(x[mine], y[mine])
    print(f"trained to {{loss:.6f}} on {{len(x[mine])}} rows", flush=True)
"""


def test_data_shared_out_by_rank_is_refused_and_by_data_rank_trains(tmp_path: Path) -> None:
    bench = Workbench(tmp_path)
    wrong = bench.script(BY_RANK.format("rank", "world_size"), "wrong.py")
    refused = bench.run("run", "--mesh", "tp=2", wrong)
    assert refused.returncode != 0, refused.stdout
    assert "InconsistentRanks" in refused.stderr
    said = r"inputs has different values on rank 1 and on rank 0.*pl\.data_rank\(\)"
    assert re.search(said, " ".join(refused.stderr.split())), refused.stderr
    right = bench.script(BY_RANK.format("data_rank", "data_world_size"), "right.py")
    trained = bench.run("run", "--mesh", "tp=2", right)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("on 64 rows") == 2
    assert len({line.split("trained")[1] for line in trained.stdout.splitlines()}) == 1


def made(mesh: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pl.distribute(model, optimizer, mesh=mesh, loss=F.mse_loss, **options)


def test_what_differs_is_named_on_all_processes_of_the_unit() -> None:
    def body(group: Group) -> list[str]:
        model, _ = made("pp=2", example=torch.zeros(4, 6), splits=["2"], microbatches=2)
        x, said = torch.zeros(4, 6), list[str]()
        longer, wider = (
            torch.zeros(4 + 2 * group.rank, 6),
            x.to([x.dtype, torch.float64][pl.rank()]),
        )
        for given in ((x, x + group.rank), (longer, longer), (wider, x)):
            with pytest.raises(pl.errors.InconsistentRanks) as caught:
                model.train_step(*given)
            assert caught.value.sides == ((0,), (1,))
            said.append(str(caught.value))
        model.train_step(x, x)  # it goes on
        group.barrier()
        return said

    for values, shape, dtype in run_ranks(2, body):
        assert "targets has different values on rank 1 and on rank 0" in values
        assert "inputs is float32 [6, 6] on rank 1, float32 [4, 6] on rank 0" in shape
        assert "inputs is float64 [4, 6] on rank 1, float32 [4, 6] on rank 0" in dtype


def test_a_loop_of_the_scripts_own_is_compared_now_and_then() -> None:
    def body(group: Group) -> int:
        model, _ = made("tp=2")
        for step in range(2 * same_inputs._EVERY):
            x = torch.full((2, 6), float(step if step < 10 else step + group.rank))
            try:
                F.mse_loss(model(x), torch.zeros(2, 6)).backward()
            except pl.errors.InconsistentRanks:
                return step
        return -1

    assert run_ranks(2, body) == [same_inputs._EVERY - 1] * 2


class Noisy(Dataset[torch.Tensor]):
    """Draws at random in the processes of a loader, as augmentation does."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(6) + index


def test_units_share_batches_and_shards_have_their_own() -> None:
    def body(group: Group) -> tuple[int, int, list[float]]:
        model, _ = made("fsdp=2,tp=2")
        seen = []
        for x in pl.shard(DataLoader(Noisy(), batch_size=4, num_workers=1)):
            model.train_step(x, x)
            seen += x.flatten().tolist()
        group.barrier()
        return pl.data_rank(), pl.data_world_size(), seen

    told = run_ranks(4, body)
    assert [entry[:2] for entry in told] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert told[0][2] == told[1][2] and told[2][2] == told[3][2]
    assert told[0][2] != told[2][2]
