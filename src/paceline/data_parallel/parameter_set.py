"""Intake: which parameters take part, from the first forward to the last step.

Parameters may be frozen and thawed while a model is trained, by all workers alike. Those that want
gradients move into buckets; a gradient that nobody averages must not reach the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.data_parallel.bucket import Named
from paceline.data_parallel.bucket_allocator import Housing
from paceline.data_parallel.direct_gradients import compute_in_bucket
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.setup import Groundwork
from paceline.errors import UsageError


class Intake:
    """The parameters of one training."""

    def __init__(self, ground: Groundwork, housing: Housing, reducer: Reducer) -> None:
        self._ground, self._housing, self._reducer = ground, housing, reducer
        self._known: dict[nn.Parameter, bool] = {}  # did it want a gradient when last seen?
        self.outside: list[Named] = []  # frozen ones, which nobody averages
        self.num_optimized = 0  # parameters of the optimizer when it was last looked at

    def take_all(self, model: nn.Module) -> None:
        """Bring what is trained, and was not brought yet, into buckets. Collective."""
        taken = {id(param) for param in self._reducer.params}
        new = [
            Named(name, param)
            for name, param in model.named_parameters()
            if param.requires_grad and id(param) not in taken
        ]
        self._take(model, new)

    @property
    def is_changed(self) -> bool:
        """Whether parameters have been frozen or thawed since they were last looked at."""
        return any(param.requires_grad is not wanted for param, wanted in self._known.items())

    def follow(self, model: nn.Module) -> None:
        """Go on with those that are trained now. Collective."""
        if self._ground.is_free:
            raise UsageError(
                f"rank {self._ground.group.rank}: parameters were frozen or thawed under a"
                " free-running pace, where workers cannot do so together; decide what is trained"
                " before distribute, or use pace ps"
            )
        self.take_all(model)
        self._reducer.refresh()

    def refuse_strays(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step with gradients, or of parameters, that have not been averaged."""
        rank = self._ground.group.rank
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
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param not in self._known:
                    raise UsageError(
                        f"rank {rank}: the optimizer has a parameter of shape {list(param.shape)}"
                        " that the model did not have when it was distributed"
                    )

    def _take(self, model: nn.Module, parameters: Sequence[Named]) -> None:
        sparse_ids = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        }
        sparse = [named for named in parameters if id(named.param) in sparse_ids]
        dense = [named for named in parameters if id(named.param) not in sparse_ids]
        ground = self._ground
        if sparse and ground.is_common:
            self._housing.share(sparse)
        elif sparse and ground.method is not None:
            raise UsageError(
                f"{sparse[0]} has sparse gradients, which only allreduce and the paces with servers"
                " exchange; use one of those, or nn.Embedding(..., sparse=False)"
            )
        buckets = self._housing.house(dense)
        if ground.serving is not None:
            ground.serving.take(buckets)
        if ground.method is not None:
            ground.method.take(buckets)
        ground.exchange.take(buckets)
        self._reducer.add(buckets, sparse)
        compute_in_bucket(model, self._housing.slots, self._reducer)
        self._known = {param: param.requires_grad for param in model.parameters()}
        taken = {id(param) for param in self._reducer.params}
        self.outside = [Named(n, p) for n, p in model.named_parameters() if id(p) not in taken]
