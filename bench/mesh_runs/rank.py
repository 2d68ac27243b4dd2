"""One process of one contender: waits for a turn, trains some steps, answers with their times.

    python -m mesh_runs.rank KIND SOCKET BARRIER              (started by mesh_runs/contest.py)

All processes start each step together. Between turns this one sleeps in a read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from harness.barrier import SpinBarrier
from harness.controller import take_turns
from harness.training_rank import memory_mb
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mesh_runs.kinds import KINDS, Kind, Place, build
from mesh_runs.models import Batch, texts

_BATCHES = 4  # made beforehand and used in turns: loading data is not what is measured


class Trainee:
    """A model in training, and the measured loop."""

    def __init__(self, kind: Kind, place: Place, barrier: SpinBarrier) -> None:
        self._kind, self._place, self._barrier = kind, place, barrier
        self._step, self._optimizer = build(kind, place)
        self._batches: dict[int, Iterator[Batch]] = {}

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train, or report the memory in use; the answer has [start, end] of each counted step."""
        if request["op"] == "memory":
            return {**memory_mb(), "held_bytes": held_bytes(self._optimizer)}
        batches, spans = self._batches_of(request["batch"]), []
        for number in range(request["warmup"] + request["steps"]):
            batch = next(batches)
            self._barrier.wait()
            start_s = time.perf_counter()
            loss = self._step(batch)
            if number >= request["warmup"]:
                spans.append((start_s, time.perf_counter()))
        return {"spans": spans, "loss": loss}

    def _batches_of(self, size: int) -> Iterator[Batch]:
        if size not in self._batches:
            own = 100 * (self._place.rank + 1) if self._kind.has_own_batches else 0
            made = [texts(size, seed=own + number) for number in range(_BATCHES)]
            self._batches[size] = cycle(made)
        return self._batches[size]


def held_bytes(optimizer: Optimizer) -> int:
    """Return how large the parameters and the optimizer's state are that this process holds."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    local = [
        t.to_local() if isinstance(t, DTensor) else t
        for t in [*params, *tensors]
        if isinstance(t, torch.Tensor)
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def main() -> None:
    name, socket_path, barrier_path = sys.argv[1:]
    torch.set_num_threads(1)
    place = Place.of_environment()
    barrier = SpinBarrier(Path(barrier_path), place.rank, place.world)
    trainee = Trainee(KINDS[name], place, barrier)
    take_turns(socket_path, {"rank": place.rank, "version": torch.__version__}, trainee.turn)


if __name__ == "__main__":
    main()
