"""One worker of horovod_steps.py: the 25 M MLP in torch, and all-reduces of 1 KB.

python -m framework_runs.horovod_rank KIND SOCKET BARRIER       (started by horovod_steps.py)

distribute   pl.distribute
ours         paceline.horovod.torch
horovod      Horovod itself; a script for the one is a script for the other
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness.barrier import SpinBarrier
from harness.controller import take_turns
from models import TASKS

from framework_runs.turns import rank_and_world

_MODULES = {"ours": "paceline.horovod.torch", "horovod": "horovod.torch"}
_CALLS = 20  # all-reduces of 1 KB in place of a step


def training(hvd: Any) -> Callable[[], object]:
    """Return a function that trains one step."""
    task = TASKS["mlp"]
    torch.manual_seed(0)
    model: Any = task.model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if hvd is None:
        import paceline as pl

        pl.init()
        model, optimizer = pl.distribute(model, optimizer)
    else:
        names = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x, y = task.make_batch(task.batch)

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        optimizer.step()

    return step


def small_operations(hvd: Any) -> Callable[[], object]:
    """Return a function that reduces 1 KB some times."""
    tensor = torch.ones(256)

    def reduce() -> None:
        for _ in range(_CALLS):
            hvd.allreduce(tensor, name="x")

    return reduce


def main() -> None:
    kind, socket_path, barrier_path = sys.argv[1:]
    torch.set_num_threads(1)
    what, _, size = kind.partition(" ")
    hvd = importlib.import_module(_MODULES[what]) if what in _MODULES else None
    if hvd is not None:
        hvd.init()
    work = small_operations(hvd) if size else training(hvd)
    barrier = SpinBarrier(Path(barrier_path), *rank_and_world())

    def turn(request: dict[str, Any]) -> dict[str, Any]:
        for _ in range(request["warmup"]):
            work()
        barrier.wait()
        start_s = time.perf_counter()
        for _ in range(request["steps"]):
            work()
        return {"spans": [(start_s, time.perf_counter())]}

    version = "paceline" if what != "horovod" else importlib.import_module("horovod").__version__
    take_turns(socket_path, {"version": version}, turn)


if __name__ == "__main__":
    main()
