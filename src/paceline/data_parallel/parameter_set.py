"""ParameterSet: which parameters are trained, from the first forward to the last step.

Parameters may be frozen and thawed while a model is trained, by all workers alike. Those that
require gradients move into buckets; a gradient that was not averaged must not reach the optimizer.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import nn

from paceline.comm.object_collectives import all_gather_object
from paceline.data_parallel.bucket import Bucket, NamedParameter
from paceline.data_parallel.bucket_allocator import BucketAllocator
from paceline.data_parallel.direct_gradients import compute_in_bucket
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.setup import TrainingSetup
from paceline.errors import DeviceMemoryError, UsageError


class ParameterSet:
    """The parameters of one training."""

    def __init__(self, setup: TrainingSetup, allocator: BucketAllocator, reducer: Reducer) -> None:
        self._setup, self._allocator, self._reducer = setup, allocator, reducer
        self._params: list[nn.Parameter] = []  # of the model
        self._trainable: list[bool] = []  # requires_grad of the same, when last seen
        self.outside: list[NamedParameter] = []  # frozen ones, which are not averaged
        self.num_optimized = 0  # number of the optimizer's parameters when last seen

    def include_all(self, model: nn.Module) -> None:
        """Move trainable parameters that are not in buckets yet into some. Collective."""
        taken = {id(param) for param in self._reducer.params}
        new = [
            NamedParameter(name, param)
            for name, param in model.named_parameters()
            if param.requires_grad and id(param) not in taken
        ]
        self._take(model, new)

    @property
    def has_changed(self) -> bool:
        """Whether parameters have been frozen or thawed since they were last seen."""
        return [param.requires_grad for param in self._params] != self._trainable

    def follow(self, model: nn.Module) -> None:
        """Follow which parameters are trained now. Collective."""
        if self._setup.is_free:
            raise UsageError(
                f"rank {self._setup.group.rank}: parameters were frozen or thawed under a"
                " free-running pace, where workers cannot do so together; decide what is trained"
                " before distribute, or use pace ps"
            )
        self.include_all(model)
        self._reducer.refresh()

    def require_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if a step would use gradients or parameters that have not been averaged."""
        rank = self._setup.group.rank
        for named in self.outside:
            if named.param.requires_grad and named.param.grad is not None:
                raise UsageError(
                    f"rank {rank}: {named} has been thawed, but its gradient was not averaged: call"
                    " the model itself (not only a part of it, nor a compiled one) once after"
                    " parameters are thawed"
                )
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if count == self.num_optimized:
            return
        self.num_optimized = count
        known = set(map(id, self._params))
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in known:
                    raise UsageError(
                        f"rank {rank}: the optimizer has a parameter of shape {list(param.shape)}"
                        " that the model did not have when it was distributed"
                    )

    def _allocate(self, dense: Sequence[NamedParameter]) -> list[Bucket]:
        """Move parameters into buckets. If a device has no memory for them, all workers raise."""
        there, allocator = self._setup.on_device, self._allocator
        if there is None:
            return allocator.allocate_buckets(dense)
        problem, made = None, list[tuple[Bucket, bool]]()
        try:
            made = allocator.make_buckets(dense)
        except torch.OutOfMemoryError as error:
            problem = f"{there.device} has too little memory for the gradients: {error}"
        group = self._setup.group
        for rank, text in zip(group.ranks, all_gather_object(group, problem), strict=True):
            if text is not None:
                made.clear()
                gc.collect()  # buckets and their slots refer to each other
                raise DeviceMemoryError(
                    f"distribute: rank {rank}: {text}. Parameters and gradients need about three"
                    " times the memory of the model, and the optimizer's state more: use a smaller"
                    " model or batch, or 16-bit parameters"
                )
        return allocator.fill(made)

    def _take(self, model: nn.Module, parameters: Sequence[NamedParameter]) -> None:
        sparse_ids = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        }
        sparse = [named for named in parameters if id(named.param) in sparse_ids]
        dense = [named for named in parameters if id(named.param) not in sparse_ids]
        setup = self._setup
        if sparse and setup.is_common:
            self._allocator.share_sparse(sparse)
        elif sparse and setup.method is not None:
            raise UsageError(
                f"{sparse[0]} has sparse gradients, which only allreduce and the paces with servers"
                " exchange; use one of those, or nn.Embedding(..., sparse=False)"
            )
        buckets = self._allocate(dense)
        if setup.serving is not None:
            setup.serving.take(buckets)
        if setup.method is not None:
            setup.method.take(buckets if setup.hosts is None else setup.hosts.take(buckets))
        setup.exchange.take(buckets)
        self._reducer.add(buckets, sparse)
        compute_in_bucket(model, self._allocator.slots, self._reducer)
        self._params = list(model.parameters())
        self._trainable = [param.requires_grad for param in self._params]
        taken = {id(param) for param in self._reducer.params}
        self.outside = [
            NamedParameter(n, p) for n, p in model.named_parameters() if id(p) not in taken
        ]
