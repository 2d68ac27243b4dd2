"""pl.distribute on a mesh: shard a model, and train the local shards with data parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from paceline.comm.devices import CPU, devices_of
from paceline.comm.host_route import broadcast_first
from paceline.comm.object_collectives import all_gather_object, raise_first_problem
from paceline.data_parallel.checks.model import find_problem, require_same_model
from paceline.data_parallel.checks.placement import find_problem_on_mesh
from paceline.data_parallel.distribute import begin
from paceline.model_parallel.clipping import patch_clip_grad_norm
from paceline.model_parallel.distribute import mesh_models
from paceline.model_parallel.fsdp.materialize import return_freed_memory
from paceline.model_parallel.mesh_model import MeshModel
from paceline.model_parallel.sharding.layout import find_optimizer_problem, shard_optimizer
from paceline.model_parallel.sharding.model_shard import ModelParallelOptions, shard_model
from paceline.model_parallel.unit import MeshUnit
from paceline.runtime.console import say
from paceline.runtime.job import Job


def distribute_on_mesh(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pace: tuple[str, Mapping[str, str | float]],
    options: ModelParallelOptions,
    max_norm: float | None,
) -> None:
    """Shard a model, and train the local shards with the data-parallel group. Collective."""
    mesh = job.mesh
    assert mesh is not None
    unit = MeshUnit(job, mesh)
    device = _check(job, unit, model, optimizer, pace[1], options)
    if device != CPU:
        unit.use_device(device)
    is_short_of_memory = any(param.is_meta for param in model.parameters())
    shard = shard_model(model, unit, options)
    shard_optimizer(optimizer, shard.names, shard.shards)
    job.ask_unit = job.data_parallel_view.ask_unit = unit.any_of
    switcher = begin(job.data_parallel_view, shard.skeleton, optimizer, *pace)
    if is_short_of_memory:
        return_freed_memory()
    mesh_model = MeshModel(job, unit, model, optimizer, shard, switcher, options.loss, max_norm)
    mesh_models[model] = mesh_model
    patch_clip_grad_norm()
    if unit.rank == 0 and job.env.rank == 0:
        for line in describe(mesh_model):
            say(line)


def _check(
    job: Job,
    unit: MeshUnit,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pace_options: Mapping[str, str | float],
    options: ModelParallelOptions,
) -> torch.device:
    """Raise UsageError for a model that cannot be sharded; else broadcast it, so that all processes
    start with the same values. Return the device where the shards are going to be. Collective."""
    device, problem = CPU, find_problem(model, optimizer, may_be_meta=True)
    if problem is None:
        device = _device_for(model, job.device)
        problem = find_problem_on_mesh(model, device, job.device, f"mesh {unit.mesh}")
    if problem is None and (unit.mesh.tp > 1 or unit.mesh.fsdp > 1):
        problem = find_optimizer_problem(optimizer, f"mesh {unit.mesh}")
    if problem is None and pace_options.get("batchnorm") == "global":
        problem = f"mesh {unit.mesh}: batchnorm=global works with dp alone; leave it out"
    if problem is None and model in mesh_models:
        problem = "this model has been distributed already; call distribute once for each model"
    group = unit.group if job.elastic.is_joining else job.world
    raise_first_problem(group.ranks, "distribute", all_gather_object(group, problem))
    compared = [f"mesh {unit.mesh}", f"schedule {options.schedule} {options.microbatches}"]
    require_same_model(group, model, optimizer, compared)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta and not job.elastic.is_joining:
                broadcast_first(group, tensor.detach())
    return device


def _device_for(model: nn.Module, here: torch.device) -> torch.device:
    """Return the device of a model; one without values gets them on the device of this process."""
    tensors = [*model.parameters(), *model.buffers()]
    found = devices_of(tensors)
    if found:
        return found[0]
    return here if any(tensor.is_meta for tensor in tensors) else CPU


def describe(mesh_model: MeshModel) -> Iterator[str]:
    """Yield the lines that are logged about how the model is sharded."""
    shard, mesh = mesh_model.shard, mesh_model.unit.mesh
    here = sum(one.tensor.numel() for one in shard.shards.values())
    yield (
        f"mesh {mesh}: the first process holds {here:,} of {shard.num_elements:,} parameters"
        f" ({100 * here / max(shard.num_elements, 1):.0f} %)"
    )
    if shard.starts:
        yield f"stages begin at {', '.join(['the inputs', *shard.starts])}"
    if shard.plan is not None:
        yield f"tensor plan\n{shard.plan.table()}"
