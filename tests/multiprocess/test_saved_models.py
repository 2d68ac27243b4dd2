"""A model or an optimizer that is saved whole, or copied, is a plain one: no trace of Paceline."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from saved_net import Net, require_plain, train
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from support import run_ranks

HERE = Path(__file__).parent
# Pace, servers, options: each binds the model to other things.
WAYS = {
    "replicated": ("allreduce", 0, {"update": "replicated"}),
    "sharded": ("allreduce", 0, {"update": "sharded"}),
    "global-norm": ("allreduce", 0, {"batchnorm": "global", "precision": "bf16"}),
    "local": ("local:2", 0, {}),
    "hogwild": ("hogwild", 0, {}),
    "ps": ("ps", 1, {}),
    "layer": ("ps[wait=layer]", 1, {}),
    "async": ("async", 1, {}),
}


def make(pace: str, options: dict[str, str]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return pl.distribute(model, optimizer, pace=pace, **options)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    torch.save(model, f"{path}.model")
    torch.save({"model": model, "optimizer": optimizer}, f"{path}.both")


def work(group: Group, pace: str, options: dict[str, str], path: str) -> None:
    model, optimizer = make(pace, options)
    if group.rank == 0:
        save(model, optimizer, f"{path}.early")
    group.barrier()
    train(model, optimizer, 3)
    group.barrier()
    if group.rank == 0:  # alone: whoever copies or saves asks no other worker
        save(model, optimizer, path)
        twin, its = copy.deepcopy((model, optimizer))
        require_plain(twin)
        for name, value in model.state_dict().items():
            assert torch.equal(value, twin.state_dict()[name]), name
        train(twin, its, 2)
        torch.save(twin.state_dict(), f"{path}.expected")
        torch.save(twin, f"{path}.twin")
    group.barrier()
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, 2)  # the original goes on
    group.barrier()
    changed = [name for name, value in model.state_dict().items() if "weight" in name
               and not torch.equal(value, before[name])]  # fmt: skip
    assert len(changed) == len([name for name in before if "weight" in name])


def load_without_paceline(*paths: str) -> None:
    block = "import sys; sys.modules['paceline'] = None"
    program = f"{block}; import saved_net; list(map(saved_net.load, sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *paths],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=HERE,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},  # torch would import our plugin
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_a_saved_model_is_a_plain_one(way: str, tmp_path: Path) -> None:
    pace, servers, options = WAYS[way]
    path = str(tmp_path / "saved")
    run_ranks(2, work, pace, options, path, servers=servers)
    load_without_paceline(f"{path}.early", path)
    expected, found = torch.load(f"{path}.expected"), torch.load(f"{path}.trained")
    for name, value in expected.items():
        torch.testing.assert_close(value, found[name])  # another number of threads
    for saved in (path, f"{path}.early"):  # nor is there a word of Paceline in the file
        assert b"paceline" not in Path(f"{saved}.model").read_bytes().replace(b"saved.model", b"")


def saved_bytes(thing: object) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.tell()


@pytest.mark.parametrize("way", ["replicated", "sharded", "hogwild", "ps"])
def test_a_layer_is_saved_without_the_rest_of_its_bucket(way: str) -> None:
    pace, num_servers, options = WAYS[way]

    def body(group: Group) -> None:
        model = nn.ModuleList([nn.Linear(200, 200), nn.Linear(4, 4)])
        plain = saved_bytes(model[1].state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pl.distribute(model, optimizer, pace=pace, **options)
        assert saved_bytes(model[1].state_dict()) < plain + 1000

    run_ranks(2, body, servers=num_servers)
