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
from pathlib import Path
from typing import Any

import torch
from harness.other_load import OtherLoad
from models import Gpt, resnet
from torch import nn
from torch.nn import functional as F

import paceline as pl

WARM_UP = 4


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
        found = measure(name, json.loads(line))
        if pl.rank() == 0:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


def measure(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Train at one pace; return the mean step of a worker."""
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
    is_free = job["pace"].split(":")[0] in ("async", "ssp")
    world = pl.world()
    others = OtherLoad(int(os.environ["PLANNER_BENCH"])) if pl.rank() == 0 else None
    world.barrier()
    start_s = time.perf_counter()

    def result(step_s: float, steps: int) -> dict[str, Any]:
        share = others.share() if others is not None else 0.0
        return {"id": job["id"], "step_s": step_s, "steps": steps, "others": round(share, 4)}

    if is_free:
        steps = 0
        while time.perf_counter() - start_s < job["turn_s"]:
            step()
            steps += 1
        took_s = time.perf_counter() - start_s
        sums = torch.tensor([float(steps), took_s], dtype=torch.float64)
        world.all_reduce(sums)
        return result(float(sums[1] / sums[0]), int(sums[0]))
    period = 8 if job["pace"].startswith("local") else 4
    steps = 0
    while True:
        for _ in range(period):
            step()
        steps += period
        done = torch.tensor([float(time.perf_counter() - start_s > job["turn_s"])])
        world.all_reduce(done)
        if done.item():
            break
    took_s = time.perf_counter() - start_s
    return result(took_s / steps, steps)


if __name__ == "__main__":
    main()
