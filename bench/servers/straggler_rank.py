"""A worker that sleeps instead of computing: trains a small model, answers with its times.

    python -m servers.straggler_rank KIND SOCKET BARRIER       (started by servers/stragglers.py)

Every turn trains a fresh model from the same beginning, at the pace that the request names. The
sleep comes between the forward pass, which has waited for the parameters, and the gradient: so a
step reads, takes as long as its delay says, and pushes, as in servers/simulation.py. Worker 0,
which is never a slow one, can keep what it read, and says afterwards how good it was.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness.barrier import SpinBarrier
from harness.controller import take_turns
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from servers.delays import Delays

_WIDTH, _BATCH = 64, 32
_FIRST_STEPS = 2  # uncounted and without sleep: memory is mapped, keys are made


def load() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target).long()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10))


class Run:
    """One training, from a fresh model to its last step."""

    def __init__(self, request: dict[str, Any], data: tuple[Tensor, Tensor]) -> None:
        self._images, self._labels = data
        self._keeps = request["keeps_curve"] and pl.rank() == 0
        torch.manual_seed(0)  # the same model everywhere
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=request["rate"])
        self._model, self._optimizer = pl.distribute(model, optimizer, pace=request["pace"])
        self._draws = torch.Generator().manual_seed(100 + pl.rank())
        self._read: list[tuple[float, list[Tensor]]] = []
        self.slept_s: list[float] = []

    def step(self, delay_s: float) -> None:
        chosen = torch.randint(len(self._images), (_BATCH,), generator=self._draws)
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self._model(self._images[chosen]), self._labels[chosen])
        start_s = time.perf_counter()
        if self._keeps:
            self._read.append((start_s, [p.detach().clone() for p in self._model.parameters()]))
        time.sleep(delay_s)
        self.slept_s.append(time.perf_counter() - start_s)
        loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def curve(self, start_s: float) -> list[tuple[float, float]]:
        """Return the loss over all images of what was read since the start, and when."""
        found, plain = [], network()
        for read_s, values in self._read:
            if read_s >= start_s:
                for param, value in zip(plain.parameters(), values, strict=True):
                    param.copy_(value)
                loss = F.cross_entropy(plain(self._images), self._labels)
                found.append((read_s - start_s, float(loss)))
        return found


class Worker:
    """This process, between turns."""

    def __init__(self, barrier: SpinBarrier) -> None:
        self._barrier, self._data = barrier, load()

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train; the answer has the start, the end, and each sleep as it really was."""
        rank = pl.rank()
        delays = Delays.from_request(request["delays"]).of(rank, request["steps"][rank])
        run = Run(request, self._data)
        for _ in range(_FIRST_STEPS):
            run.step(0.0)
        run.slept_s.clear()
        self._barrier.wait()
        start_s = time.perf_counter()
        for delay_s in delays:
            run.step(delay_s)
        end_s = time.perf_counter()
        self._barrier.wait()
        answer = {"start_s": start_s, "end_s": end_s, "slept_s": run.slept_s}
        return {**answer, "rank": rank, "curve": run.curve(start_s)}


def main() -> None:
    _, socket_path, barrier_path = sys.argv[1:]
    torch.set_num_threads(1)
    pl.init()
    worker = Worker(SpinBarrier(Path(barrier_path), pl.rank(), pl.world_size()))
    introduction = {"rank": pl.rank(), "version": f"paceline {pl.__version__}"}
    take_turns(socket_path, introduction, worker.turn)


if __name__ == "__main__":
    main()
