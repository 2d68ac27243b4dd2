"""Checks of the model: before it is distributed, and `pl.check_consistency()`.

A problem that one rank finds before the start is sent to all: the ranks that would otherwise wait
for that rank raise the same error.

CONSISTENCY: do all ranks hold the same values? Every rank makes one line for each parameter, buffer
and entry of optimizer state: its name, its kind and a hash of its bits. Ranks compare one hash of
all lines. Only if those differ do they exchange the lines, and examine the first that differs.

    line     "parameter conv.weight", "float32[8, 3]", hash of the elements in their logical order
    digest   hash of all lines; the same in two runs if and only if both hold the same bits
    side     the ranks that agree with each other about a line
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object, first_difference
from paceline.data_parallel.bucket import NamedParameter, describe, is_dense
from paceline.errors import InconsistentRanks, UsageError
from paceline.ps.server.optimizer import optimizer_class
from paceline.runtime import job

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def find_problem(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, may_be_meta: bool = False
) -> str | None:
    """Return what is wrong with the model or the optimizer on this rank, or None."""
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
        if param.is_meta and not may_be_meta:
            return f"{name} is on the meta device, where tensors have no values: materialise it"
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
    """Return why parameter servers cannot train them, or None."""
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
    """Return the message about a parameter that servers cannot update: not in the optimizer."""
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
        lines.append(
            f"{kind} parameter {NamedParameter(name, param)} stride {list(param.stride())}"
        )
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


# -- the same values on all ranks: pl.check_consistency() -----------------------------------------

_CHUNK_ELEMENTS = 1 << 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # of others only the type is compared

Line = tuple[str, str, str]  # name, kind, hash


# Of models on a mesh: the local shards, by the names of the full model.
local_models: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()


def check_consistency(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Compare the bits of the model, and of the optimizer's state, on all ranks.

    Returns a digest that is the same on all ranks, and in two runs that computed the same.
    InconsistentRanks, on all ranks, names the first tensor that differs. Collective and blocking;
    the cost is that of reading all tensors once.

    >>> import torch
    >>> pl.check_consistency(torch.nn.ReLU())
    '71857576257465c7'
    """
    mine = job.current()
    peers = mine.data_parallel_view.world  # on a mesh: the ranks with the same shards
    values = dict(_values(local_models.get(model, model), optimizer))
    lines = [(name, _kind(value), _hash(value)) for name, value in values.items()]
    digest = hashlib.blake2b(repr(lines).encode(), digest_size=8).hexdigest()
    if len(set(all_gather_object(peers, digest))) > 1:
        _raise_difference(peers, lines, values)
    if peers is mine.world:
        return digest
    whole = sorted(set(all_gather_object(mine.world, digest)))
    return hashlib.blake2b(repr(whole).encode(), digest_size=8).hexdigest()


# -- what is compared -----------------------------------------------------------------------------


def _values(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, object]]:
    for name, param in model.named_parameters():
        yield f"parameter {name}", param
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer
    if optimizer is not None:
        yield from _optimizer_values(model, optimizer)


def _optimizer_values(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, object]]:
    """Yield the optimizer's state under the names of its parameters."""
    names = {param: name for name, param in model.named_parameters()}
    state = optimizer.state_dict()
    for number, (saved, group) in enumerate(
        zip(state["param_groups"], optimizer.param_groups, strict=True)
    ):
        for key, value in saved.items():
            if key not in ("params", "param_names"):
                yield from _leaves(f"optimizer group {number} {key}", value)
        for index, param in zip(saved["params"], group["params"], strict=True):
            of = names.get(param, f"parameter {index}")
            for key, value in sorted(state["state"].get(index, {}).items()):
                yield from _leaves(f"optimizer state {key} of {of}", value)


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the tensors and plain values inside of containers."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(f"{name} {key}", part)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _leaves(f"{name} [{index}]", part)
    else:
        yield name, value


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if is_lazy(value):
        return "uninitialized"
    layout = "" if value.layout is torch.strided else f" {value.layout}"
    return f"{describe(value)}{layout}"


def _hash(value: object) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    if isinstance(value, _PLAIN):
        hashed.update(repr(value).encode())
    elif isinstance(value, Tensor) and not is_lazy(value):
        for part in _dense_parts(value.detach()):
            hashed.update(_bytes(part))
    return hashed.hexdigest()


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _bytes(tensor: Tensor) -> Any:
    """Return the memory of the elements in logical order, whatever the strides are."""
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


# -- what differs ---------------------------------------------------------------------------------


def _raise_difference(world: Group, lines: list[Line], values: dict[str, object]) -> None:
    """Raise the error about the first line on which ranks differ; the same on every rank."""
    row = find_difference(
        [[tuple(line) for line in by_rank] for by_rank in all_gather_object(world, lines)]
    )
    ranks_by_line: dict[Line, list[int]] = {}
    for rank, line in zip(world.ranks, row, strict=True):
        ranks_by_line.setdefault(line, []).append(rank)
    sides = sorted(ranks_by_line.items(), key=lambda side: -len(side[1]))
    name, kind, _ = row[0]
    if any(line[:2] != (name, kind) for line in row):
        found = "; ".join(f"{line[0]}: {line[1]} on {_ranks(on)}" for line, on in sides)
    else:
        found = " against ".join(_ranks(on) for _, on in sides)
        found = f"{name}: {kind} differs, {found}{_distance(world, values[name])}"
    raise InconsistentRanks(
        f"rank {world.ranks[world.rank]}: the ranks do not hold the same values. First difference:"
        f" {found}. Look for what only some ranks do: a changed parameter, a step that was left"
        " out, a random number from another seed",
        name=name,
        sides=tuple(tuple(on) for _, on in sides),
    )


def find_difference(by_rank: list[list[Line]]) -> list[Line]:
    """Return each rank's line about the first item that is not the same on all ranks."""
    missing = ("", "nothing", "")
    row = next(row for row in zip_longest(*by_rank, fillvalue=missing) if len(set(row)) > 1)
    by_name = [{line[0]: line for line in lines} for lines in by_rank]
    for name, _, _ in row:
        if name and not all(name in lines for lines in by_name):
            return [lines.get(name, (name, "nothing", "")) for lines in by_name]
    return list(row)  # the same items with other values, or in another order


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _distance(world: Group, value: object) -> str:
    """Return how far apart the ranks are. Collective: all have a value of the same kind."""
    if not isinstance(value, Tensor):
        return f" (here: {value!r})"
    if value.layout is not torch.strided or value.is_complex():
        return ""
    flat = value.detach().cpu().reshape(-1)
    largest, at = 0.0, 0
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS]
        # Not every dtype has arithmetic; of float64 these must be copies, too.
        high, low = (chunk.to(torch.float64, copy=True) for _ in range(2))
        world.all_reduce(high, "max")
        world.all_reduce(low, "min")
        apart = high - low
        apart[apart.isnan()] = 0.0
        if float(apart.max()) > largest:
            largest, at = float(apart.max()), start + int(apart.argmax())
    if not largest:
        return " (in the sign of zero or in what is not a number)"
    return f" (by up to {largest:.3g}, at flat index {at})"
