"""pl.distribute: make a model and its optimizer train on all workers.

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
from paceline.collectives.agreement import refuse_problems, tell_all
from paceline.config import requested_pace
from paceline.data_parallel.checks import (
    find_problem,
    find_problem_with_servers,
    require_same_model,
)
from paceline.data_parallel.options import Options, fits
from paceline.data_parallel.succession import Chosen, Succession, say
from paceline.errors import PacelineError, UsageError
from paceline.job import Job, current
from paceline.pace.known import find, needs_servers
from paceline.pace.parse import PaceSpec
from paceline.pace.schedule import Schedule, notices_of, parse_schedule

_successions: weakref.WeakKeyDictionary[nn.Module, Succession] = weakref.WeakKeyDictionary()
_numbers = itertools.count()  # alike on all workers
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pace: str = "allreduce",
    **options: str | float,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train this model on all workers of the job; return the same two objects. Collective.

    Every worker starts with rank 0's parameters and buffers. When `backward()` returns,
    `param.grad` holds the average over the workers; inside `with model.no_sync():` gradients add up
    locally.

    pace       how the workers agree: "allreduce", or through parameter servers "ps" (in lockstep),
               "async", "ssp:3" (at most 3 clocks apart), or less often: "local:8", "diloco:500",
               "easgd:10" and more (docs/guides/paces.md); `paceline run --pace` wins over it
    options    of the pace, as keywords here or in its brackets: "allreduce[update=sharded]"

    allreduce and ps:
    buffers    after each step: "broadcast" rank 0's, "average" over the workers, or leave "local"
    batchnorm  "local" statistics of each worker's batch, or "global" ones of all batches together
    unused     parameters without gradient: "warn" once, "error", or "ignore"
    resize_lr  in an elastic job: "keep" the learning rates whoever is there, or let them follow the
               number of workers, "linear" or as its "sqrt" (for pl.shard(..., resize="worker"))
    all:
    nonfinite  NaN or infinite gradients: "ignore", "raise" on all ranks, or "skip" the step on all
               (a GradScaler skips such steps itself, on all ranks: leave it at "ignore"); servers
               can also "quarantine" them: leave out that worker's gradient only
    bucket_mb  gradients travel in parts of about this size (16)
    allreduce:
    update     "replicated": every worker updates a copy of its own; "sharded": parameters and
               optimizer state exist once per host, each worker updates its part; "auto": sharded
               where several workers share a host and the optimizer allows it
    ps, async, ssp: docs/guides/parameter-server.md says more
    server_dtype, wire   "fp32", "bf16" or "fp16": how servers keep parameters (rounded
               stochastically, `seed`), and how tensors travel between hosts
    async, ssp:
    push       "grad", or "delta" and "params" of an optimizer that runs on the worker
    compensate "dc" corrects for staleness (`dc_lambda`); lr="staleness" divides the rate by it
    max_staleness, softsync, unit   older gradients are dropped; gradients are applied in groups;
               ssp counts "clock"s or "version"s

    Raises UsageError (also on the ranks that did nothing wrong) for a model or optimizer that
    cannot be distributed, InconsistentRanks when the ranks' models differ.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = pl.distribute(model, optimizer)
    """
    job, number = current(), next(_numbers)
    group = job.worker_group(f"distribute {number}")  # its own order of operations
    problem: str | None = None
    phases: list[Chosen] = []
    try:
        phases = _choose(job, pace, options)
    except PacelineError as error:  # the others must hear of it
        problem = str(error)
    problem = problem or find_problem(model, optimizer) or _find_second_call(model, optimizer)
    for phase in phases:
        if problem is None and needs_servers(phase.pace.name) and job.servers:
            problem = find_problem_with_servers(model, optimizer, phase.options.push)
    try:
        refuse_problems(group.ranks, "distribute", tell_all(group, problem))
        told = [f"pace {phase.pace}@{phase.start}, options {phase.options}" for phase in phases]
        require_same_model(group, model, optimizer, told)
    except PacelineError:
        # Together with the others: a group that is dropped at any other time waits for theirs.
        group.close()
        raise
    _core.keep_freed_memory()
    succession = Succession(job, group, model, optimizer, phases, number)
    _successions[model] = succession
    _optimizers.add(optimizer)
    if job.env.rank == 0:
        _announce(job, succession)
    return model, optimizer


def _choose(job: Job, pace: str, given: Mapping[str, str | float]) -> list[Chosen]:
    """Combine the script's pace and arguments with what the command line says, which wins."""
    mine, told = parse_schedule(pace), requested_pace()
    asked = mine if told is None else parse_schedule(told)
    if told is not None and job.env.rank == 0 and str(asked) != str(mine):
        say(f"pace {asked} from the command line instead of the script's {mine}")
    phases = [
        Chosen(phase.start, phase.pace, _options(phase.pace, mine, asked, given))
        for phase in asked.phases
    ]
    for phase in phases:
        _check(job, phase)
    for notice in notices_of(pace if told is None else told) if job.env.rank == 0 else ():
        say(notice)
    return phases


def _options(
    pace: PaceSpec, mine: Schedule, asked: Schedule, given: Mapping[str, str | float]
) -> Options:
    """Return the options of a phase: what the script says counts where the pace has it as well."""
    written = next((p.pace for p in mine.phases if p.pace.name == pace.name), mine.first).options
    if len(asked.phases) > 1 or asked.first.name != mine.first.name:
        names = {name for phase in asked.phases for name in given if _has(phase.pace, name)}
        if asked == mine and (unknown := sorted(set(given) - names)):
            raise UsageError(f"none of the paces of {asked} has an option {unknown[0]!r}")
        given = {key: value for key, value in given.items() if fits(pace, key, value)}
        written = {key: value for key, value in written.items() if fits(pace, key, value)}
    return Options.of(PaceSpec(pace.name, pace.number, {**written, **pace.options}), given)


def _has(pace: PaceSpec, name: str) -> bool:
    row = find(pace.name)
    return row is not None and name in row.options


def _check(job: Job, phase: Chosen) -> None:
    if needs_servers(phase.pace.name) and not job.servers:
        _do_without_servers(job, phase.pace)
    if job.elastic.is_on:
        _refuse_in_elastic_jobs(phase.options)


def _refuse_in_elastic_jobs(options: Options) -> None:
    """Refuse what cannot go on when a worker is lost."""
    if options.batchnorm == "global":
        raise UsageError(
            "batchnorm=global cannot be used in an elastic job: its exchange is in the middle of"
            " forward, which cannot be repeated when a worker is lost; use batchnorm=local, or"
            " start the job without --min, --max and --on-loss"
        )
    if options.update == "sharded":
        raise UsageError(
            "update=sharded cannot be used in an elastic job: with a worker its part of the"
            " optimizer's state would be lost; use update=replicated (or auto), or start the job"
            " without --min, --max and --on-loss"
        )


def _do_without_servers(job: Job, asked: PaceSpec) -> None:
    """Alone there is nobody to agree with, so a plain step is what any pace comes to."""
    if job.world.size > 1:
        raise UsageError(
            f"pace {asked} needs parameter servers, and this job has none: start it with"
            f" `paceline run -n {job.world.size} -s 1 --pace {asked.name} ...` (or -s colocated)"
        )
    say(f"pace {asked}: one worker and no servers, so the optimizer runs here, step by step")


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
