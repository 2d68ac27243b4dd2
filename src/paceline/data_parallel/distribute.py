"""pl.distribute: make a model and its optimizer train on all workers.

Both stay the objects that they were. The model gets hooks (on its parameters, and around forward),
the optimizer another `step`; nothing is wrapped, so state_dict, schedulers, GradScaler and copies
of the model work as in a plain script.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import nn

from paceline import _core
from paceline.collectives.agreement import refuse_problems, tell_all
from paceline.data_parallel.checks import find_problem, require_same_model
from paceline.data_parallel.choice import Choice, Chosen, say
from paceline.data_parallel.succession import Succession
from paceline.data_parallel.wishes import wishes_of
from paceline.errors import PacelineError
from paceline.job import Job, current

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
               "backup:1" (without the slowest one), "async", "ssp:3" (at most 3 clocks apart), or
               less often: "local:8", "diloco:500", "easgd:10" and more (docs/guides/paces.md);
               `paceline run --pace` wins over it
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
    compress   a codec for what travels, such as "int8" or "topk:0.01+int8"; not with every pace
               (docs/guides/compression.md)
    precision  "fp32", or "bf16" and "fp16": what the model computes in; parameters stay float32;
               float16 needs pl.GradScaler (docs/guides/mixed-precision.md); `paceline run
               --precision` wins over it
    allreduce:
    update     "replicated": every worker updates a copy of its own; "sharded": parameters and
               optimizer state exist once per host, each worker updates its part; "auto": sharded
               where several workers share a host and the optimizer allows it
    ps, async, ssp: docs/guides/parameter-server.md says more
    server_dtype, wire   "fp32", "bf16" or "fp16": how servers keep parameters (rounded
               stochastically, `seed`), and how tensors travel between hosts (which follows
               precision)
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
    if job.env.is_data_worker:  # it makes batches, and trains nothing
        return model, optimizer
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
        refuse_problems(group.ranks, "distribute", tell_all(group, problem))
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
    return model, optimizer


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
