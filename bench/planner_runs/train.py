"""The script that is planned and measured: three models, any pace, slow workers.

    train.py MODEL                      trains until it is stopped (for a profile)
    train.py MODEL PLAN OUT             one training for each line of PLAN; rank 0 writes to OUT

A line of PLAN is {"id", "pace", "slow", "compute_s", "turn_s"}. A slow worker ("1:3x") sleeps as
long as the rest of its computation would take. Lockstep paces do the same number of steps on all
workers; free-running workers train for the same time, and their steps are added up.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from harness.other_load import MOST_OTHERS, OtherLoad
from models import Gpt, resnet
from torch import nn
from torch.nn import functional as F

import paceline as pl

WARM_UP = 4
_TRIES = 4


def build(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a model with one batch."""
    torch.manual_seed(0)
    if name == "mlp":
        wide = [512, 1024, 1024, 1024, 1024, 512]
        pairs = list(zip(wide, wide[1:], strict=False))
        layers = [part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1]), torch.randn(64, 512), torch.randint(512, (64,))
    if name == "resnet":
        return resnet(16), torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    text = torch.randint(256, (4, 129))
    return Gpt(192, 4, 4, 256, 128), text[:, :-1].contiguous(), text[:, 1:].flatten()


def distributed(name: str, pace: str) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    model, x, y = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer = pl.distribute(model, optimizer, pace=pace)
    return model, optimizer, x, y


def main() -> None:
    torch.set_num_threads(1)
    pl.init()
    name = sys.argv[1]
    if len(sys.argv) == 2:
        model, optimizer, x, y = distributed(name, "allreduce")
        while not pl.should_stop():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return
    plan, out = Path(sys.argv[2]), Path(sys.argv[3])
    for line in plan.read_text(encoding="utf-8").splitlines():
        for found in measure(name, json.loads(line)):
            if pl.rank() == 0:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")


def measure(name: str, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train at one pace; yield the mean step of a worker, again while others disturb it."""
    model, optimizer, x, y = distributed(name, job["pace"])
    slow_rank, _, factor = (job["slow"] or "-1:1x").removesuffix("x").partition(":")
    pause_s = (float(factor) - 1) * job["compute_s"] if pl.rank() == int(slow_rank) else 0.0

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if pause_s:
            time.sleep(pause_s)
        loss.backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    for _ in range(_TRIES):
        found = _timed(step, job)
        yield found
        if found["others"] <= MOST_OTHERS:
            return


def _timed(step: Callable[[], None], job: dict[str, Any]) -> dict[str, Any]:
    """Train for a while; return the mean step, and what others used of the processors."""
    world = pl.world()
    others = OtherLoad(int(os.environ["PLANNER_BENCH"])) if pl.rank() == 0 else None
    world.barrier()
    start_s = time.perf_counter()
    steps = 0
    if job["pace"].split(":")[0] in ("async", "ssp"):
        while time.perf_counter() - start_s < job["turn_s"]:
            step()
            steps += 1
        sums = torch.tensor([float(steps), time.perf_counter() - start_s], dtype=torch.float64)
        world.all_reduce(sums)
        steps, step_s = int(sums[0]), float(sums[1] / sums[0])
    else:
        period = 8 if job["pace"].startswith("local") else 4
        done = torch.zeros(1)
        while not done.item():
            for _ in range(period):
                step()
            steps += period
            done[0] = float(time.perf_counter() - start_s > job["turn_s"])
            world.all_reduce(done)
        step_s = (time.perf_counter() - start_s) / steps
    share = torch.tensor([others.share() if others is not None else 0.0])
    world.all_reduce(share)  # all workers decide alike whether to measure again
    return {"id": job["id"], "step_s": step_s, "steps": steps, "others": round(share.item(), 4)}


if __name__ == "__main__":
    main()
