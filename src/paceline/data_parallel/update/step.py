"""optimizer.step() in a distributed model: what happens around the user's own step.

The optimizer stays the object that the script made: schedulers, GradScaler and state_dict see what
they know. Only its `step` is replaced, by a method that lets an UPDATE run the real one:

    ReplicatedUpdate    every worker updates everything, from the same averaged gradients
    ShardedUpdate       every worker of a host updates its part of parameters that they share

All workers of a host compute with the same parameters, which lie in memory that they share. After
backward every worker has the averaged gradients, so it can update any part on its own; it updates
the pieces that it owns (ownership.py) with the user's optimizer, which sees only those. One barrier
before (nobody still reads the old values) and one behind (everybody has written the new ones), and
the next step can begin: the gather that a sharded update needs elsewhere is a barrier here. Between
hosts nothing is sent at all, since each host updates a copy of its own.

The script sees the parameters through a private view: what it writes to them between two steps (a
constraint on the weights, an average swapped in for evaluation) only this worker sees, as if it had
a copy of its own; at the next step the owner of each piece takes it over.

The optimizer's state exists once per host as well. It is kept in engine memory, so that
`state_dict()` on any one worker can read all of it without asking the others (optimizer_state.py).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version

from paceline import _core
from paceline.comm.group import Group, PreparedAllReduce
from paceline.data_parallel.bucket import Bucket, Slot
from paceline.data_parallel.hooks import keep_optimizer_plain, replace_method
from paceline.data_parallel.update.optimizer_state import HostState
from paceline.data_parallel.update.ownership import (
    Range,
    cut_anywhere,
    cut_at_borders,
    is_elementwise,
)
from paceline.errors import UsageError
from paceline.observe.telemetry.trace import tracer

Step = Callable[[], Any]
_BOUND = "_paceline_binds"


class Update(Protocol):
    """Runs the optimizer's own step on what this worker has to update."""

    name: str
    waited_s: float  # for other workers, in all steps so far

    def run(self, step: Step) -> Any:
        """Call `step`, once; afterwards the parameters are the same on all workers."""


class ReplicatedUpdate:
    """Every worker does the same to its own copy."""

    name = "replicated"
    waited_s = 0.0

    def run(self, step: Step) -> Any:
        return step()


class BoundStep:
    """What `optimizer.step()` of one optimizer does; another pace has another `around`."""

    def __init__(
        self,
        around: Callable[[torch.optim.Optimizer, Step], Any],
        after: Callable[[], None] | None,
    ) -> None:
        self.around = around  # runs the optimizer's own step
        self.after = after  # called after it


def bind_step(
    optimizer: torch.optim.Optimizer,
    around: Callable[[torch.optim.Optimizer, Step], Any],
    after: Callable[[], None] | None = None,
) -> BoundStep:
    """Let `around(optimizer, step)` decide what `optimizer.step()` does."""
    bound = BoundStep(around, after)

    def step(self: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            raise UsageError(
                f"{type(self).__name__}.step(closure): a closure computes the loss inside the"
                " step, where the workers could come to different decisions; call backward()"
                " before step() and pass no closure"
            )
        result = bound.around(self, own)
        if bound.after is not None:
            bound.after()
        return result

    def own() -> Any:
        start_s = time.monotonic() if tracer.on else 0.0
        result = old()
        if start_s:
            tracer.add("optimizer", start_s)
        return result

    keep_optimizer_plain(optimizer)
    old = replace_method(optimizer, "step", step)
    if hasattr(old, _BOUND):  # on a mesh its step is bound twice; what is inside is recorded
        own = old
    setattr(step, _BOUND, True)
    return bound


@dataclass
class Piece:
    """What one worker updates of one parameter."""

    slot: Slot
    range: Range
    tensor: torch.nn.Parameter  # in shared memory: in the parameter's shape, or a flat part of it
    shown: torch.Tensor  # the same part as this worker's script sees it
    grad: torch.Tensor  # the same part of the averaged gradients


class ShardedUpdate:
    """Updates this worker's pieces; the other workers of the host do theirs at the same time."""

    name = "sharded"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        host: Group,
        engine: _core.Engine,
        slot_of: Callable[[torch.nn.Parameter], Slot | None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._host = host
        self._slot_of = slot_of
        self._cut = cut_anywhere if is_elementwise(optimizer) else cut_at_borders
        self._pieces: dict[torch.nn.Parameter, list[Piece]] = {}  # of all workers, by parameter
        self._buckets: dict[Bucket, list[Slot]] = {}
        self._news = torch.zeros(1, dtype=torch.int32)
        self._tell_news = PreparedAllReduce(host, self._news, "max", self._news)
        self.waited_s = 0.0
        self.state = HostState(optimizer, host, engine)
        self._take_in_new_parameters(optimizer)

    def run(self, step: Step) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        self._take_in_new_parameters(optimizer)
        self._wait(self._host.barrier)  # whoever still computes with the old values, finish
        self._adopt_changes()
        everything = [group["params"] for group in optimizer.param_groups]
        try:
            for group, params in zip(optimizer.param_groups, everything, strict=True):
                group["params"] = self._mine(params)
            result = step()
        finally:
            for group, params in zip(optimizer.param_groups, everything, strict=True):
                group["params"] = params
        increment_version(list(self._pieces))  # autograd must notice that the parameters changed
        self._news[0] = self.state.move_to_engine_memory()
        self._wait(self._tell_news.run)
        if self._news.item():
            self.state.tell_where()
        return result

    def _wait(self, collective: Callable[[], object]) -> None:
        start, is_traced, start_s = time.perf_counter(), tracer.on, time.monotonic()
        collective()
        self.waited_s += time.perf_counter() - start
        if is_traced:
            tracer.add("wait", start_s, behind="barrier")

    def _adopt_changes(self) -> None:
        """Take over what the script itself did to parameters since the last step.

        Each worker saw its own changes only. As in any data parallel training all are expected to
        have done the same, so each piece's owner speaks for all.
        """
        for bucket, slots in self._buckets.items():
            assert bucket.host is not None
            for slot in slots:
                if slot.param.data_ptr() != slot.home.data_ptr():  # param.data = another tensor
                    slot.home.copy_(slot.param.detach())
                    slot.param.data = slot.home
            if not bucket.host.is_changed():
                continue
            with torch.no_grad():
                for slot in slots:
                    for piece in self._pieces[slot.param]:
                        if piece.range.owner == self._host.rank:
                            piece.tensor.copy_(piece.shown)
            bucket.host.discard()

    def _mine(self, params: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return what this worker updates of these, with its gradients in place."""
        mine: list[torch.nn.Parameter] = []
        for param in params:
            if param not in self._pieces:  # not shared: every worker updates its own copy
                mine.append(param)
                continue
            for piece in self._pieces[param]:
                if piece.range.owner == self._host.rank:
                    _give_gradient(piece)
                    mine.append(piece.tensor)
        return mine

    def _take_in_new_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Share out the parameters that were not there before (first call: all)."""
        slots: list[Slot] = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                slot = self._slot_of(param)
                if param not in self._pieces and slot is not None:
                    slots.append(slot)
        if not slots:
            return
        slots.sort(key=lambda slot: slot.index)
        pieces: list[Piece] = []
        for part in self._cut([slot.place.count for slot in slots], self._host.size):
            slot = slots[part.index]
            pieces.append(_piece(slot, part))
            self._pieces.setdefault(slot.param, []).append(pieces[-1])
        for slot in slots:
            self._buckets.setdefault(slot.bucket, []).append(slot)
        self.state.add([(piece.slot.param, piece.range, piece.tensor) for piece in pieces])


def _piece(slot: Slot, part: Range) -> Piece:
    flats = (slot.bucket.params, slot.bucket.shown, slot.bucket.averaged)
    if part.stop - part.start == slot.place.count:
        tensor, shown, grad = (slot.place.view(flat) for flat in flats)
    else:
        start, stop = slot.place.start + part.start, slot.place.start + part.stop
        tensor, shown, grad = (flat[start:stop] for flat in flats)
    return Piece(slot, part, torch.nn.Parameter(tensor), shown, grad)


def _give_gradient(piece: Piece) -> None:
    grad, averaged = piece.slot.param.grad, piece.slot.averaged
    if grad is None:
        piece.tensor.grad = None
        return
    if grad.data_ptr() != averaged.data_ptr():  # the script put another tensor there
        averaged.copy_(grad)
    piece.tensor.grad = piece.grad
