"""What pl.distribute does: make a model and its optimizer train on all workers.

Both stay the objects that they were. The model gets hooks (on its parameters, and around forward),
the optimizer another `step`; nothing is wrapped, so state_dict, schedulers, GradScaler and copies
of the model work as in a plain script.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping

import torch
from torch import nn

from paceline import _core
from paceline.comm.object_collectives import all_gather_object, raise_first_problem
from paceline.data_parallel.checks.model import find_problem, require_same_model
from paceline.data_parallel.pace_switch.choice import Choice, Chosen
from paceline.data_parallel.pace_switch.requests import wishes_of
from paceline.data_parallel.pace_switch.switcher import Succession
from paceline.errors import PacelineError
from paceline.observe.telemetry.events import Settled
from paceline.runtime.console import say
from paceline.runtime.job import Job

_successions: weakref.WeakKeyDictionary[nn.Module, Succession] = weakref.WeakKeyDictionary()
_numbers = itertools.count()  # alike on all workers
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def begin(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pace: str,
    options: Mapping[str, str | float],
) -> Succession:
    """Train a model, or a part of one, with the workers of this job. Collective."""
    number = next(_numbers)
    group = job.worker_group(f"distribute {number}")  # its own order of operations
    choice, phases = Choice(job, options), list[Chosen]()
    problem: str | None = None
    try:
        phases = choice.at_start(pace)
    except PacelineError as error:  # the others must hear of it
        problem = str(error)
    problem = problem or find_problem(model, optimizer) or _find_second_call(model, optimizer)
    problem = problem or choice.find_problem(model, optimizer, phases)
    try:
        raise_first_problem(group.ranks, "distribute", all_gather_object(group, problem))
        told = [f"pace {phase.pace}@{phase.start}, options {phase.options}" for phase in phases]
        require_same_model(group, model, optimizer, told)
    except PacelineError:
        # Together with the others: a group that is dropped at any other time waits for theirs.
        group.close()
        raise
    _core.keep_freed_memory()
    succession = Succession(
        job, group, model, optimizer, phases, choice.while_running, wishes_of(job), number
    )
    _successions[model] = succession
    _optimizers.add(optimizer)
    if job.env.rank == 0:
        _announce(job, succession)
    return succession


def distributed() -> list[tuple[nn.Module, Succession]]:
    """Return the models that are distributed, in order."""
    return list(_successions.items())


def _find_second_call(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    if model in _successions:
        return "this model has been distributed already; call distribute once for each model"
    if optimizer in _optimizers:
        return "this optimizer belongs to a model that has been distributed already"
    taken = {id(p) for one in _successions.values() for p in one.training.reducer.params}
    for name, param in model.named_parameters():
        if id(param) in taken:
            return f"{name} belongs to another model that has been distributed already"
    return None


def _announce(job: Job, succession: Succession) -> None:
    if job.env.source != "alone":
        say(f"{succession.pace}: {succession.training.describe()}")
        job.rendezvous.agent.report(Settled(job.env.rank, _settled(job, succession)))


def _settled(job: Job, succession: Succession) -> dict[str, str]:
    training = succession.training
    settled = {"pace": str(succession.pace), "precision": training.options.precision}
    mesh = job.whole.mesh
    return {**settled, "mesh": str(mesh)} if mesh is not None else settled
