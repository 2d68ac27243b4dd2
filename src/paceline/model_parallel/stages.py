"""StagePlan: where a model is split into stages, and which stages this process holds.

A traced forward pass may be valid for inputs of one size only. Inputs of other sizes (the last
batch of an epoch, an evaluation) are traced when they occur, with a copy of the model on the meta
device: by then this process has released the other stages.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from paceline.comm.devices import CPU
from paceline.errors import UsageError
from paceline.model_parallel.pipeline.graph import LayerGraph
from paceline.model_parallel.pipeline.measuring import LayerCost, measure_layers
from paceline.model_parallel.pipeline.microbatches import (
    count_microbatches,
    count_rows,
    split_batch,
)
from paceline.model_parallel.pipeline.partitioning import choose_split_points
from paceline.model_parallel.pipeline.pipeline import Pipeline
from paceline.model_parallel.pipeline.schedules import (
    stage_ranks,
    stages_of_rank,
    stages_per_process,
)
from paceline.model_parallel.pipeline.splitting import (
    StageModule,
    find_tied,
    release_other_stages,
    split,
)
from paceline.model_parallel.pipeline.stage_links import FormLink
from paceline.model_parallel.pipeline.tracing import trace
from paceline.model_parallel.sharding.layout import LocalShard, LocalShards, SliceSpec
from paceline.model_parallel.sharding.model_shard import ModelParallelOptions
from paceline.model_parallel.unit import MeshUnit

_numbers = itertools.count()  # the same on all workers
_links = itertools.count()


class StagePlan:
    """The stages of one model: chosen from the full model, kept after tp has sharded matrices."""

    def __init__(self, model: nn.Module, unit: MeshUnit, options: ModelParallelOptions) -> None:
        """Trace the model, and agree where to split it: as one process of the job measures."""
        self._unit, self._options = unit, options
        example = self._example_microbatch(_require_loss_and_example(unit, options))
        self._graphs = [trace(model, example, unit.device)]
        self._blueprint = _copy_to_meta(model)
        self._count = unit.mesh.pp * stages_per_process(options.schedule)
        self.starts = self._choose_starts(model, example)
        self._local: list[StageModule] = []
        self._numbers = stages_of_rank(options.schedule, unit.index("pp"), unit.mesh.pp)

    def _example_microbatch(self, example: tuple[Any, ...]) -> tuple[Any, ...]:
        asked, pp = self._options.microbatches, self._unit.mesh.pp
        if asked != "auto" and (not isinstance(asked, int) or asked < 1):
            raise UsageError(f"microbatches={asked!r}: pass a number of at least 1, or 'auto'")
        rows = count_rows(example)
        count = count_microbatches(rows, asked, self._options.schedule, pp)
        return tuple(split_batch(example, rows, count)[0])

    def _choose_starts(self, model: nn.Module, example: tuple[Any, ...]) -> list[str]:
        splits = self._options.splits
        if splits is None:

            def measured() -> list[str]:
                is_empty = any(one.is_meta for one in model.parameters())
                costs = _costs_by_size(model, self._graphs[0]) if is_empty else None
                costs = costs or measure_layers(model, *example)
                holders = stage_ranks(self._options.schedule, self._unit.mesh.pp)
                return choose_split_points(self._graphs[0], costs, self._count, holders)

            return self._unit.agree_once(f"stages of model {next(_numbers)}", measured)
        if len(splits) != self._count - 1:
            raise UsageError(
                f"splits={list(splits)}: {len(splits) + 1} stages, but schedule"
                f" {self._options.schedule!r} with pp={self._unit.mesh.pp} has {self._count}: name"
                f" {self._count - 1} layers, each of which begins a stage"
            )
        return list(splits)

    def keep_local(
        self, model: nn.Module, shards: LocalShards, specs: Mapping[str, SliceSpec]
    ) -> Pipeline:
        """Keep this process's stages; release the parameters of all other stages."""
        unit, options = self._unit, self._options
        stages = split(self._graphs[0], self.starts)
        self._local = [stages[number] for number in self._numbers]
        tied = find_tied(stages)
        first = self._first_holders(tied)
        names = {param: name for name, param in model.named_parameters()}
        for stage in self._local:
            for name, param in stage.named_parameters():
                is_counted = first.get(name, unit.index("pp")) == unit.index("pp")
                shards[names[param]] = LocalShard(param, specs[names[param]], is_counted)
        pipeline = Pipeline(
            self._local,
            self._numbers,
            len(stages),
            unit.host_axis("pp").get_group(),
            options.loss,
            options.schedule,
            options.microbatches,
            tied,
            self._on_device(),
        )
        pipeline.prepare = self._prepare
        release_other_stages(model, self._local)
        return pipeline

    def _on_device(self) -> tuple[DeviceMesh, FormLink] | None:
        unit, name = self._unit, f"pipeline {next(_links)} of {self._unit.ranks[0]}"
        if unit.device == CPU:
            return None
        return unit.axis("pp"), lambda link, pair: unit.form_link(f"{name}/{link}", "pp", pair)

    def _first_holders(self, tied: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the first process on pp that holds each tied parameter."""
        schedule, pp = self._options.schedule, self._unit.mesh.pp
        of_rank = [set(stages_of_rank(schedule, rank, pp)) for rank in range(pp)]
        return {
            name: next(rank for rank in range(pp) if of_rank[rank] & set(where))
            for name, where in tied.items()
        }

    def _prepare(self, inputs: tuple[Any, ...]) -> None:
        """Trace the model for inputs of this size, if no trace is valid for them."""
        if any(graph.fits(inputs) for graph in self._graphs):
            return
        empty = pytree.tree_map_only(torch.Tensor, lambda one: one.to("meta"), inputs)
        self._graphs.append(trace(self._blueprint, empty, self._unit.device))
        others = split(self._graphs[-1], self.starts)
        for stage, number in zip(self._local, self._numbers, strict=True):
            stage.add_program_of(others[number])


def _require_loss_and_example(unit: MeshUnit, options: ModelParallelOptions) -> tuple[Any, ...]:
    if options.loss is None:
        raise UsageError(
            f"mesh {unit.mesh}: with pp the last stage computes the loss; pass it:"
            " distribute(..., loss=torch.nn.functional.cross_entropy)"
        )
    if options.example is None:
        raise UsageError(
            f"mesh {unit.mesh}: pp traces the model with an example; pass inputs of the size of a"
            " batch: distribute(..., example=x)"
        )
    return options.example


def _costs_by_size(model: nn.Module, graph: LayerGraph) -> list[LayerCost]:
    """Return costs by the size of parameters, for a model on meta, which cannot be run."""
    modules = dict(model.named_modules())
    sizes = {
        name: sum(p.numel() * p.element_size() for p in modules[name].parameters())
        for name in graph.layers
    }
    return [LayerCost(name, float(size), 0.0, size, 0, 0) for name, size in sizes.items()]


def _copy_to_meta(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device, without copying its data first."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
