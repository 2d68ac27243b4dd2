"""A model is cut, and its parts are distributed: what pl.distribute does on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from paceline.comm.object_collectives import all_gather_object, raise_first_problem
from paceline.data_parallel.checks.model import find_problem, require_same_model
from paceline.data_parallel.distribute import begin
from paceline.model_parallel.clipping import teach_torch
from paceline.model_parallel.fsdp.materialize import return_freed_memory
from paceline.model_parallel.mesh_model import Meshed
from paceline.model_parallel.options import Wishes
from paceline.model_parallel.parts.layout import find_problem_with_cuts, use_parts
from paceline.model_parallel.parts.slicing import cut_model
from paceline.model_parallel.registry import meshed
from paceline.model_parallel.unit import Unit
from paceline.runtime.console import say
from paceline.runtime.job import Job


def distribute_parts(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pace: tuple[str, Mapping[str, str | float]],
    wishes: Wishes,
    max_norm: float | None,
) -> None:
    """Cut a model, and train the part that is here with those who have the same. Collective."""
    mesh = job.mesh
    assert mesh is not None
    unit = Unit(job, mesh)
    _check(job, unit, model, optimizer, pace[1], wishes)
    is_short_of_memory = any(param.is_meta for param in model.parameters())
    cut = cut_model(model, unit, wishes)
    use_parts(optimizer, cut.names, cut.holding)
    job.ask_unit = job.data_parallel_view.ask_unit = unit.any_of
    switcher = begin(job.data_parallel_view, cut.skeleton, optimizer, *pace)
    if is_short_of_memory:
        return_freed_memory()
    made = Meshed(job, unit, model, optimizer, cut, switcher, wishes.loss, max_norm)
    meshed[model] = made
    teach_torch()
    if unit.rank == 0 and job.env.rank == 0:
        for line in describe(made):
            say(line)


def _check(
    job: Job,
    unit: Unit,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, str | float],
    wishes: Wishes,
) -> None:
    """Refuse what cannot be cut, and let all processes begin with the same model. Collective."""
    problem = find_problem(model, optimizer, may_be_meta=True)
    if problem is None and (unit.mesh.tp > 1 or unit.mesh.fsdp > 1):
        problem = find_problem_with_cuts(optimizer, f"mesh {unit.mesh}")
    if problem is None and options.get("batchnorm") == "global":
        problem = f"mesh {unit.mesh}: batchnorm=global is for dp alone; leave it out"
    if problem is None and model in meshed:
        problem = "this model has been distributed already; call distribute once for each model"
    group = unit.group if job.elastic.is_joining else job.world
    raise_first_problem(group.ranks, "distribute", all_gather_object(group, problem))
    told = [f"mesh {unit.mesh}", f"schedule {wishes.schedule} {wishes.microbatches}"]
    require_same_model(group, model, optimizer, told)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta and not job.elastic.is_joining:
                group.broadcast(tensor.detach())


def describe(meshed: Meshed) -> Iterator[str]:
    """Say how the model is cut, in lines."""
    cut, mesh = meshed.cut, meshed.unit.mesh
    here = sum(held.param.numel() for _, held in cut.holding)
    whole = cut.num_elements
    yield (
        f"mesh {mesh}: the first process holds {here:,} of {whole:,} parameters"
        f" ({100 * here / max(whole, 1):.0f} %)"
    )
    if cut.starts:
        yield f"stages begin at {', '.join(['the inputs', *cut.starts])}"
    if cut.plan is not None:
        yield f"tensor plan\n{cut.plan.table()}"
