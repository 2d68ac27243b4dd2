"""One worker of a training job: takes some steps and reports its times and what it uses.

Started by growth.py through `paceline run`: train.py MODEL STEPS. Without `paceline run` it trains
alone, without communication.
"""

import json
import sys
import time

import torch
from models import TASKS

import paceline as pl
from crowd_runs.facts import process_facts

_FIRST_STEPS = 2  # uncounted: memory is mapped


def main() -> None:
    task, steps = TASKS[sys.argv[1]], int(sys.argv[2])
    pl.init()
    torch.set_num_threads(1)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = pl.distribute(model, optimizer)
    times_s = []
    for x, target in task.batches(_FIRST_STEPS + steps):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        task.loss(model(x), target).backward()
        optimizer.step()
        times_s.append(time.perf_counter() - began_s)
    pl.world().barrier()
    facts = process_facts(pl.rank())
    pl.world().barrier()
    print(json.dumps({**facts, "steps_s": times_s[_FIRST_STEPS:], "batch": task.batch}), flush=True)


if __name__ == "__main__":
    main()
