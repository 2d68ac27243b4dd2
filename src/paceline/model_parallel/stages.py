"""Which stages of a pipeline this process holds, and where the model is cut into them.

A traced forward pass may hold for inputs of one size only. Other sizes (the last batch of an epoch,
an evaluation) are traced again when they come, with a copy of the model that has no data: by then
this process has let go of the other stages.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.model_parallel.options import Wishes
from paceline.model_parallel.parts.layout import Held, Holding, Part
from paceline.model_parallel.pipeline.batches import count_microbatches, cut, rows_of
from paceline.model_parallel.pipeline.graph import LayerGraph
from paceline.model_parallel.pipeline.measuring import LayerCost, measure_layers
from paceline.model_parallel.pipeline.partitioning import choose_starts
from paceline.model_parallel.pipeline.pipeline import Pipeline
from paceline.model_parallel.pipeline.schedules import (
    indices_of,
    owners,
    stages_per_process,
)
from paceline.model_parallel.pipeline.splitting import release_others, shared, split
from paceline.model_parallel.pipeline.stage_module import StageModule
from paceline.model_parallel.pipeline.tracing import trace
from paceline.model_parallel.unit import Unit

_numbers = itertools.count()  # alike on all workers


class Stages:
    """The stages of one model: chosen when it is still whole, taken when matrices are cut."""

    def __init__(self, model: nn.Module, unit: Unit, wishes: Wishes) -> None:
        """Trace the model, and agree where it is cut: as one process of the job measures."""
        self._unit, self._wishes = unit, wishes
        example = self._microbatch(_required(unit, wishes))
        self._graphs = [trace(model, example)]
        self._blueprint = _without_data(model)
        self._count = unit.mesh.pp * stages_per_process(wishes.schedule)
        self.starts = self._chosen(model, example)
        self._mine: list[StageModule] = []
        self._numbers = indices_of(wishes.schedule, unit.index("pp"), unit.mesh.pp)

    def _microbatch(self, example: tuple[Any, ...]) -> tuple[Any, ...]:
        asked, pp = self._wishes.microbatches, self._unit.mesh.pp
        if asked != "auto" and (not isinstance(asked, int) or asked < 1):
            raise UsageError(f"microbatches={asked!r}: pass a number of at least 1, or 'auto'")
        rows = rows_of(example)
        count = count_microbatches(rows, asked, self._wishes.schedule, pp)
        return tuple(cut(example, rows, count)[0])

    def _chosen(self, model: nn.Module, example: tuple[Any, ...]) -> list[str]:
        splits = self._wishes.splits
        if splits is None:

            def measured() -> list[str]:
                is_empty = any(one.is_meta for one in model.parameters())
                costs = _by_size(model, self._graphs[0]) if is_empty else None
                costs = costs or measure_layers(model, *example)
                holders = owners(self._wishes.schedule, self._unit.mesh.pp)
                return choose_starts(self._graphs[0], costs, self._count, holders)

            return self._unit.agree_once(f"stages of model {next(_numbers)}", measured)
        if len(splits) != self._count - 1:
            raise UsageError(
                f"splits={list(splits)}: {len(splits) + 1} stages, but schedule"
                f" {self._wishes.schedule!r} with pp={self._unit.mesh.pp} has {self._count}: name"
                f" {self._count - 1} layers, each of which begins a stage"
            )
        return list(splits)

    def take(self, model: nn.Module, holding: Holding, parts: Mapping[str, Part]) -> Pipeline:
        """Keep this process's stages; the parameters of all others are let go."""
        unit, wishes = self._unit, self._wishes
        stages = split(self._graphs[0], self.starts)
        self._mine = [stages[number] for number in self._numbers]
        tied = shared(stages)
        first = self._first_holders(tied)
        names = {param: name for name, param in model.named_parameters()}
        for stage in self._mine:
            for name, param in stage.named_parameters():
                counts = first.get(name, unit.index("pp")) == unit.index("pp")
                holding.held[names[param]] = Held(param, parts[names[param]], counts)
        pipeline = Pipeline(
            self._mine,
            self._numbers,
            len(stages),
            unit.axis("pp").get_group(),
            wishes.loss,
            wishes.schedule,
            wishes.microbatches,
            tied,
        )
        pipeline.prepare = self._prepare
        release_others(model, self._mine)
        return pipeline

    def _first_holders(self, tied: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the first process on pp that has a parameter which several have."""
        schedule, pp = self._wishes.schedule, self._unit.mesh.pp
        of_rank = [set(indices_of(schedule, rank, pp)) for rank in range(pp)]
        return {
            name: next(rank for rank in range(pp) if of_rank[rank] & set(where))
            for name, where in tied.items()
        }

    def _prepare(self, inputs: tuple[Any, ...]) -> None:
        """See to it that the stages can compute inputs of this size."""
        if any(graph.fits(inputs) for graph in self._graphs):
            return
        empty = pytree.tree_map_only(torch.Tensor, lambda one: one.to("meta"), inputs)
        self._graphs.append(trace(self._blueprint, empty))
        others = split(self._graphs[-1], self.starts)
        for stage, number in zip(self._mine, self._numbers, strict=True):
            stage.learn(others[number])


def _required(unit: Unit, wishes: Wishes) -> tuple[Any, ...]:
    if wishes.loss is None:
        raise UsageError(
            f"mesh {unit.mesh}: with pp the last stage computes the loss; pass it:"
            " distribute(..., loss=torch.nn.functional.cross_entropy)"
        )
    if wishes.example is None:
        raise UsageError(
            f"mesh {unit.mesh}: pp needs to see how a batch goes through the model; pass inputs of"
            " the size of a batch: distribute(..., example=x)"
        )
    return wishes.example


def _by_size(model: nn.Module, graph: LayerGraph) -> list[LayerCost]:
    """Say what layers cost where nothing can be run: as much as they have parameters."""
    modules = dict(model.named_modules())
    sizes = {
        name: sum(p.numel() * p.element_size() for p in modules[name].parameters())
        for name in graph.layers
    }
    return [LayerCost(name, float(size), 0.0, size, 0, 0) for name, size in sizes.items()]


def _without_data(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device, without copying its data first."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
