"""Optimizer state that is not all on this worker: to the script it looks complete and local.

`state_dict()` returns every parameter's state in the parameter's shape; `load_state_dict()` loads
such a state.

HostState: the workers of a host have shared out the parameters, and each holds the state of its own
shards. `state_dict()` may be called on one worker alone, without the others. So state tensors lie
in engine memory, which all workers of the host can read; whenever new ones appear (as a rule in the
first step), their owners send their locations to the others. Only `step()`, which all workers call
together, changes them.

ServedState: servers run the optimizer. `state_dict()` fetches the state from them; any one worker
may call it at any time. `load_state_dict()` sends it to them: call it on all workers, or on one
while the others wait.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline import _core
from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object
from paceline.data_parallel.bucket import Bucket, ParamSlot
from paceline.data_parallel.hooks import replace_method, restore_method
from paceline.data_parallel.update.ownership import ShardRange
from paceline.ps import state_wire
from paceline.ps.client.remote_table import RemoteTable
from paceline.ps.placement import Placement
from paceline.ps.server.optimizer import StateEntry
from paceline.ps.spec import ShardPiece, ShardSpec

_ALIGNMENT = 64

Shards = Sequence[tuple[torch.nn.Parameter, ShardRange, torch.nn.Parameter]]


class FullState:
    """Makes `state_dict()` of an optimizer return all of its state, and loads such a state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        inner = replace_method(optimizer, "state_dict", lambda _: self._state_dict(inner))
        load = replace_method(
            optimizer, "load_state_dict", lambda _, state: self._load_state_dict(load, state)
        )
        self._replaced = {"state_dict": inner, "load_state_dict": load}

    def close(self) -> None:
        """Restore the optimizer's own methods."""
        for name, old in self._replaced.items():
            restore_method(self._opt, name, old)

    @property
    def _opt(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _state_dict(self, state_dict: Any) -> dict[str, Any]:
        optimizer = self._opt
        mine = optimizer.state
        optimizer.state = self._full(mine)
        try:
            return state_dict()  # type: ignore[no-any-return]
        finally:
            optimizer.state = mine

    def _load_state_dict(self, load_state_dict: Any, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError

    def _full(self, mine: dict[Any, Any]) -> defaultdict[torch.Tensor, Any]:
        """Return every parameter's state in its own shape; `mine` is the optimizer's own state."""
        raise NotImplementedError


class HostState(FullState):
    """The optimizer state of all workers of this host, as one of them sees it."""

    def __init__(self, optimizer: torch.optim.Optimizer, host: Group, engine: _core.Engine) -> None:
        super().__init__(optimizer)
        self._host = host
        self._engine = engine
        self._shards: list[tuple[torch.nn.Parameter, ShardRange, torch.nn.Parameter]] = []
        self._remote: dict[int, dict[str, Any]] = defaultdict(dict)  # of other shards, by key
        self._shared: dict[tuple[int, str], torch.Tensor] = {}  # own tensors in engine memory
        self._values: dict[tuple[int, str], Any] = {}  # own entries that are not tensors, as sent
        self._news: list[tuple[int, str, Any]] = []
        self.loaded: dict[torch.nn.Parameter, dict[str, Any]] = {}  # until the next step

    def add(self, shards: Shards) -> None:
        """Manage the state of more shards; existing state is shared out."""
        self._shards.extend(shards)
        self._keep_own()

    # -- after a step -------------------------------------------------------------------------

    def move_to_engine_memory(self) -> bool:
        """Move new state of own shards to where the others can read it; return whether there is
        any."""
        self.loaded.clear()
        state = self._opt.state
        new: list[tuple[int, str, torch.Tensor]] = []
        for number, (_, part, tensor) in enumerate(self._shards):
            if part.owner != self._host.rank or tensor not in state:
                continue
            for key, value in state[tensor].items():
                if not isinstance(value, torch.Tensor):
                    if self._values.get((number, key), _NOTHING) != value:
                        self._values[number, key] = value
                        self._news.append((number, key, {"value": value}))
                    continue
                known = self._shared.get((number, key))
                if known is None or known.shape != value.shape or known.dtype != value.dtype:
                    new.append((number, key, value))
                elif known is not value:  # the optimizer made a new tensor
                    state[tensor][key] = known.copy_(value)
        if new:
            self._place(new)
        return bool(self._news)

    def _place(self, new: Sequence[tuple[int, str, torch.Tensor]]) -> None:
        sizes = [-(-_bytes(value) // _ALIGNMENT) * _ALIGNMENT for _, _, value in new]
        memory = torch.from_numpy(self._engine.allocate(max(sum(sizes), 1), apart=True))
        segment, offset = self._engine.locate(memory.data_ptr(), memory.numel())
        at = 0
        for (number, key, value), size in zip(new, sizes, strict=True):
            flat = memory[at : at + _bytes(value)]
            if flat.numel():  # separate memory for torch: torch.save refuses one with two dtypes
                flat = torch.from_numpy(flat.numpy())
            flat = flat.view(value.dtype)
            shared = flat.as_strided(value.size(), value.stride()).copy_(value)
            self._shared[number, key] = shared
            self._opt.state[self._shards[number][2]][key] = shared
            place = {
                "where": [segment, offset + at],
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "stride": list(value.stride()),
            }
            self._news.append((number, key, place))
            at += size

    def exchange_locations(self) -> None:
        """Exchange the locations of new state. Collective on the host."""
        news, self._news = self._news, []
        for entries in all_gather_object(self._host, news):
            for number, key, entry in entries:
                self._remote[number][key] = entry

    # -- what the script sees -----------------------------------------------------------------

    def _load_state_dict(self, load_state_dict: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(state_dict)
        for known in (self._remote, self._shared, self._values, self.loaded):
            known.clear()
        self._keep_own()

    def _keep_own(self) -> None:
        """Keep the state of own shards, of the full state that the optimizer holds."""
        state = self._opt.state
        for param, part, tensor in self._shards:
            entries = self.loaded.get(param) or state.get(param)
            if not entries:
                continue
            self.loaded.setdefault(param, dict(entries))
            if part.owner == self._host.rank:
                state[tensor] = {
                    key: shard_value(value, param, part) for key, value in entries.items()
                }
        for param, _, _ in self._shards:
            state.pop(param, None)

    def _full(self, mine: dict[Any, Any]) -> defaultdict[torch.Tensor, Any]:
        cut = {id(tensor) for _, _, tensor in self._shards}
        full: defaultdict[torch.Tensor, Any] = defaultdict(
            dict, {key: value for key, value in mine.items() if id(key) not in cut}
        )
        parts: dict[torch.nn.Parameter, list[_Entries]] = defaultdict(list)
        for number, (param, part, tensor) in enumerate(self._shards):
            if part.owner == self._host.rank:
                entries = dict(mine.get(tensor, {}))
            else:
                remote = self._remote[number].items()
                entries = {key: self._read(part.owner, entry) for key, entry in remote}
            parts[param].append((part, tensor.shape, entries))
        for param, shards in parts.items():
            if param in self.loaded:
                full[param] = self.loaded[param]
            elif shards[0][2]:
                full[param] = join_shards(param, shards)
        return full

    def _read(self, owner: int, entry: dict[str, Any]) -> Any:
        """Return one entry of another worker's state; a tensor is read in that worker's memory."""
        if "where" not in entry:
            return entry["value"]
        dtype: torch.dtype = getattr(torch, entry["dtype"])
        count = math.prod(entry["shape"])
        if count == 0:
            return torch.empty(entry["shape"], dtype=dtype)
        segment, offset = entry["where"]
        rank = self._host.ranks[owner]
        memory = self._engine.memory_of_peer(rank, segment, offset, count * dtype.itemsize)
        return torch.from_numpy(memory).view(dtype).as_strided(entry["shape"], entry["stride"])


class ServedState(FullState):
    """The optimizer state on the servers, as the script sees it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settle: Callable[[], None],
    ) -> None:
        super().__init__(optimizer)
        self._settle = settle  # waits until the servers have finished the last step
        self._buckets: list[tuple[RemoteTable, Sequence[Bucket]]] = []

    def add(self, table: RemoteTable, buckets: Sequence[Bucket], is_first: bool) -> None:
        """Manage the state of more buckets; the first worker sends existing state."""
        self._buckets.append((table, buckets))
        state = self._opt.state
        if is_first and any(slot.param in state for bucket in buckets for slot in bucket.slots):
            self._send(table, buckets)
        self._forget(buckets)

    def _load_state_dict(self, load_state_dict: Any, state_dict: dict[str, Any]) -> None:
        self._settle()
        load_state_dict(state_dict)
        for table, buckets in self._buckets:
            self._send(table, buckets)
            self._forget(buckets)

    def _forget(self, buckets: Sequence[Bucket]) -> None:
        """Drop what the servers hold now."""
        for bucket in buckets:
            for slot in bucket.slots:
                self._opt.state.pop(slot.param, None)

    def _full(self, mine: dict[Any, Any]) -> defaultdict[torch.Tensor, Any]:
        self._settle()
        parts: dict[ParamSlot, list[_Entries]] = defaultdict(list)
        for table, buckets in self._buckets:
            for part, spec, entries in state_wire.fetch(table):
                self._collect(parts, buckets[part.item], spec, part, entries)
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict, mine)
        for slot, shards in parts.items():
            shards.sort(key=lambda shard: shard[0].start)
            if shards[0][2]:
                state[slot.param] = join_shards(slot.param, shards)
        return state

    def _collect(
        self, parts: Any, bucket: Bucket, spec: ShardSpec, part: Placement, entries: Any
    ) -> None:
        of_piece: dict[int, dict[str, Any]] = defaultdict(dict)
        for entry in entries:
            of_piece[entry.piece][entry.key] = entry.value
        for number, piece in enumerate(spec.pieces):
            slot = bucket.slots[piece.param]
            which = _range(slot, piece, part)
            parts[slot].append((which, torch.Size(piece.shape), of_piece[number]))

    def _send(self, table: RemoteTable, buckets: Sequence[Bucket]) -> None:
        def entries_of(part: Placement, spec: ShardSpec) -> list[StateEntry]:
            entries: list[StateEntry] = []
            for index, piece in enumerate(spec.pieces):
                slot = buckets[part.item].slots[piece.param]
                is_flat = piece.shape != tuple(slot.param.shape)
                for key, value in self._opt.state.get(slot.param, {}).items():
                    mine = shard_value(
                        _on_host(value), slot.param, _range(slot, piece, part), is_flat=is_flat
                    )
                    if mine is not None:
                        entries.append(StateEntry(index, key, mine))
            return entries

        state_wire.send(table, entries_of)


_Entries = tuple[ShardRange, torch.Size, dict[str, Any]]  # of a shard: its shape and its state
_NOTHING = object()


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def shard_value(
    value: Any, param: torch.nn.Parameter, part: ShardRange, *, is_flat: bool = False
) -> Any:
    """Return the shard's part of one entry of a parameter's state.

    A shard that is the complete parameter has the parameter's shape, unless `is_flat`.
    """
    if not isinstance(value, torch.Tensor) or value.shape != param.shape:
        return value.clone() if isinstance(value, torch.Tensor) else value
    if part.stop - part.start == param.numel() and not is_flat:
        return value
    dense = torch.empty_strided(param.size(), param.stride(), dtype=value.dtype).copy_(value)
    return dense.as_strided((param.numel(),), (1,))[part.start : part.stop].clone()


def join_shards(param: torch.nn.Parameter, shards: Sequence[_Entries]) -> dict[str, Any]:
    """Return the full state of a parameter from that of its shards, in the parameter's shape."""
    _, shape, first = shards[0]
    if len(shards) == 1 and shape == param.shape:
        return first
    joined: dict[str, Any] = {}
    for key, value in first.items():
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            joined[key] = value  # common to all shards, like the number of steps
            continue
        flat = torch.empty(param.numel(), dtype=value.dtype)
        for part, _, entries in shards:
            flat[part.start : part.stop] = entries[key]
        joined[key] = flat.as_strided(param.size(), param.stride())
    return joined


def _range(slot: ParamSlot, piece: ShardPiece, part: Placement) -> ShardRange:
    """Return which elements of its parameter a server's piece is."""
    start = part.start + piece.start - slot.segment.start
    return ShardRange(slot.index, start, start + piece.count, owner=part.server)
