"""From a full model to the shard of it that this process holds.

    trace     with pp: the forward pass becomes a graph of layers, which is split into stages
    tp        matrices are sharded, in place
    pp        the layers of other stages are released
    fsdp      what is left is sharded

Every step keeps the names of the full model, and records which slices of each parameter are here
(layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.errors import UsageError
from paceline.model_parallel.fsdp.blocks import recompute
from paceline.model_parallel.fsdp.materialize import MetaModel, materialize
from paceline.model_parallel.sharding.layout import (
    LocalShard,
    LocalShards,
    Skeleton,
    SliceSpec,
    make_skeleton,
)
from paceline.model_parallel.train_step import Loss
from paceline.model_parallel.unit import MeshUnit

if TYPE_CHECKING:
    from paceline.model_parallel.fsdp.fully_sharded import FullyShardedModel
    from paceline.model_parallel.pipeline.pipeline import Pipeline
    from paceline.model_parallel.stages import StagePlan
    from paceline.model_parallel.tensor.plan import TensorPlan


@dataclass(frozen=True)
class ModelParallelOptions:
    """The arguments of pl.distribute that are for meshes."""

    loss: Loss | None = None
    example: tuple[Any, ...] | None = None  # inputs of the model, of the size of a batch
    plan: Mapping[str, Any] | None = None
    splits: Sequence[str] | None = None
    schedule: str = "1f1b"
    microbatches: int | str = "auto"
    activations: str = "keep"
    init: Callable[[nn.Module], None] | None = None
    seed: int = 0


@dataclass
class ModelShard:
    """What this process holds of a model."""

    names: dict[nn.Parameter, str]  # of the full model, as the script had it
    aliases: dict[str, str]  # further names of tied parameters
    num_elements: int  # of the full model
    shards: LocalShards = field(default_factory=dict)
    skeleton: Skeleton = field(default_factory=Skeleton)
    plan: TensorPlan | None = None
    pipeline: Pipeline | None = None
    fsdp: FullyShardedModel | None = None
    starts: Sequence[str] = ()


def shard_model(model: nn.Module, unit: MeshUnit, options: ModelParallelOptions) -> ModelShard:
    """Release what other processes of the unit hold. Collective among them; in place."""
    names = {param: name for name, param in model.named_parameters()}
    aliases = {
        name: names[param]
        for name, param in model.named_parameters(remove_duplicate=False)
        if names[param] != name
    }
    result = ModelShard(names, aliases, sum(param.numel() for param in names))
    meta_model = MetaModel.of(model) if any(p.is_meta for p in names) else None
    if meta_model is not None and unit.mesh.tp > 1:
        raise UsageError(
            f"mesh {unit.mesh}: tp tests its sharding with the model's values, and this model is on"
            " the meta device; build it on the CPU, or use pp or fsdp"
        )
    specs = {name: SliceSpec(tuple(param.shape)) for param, name in names.items()}
    stages: StagePlan | None = None
    if unit.mesh.pp > 1:
        from paceline.model_parallel.stages import StagePlan

        stages = StagePlan(model, unit, options)
        result.starts = stages.starts
    if unit.mesh.tp > 1:
        from paceline.model_parallel.tensor.parallelize import parallelize

        axes = unit.axis("tp"), unit.host_axis("tp")
        result.plan = parallelize(model, axes[0], options.plan, options.example, axes[1])
        specs.update(result.plan.parts)
    buffers: set[str] | None = None
    if stages is not None:
        result.pipeline = stages.keep_local(model, result.shards, specs)
        buffers = {name for stage in result.pipeline.modules for name, _ in stage.named_buffers()}
    else:
        for name, param in model.named_parameters():
            result.shards[name] = LocalShard(param, specs[name])
    if options.activations == "recompute":
        recompute(model)
    if unit.mesh.fsdp > 1:
        from paceline.model_parallel.fsdp.fully_sharded import FullyShardedModel

        result.fsdp = FullyShardedModel(model, unit.axis("fsdp"), specs)
        result.shards = result.fsdp.shards
    for name, shard in result.shards.items():  # all processes of tp hold what it does not shard
        if unit.index("tp") > 0 and (result.plan is None or name not in result.plan.parts):
            shard.is_counted = False
    if meta_model is not None:
        materialize(result.shards, meta_model, options.seed, options.init, unit.device)
    result.skeleton = make_skeleton(model, result.shards, aliases, buffers)
    return result
