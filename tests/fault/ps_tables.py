"""Tables of plain numbers on real servers, and books about them that outlive a killed process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.comm.shared_memory import allocate
from paceline.ps.client.items import Item, ItemParam
from paceline.ps.client.remote_table import RemoteTable
from paceline.ps.spec import OptimizerSpec, Rule
from paceline.runtime import job

SGD = OptimizerSpec("SGD", ({"lr": 1.0},))
FREE = Rule(bound=None)


def remote_table(name: str, count: int, rule: Rule = FREE, optimizer: OptimizerSpec = SGD):
    """Make a table of float64 zeros, or join it; collective among the workers."""
    here = job.current()
    memory = [allocate(here.fabric.engine, (count,), torch.float64).zero_() for _ in range(3)]
    grads, params, average = memory
    held = [ItemParam("cells", 0, 0, count, (count,))]
    item = Item("numbers", held, grads, params, average if rule.aggregate else None)
    workers = here.fabric.membership.workers
    table = RemoteTable(here.servers, workers, name, [item], optimizer, rule)
    if here.env.rank == 0:
        table.open()
        table.assign(0)
    here.world.barrier()
    if here.env.rank:
        table.open()
    here.world.barrier()
    return table


class Books:
    """Numbers in a file, one row per client: what it issued, what was acknowledged, whether it is
    done; the last row is the test's own. A page that was written to survives its writer."""

    ISSUED, ACKED, DONE = range(3)

    def __init__(self, path: Path | str, num_clients: int = 0) -> None:
        if num_clients:
            np.zeros((num_clients + 1, 3), dtype=np.int64).tofile(path)
        self.rows = np.memmap(path, dtype=np.int64, mode="r+").reshape(-1, 3)

    @property
    def is_over(self) -> bool:
        return bool(self.rows[-1, self.DONE])

    def end(self) -> None:
        self.rows[-1, self.DONE] = 1

    def issued(self, client: int) -> int:
        return int(self.rows[client, self.ISSUED])

    def acked(self, client: int) -> int:
        return int(self.rows[client, self.ACKED])

    @contextlib.contextmanager
    def update(self, client: int) -> Any:
        """Count an update that is issued now, and acknowledged if the block ends well."""
        self.rows[client, self.ISSUED] += 1
        yield
        self.rows[client, self.ACKED] += 1


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until something is so."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)
