"""What a process of a job uses, as its worker reports it."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_facts(rank: int) -> dict[str, float]:
    """Return descriptors, threads and memory of this process."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    memory = {row[0].rstrip(":"): int(row[1]) for row in rows}
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return {
        "rank": rank,
        "fds": len(names),
        "sockets": sum(name.startswith("socket:") for name in names),
        "threads": len(os.listdir("/proc/self/task")),
        "pss_kb": memory["Pss"],  # a page that n processes share counts 1/n in each
        "shared_kb": memory["Pss_Shmem"],
        "private_kb": memory["Private_Dirty"] + memory["Private_Clean"],
        "told_s": time.time(),
    }
