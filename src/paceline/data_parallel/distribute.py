"""pl.distribute: make a model and its optimizer train on all workers.

Both stay the same objects. The model gets hooks (on its parameters, and around forward), the
optimizer another `step`; nothing is wrapped, so state_dict, schedulers, GradScaler and copies of
the model work as in a plain script.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from paceline import _core
from paceline.comm.object_collectives import all_gather_object, raise_first_problem
from paceline.data_parallel.auto_pace.auto_pace import AutoPace
from paceline.data_parallel.checks.model import find_problem, require_same_model
from paceline.data_parallel.pace_switch.choice import PaceChoice, PhaseOptions
from paceline.data_parallel.pace_switch.requests import pace_requests_of
from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.errors import PacelineError
from paceline.observe.telemetry.events import TrainingConfigured
from paceline.runtime.config import requested_probe
from paceline.runtime.console import say
from paceline.runtime.job import Job
from paceline.runtime.probe_spec import NO_PROBE, parse_probe

_switchers: weakref.WeakKeyDictionary[nn.Module, PaceSwitcher] = weakref.WeakKeyDictionary()
_numbers = itertools.count()  # the same on all workers
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def begin(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pace: str,
    options: Mapping[str, str | float],
) -> PaceSwitcher:
    """Train a model, or the local shards of one, with the workers of this job. Collective."""
    number = next(_numbers)
    group = job.worker_group(f"distribute {number}")  # its own order of operations
    choice, phases = PaceChoice(job, options), list[PhaseOptions]()
    problem: str | None = None
    try:
        phases = choice.at_start(pace)
    except PacelineError as error:  # sent to the others, which would wait
        problem = str(error)
    problem = problem or find_problem(model, optimizer) or _find_second_call(model, optimizer)
    problem = problem or choice.find_problem(model, optimizer, phases)
    try:
        raise_first_problem(group.ranks, "distribute", all_gather_object(group, problem))
        shown = [f"pace {phase.pace}@{phase.start}, options {phase.options}" for phase in phases]
        shown += [] if choice.request is None else [f"planner {choice.request}"]
        require_same_model(group, model, optimizer, shown)
    except PacelineError:
        # Together with the other workers: closing a group at any other time waits for theirs.
        group.close()
        raise
    _core.keep_freed_memory()
    switcher = PaceSwitcher(
        job, group, model, optimizer, phases, choice.while_running, pace_requests_of(job), number
    )
    if choice.request is not None:
        switcher.auto = AutoPace(job, group, choice.request, choice.while_running)
        if not job.elastic.is_joining:
            switcher.auto.begin(0)
    job.closers.append(partial(_leave, weakref.ref(model)))
    _switchers[model] = switcher
    _optimizers.add(optimizer)
    probe = parse_probe(requested_probe())
    if probe is not NO_PROBE:
        from paceline.data_parallel.probe.attach import attach_probes

        attach_probes(probe, job, model, optimizer, lambda: switcher.training.settle())
    if job.env.rank == 0:
        _announce(job, switcher)
    return switcher


def _leave(model: weakref.ref[nn.Module]) -> None:
    """Let a model be freed when the script drops it: torch keeps what a hook refers to."""
    alive = model()
    switcher = None if alive is None else _switchers.pop(alive, None)
    if switcher is not None:
        switcher.training.reducer.close()


def distributed() -> list[tuple[nn.Module, PaceSwitcher]]:
    """Return the distributed models, in order."""
    return list(_switchers.items())


def _find_second_call(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    if model in _switchers:
        return "this model has been distributed already; call distribute once for each model"
    if optimizer in _optimizers:
        return "this optimizer belongs to a model that has been distributed already"
    taken = {id(p) for one in _switchers.values() for p in one.training.reducer.params}
    for name, param in model.named_parameters():
        if id(param) in taken:
            return f"{name} belongs to another model that has been distributed already"
    return None


def _announce(job: Job, switcher: PaceSwitcher) -> None:
    if job.env.source != "alone":
        say(f"{switcher.pace}: {switcher.training.describe()}")
        job.rendezvous.agent.report(TrainingConfigured(job.env.rank, _settled(job, switcher)))


def _settled(job: Job, switcher: PaceSwitcher) -> dict[str, str]:
    training = switcher.training
    settled = {"pace": str(switcher.pace), "precision": training.options.precision}
    mesh = job.full_view.mesh
    return {**settled, "mesh": str(mesh)} if mesh is not None else settled
