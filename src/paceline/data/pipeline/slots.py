"""Memory of a data worker that one asker on this host reads in place.

A SLOT holds one batch from when it is written until the asker gives it back, which it does when the
last of the tensors in it is gone. Slots are then used again: their pages stay mapped on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline import _core
from paceline.collectives.memory import allocate
from paceline.data.pipeline.messages import Slot

_PAGE = 4096


@dataclass(eq=False)
class _Room:
    memory: torch.Tensor
    where: Slot


class Slots:
    """The slots for one asker."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._free: list[_Room] = []
        self._taken: dict[int, _Room] = {}
        self._made = 0

    def take(self, num_bytes: int) -> tuple[torch.Tensor, Slot]:
        """Return memory for a batch; raises SharedMemoryError."""
        fitting = [room for room in self._free if room.memory.numel() >= num_bytes]
        if fitting:
            room = min(fitting, key=lambda room: room.memory.numel())
            self._free.remove(room)
        else:
            if self._free:  # all of them are too small: let one go instead of keeping both
                self._free.remove(min(self._free, key=lambda room: room.memory.numel()))
            room = self._make(num_bytes)
        self._taken[room.where.number] = room
        return room.memory, room.where

    def give_back(self, number: int) -> None:
        """Use a slot again; without effect for one that is not taken."""
        room = self._taken.pop(number, None)
        if room is not None:
            self._free.append(room)

    @property
    def num_taken(self) -> int:
        """How many the asker holds."""
        return len(self._taken)

    def _make(self, num_bytes: int) -> _Room:
        # A little more than is needed now: batches of variable length shall fit next time.
        size = -(-(num_bytes + num_bytes // 8) // _PAGE) * _PAGE
        memory = allocate(self._engine, (size,), torch.uint8)
        self._made += 1
        return _Room(memory, Slot(self._made, *self._engine.locate(memory.data_ptr(), size)))
