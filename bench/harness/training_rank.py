"""One worker of one training contender: waits for a turn, trains some steps, answers with times.

    python -m harness.training_rank KIND SOCKET BARRIER       (started by harness/training.py)

Between turns this process sleeps in a read on a Unix socket and says in its next answer how much
CPU it used nevertheless. Workers that do not communicate keep training until the slowest of them
has done its steps, so that no worker does its last steps on an idle machine.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from models import TASKS, Batch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.barrier import SpinBarrier
from harness.controller import take_turns
from harness.traffic import sent_bytes
from harness.training_kinds import Worker, kind_of

_BATCHES = 4  # made beforehand and used in turns: loading data is not what is measured

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True),
}


class Training:
    """A model in training, and the measured loop."""

    def __init__(self, worker: Worker, is_free: bool, barrier: SpinBarrier) -> None:
        self._task, self._barrier = TASKS[os.environ["BENCH_MODEL"]], barrier
        self._is_free = is_free
        torch.manual_seed(1)  # the same model everywhere
        self._plain = self._task.model()
        optimizer = OPTIMIZERS[os.environ["BENCH_OPTIMIZER"]](self._plain)
        self._model, self._optimizer = worker.distribute(self._plain, optimizer)
        torch.manual_seed(100 + worker.rank)  # other samples for each worker
        self._batches: Iterator[Batch] = cycle(self._task.batches(_BATCHES))
        self._parked_at = (time.monotonic(), time.process_time())

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train; the answer has [start, end] of each counted step."""
        parked_s, parked_cpu_s = self._parked()
        self._barrier.wait()
        for _ in range(request["warmup"]):
            loss = self._step()
        spans, sent_before = [], sent_bytes()
        for _ in range(request["steps"]):
            start_s = time.perf_counter()
            loss = self._step()
            spans.append((start_s, time.perf_counter()))
        sent = sent_bytes() - sent_before
        if self._is_free:
            self._keep_on()
        answer = {"spans": spans, "sent": sent, "loss": loss.item(), "checksum": self._checksum()}
        self._parked_at = (time.monotonic(), time.process_time())
        return {**answer, "parked_s": parked_s, "parked_cpu_s": parked_cpu_s}

    def _step(self) -> Tensor:
        x, target = next(self._batches)
        self._optimizer.zero_grad()
        loss = self._task.loss(self._model(x), target)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _keep_on(self) -> None:
        self._barrier.arrive()
        while not self._barrier.have_all_arrived():
            self._step()

    def _checksum(self) -> float:
        """Return a number that is the same for workers whose parameters are."""
        total = math.fsum(p.detach().sum().item() for p in self._plain.parameters())
        if not math.isfinite(total):
            raise FloatingPointError("the parameters are no longer finite")
        return total

    def _parked(self) -> tuple[float, float]:
        wall_s, cpu_s = self._parked_at
        return time.monotonic() - wall_s, time.process_time() - cpu_s


def memory_mb() -> dict[str, float]:
    """Return this process's share of the memory it uses, by sort.

    PSS counts a page that n processes share as 1/n for each, so that sums over workers are right.
    """
    found = {}
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.startswith("Pss"):
                found[name] = int(value.split()[0]) / 1024
    return found


def main() -> None:
    name, socket_path, barrier_path = sys.argv[1:]
    torch.set_num_threads(1)
    kind = kind_of(name)
    worker = Worker(kind)
    barrier = SpinBarrier(Path(barrier_path), worker.rank, worker.world)
    training = Training(worker, kind.is_free, barrier)

    def turn(request: dict[str, Any]) -> dict[str, Any]:
        return memory_mb() if request["op"] == "memory" else training.turn(request)

    take_turns(socket_path, {"rank": worker.rank, "version": worker.version}, turn)


if __name__ == "__main__":
    main()
