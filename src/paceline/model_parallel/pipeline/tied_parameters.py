"""TiedParameters: parameters that several stages use (tied embeddings); gradients are summed.

Each process that holds a copy computes a part of the gradient. The processes exchange these, and
all add them in the order of the ranks, so that equal copies stay bitwise equal. Stages of one
process share one Parameter, and need no exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.devices import is_on_device
from paceline.errors import UsageError
from paceline.model_parallel.pipeline.stage_links import StageLinks
from paceline.observe.telemetry.trace import Stopwatch

_TAG = 1 << 30  # above those of microbatches


class TiedParameters:
    """The parameters of this process that other processes of the pipeline hold too."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        stage_ranks: Sequence[int],
        group: Any,
        names: Mapping[str, Sequence[int]],
        on_device: StageLinks | None = None,
    ) -> None:
        self._group, self._rank = group, int(group.rank())
        self._links = on_device
        self._copies: list[tuple[int, nn.Parameter, list[int]]] = []
        for number, (name, indices) in enumerate(sorted(names.items())):
            ranks = sorted({stage_ranks[index] for index in indices})
            if self._rank not in ranks:
                continue
            local = [stages[index] for index in indices if stage_ranks[index] == self._rank]
            params = {id(p): p for p in (_find(stage, name) for stage in local)}
            if len(params) > 1:
                raise UsageError(
                    f"pipeline: stages of rank {self._rank} have copies of {name}, which is one"
                    " parameter of the model; let them use the same nn.Parameter"
                )
            (param,) = params.values()
            if len(ranks) > 1 and param.requires_grad:
                self._copies.append((number, param, ranks))
        self._before: list[Tensor | None] = []

    def begin_batch(self) -> None:
        """Before a batch: set gradients aside that have been summed already."""
        self._before = [param.grad for _, param, _ in self._copies]
        for _, param, _ in self._copies:
            param.grad = None

    def sum_gradients(self, waiting: Stopwatch) -> None:
        """After a batch: sum its gradients over all processes, and add those from before it."""
        own, works, others = [], [], []
        for number, param, ranks in self._copies:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            own.append(grad.contiguous())
            arriving = {rank: torch.empty_like(own[-1]) for rank in ranks if rank != self._rank}
            others.append(arriving)
            for rank, room in arriving.items():
                works += self._exchange(own[-1], room, rank, number)
        with waiting:
            for work in works:
                work.wait()
        together = zip(self._copies, own, others, self._before, strict=True)
        for (_, param, ranks), grad, arrived, before in together:
            terms = [grad if rank == self._rank else arrived[rank] for rank in ranks]
            total = sum(terms[1:], terms[0])
            param.grad = total if before is None else before.add_(total)  # keeps its memory
        self._before = []

    def _exchange(self, grad: Tensor, room: Tensor, rank: int, number: int) -> list[Any]:
        if is_on_device(grad):
            assert self._links is not None, "gradients are on a device only if the model is"
            to, back = self._links.of_tied(self._rank, rank), self._links.of_tied(rank, self._rank)
            return [to.send(grad), back.receive(room)]
        tag = _TAG + number
        return [self._group.recv([room], rank, tag), self._group.send([grad], rank, tag)]


def _find(stage: nn.Module, name: str) -> nn.Parameter:
    found = dict(stage.named_parameters()).get(name)
    if found is None:
        raise UsageError(
            f"pipeline: parameter {name} is listed as shared, but a stage does not have it"
        )
    return found
