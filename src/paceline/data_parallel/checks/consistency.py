"""Do all ranks hold the same model? `pl.check_consistency()`.

Every rank makes one line for each parameter, buffer and piece of optimizer state: its name, its
kind and a hash of its bits. Ranks compare one hash of all lines. Only when those differ do the
lines travel, and the first one that differs is looked at closely.

    line     "parameter conv.weight", "float32[8, 3]", hash of the elements in their logical order
    digest   hash of all lines; the same in two runs if and only if both hold the same bits
    side     the ranks that agree with each other about a line
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object
from paceline.data_parallel.bucket import describe
from paceline.errors import InconsistentRanks
from paceline.runtime import job

_CHUNK_ELEMENTS = 1 << 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # others count by their type alone

Line = tuple[str, str, str]  # name, kind, hash


# Of models on a mesh: what this process holds, by the names of the whole.
parts: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()


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
    peers = mine.column.world  # on a mesh: those who hold the same part
    values = dict(_values(parts.get(model, model), optimizer))
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
    """Name the state after the parameters that it belongs to."""
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
    """Take containers apart, down to tensors and plain values."""
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
    """Find the first line on which ranks differ; every rank comes to the same conclusion."""
    row = find_difference(
        [[tuple(line) for line in told] for told in all_gather_object(world, lines)]
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


def find_difference(told: list[list[Line]]) -> list[Line]:
    """Return each rank's line of the first thing that is not the same on all ranks."""
    missing = ("", "nothing", "")
    row = next(row for row in zip_longest(*told, fillvalue=missing) if len(set(row)) > 1)
    by_name = [{line[0]: line for line in lines} for lines in told]
    for name, _, _ in row:
        if name and not all(name in lines for lines in by_name):
            return [lines.get(name, (name, "nothing", "")) for lines in by_name]
    return list(row)  # the same things with other values, or in another order


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _distance(world: Group, value: object) -> str:
    """Say how far the ranks are apart. Collective: all have a value of the same kind."""
    if not isinstance(value, Tensor):
        return f" (here: {value!r})"
    if value.layout is not torch.strided or value.is_complex():
        return ""
    flat = value.detach().cpu().reshape(-1)
    largest, at = 0.0, 0
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS]
        high, low = chunk.double(), chunk.double()  # not every dtype has an arithmetic of its own
        world.all_reduce(high, "max")
        world.all_reduce(low, "min")
        apart = high - low
        apart[apart.isnan()] = 0.0
        if float(apart.max()) > largest:
            largest, at = float(apart.max()), start + int(apart.argmax())
    if not largest:
        return " (in the sign of zero or in what is not a number)"
    return f" (by up to {largest:.3g}, at flat index {at})"
