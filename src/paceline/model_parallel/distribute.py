"""pl.distribute: make a model and its optimizer train on all workers, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.data_parallel.distribute import begin
from paceline.errors import UsageError
from paceline.model_parallel.fsdp.blocks import recompute
from paceline.model_parallel.options import Wishes
from paceline.model_parallel.registry import meshed
from paceline.model_parallel.train_step import Loss, TrainStep
from paceline.runtime.config import requested_mesh
from paceline.runtime.console import say
from paceline.runtime.job import Job, current
from paceline.runtime.mesh import Mesh


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pace: str = "allreduce",
    *,
    mesh: str | None = None,
    loss: Loss | None = None,
    max_norm: float | None = None,
    example: Any = None,
    plan: Mapping[str, Any] | None = None,
    splits: Sequence[str] | None = None,
    schedule: str = "1f1b",
    microbatches: int | str = "auto",
    activations: str = "keep",
    init: Callable[[nn.Module], None] | None = None,
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
    options    of the pace, as keywords here or in its brackets: "allreduce[update=sharded]". Tables
               of them are in docs/guides/paces.md and parameter-server.md; `paceline paces ssp`
               prints those of a pace, with defaults and meaning
    mesh       how the workers share data and model, such as "dp=2,tp=2", "pp=4" or "fsdp=4": the
               pace is that of dp, and the others hold parts of one model
               (docs/guides/model-parallel.md); `paceline run --mesh` wins over it

    with a mesh:
    loss       `loss(output, target)`, the mean over a batch, for `model.train_step(x, y)`
    max_norm   clip gradients to this norm in `train_step` (elsewhere: pl.clip_grad_norm_)
    example    inputs of the model, of the size of a batch: pp cuts the model by what they cost, tp
               tries its cuts with them
    plan       of tp: styles by the names of modules; None: found automatically
    splits     of pp: the layers that begin stage 1, 2, ...; None: so that stages cost the same
    schedule, microbatches   of pp: "gpipe", "1f1b", "interleaved:2", "zero-bubble"; how many parts
               a batch is cut into, or "auto"
    activations   "keep" what backward needs, or "recompute" it block by block
    init       initialises a module of a model that was built on the meta device; None: its
               reset_parameters()

    Raises UsageError (also on the ranks that did nothing wrong) for a model or optimizer that
    cannot be distributed, InconsistentRanks when the ranks' models differ.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = pl.distribute(model, optimizer)
    """
    job = current()
    if job.env.is_data_worker:  # it makes batches, and trains nothing
        return model, optimizer
    if max_norm is not None and not max_norm > 0:
        raise UsageError(f"distribute(max_norm={max_norm}): expected a number above 0, or None")
    if activations not in ("keep", "recompute"):
        raise UsageError(f"activations={activations!r}: expected 'keep' or 'recompute'")
    asked = requested_mesh() or mesh
    if asked is not None:
        _use_mesh(job, asked, mesh)
    if job.mesh is None or job.mesh.unit_size == 1:
        if activations == "recompute":
            recompute(model)
        begin(job, model, optimizer, pace, options)
        TrainStep(model, optimizer, loss, max_norm)
        return model, optimizer
    given = None if example is None else example if isinstance(example, tuple) else (example,)
    wishes = Wishes(
        *(loss, given, plan, splits, schedule, microbatches, activations, init),
        seed=torch.initial_seed(),
    )
    # Here, because of what torch imports for it.
    from paceline.model_parallel.setup import distribute_parts

    distribute_parts(job, model, optimizer, (pace, options), wishes, max_norm)
    return model, optimizer


def _use_mesh(job: Job, asked: str, mine: str | None) -> None:
    chosen = Mesh.parse(asked)
    if mine is not None and job.env.rank == 0 and Mesh.parse(mine) != chosen:
        say(f"mesh {chosen} from the command line instead of the script's {mine}")
    job.set_mesh(chosen)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the gradients of a model, whole or in parts, to a norm over all of them; return what it
    was. Call it between backward() and optimizer.step(), on all workers.

    >>> model = torch.nn.Linear(4, 2)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> norm = pl.clip_grad_norm_(model, 1.0)
    """
    if model in meshed:
        return meshed[model].clip(max_norm, norm_type)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
