"""Check that the processes of a unit train on the same batch, in the first steps and then rarely.

To read a batch on a device waits for it. So the values of such batches are compared in the first
steps only, and their shapes later, too.

The processes of `tp` and `pp` compute one batch together. A script that shards data by `pl.rank()`
gives each of them a different batch, and the unit would silently train on a mixture of both. So
each process describes its batch in a few lines, one for each tensor (dtype, shape and a hash), and
the unit compares them. Processes along `fsdp` have batches of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from paceline.comm.devices import is_on_device
from paceline.comm.object_collectives import all_gather_object
from paceline.errors import InconsistentRanks
from paceline.model_parallel.unit import MeshUnit
from paceline.runtime.job import Job

_FIRST, _EVERY = 3, 100  # compare in the first 3 steps, then in every 100th
_ALL_BYTES = 1 << 18  # of a larger tensor some elements are hashed
_ELEMENTS = 1 << 12

Described = list[list[str]]  # of each tensor: where it is, its type, a hash of its values


class SameInputs:
    """Compares the batches of one model within a unit."""

    def __init__(self, job: Job, unit: MeshUnit) -> None:
        self._unit, self._waiting = unit, job.reporter.waiting
        self._is_needed = unit.mesh.pp * unit.mesh.tp > 1
        self._steps = 0

    def compare(self, **given: Any) -> None:
        """Raise InconsistentRanks on all processes of the unit if their arguments differ; None is
        not compared. Collective in some steps, which are the same on all processes."""
        if not self._is_needed:
            return
        self._steps += 1
        if self._steps > _FIRST and self._steps % _EVERY:
            return
        with self._waiting:
            gathered = all_gather_object(
                self._unit.group,
                [self._unit.index("fsdp"), describe(given, may_wait=self._steps <= _FIRST)],
            )
        for shard in range(self._unit.mesh.fsdp):
            described = {
                rank: theirs
                for rank, (index, theirs) in zip(self._unit.group.ranks, gathered, strict=True)
                if index == shard
            }
            require_same(described, str(self._unit.mesh))


def describe(given: dict[str, Any], *, may_wait: bool = True) -> Described:
    """Return a line for each tensor or number in the arguments. `may_wait`: for a device."""
    named = {name: value for name, value in given.items() if value is not None}
    leaves, _ = tree_flatten_with_path(named)
    return [[_name(path), *_described(leaf, may_wait)] for path, leaf in leaves]


def _name(path: Sequence[Any]) -> str:
    return str(path[0].key) + keystr(tuple(path[1:]))


def _described(leaf: Any, may_wait: bool) -> Iterator[str]:
    if not isinstance(leaf, torch.Tensor):
        yield type(leaf).__name__
        yield repr(leaf) if isinstance(leaf, bool | int | float | str) else ""
        return
    yield f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    is_read = _has_values(leaf) and (may_wait or not is_on_device(leaf))
    yield _hash(leaf.detach()) if is_read else ""


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether the values can be read, and are the full tensor's: a DTensor has a shard of them."""
    is_shard = isinstance(tensor, torch.distributed.tensor.DTensor)
    is_plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return is_plain and not (tensor.is_meta or is_shard)


def _hash(tensor: torch.Tensor) -> str:
    flat = tensor.reshape(-1)
    if tensor.nbytes > _ALL_BYTES:
        flat = flat[:: max(1, flat.numel() // _ELEMENTS)]
    values = flat.resolve_conj().resolve_neg().cpu().contiguous().view(torch.uint8)
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()


def require_same(described: dict[int, Described], mesh: str) -> None:
    """Raise InconsistentRanks for the first difference between the descriptions by rank."""
    first, *others = described
    for rank in others:
        mine = {name: rest for name, *rest in described[first]}
        theirs = {name: rest for name, *rest in described[rank]}
        common = [name for name in mine if name in theirs]
        named = next((name for name in common if mine[name] != theirs[name]), None)
        if named is None:
            continue
        here, there = mine[named][0], theirs[named][0]
        found = f"{named} has different values on rank {rank} and on rank {first}"
        if here != there:
            found = f"{named} is {there} on rank {rank}, {here} on rank {first}"
        raise InconsistentRanks(
            f"mesh {mesh}: the processes of a unit train on one batch, but {found}; let pl.shard"
            " distribute the data, or use pl.data_rank() and pl.data_world_size() instead of"
            " pl.rank() and pl.world_size(), and use the same seed for random data",
            name=named,
            sides=_sides(described, named),
        )


def _sides(described: dict[int, Described], named: str) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that agree with each other; the side with most ranks first."""
    sides: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in described.items():
        value = next((tuple(rest) for name, *rest in lines if name == named), ())
        sides.setdefault(value, []).append(rank)
    return tuple(sorted(map(tuple, sides.values()), key=len, reverse=True))
