"""The contenders as one rank sees them: memory, operations, a version. One class for each library.

Each `bind` returns a function without arguments that does the operation once, so that nothing but
the library's own call is inside the measured time. Libraries are imported where they are used: a
rank has only its own contender's environment.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from harness.values import Array

Call = Callable[[], Any]


class Subject(Protocol):
    rank: int
    world: int
    version: str

    def allocate(self, count: int, memory: str) -> Any: ...
    def view(self, tensor: Any) -> Array: ...
    def bind(self, op: str, source: Any, target: Any) -> Call: ...
    def close(self) -> None: ...


class _TorchTensors:
    """Memory of the contenders that work on torch tensors."""

    def allocate(self, count: int, memory: str) -> Any:
        import torch

        if memory != "ordinary":
            raise ValueError(f"{type(self).__name__} has no {memory} memory")
        return torch.empty(count, dtype=torch.float32)

    def view(self, tensor: Any) -> Array:
        return tensor.numpy()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Nothing outlives the process, and some libraries wait for peers that are gone already."""


class PacelineGroup(_TorchTensors):
    """Paceline's own interface; memory is "engine" (pl.empty) or "ordinary"."""

    def __init__(self) -> None:
        import paceline as pl

        pl.init()
        self._pl, self._group = pl, pl.world()
        self.rank, self.world, self.version = pl.rank(), pl.world_size(), pl.__version__

    def allocate(self, count: int, memory: str) -> Any:
        return self._pl.empty(count) if memory == "engine" else super().allocate(count, memory)

    def bind(self, op: str, source: Any, target: Any) -> Call:
        group, at_root = self._group, self.rank == 0
        if op == "send_recv":
            if self.rank % 2 == 0:
                return lambda: group.send(source, self.rank + 1)
            return lambda: group.recv(source, self.rank - 1)
        calls: dict[str, Call] = {
            "all_reduce": lambda: group.all_reduce(source),
            "all_reduce_out": lambda: group.all_reduce(source, out=target),
            "reduce": lambda: group.reduce(source, 0),
            "broadcast": lambda: group.broadcast(source, 0),
            "reduce_scatter": lambda: group.reduce_scatter(source, out=target),
            "all_gather": lambda: group.all_gather(source, out=target),
            "gather": lambda: group.gather(source, 0, out=target if at_root else None),
            "scatter": lambda: group.scatter(target, source if at_root else None, root=0),
            "all_to_all": lambda: group.all_to_all(source, out=target),
            "barrier": group.barrier,
        }
        return calls[op]


class TorchDistributed(_TorchTensors):
    """torch.distributed on ordinary tensors, with the backend "gloo" or "paceline"."""

    def __init__(self, backend: str) -> None:
        import torch
        import torch.distributed as dist

        if backend == "paceline":
            import paceline

            self.version = paceline.__version__
        else:
            self.version = torch.__version__
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # A FileStore, because torch's TCPStore would listen on all interfaces.
        store = dist.FileStore(os.environ["BENCH_STORE"], self.world)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)
        self._dist = dist

    def bind(self, op: str, source: Any, target: Any) -> Call:
        dist, rank, world = self._dist, self.rank, self.world
        if op == "send_recv":
            if rank % 2 == 0:
                return lambda: dist.send(source, rank + 1)
            return lambda: dist.recv(source, rank - 1)
        from_root = list(source.chunk(world)) if rank == 0 and op == "scatter" else None
        at_root = list(target.chunk(world)) if rank == 0 and op == "gather" else None
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(source),
            "reduce": lambda: dist.reduce(source, 0),
            "broadcast": lambda: dist.broadcast(source, 0),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source),
            "all_gather": lambda: dist.all_gather_into_tensor(target, source),
            "gather": lambda: dist.gather(source, at_root, dst=0),
            "scatter": lambda: dist.scatter(target, from_root, src=0),
            "all_to_all": lambda: dist.all_to_all_single(target, source),
            "barrier": dist.barrier,
        }
        return calls[op]


class DeepSpeedShm(_TorchTensors):
    """DeepSpeed's all-reduce over shared memory, written for inference on CPUs."""

    def __init__(self) -> None:
        import deepspeed
        import torch
        from deepspeed.ops.op_builder import ShareMemCommBuilder

        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        ShareMemCommBuilder().load(verbose=False).initialize(self.world, self.rank)
        self.version = deepspeed.__version__
        self._all_reduce = torch.ops.deepspeed.inference_all_reduce_

    def bind(self, op: str, source: Any, target: Any) -> Call:  # noqa: ARG002
        return {"all_reduce": lambda: self._all_reduce(source)}[op]


class Mpi:
    """Any MPI under mpi4py, on numpy arrays."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.world = self._comm.rank, self._comm.size
        words = MPI.Get_library_version().replace(",", " ").replace(":", " ").split()
        self.version = next(word.strip("v") for word in words if word.strip("v")[0].isdigit())

    def allocate(self, count: int, memory: str) -> Array:  # noqa: ARG002
        return np.empty(count, np.float32)

    def view(self, tensor: Array) -> Array:
        return tensor

    def bind(self, op: str, source: Any, target: Any) -> Call:  # noqa: ARG002
        comm, in_place, add = self._comm, self._mpi.IN_PLACE, self._mpi.SUM
        return {"all_reduce": lambda: comm.Allreduce(in_place, source, op=add)}[op]

    def close(self) -> None:
        """Give MPICH the chance to remove its shared memory."""
        self._mpi.Finalize()


class PlainTcp(Mpi):
    """TCP connections between pairs of ranks that exchange arrays: what the link can carry.

    An all-reduce of two ranks sends as many bytes in each direction. Nothing is added up here.
    """

    _PORT = 18515  # in a separate network namespace, so it is free

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = "plain sockets"
        host, port = os.environ["BENCH_TCP_HOST"], self._PORT + int(os.environ["LOCAL_RANK"])
        if self.rank < self.world // 2:
            self._socket = socket.create_server((host, port)).accept()[0]
        else:
            self._socket = self._connect(host, port)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connect(self, host: str, port: int) -> socket.socket:
        for _ in range(600):
            with suppress(ConnectionRefusedError):
                return socket.create_connection((host, port))
            time.sleep(0.1)
        raise TimeoutError(f"no process listens at {host}:{port} after 60 s")

    def bind(self, op: str, source: Any, target: Any) -> Call:
        if op != "exchange":
            raise ValueError(f"plain TCP knows the operation exchange, not {op}")

        def exchange() -> None:
            sender = threading.Thread(target=self._socket.sendall, args=(memoryview(source),))
            sender.start()
            rest = memoryview(target).cast("B")
            while rest:
                rest = rest[self._socket.recv_into(rest) :]
            sender.join()

        return exchange

    def close(self) -> None:
        self._socket.close()


def make(kind: str) -> Subject:
    """Join the contender's job and return this rank's side of it."""
    if kind in ("torch-gloo", "torch-paceline"):
        return TorchDistributed(kind.removeprefix("torch-"))
    return {
        "paceline": PacelineGroup,
        "deepspeed": DeepSpeedShm,
        "mpi": Mpi,
        "tcp": PlainTcp,
    }[kind]()
