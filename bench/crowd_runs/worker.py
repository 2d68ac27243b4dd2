"""One worker of a large job: joins, reports, adds up a tensor with all others, sleeps, and leaves.

Started by many_processes.py through `paceline run`. Some workers print a line of JSON.
"""

import json
import sys
import time

import torch

import paceline as pl
from crowd_runs.facts import process_facts


def main() -> None:
    pl.init()
    world = pl.world()
    x = torch.full((1024,), float(pl.rank()))
    world.barrier()
    barrier_s = time.time()
    world.all_reduce(x)
    done_s = time.time()
    n = pl.world_size()
    assert torch.all(x == n * (n - 1) // 2), f"the sum is {x[0].item()}"
    time.sleep(float(sys.argv[1]))  # the workers of this job are idle
    facts = process_facts(pl.rank())  # while all others are there
    world.barrier()
    if pl.rank() % max(1, n // 8) == 0 or pl.rank() == n - 1:
        times = {"barrier_s": barrier_s, "all_reduce_s": done_s - barrier_s}
        print(json.dumps({**facts, **times}), flush=True)
    world.barrier()


if __name__ == "__main__":
    main()
