"""A parameter server on torch.distributed.rpc, in the way that PyTorch's own tutorials show.

A worker sends its gradient with one blocking call; the server adds it under a lock and returns the
parameters. The tensors travel through TensorPipe: through shared memory by its own choice, or over
TCP on the loopback interface if configured so; the faster one is used.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from servers.values import RATE

_SERVER = "server"
_TIMEOUT_S = 120.0


class _Server:
    """The parameters, in the server's process only."""

    lock = threading.Lock()
    params: Tensor | None = None  # guarded by: lock


def push_pull(grad: Tensor) -> Tensor:
    """Apply a gradient and return the parameters; runs on the server."""
    with _Server.lock:
        if _Server.params is None or _Server.params.shape != grad.shape:
            _Server.params = torch.zeros_like(grad)
        _Server.params.add_(grad, alpha=-RATE)
        return _Server.params


def join(rank: int, num_workers: int, tcp_only: bool) -> None:
    """Join as worker `rank`, or as the server, which comes after the workers."""
    more: dict[str, Any] = {"_transports": ["uv"]} if tcp_only else {}
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    rpc.init_rpc(
        _SERVER if rank == num_workers else f"worker{rank}",
        rank=rank,
        world_size=num_workers + 1,
        # A file, because a TCPStore would listen on all interfaces.
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{os.environ['BENCH_STORE']}",
            num_worker_threads=4,
            rpc_timeout=_TIMEOUT_S,
            **more,
        ),
    )


def call_push_pull(grad: Tensor) -> Tensor:
    """Push and pull, from a worker."""
    return rpc.rpc_sync(_SERVER, push_pull, (grad,))  # type: ignore[no-any-return]
