"""Parameters that several stages use (tied embeddings): their gradients are summed.

Each process that holds a copy computes a part of the gradient. They tell each other, and all add up
in the order of the ranks, so that copies which were equal stay equal to the last bit. Stages of one
process share one Parameter, and need nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.observe.telemetry.trace import Stopwatch

_TAG = 1 << 30  # behind those of microbatches


class Shared:
    """The parameters of this process that others hold too."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        owners: Sequence[int],
        group: Any,
        names: Mapping[str, Sequence[int]],
    ) -> None:
        self._group, self._rank = group, int(group.rank())
        self._copies: list[tuple[int, nn.Parameter, list[int]]] = []
        for number, (name, holding) in enumerate(sorted(names.items())):
            ranks = sorted({owners[index] for index in holding})
            if self._rank not in ranks:
                continue
            local = [stages[index] for index in holding if owners[index] == self._rank]
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

    def set_aside(self) -> None:
        """Before a batch: take away what has been summed already."""
        self._before = [param.grad for _, param, _ in self._copies]
        for _, param, _ in self._copies:
            param.grad = None

    def add_up(self, waiting: Stopwatch) -> None:
        """After a batch: sum what it added on all processes, and add what was there before."""
        own, works, others = [], [], []
        for number, param, ranks in self._copies:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            own.append(grad.contiguous())
            arriving = {rank: torch.empty_like(own[-1]) for rank in ranks if rank != self._rank}
            others.append(arriving)
            for rank, room in arriving.items():
                works.append(self._group.recv([room], rank, _TAG + number))
                works.append(self._group.send([own[-1]], rank, _TAG + number))
        with waiting:
            for work in works:
                work.wait()
        together = zip(self._copies, own, others, self._before, strict=True)
        for (_, param, ranks), grad, arrived, before in together:
            terms = [grad if rank == self._rank else arrived[rank] for rank in ranks]
            total = sum(terms[1:], terms[0])
            param.grad = total if before is None else before.add_(total)  # keeps its memory
        self._before = []


def _find(stage: nn.Module, name: str) -> nn.Parameter:
    found = dict(stage.named_parameters()).get(name)
    if found is None:
        raise UsageError(f"pipeline: parameter {name} is said to be shared, but a stage lacks it")
    return found
