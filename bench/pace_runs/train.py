"""The training of all comparisons: a plain Paceline script, several times in a row.

    paceline run -n 4 bench/pace_runs/train.py PLAN OUT     (started by pace_runs/jobs.py)

PLAN has a line of JSON for each training; what each worker has measured goes to files in OUT.
At intervals the model of all workers is copied, and evaluated after training. Only the copy
interrupts training, and its time (`agreed()` may need the network) is not counted. A delay is a
sleep between forward and backward: it simulates longer computing without using a core.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness.traffic import sent_bytes
from servers.delays import Delays
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

import paceline as pl
from pace_runs import tasks


class Watch:
    """Seconds and bytes since the start, without those of the copies in between."""

    def __init__(self) -> None:
        self._start = (time.perf_counter(), sent_bytes())

    def read(self) -> tuple[float, int]:
        seconds, sent = self._start
        return time.perf_counter() - seconds, sent_bytes() - sent

    def leave_out(self, since: tuple[float, int]) -> None:
        """Forget what has been measured since an earlier reading."""
        now = self.read()
        seconds, sent = self._start
        self._start = (seconds + now[0] - since[0], sent + now[1] - since[1])


class Training:
    """One line of the plan."""

    def __init__(self, run: dict[str, Any], task: tasks.Task) -> None:
        self._run, self._task = run, task
        self._rank = int(os.environ.get("BENCH_RANK", pl.rank()))  # also of independent processes
        self._copies: list[tuple[int, float, dict[str, Tensor]]] = []

    def go(self) -> dict[str, Any]:
        """Train; return what this worker has measured."""
        run, task = self._run, self._task
        torch.manual_seed(run["seed"])
        model = task.model()
        optimizer = tasks.make_optimizer(run["optimizer"] or task.optimizer, model)
        model, optimizer = pl.distribute(model, optimizer, pace=run["pace"])
        steps = run["steps"][self._rank]
        shared_out = iter(pl.shard(self._loader()))
        # The workers agree on the pass when it begins: not while they are timed.
        batches = itertools.chain([next(shared_out)], shared_out)
        delays = Delays.from_request(run["delays"]).of(self._rank, steps) if run["delays"] else None
        due = {steps * part // run["copies"] for part in range(1, run["copies"])}
        meet(run)
        watch = Watch()
        for step in range(steps):
            if step in due:
                self._copy(model, step, watch)
            x, y = next(batches)
            loss = F.cross_entropy(model(x), y)
            if delays is not None:
                time.sleep(delays[step])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds, sent = watch.read()
        if run["stands_aside"]:
            model.subscribe()  # no worker waits for one that has done its part
        shared_out.close()
        pl.world().barrier()  # the last copy includes what the other workers did so far
        all_seconds, _ = watch.read()
        model.pull()
        self._copy(model, steps, watch, at_s=all_seconds)
        curve = self._judge()
        pl.world().barrier()
        return {"run": run["id"], "steps": steps, "s": seconds, "sent": sent, "curve": curve}

    def _loader(self) -> DataLoader[Any]:
        """One pass that is long enough for the fastest; the same samples whatever the pace."""
        run = self._run
        count = max(run["steps"]) * pl.world_size() * run["batch"]
        draws = torch.Generator().manual_seed(1000 + run["seed"])
        chosen = torch.randint(self._task.num_train, (count,), generator=draws)
        return DataLoader(Subset(self._task.train, chosen.tolist()), run["batch"])

    def _copy(self, model: nn.Module, step: int, watch: Watch, at_s: float | None = None) -> None:
        since = watch.read()
        with model.agreed():
            if self._rank == 0:
                values = {name: value.clone() for name, value in model.state_dict().items()}
                self._copies.append((step, since[0] if at_s is None else at_s, values))
        watch.leave_out(since)

    def _judge(self) -> list[tuple[int, float, float]]:
        curve, plain = [], self._task.model()
        for step, at_s, values in self._copies:
            plain.load_state_dict(values)
            curve.append((step, at_s, self._task.judge(plain)))
        return curve


def meet(run: dict[str, Any]) -> None:
    """Start together; independent workers synchronise in a directory."""
    pl.world().barrier()
    if not run["meets_in"]:
        return
    directory, count = Path(run["meets_in"]), len(run["steps"])
    directory.mkdir(exist_ok=True)
    (directory / os.environ["BENCH_RANK"]).touch()
    while len(list(directory.iterdir())) < count:
        time.sleep(0.005)


def main() -> None:
    plan, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    pl.init()
    rank = os.environ.get("BENCH_RANK", pl.rank())
    loaded: dict[str, tasks.Task] = {}
    with (out / f"{rank}.jsonl").open("a", encoding="utf-8") as file:
        for line in plan.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            if run["task"] not in loaded:
                loaded[run["task"]] = tasks.load(run["task"])
            reported = Training(run, loaded[run["task"]]).go()
            gc.collect()  # the groups of the last model are closed by all at the same place
            file.write(json.dumps(reported) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
