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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.optim import Optimizer

from paceline.pace.parse import parse

_OURS, _UNENCRYPTED = "paceline ", "unencrypted "
_WITH_LOCAL_STEPS = ("local", "post_local", "bmuf", "diloco", "easgd", "eamsgd")
_ONE_BUCKET_MB = 200  # several of PowerSGD's wait for each other on gloo, for ever
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
    hook: str = ""  # of DDP: "fp16" or "powersgd"
    is_alone: bool = False  # one process whatever the number of workers
    is_encrypted: bool = True  # ours, between hosts

    @property
    def is_coordinated(self) -> bool:
        """Whether all workers have the same parameters after the same number of steps."""
        return bool(self.library) and self._word in ("allreduce", "ps")

    @property
    def is_free(self) -> bool:
        """Whether each worker continues without waiting for the other workers."""
        return not self.library or self._word in ("async", "ssp")

    @property
    def period(self) -> int:
        """After how many steps everything has happened that happens in some of them."""
        return int(parse(self.pace).value) if self._word in _WITH_LOCAL_STEPS else 1

    @property
    def _word(self) -> str:
        return self.pace.partition("[")[0].partition(":")[0]


KINDS = {
    "one": Kind("one process", is_alone=True),
    "independent": Kind("independent"),
    "independent-kept": Kind("independent, memory kept", keeps_memory=True),
    "ddp-gloo": Kind("DDP gloo", "gloo"),
    "ddp-gloo-kept": Kind("DDP gloo, memory kept", "gloo", keeps_memory=True),
    "ddp-gloo-views": Kind("DDP gloo, views", "gloo", views=True),
    "ddp-fp16": Kind("DDP gloo, fp16 hook", "gloo", hook="fp16"),
    "ddp-powersgd": Kind("DDP gloo, PowerSGD rank 1", "gloo", hook="powersgd"),
    "ddp-paceline": Kind("DDP paceline", "paceline"),
    "replicated": Kind("paceline replicated", "ours", update="replicated"),
    "sharded": Kind("paceline sharded", "ours", update="sharded"),
    "auto": Kind("paceline auto", "ours", update="auto"),
    "ps": Kind("paceline ps", "ours", "ps", servers=1),
    "async": Kind("paceline async", "ours", "async", servers=1),
    "ssp": Kind("paceline ssp:3", "ours", "ssp:3", servers=1),
    "tensorflow": Kind("TensorFlow servers", "tensorflow", "async", servers=1),
}


def at_pace(text: str, *, encrypted: bool = True) -> str:
    """Return the name of the contender that trains at this pace of ours."""
    return _OURS + ("" if encrypted else _UNENCRYPTED) + text


def kind_of(name: str) -> Kind:
    """Return a contender of the table, or one that was named by `at_pace`."""
    if name.startswith(_OURS):
        pace = name.removeprefix(_OURS)
        plain = pace.removeprefix(_UNENCRYPTED)
        return Kind(name, "ours", plain, is_encrypted=plain == pace)
    return KINDS[name]


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
            return self._wrap(model), optimizer
        return model, optimizer

    def _wrap(self, model: nn.Module) -> nn.Module:
        kind, wrap = self._kind, nn.parallel.DistributedDataParallel
        cap = {"bucket_cap_mb": _ONE_BUCKET_MB} if kind.hook == "powersgd" else {}
        wrapped = wrap(model, gradient_as_bucket_view=kind.views, **cap)
        if kind.hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif kind.hook == "powersgd":
            # Plain all-reduce in the first two steps, which are not measured: DDP rebuilds its
            # buckets after the first one, and the hook keeps state by bucket.
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2
            )
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped


def keep_freed_memory() -> None:
    """Let malloc keep large blocks that were freed, as Paceline does.

    By default every large tensor is mapped afresh from the kernel, which clears it page by page.
    """
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        if mallopt(option, value) != 1:
            raise RuntimeError(f"this malloc refuses option {option} with the value {value}")
