"""SyncBatchNorm: batch normalization with the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.group import Group
from paceline.data_parallel.model_state.batchnorm import forward_in_training
from paceline.errors import UsageError
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Sum
from paceline.horovod.torch.operations import allgather, allreduce_


class _Statistics:
    """The two collectives that global statistics need, as named operations of a process set."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set

    @property
    def size(self) -> int:
        return self._process_set.named.size

    def all_gather(self, tensor: torch.Tensor, *, out: torch.Tensor) -> None:
        name = self._process_set.next_name("sync_batch_norm")
        out.copy_(allgather(tensor.unsqueeze(0), name, self._process_set))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        name = self._process_set.next_name("sync_batch_norm")
        allreduce_(tensor, name=name, op=Sum, process_set=self._process_set)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm for inputs of any dimension; in training it uses the statistics of all ranks."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self._statistics: Any = _Statistics(process_set)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise UsageError(f"SyncBatchNorm: expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch."""
        self._check_input_dim(input)
        batch_decides = self.training or not self.track_running_stats
        if not batch_decides or self._statistics.size == 1:
            return super().forward(input)
        return forward_in_training(self, input, cast(Group, self._statistics))
