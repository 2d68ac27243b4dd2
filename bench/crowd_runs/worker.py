"""One worker of a large job: joins, reports, adds up a tensor with all others, sleeps, and leaves.

Started by many_processes.py through `paceline run`. Some workers print a line of JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import paceline as pl


def memory_kb() -> dict[str, int]:
    """Return this process's share of the memory it uses, in KB, by sort."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {row[0].rstrip(":"): int(row[1]) for row in rows}


def descriptors() -> tuple[int, int]:
    """Return how many descriptors this process has, and how many of them are sockets."""
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return len(names), sum(name.startswith("socket:") for name in names)


def main() -> None:
    pl.init()
    joined_s, world = time.time(), pl.world()
    x = torch.full((1024,), float(pl.rank()))
    world.barrier()
    barrier_s = time.time()
    world.all_reduce(x)
    done_s = time.time()
    n = pl.world_size()
    assert torch.all(x == n * (n - 1) // 2), f"the sum is {x[0].item()}"
    time.sleep(float(sys.argv[1]))  # the workers of this job are idle
    memory, (num_fds, num_sockets) = memory_kb(), descriptors()
    world.barrier()
    if pl.rank() % max(1, n // 8) == 0 or pl.rank() == n - 1:
        print(
            json.dumps(
                {
                    "rank": pl.rank(),
                    "joined_s": joined_s,
                    "barrier_s": barrier_s,
                    "all_reduce_s": done_s - barrier_s,
                    "fds": num_fds,
                    "sockets": num_sockets,
                    "threads": len(os.listdir("/proc/self/task")),
                    "pss_kb": memory["Pss"],
                    "private_kb": memory["Private_Dirty"] + memory["Private_Clean"],
                    "told_s": time.time(),
                }
            ),
            flush=True,
        )
    world.barrier()


if __name__ == "__main__":
    main()
