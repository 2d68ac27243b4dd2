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
    """Which process of which contender this is; ranks after the workers' are servers."""

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


class PacelineClient(_Place):
    """Paceline's pl.ps.Client: one key, with arrays in engine memory or in ordinary memory."""

    def __init__(self, pace: str, memory: str = "engine") -> None:
        import paceline as pl

        super().__init__()
        torch.set_num_threads(1)
        pl.init()
        self.version = f"paceline {pl.__version__}"
        self._client, self._pace = pl.ps.Client(pace), pace
        self._allocate = pl.empty if memory == "engine" else torch.empty

    def prepare(self, count: int) -> None:
        self._grad, self._params = self._allocate(count).zero_(), self._allocate(count).zero_()
        # A mean, times the number of workers, is the sum that asynchronous pushes add up to.
        rate = RATE * self.num_workers if self._pace == "ps" else RATE
        self._client.init("params", self._params, "SGD", lr=rate)

    def push_pull(self) -> None:
        self._client.push_pull("params", self._grad, self._params).wait()

    @property
    def grad(self) -> Array:
        return self._grad.numpy()  # type: ignore[no-any-return]

    @property
    def params(self) -> Array:
        return self._params.numpy()  # type: ignore[no-any-return]


def make(kind: str) -> Subject:
    if kind in ("paceline-async", "paceline-ps"):
        return PacelineClient(kind.removeprefix("paceline-"))
    if kind == "paceline-any":
        return PacelineClient("async", memory="any")
    if kind in ("rpc", "rpc-tcp"):
        return TorchRpc(tcp_only=kind == "rpc-tcp")
    raise ValueError(f"there is no contender {kind!r}")
