"""One worker: trains with batches of pl.shard, and answers with the mean time of a step.

    python -m telemetry_runs.rank MODEL SOCKET BARRIER          (started by telemetry_runs/steps.py)

A request may say that this turn's steps are to be timed or not, whatever the environment says: then
both are measured in the same processes, with the same memory placement.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness.barrier import SpinBarrier
from harness.controller import take_turns
from models import TASKS
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline as pl
from paceline.runtime import job
from telemetry_runs.small import SMALL

_SAMPLES = 10**7  # more than are used: no epoch ends


class Rows:
    """A dataset that costs nothing: the same few batches again and again."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return _SAMPLES

    def __getitems__(self, indices: list[int]) -> Any:
        return self._batches[indices[0] // len(indices) % len(self._batches)]


def same(batch: Any) -> Any:
    """Collate what is collated."""
    return batch


class Training:
    """A model in training, and the measured loop."""

    def __init__(self, name: str, barrier: SpinBarrier) -> None:
        task = SMALL if name == "small" else TASKS[name]
        torch.manual_seed(1)
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._model, self._optimizer = pl.distribute(model, optimizer)
        rows = Rows(task.batches(4))
        loader = DataLoader(rows, batch_size=task.batch, collate_fn=same)  # type: ignore[arg-type]
        self._loader = pl.shard(loader)
        self._batches: Iterator[Any] = iter(())
        self._barrier = barrier

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train so many steps; return the mean time of one."""
        reporter = job.current().reporter
        if request["times_steps"] is not None:
            reporter.times_steps = request["times_steps"]
        self._batches = iter(self._loader)  # a pass is timed, or it is not
        self._barrier.wait()
        for _ in range(request["warmup"]):
            self._step()
        start_s = time.perf_counter()
        for _ in range(request["steps"]):
            self._step()
        return {"step_s": (time.perf_counter() - start_s) / max(1, request["steps"])}

    def _step(self) -> None:
        x, target = next(self._batches)
        self._optimizer.zero_grad()
        F.cross_entropy(self._model(x), target).backward()
        self._optimizer.step()


def main() -> None:
    name, socket_path, barrier_path = sys.argv[1:]
    torch.set_num_threads(1)
    pl.init()
    barrier = SpinBarrier(Path(barrier_path), pl.rank(), pl.world_size())
    training = Training(name, barrier)
    take_turns(socket_path, {"rank": pl.rank(), "version": pl.__version__}, training.turn)


if __name__ == "__main__":
    main()
