"""Chunks: what one worker updates of the shared parameters in one call of the optimizer.

The shards of a worker (ownership.py) are divided into PIECES, and pieces are put together to CHUNKS
of about the same size. The same chunk can be made of the shared memory or of a worker's own copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from paceline.data_parallel.bucket import ParamSlot
from paceline.data_parallel.update.ownership import ShardRange
from paceline.errors import UsageError

Cut = Callable[[Sequence[int], int], list[ShardRange]]
Param = torch.nn.Parameter
Entries = dict[str, torch.Tensor]

_LINE_ELEMENTS = 16


@dataclass(frozen=True)
class Piece:
    """A shard of one parameter."""

    number: int  # among all pieces of the host
    slot: ParamSlot
    range: ShardRange

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this piece of a tensor that is laid out as the parameter."""
        if self.range.stop - self.range.start == self.slot.segment.count:
            return whole
        flat = whole.as_strided((self.slot.segment.count,), (1,))
        return flat[self.range.start : self.range.stop]


@dataclass(frozen=True)
class Place:
    """One copy of everything: in shared memory, or of one worker."""

    params: Mapping[Param, torch.Tensor]
    state: Mapping[Param, Entries]  # what has a number for each element
    counters: Mapping[int, Entries]  # other state tensors, by piece: for example its steps


class Chunk:
    """Some pieces that one call of the optimizer updates."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        tensors: Sequence[Param],
        by_group: Sequence[list[Param]],
        state: Sequence[Entries],
    ) -> None:
        self._tensors = tensors  # of each piece
        self._grads = [
            (tensor, one, one.of(one.slot.averaged))
            for tensor, one in zip(tensors, pieces, strict=True)
        ]
        self._by_group = by_group
        self._state = {
            tensor: entries for tensor, entries in zip(tensors, state, strict=True) if entries
        }
        self._values = [*chain.from_iterable(map(dict.values, self._state.values()))]

    def written(self) -> list[torch.Tensor]:
        """Return all tensors that the optimizer changes."""
        return [*(tensor.detach() for tensor in self._tensors), *self._values]

    def run(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """Update this chunk with the optimizer's own step."""
        for tensor, piece, grad in self._grads:
            tensor.grad = None if piece.slot.param.grad is None else grad
        groups, outer = optimizer.param_groups, optimizer.state
        own = [group["params"] for group in groups]
        held: defaultdict[Any, Any] = defaultdict(dict, self._state)
        try:
            for group, params in zip(groups, self._by_group, strict=True):
                group["params"] = params
            optimizer.state = held
            result = step()
        finally:
            optimizer.state = outer
            for group, params in zip(groups, own, strict=True):
                group["params"] = params
        self._keep(held, optimizer)
        return result

    def _keep(self, held: Mapping[torch.Tensor, Any], optimizer: torch.optim.Optimizer) -> None:
        """Copy state that the optimizer has replaced to where it belongs."""
        found = [*chain.from_iterable(map(dict.values, held.values()))]
        if len(found) != len(self._values):
            raise UsageError(
                f"{type(optimizer).__name__} has made new state in a step, although none of its"
                " settings has changed; in an elastic job use update=replicated with it"
            )
        if all(map(is_, found, self._values)):
            return
        for value, other in zip(self._values, found, strict=True):
            if value is not other:
                value.copy_(other)
        values = iter(self._values)
        for entries in self._state.values():
            entries.update(zip(entries, values, strict=False))


def params_of(optimizer: torch.optim.Optimizer) -> list[Param]:
    """Return the parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether there are hooks that would be called for each chunk."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def is_shareable(optimizer: torch.optim.Optimizer, slots: Mapping[Param, ParamSlot]) -> bool:
    """Return whether all of an optimizer's parameters and state can be in shared memory."""
    params = params_of(optimizer)
    buckets = {slots[param].bucket for param in params if param in slots}
    updated = set(params)
    return (
        not has_step_hooks(optimizer)
        and all(param in slots for param in params)
        and all(slot.param in updated for bucket in buckets for slot in bucket.slots)
        and all(param in updated for param in optimizer.state)
        and all(
            isinstance(value, torch.Tensor)
            for entries in optimizer.state.values()
            for value in entries.values()
        )
    )


def plan_chunks(
    slots: Sequence[ParamSlot], cut: Cut, num_workers: int, chunk_elements: int, *, splits: bool
) -> list[list[list[Piece]]]:
    """Return the chunks of each worker. `splits`: the parts of a parameter may be cut again."""
    count = 0
    owned: list[list[list[Piece]]] = [[] for _ in range(num_workers)]
    sizes = [0] * num_workers  # of the last chunk of each worker
    for shard in cut([slot.segment.count for slot in slots], num_workers):
        start = shard.start
        while True:
            chunks, size = owned[shard.owner], sizes[shard.owner]
            room = chunk_elements - size if chunks else 0
            if room <= 0:
                chunks.append([])
                sizes[shard.owner], room = 0, chunk_elements
            lines = max(room // _LINE_ELEMENTS, 1) * _LINE_ELEMENTS
            stop = min(shard.stop, start + lines) if splits else shard.stop
            part = ShardRange(shard.index, start, stop, shard.owner)
            chunks[-1].append(Piece(count, slots[shard.index], part))
            sizes[shard.owner] += stop - start
            count, start = count + 1, stop
            if start >= shard.stop:
                break
    return owned


def make_chunk(pieces: Sequence[Piece], place: Place, groups: Sequence[set[Param]]) -> Chunk:
    """Return a chunk of one copy; `groups` are the parameters of each param group."""
    by_group: list[list[Param]] = [[] for _ in groups]
    tensors, state = [], []
    for piece in pieces:
        param = piece.slot.param
        tensors.append(Param(piece.of(place.params[param]), requires_grad=param.requires_grad))
        entries = {key: piece.of(value) for key, value in place.state.get(param, {}).items()}
        state.append({**entries, **place.counters.get(piece.number, {})})
        for group, params in zip(by_group, groups, strict=True):
            if param in params:
                group.append(tensors[-1])
    return Chunk(pieces, tensors, by_group, state)
