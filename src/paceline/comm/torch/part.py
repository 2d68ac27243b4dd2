"""The CPU's part of a group of several backends: `cpu:paceline,cuda:nccl`, from torch 2.14 on.

A process group written in Python (backend.py) replaces a whole group of torch, also the parts of
other devices. A subclass of `Backend` is one part of it, but torch 2.13 cannot create one. Calls go
through torch's C++ group, so `backend="paceline"` alone remains a process group.

Which groups have several backends: requested.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from paceline.comm.torch.backend import PacelineProcessGroup
from paceline.errors import UsageError

_CPU = torch.device("cpu")
_Backend: Any = c10d.Backend

_FORWARDED = (
    "abort",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "getBackendName",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
    "shutdown",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_wait_for_pending_works",
)


class PacelinePart(_Backend):  # type: ignore[misc]
    """Calls of torch's C++ group for tensors on the CPU; a process group of ours does the work."""

    def __init__(self, whole: PacelineProcessGroup) -> None:
        super().__init__(whole.rank(), whole.size())
        self.whole = whole

    def start_coalescing(self) -> None:
        self.whole._start_coalescing(_CPU)

    def end_coalescing(self) -> c10d.Work:
        return self.whole._end_coalescing(_CPU)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> c10d.Work:  # noqa: ARG002
        raise UsageError(
            "recv without a source: in a group of several backends torch cannot return the sender;"
            " name the source, or use a group of its own: new_group(backend='paceline')"
        )

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self.whole.monitored_barrier(opts.timeout, wait_all_ranks)


def _forwarding(name: str) -> Callable[..., Any]:
    def call(self: PacelinePart, *arguments: Any) -> Any:
        return getattr(self.whole, name)(*arguments)

    call.__name__ = name
    return call


for _name in _FORWARDED:  # torch's C++ class finds its overrides by these names
    setattr(PacelinePart, _name, _forwarding(_name))
