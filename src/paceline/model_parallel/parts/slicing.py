"""From a whole model to the part of it that this process holds.

    trace     with pp: the forward pass becomes a graph of layers, of which stages are made
    tp        matrices are cut, in place
    pp        the layers of other stages are let go
    fsdp      what is left is sharded

Every step keeps the names of the whole model, and says what of each parameter is here (layout.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from paceline.errors import UsageError
from paceline.model_parallel.fsdp.blocks import recompute
from paceline.model_parallel.fsdp.materialize import Recipes, materialize
from paceline.model_parallel.options import Wishes
from paceline.model_parallel.parts.layout import Held, Holding, Part, Skeleton, skeleton_of
from paceline.model_parallel.unit import Unit

if TYPE_CHECKING:
    from paceline.model_parallel.fsdp.sharded import Sharded
    from paceline.model_parallel.pipeline.pipeline import Pipeline
    from paceline.model_parallel.stages import Stages
    from paceline.model_parallel.tensor import TensorPlan


@dataclass
class Cut:
    """A model of which this process holds a part."""

    names: dict[nn.Parameter, str]  # of the whole model, as the script had it
    aliases: dict[str, str]  # further names of tied parameters
    num_elements: int  # of the whole model
    holding: Holding = field(default_factory=Holding)
    skeleton: Skeleton = field(default_factory=Skeleton)
    plan: TensorPlan | None = None
    pipeline: Pipeline | None = None
    sharded: Sharded | None = None
    starts: Sequence[str] = ()


def cut_model(model: nn.Module, unit: Unit, wishes: Wishes) -> Cut:
    """Let go of what other processes of the unit hold. Collective among them; in place."""
    names = {param: name for name, param in model.named_parameters()}
    aliases = {
        name: names[param]
        for name, param in model.named_parameters(remove_duplicate=False)
        if names[param] != name
    }
    cut = Cut(names, aliases, sum(param.numel() for param in names))
    recipes = Recipes.of(model) if any(p.is_meta for p in names) else None
    if recipes is not None and unit.mesh.tp > 1:
        raise UsageError(
            f"mesh {unit.mesh}: tp tries its cuts with the model's values, and this one is on the"
            " meta device; build it on the CPU, or use pp or fsdp"
        )
    shapes = {name: tuple(param.shape) for param, name in names.items()}
    stages: Stages | None = None
    if unit.mesh.pp > 1:
        from paceline.model_parallel.stages import Stages

        stages = Stages(model, unit, wishes)
        cut.starts = stages.starts
    if unit.mesh.tp > 1:
        from paceline.model_parallel.tensor import parallelize

        cut.plan = parallelize(model, unit.axis("tp"), wishes.plan, wishes.example)
    parts = {name: Part(shape) for name, shape in shapes.items()}
    if cut.plan is not None:
        parts.update(cut.plan.parts)
    buffers: set[str] | None = None
    if stages is not None:
        cut.pipeline = stages.take(model, cut.holding, parts)
        buffers = {name for stage in cut.pipeline.modules for name, _ in stage.named_buffers()}
    else:
        for name, param in model.named_parameters():
            cut.holding.held[name] = Held(param, parts[name])
    if wishes.activations == "recompute":
        recompute(model)
    if unit.mesh.fsdp > 1:
        from paceline.model_parallel.fsdp.sharded import Sharded

        cut.sharded = Sharded(model, unit.axis("fsdp"), parts)
        cut.holding = cut.sharded.holding
    for name, held in cut.holding:  # what tp leaves whole is on all of its processes
        if unit.index("tp") > 0 and (cut.plan is None or name not in cut.plan.parts):
            held.counts = False
    if recipes is not None:
        materialize(cut.holding, recipes, wishes.seed, wishes.init)
    params = {name: held.param for name, held in cut.holding}
    params.update({a: params[name] for a, name in aliases.items() if name in params})
    cut.skeleton = skeleton_of(model, params, buffers)
    return cut
