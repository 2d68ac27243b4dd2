"""Who is compared in pushing and pulling: one class for each server, as a worker sees it.

Each has memory for a gradient, which the worker fills, and `push_pull`, after which `params` are
the parameters that came back. Libraries are imported where they are used.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch

from servers.values import RATE, Array


class Subject(Protocol):
    rank: int
    num_workers: int
    version: str

    def prepare(self, count: int) -> None: ...
    def push_pull(self) -> None: ...
    @property
    def grad(self) -> Array: ...
    @property
    def params(self) -> Array: ...
    @property
    def is_server(self) -> bool: ...


class _Place:
    """Which process of which contender this is; ranks behind the workers are servers."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.num_workers = int(os.environ["BENCH_WORKERS"])

    @property
    def is_server(self) -> bool:
        return self.rank >= self.num_workers


class TorchRpc(_Place):
    """torch.distributed.rpc with a server process; fresh tensors come back from every call."""

    def __init__(self, tcp_only: bool) -> None:
        from servers import rpc

        super().__init__()
        torch.set_num_threads(1)
        self.version = f"torch {torch.__version__}"
        self._call = rpc.call_push_pull
        rpc.join(self.rank, self.num_workers, tcp_only)

    def prepare(self, count: int) -> None:
        self._grad, self._params = torch.zeros(count), torch.zeros(count)

    def push_pull(self) -> None:
        self._params = self._call(self._grad)

    @property
    def grad(self) -> Array:
        return self._grad.numpy()  # type: ignore[no-any-return]

    @property
    def params(self) -> Array:
        return self._params.numpy()  # type: ignore[no-any-return]


class PacelineTable(_Place):
    """What our server paces do between backward and the next forward, with one bucket."""

    def __init__(self, pace: str) -> None:
        import paceline as pl

        super().__init__()
        torch.set_num_threads(1)
        pl.init()
        self.version, self._pace = f"paceline {pl.__version__}", pace

    def prepare(self, count: int) -> None:
        import paceline as pl
        from paceline.job import current
        from paceline.pace.parse import parse
        from paceline.pace.server import rule_of
        from paceline.ps.remote_table import Held, Item, RemoteTable
        from paceline.ps.spec import OptimizerSpec

        self._grad, self._params = pl.empty(count), pl.empty(count).zero_()
        rule = rule_of(parse(self._pace))
        average = pl.empty(count) if rule.aggregate else None
        held = [Held("params", 0, 0, count, (count,))]
        items = [Item("params", held, self._grad, self._params, average)]
        # A mean, times the number of workers, is the sum that asynchronous pushes add up to.
        rate = RATE * self.num_workers if rule.aggregate else RATE
        optimizer = OptimizerSpec("SGD", ({"lr": rate},))
        workers = range(self.num_workers)
        self._table = RemoteTable(
            current().servers, workers, f"bench {count}", items, optimizer, rule
        )
        for worker in workers:  # the first one makes the table, the others join it
            if worker == self.rank:
                self._table.open()
                if worker == 0:
                    self._table.assign(0)
            pl.world().barrier()

    def push_pull(self) -> None:
        pushed = self._table.push(0)
        if self._table.rule.aggregate:
            pushed.wait()
        self._table.commit(None).wait()

    @property
    def grad(self) -> Array:
        return self._grad.numpy()  # type: ignore[no-any-return]

    @property
    def params(self) -> Array:
        return self._params.numpy()  # type: ignore[no-any-return]


def make(kind: str) -> Subject:
    if kind in ("paceline", "paceline-ps"):
        return PacelineTable("async" if kind == "paceline" else "ps")
    if kind in ("rpc", "rpc-tcp"):
        return TorchRpc(tcp_only=kind == "rpc-tcp")
    raise ValueError(f"there is no contender {kind!r}")
