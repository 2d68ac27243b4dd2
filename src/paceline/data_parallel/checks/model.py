"""What is looked at before a model is distributed, so that mistakes show at once and on all ranks.

A problem that one rank finds is told to all: whoever would otherwise wait for that rank raises the
same error instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.comm.object_collectives import first_difference
from paceline.data_parallel.bucket import Named, describe, is_dense
from paceline.errors import InconsistentRanks, UsageError
from paceline.ps.server.optimizer import optimizer_class

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def find_problem(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, may_be_meta: bool = False
) -> str | None:
    """Return what is wrong with them on this rank, or None."""
    if not isinstance(model, nn.Module):
        return f"distribute(model, ...): expected a torch.nn.Module, got {type(model).__name__}"
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return (
            "the model is already wrapped in DistributedDataParallel, which averages gradients"
            " itself; pass the plain model"
        )
    bad = _find_bad_parameter(model, may_be_meta)
    return bad or _find_bad_optimizer(model, optimizer)


def _find_bad_parameter(model: nn.Module, may_be_meta: bool) -> str | None:
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            return f"{name} is not initialised yet (a lazy module): call the model once before"
        if param.device.type != "cpu" and not (may_be_meta and param.is_meta):
            return f"{name} is on {param.device}: this version trains on CPU only"
        if param.requires_grad and param.dtype not in _DTYPES:
            return f"{name} is {describe(param)}: parameters must be real floating-point numbers"
        if param.layout is not torch.strided or not is_dense(param):
            return f"{name} has gaps in its memory: replace it by its .contiguous() copy"
    if not any(param.requires_grad for param in model.parameters()):
        return "the model has no parameter with requires_grad=True: there is nothing to train"
    return None


def _find_bad_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        return f"distribute(..., optimizer): expected a torch.optim.Optimizer, got {kind}"
    if isinstance(optimizer, torch.optim.LBFGS):
        return (
            "LBFGS evaluates the loss inside step(closure), where each worker would follow its own"
            " loss into another search direction; use an optimizer without closure"
        )
    known = {id(param) for param in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                return (
                    f"parameter {position} of the optimizer's group {number} ({describe(param)}) is"
                    " not a parameter of this model; make the optimizer from model.parameters() of"
                    " the model that you pass"
                )
    return None


def find_problem_with_servers(
    model: nn.Module, optimizer: torch.optim.Optimizer, push: str
) -> str | None:
    """Return what parameter servers cannot do for them, or None."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return (
                f"{name}.weight has sparse gradients, which servers do not take in this version;"
                " make the embedding with sparse=False, or use pace allreduce"
            )
    updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in updated:
            return not_in_optimizer(name)
    if push == "grad":
        kind = type(optimizer)
        try:
            known = optimizer_class(kind.__name__)
        except UsageError as error:
            return str(error)
        if kind is not known:  # a class of the same name
            return (
                f"the optimizer is {kind.__module__}.{kind.__name__}, and servers run the"
                f" optimizers of torch.optim only; use torch.optim.{kind.__name__}, push=delta with"
                " a free-running pace, or pace allreduce, which run any optimizer on the workers"
            )
    return None


def not_in_optimizer(name: str) -> str:
    """Say that servers cannot update a parameter that the optimizer does not have."""
    return (
        f"{name} is trainable but the optimizer does not have it: the servers update what the"
        " optimizer has; add it there, or freeze it with requires_grad_(False)"
    )


def require_same_model(
    group: Group,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Sequence[str],
) -> None:
    """Raise InconsistentRanks on every rank when their models or settings differ. Collective."""
    lines = [*options, *_model_lines(model), *_optimizer_lines(model, optimizer)]
    difference = first_difference(group, lines)
    if difference is not None:
        raise InconsistentRanks(
            f"distribute: the model or its settings differ between ranks: {difference}; every rank"
            " must build the same model, in the same order, with the same optimizer"
        )


def _model_lines(model: nn.Module) -> list[str]:
    lines = []
    for name, param in model.named_parameters():
        kind = "trainable" if param.requires_grad else "frozen"
        lines.append(f"{kind} parameter {Named(name, param)} stride {list(param.stride())}")
    lines += [f"buffer {name} {describe(buffer)}" for name, buffer in model.named_buffers()]
    return lines


def _optimizer_lines(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    lines = [f"optimizer {type(optimizer).__name__}"]
    for number, group in enumerate(optimizer.param_groups):
        settings = {
            key: value if not isinstance(value, torch.Tensor) else value.tolist()
            for key, value in group.items()
            if key != "params"
        }
        lines.append(f"group {number} with {settings}")
        lines += [f"group {number} has {names[id(param)]}" for param in group["params"]]
    return lines
