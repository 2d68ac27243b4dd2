"""What is compared in training: how each contender makes a plain model data parallel.

Every class takes the same model and optimizer and gives back the ones to train with. Nothing else
differs between contenders: the loop is in training_rank.py.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # from malloc.h


@dataclass(frozen=True)
class Kind:
    """One contender; `library` is what does the communication, if anything."""

    label: str
    library: str = ""  # "" (none), "gloo" or "paceline" under DDP, "ours", "tensorflow"
    pace: str = "allreduce"  # of ours
    update: str = ""  # of ours
    servers: int = 0  # processes beside the workers
    keeps_memory: bool = False
    views: bool = False  # DDP's gradient_as_bucket_view
    is_alone: bool = False  # one process whatever the number of workers

    @property
    def is_coordinated(self) -> bool:
        """Whether all workers have the same parameters after the same number of steps."""
        return bool(self.library) and self.pace in ("allreduce", "ps")


KINDS = {
    "one": Kind("one process", is_alone=True),
    "independent": Kind("independent"),
    "independent-kept": Kind("independent, memory kept", keeps_memory=True),
    "ddp-gloo": Kind("DDP gloo", "gloo"),
    "ddp-gloo-views": Kind("DDP gloo, views", "gloo", views=True),
    "ddp-paceline": Kind("DDP paceline", "paceline"),
    "replicated": Kind("paceline replicated", "ours", update="replicated"),
    "sharded": Kind("paceline sharded", "ours", update="sharded"),
    "auto": Kind("paceline auto", "ours", update="auto"),
    "ps": Kind("paceline ps", "ours", "ps", servers=1),
    "async": Kind("paceline async", "ours", "async", servers=1),
    "ssp": Kind("paceline ssp:3", "ours", "ssp:3", servers=1),
    "tensorflow": Kind("TensorFlow servers", "tensorflow", "async", servers=1),
}


class Worker:
    """This process's side of a contender."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = f"torch {torch.__version__}"
        if kind.keeps_memory:
            keep_freed_memory()
        if kind.library in ("gloo", "paceline"):
            self._join_torch(kind.library)
        elif kind.library == "ours":
            self._join_paceline()

    def _join_torch(self, backend: str) -> None:
        import torch.distributed as dist

        if backend == "paceline":
            self._name_paceline()
        # A FileStore, because torch's TCPStore would listen on all interfaces.
        store = dist.FileStore(os.environ["BENCH_STORE"], self.world)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)

    def _join_paceline(self) -> None:
        import paceline as pl

        self._name_paceline()
        pl.init()

    def _name_paceline(self) -> None:
        import paceline

        self.version = f"paceline {paceline.__version__}"

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[Any, Optimizer]:
        """Return the model to call and the optimizer to step."""
        if self._kind.library == "ours":
            import paceline as pl

            options = {"update": self._kind.update} if self._kind.update else {}
            return pl.distribute(model, optimizer, pace=self._kind.pace, **options)
        if self._kind.library:
            views = self._kind.views
            wrap = nn.parallel.DistributedDataParallel
            return wrap(model, gradient_as_bucket_view=views), optimizer
        return model, optimizer


def keep_freed_memory() -> None:
    """Let malloc keep large blocks that were freed, as Paceline does.

    By default every large tensor is mapped afresh from the kernel, which clears it page by page.
    """
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        if mallopt(option, value) != 1:
            raise RuntimeError(f"this malloc refuses option {option} with the value {value}")
