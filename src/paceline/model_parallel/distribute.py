"""pl.distribute: train a model and its optimizer on all workers, replicated or sharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.data_parallel.distribute import begin
from paceline.data_parallel.hooks import refuse_collisions
from paceline.errors import UsageError
from paceline.model_parallel.fsdp.blocks import recompute
from paceline.model_parallel.train_step import Loss, TrainStep, as_inputs
from paceline.runtime.config import requested_mesh
from paceline.runtime.console import say
from paceline.runtime.job import Job, current
from paceline.runtime.mesh import Mesh

if TYPE_CHECKING:
    from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
    from paceline.model_parallel.mesh_model import MeshModel

# The models of this process that are sharded over a mesh.
mesh_models: weakref.WeakKeyDictionary[nn.Module, MeshModel] = weakref.WeakKeyDictionary()


def find_mesh_model(switcher: PaceSwitcher) -> MeshModel | None:
    """Return the sharded model that this trains; None: its model is not sharded."""
    return next((one for one in mesh_models.values() if one.switcher is switcher), None)


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
               "backup:1" (without the slowest worker), "async", "ssp:3" (at most 3 clocks apart),
               or less often: "local:8", "diloco:500", "easgd:10" and more (docs/guides/paces.md);
               `paceline run --pace` overrides it
    options    of the pace, as keywords here or in its brackets: "allreduce[update=sharded]".
               docs/guides/paces.md and parameter-server.md list them; `paceline paces ssp` prints
               those of a pace, with defaults and meaning
    mesh       how the workers share data and model, such as "dp=2,tp=2", "pp=4" or "fsdp=4": the
               pace is used on dp, and on the other axes each worker holds a shard of one model
               (docs/guides/model-parallel.md); `paceline run --mesh` overrides it

    with a mesh:
    loss       `loss(output, target)`, the mean over a batch, for `model.train_step(x, y)`
    max_norm   clip gradients to this norm in `train_step` (elsewhere: pl.clip_grad_norm_)
    example    inputs of the model, of the size of a batch: pp measures layers with them, tp tests
               its sharding with them
    plan       of tp: styles by the names of modules; None: found automatically
    splits     of pp: the layers that begin stage 1, 2, ...; None: so that stages cost the same
    schedule, microbatches   of pp: "gpipe", "1f1b", "interleaved:2", "zero-bubble"; the number of
               microbatches of a batch, or "auto"
    activations   "keep" what backward needs, or "recompute" it block by block
    init       initialises a module of a model that was built on the meta device; None: its
               reset_parameters()

    Raises UsageError on all ranks for a model or optimizer that cannot be distributed,
    InconsistentRanks when the ranks' models differ.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = pl.distribute(model, optimizer)
    """
    job = current()
    if job.env.is_data_worker:  # it prepares batches, and does not train
        return model, optimizer
    if max_norm is not None and not max_norm > 0:
        raise UsageError(f"distribute(max_norm={max_norm}): expected a number above 0, or None")
    if activations not in ("keep", "recompute"):
        raise UsageError(f"activations={activations!r}: expected 'keep' or 'recompute'")
    asked = requested_mesh() or mesh
    if asked is not None:
        _use_mesh(job, asked, mesh)
    is_whole = job.mesh is None or job.mesh.unit_size == 1
    if isinstance(model, nn.Module) and not isinstance(model, nn.parallel.DistributedDataParallel):
        # A model in DistributedDataParallel is refused below, for a better reason.
        refuse_collisions(model, needs_training_names=loss is not None or not is_whole)
    if is_whole:
        if activations == "recompute":
            recompute(model)
        begin(job, model, optimizer, pace, options)
        TrainStep(model, optimizer, loss, max_norm)
        return model, optimizer
    # Here, because of what torch imports for it.
    from paceline.model_parallel.setup import distribute_on_mesh
    from paceline.model_parallel.sharding.model_shard import ModelParallelOptions

    given = None if example is None else as_inputs(example)
    asked_options = ModelParallelOptions(
        *(loss, given, plan, splits, schedule, microbatches, activations, init),
        seed=torch.initial_seed(),
    )
    distribute_on_mesh(job, model, optimizer, (pace, options), asked_options, max_norm)
    return model, optimizer


def _use_mesh(job: Job, asked: str, in_script: str | None) -> None:
    chosen = Mesh.parse(asked)
    if in_script is not None and job.env.rank == 0 and Mesh.parse(in_script) != chosen:
        say(f"mesh {chosen} from the command line instead of the script's {in_script}")
    job.set_mesh(chosen)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the gradients of a model, sharded or not, to a norm over all of them; return the norm
    before. Call it between backward() and optimizer.step(), on all workers.

    >>> model = torch.nn.Linear(4, 2)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> norm = pl.clip_grad_norm_(model, 1.0)
    """
    if model in mesh_models:
        return mesh_models[model].clip(max_norm, norm_type)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
