"""The optimizer's state when servers run the optimizer: to the script it looks local.

`state_dict()` fetches it from the servers, in the parameters' shapes; any one worker may call it,
whenever it likes. `load_state_dict()` sends it to them: call it on all workers, or on one while the
others wait.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.data_parallel.bucket import Bucket, Slot
from paceline.data_parallel.optimizer_state import join_parts, part_of
from paceline.data_parallel.ownership import Range
from paceline.data_parallel.update import replace_method, restore_method
from paceline.ps import table_state
from paceline.ps.optimizer import StateEntry
from paceline.ps.placement import Part
from paceline.ps.remote_table import RemoteTable
from paceline.ps.spec import Piece, ShardSpec


class ServedState:
    """The servers' optimizer state of one model, as the script sees it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settle: Callable[[], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._settle = settle  # waits until the servers have ended the last step
        self._buckets: list[tuple[RemoteTable, Sequence[Bucket]]] = []
        inner = replace_method(optimizer, "state_dict", lambda _: self._state_dict(inner))
        load = replace_method(
            optimizer, "load_state_dict", lambda _, state: self._load_state_dict(load, state)
        )
        self._replaced = {"state_dict": inner, "load_state_dict": load}

    def close(self) -> None:
        """Let the optimizer have its own methods again."""
        for name, old in self._replaced.items():
            restore_method(self._opt, name, old)

    def add(self, table: RemoteTable, buckets: Sequence[Bucket], is_first: bool) -> None:
        """Keep the state of these buckets too; the first worker brings what there is already."""
        self._buckets.append((table, buckets))
        state = self._opt.state
        if is_first and any(slot.param in state for bucket in buckets for slot in bucket.slots):
            self._send(table, buckets)
        self._forget(buckets)

    @property
    def _opt(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _state_dict(self, state_dict: Any) -> dict[str, Any]:
        self._settle()
        optimizer = self._opt
        mine = optimizer.state
        optimizer.state = defaultdict(dict, {**mine, **self._fetch()})
        try:
            return state_dict()  # type: ignore[no-any-return]
        finally:
            optimizer.state = mine

    def _load_state_dict(self, load_state_dict: Any, state_dict: dict[str, Any]) -> None:
        self._settle()
        load_state_dict(state_dict)
        for table, buckets in self._buckets:
            self._send(table, buckets)
            self._forget(buckets)

    def _forget(self, buckets: Sequence[Bucket]) -> None:
        """Drop what the servers have now."""
        for bucket in buckets:
            for slot in bucket.slots:
                self._opt.state.pop(slot.param, None)

    def _fetch(self) -> dict[torch.Tensor, Any]:
        parts: dict[Slot, list[tuple[Range, torch.Size, dict[str, Any]]]] = defaultdict(list)
        for table, buckets in self._buckets:
            for part, spec, entries in table_state.fetch(table):
                self._collect(parts, buckets[part.item], spec, part, entries)
        state: dict[torch.Tensor, Any] = {}
        for slot, pieces in parts.items():
            pieces.sort(key=lambda piece: piece[0].start)
            if pieces[0][2]:
                state[slot.param] = join_parts(slot.param, pieces)
        return state

    def _collect(
        self, parts: Any, bucket: Bucket, spec: ShardSpec, part: Part, entries: Any
    ) -> None:
        of_piece: dict[int, dict[str, Any]] = defaultdict(dict)
        for entry in entries:
            of_piece[entry.piece][entry.key] = entry.value
        for number, piece in enumerate(spec.pieces):
            slot = bucket.slots[piece.param]
            which = _range(slot, piece, part)
            parts[slot].append((which, torch.Size(piece.shape), of_piece[number]))

    def _send(self, table: RemoteTable, buckets: Sequence[Bucket]) -> None:
        def entries_of(part: Part, spec: ShardSpec) -> list[StateEntry]:
            entries: list[StateEntry] = []
            for index, piece in enumerate(spec.pieces):
                slot = buckets[part.item].slots[piece.param]
                is_flat = piece.shape != tuple(slot.param.shape)
                for key, value in self._opt.state.get(slot.param, {}).items():
                    mine = part_of(value, slot.param, _range(slot, piece, part), is_flat=is_flat)
                    if mine is not None:
                        entries.append(StateEntry(index, key, mine))
            return entries

        table_state.send(table, entries_of)


def _range(slot: Slot, piece: Piece, part: Part) -> Range:
    """Which elements of its parameter a piece is."""
    start = part.start + piece.start - slot.place.start
    return Range(slot.index, start, start + piece.count, owner=part.server)
