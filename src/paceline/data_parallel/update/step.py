"""optimizer.step() in a distributed model: what happens around the user's own step.

The optimizer stays the object that the script made: schedulers, GradScaler and state_dict see what
they know. Only its `step` is replaced, by a method that lets an UPDATE run the real one:

    ReplicatedUpdate    every worker updates everything, from the same averaged gradients
    ShardedUpdate       every worker of a host updates its shards of parameters that they share

All workers of a host compute with the same parameters, which lie in shared memory. After backward
every worker has the averaged gradients, so it can update any part on its own; it updates the shards
that it owns (ownership.py) with the user's optimizer, which sees only those. One barrier before
(no worker still reads the old values) and one after (all have written the new ones), and the next
step can begin: the gather that a sharded update needs elsewhere is a barrier here. Nothing is sent
between hosts, since each host updates a copy of its own.

The script sees the parameters through a private view. What it writes to them between two steps (a
constraint on the weights, an average swapped in for evaluation) only this worker sees, as if it had
a copy of its own; at the next step the owner of each shard applies it.

The optimizer's state exists once per host as well. It is kept in engine memory, so that
`state_dict()` on any one worker can read all of it without asking the others (optimizer_state.py).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import increment_version

from paceline import _core
from paceline.comm.engine_calls import PreparedAllReduce
from paceline.comm.group import Group
from paceline.data_parallel.bucket import Bucket, ParamSlot
from paceline.data_parallel.hooks import make_optimizer_copies_plain, replace_method
from paceline.data_parallel.update.optimizer_state import HostState
from paceline.data_parallel.update.ownership import (
    ShardRange,
    cut_anywhere,
    cut_at_borders,
    is_elementwise,
)
from paceline.errors import UsageError
from paceline.observe.telemetry.trace import tracer

Step = Callable[[], Any]
_BOUND = "_paceline_binds"


class Update:
    """Runs the optimizer's own step on what this worker has to update. Base of all updates."""

    name = ""
    waited_s = 0.0  # for other workers, in all steps so far

    def run(self, step: Step) -> Any:
        """Call `step`, once; afterwards the parameters are the same on all workers."""
        raise NotImplementedError

    def hook_modules(self, model: torch.nn.Module) -> None:
        """Add hooks to the modules of the model, if this update needs any."""


class ReplicatedUpdate(Update):
    """Every worker does the same to its own copy."""

    name = "replicated"

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

    make_optimizer_copies_plain(optimizer)
    old = replace_method(optimizer, "step", step)
    if hasattr(old, _BOUND):  # on a mesh its step is bound twice; the inner one is recorded
        own = old
    setattr(step, _BOUND, True)
    return bound


@contextmanager
def stepping_on(
    optimizer: torch.optim.Optimizer, params_by_group: Sequence[list[torch.nn.Parameter]]
) -> Iterator[None]:
    """Let the param groups hold these parameters instead of their own, for one step."""
    groups = optimizer.param_groups
    own = [group["params"] for group in groups]
    try:
        for group, params in zip(groups, params_by_group, strict=True):
            group["params"] = params
        yield
    finally:
        for group, params in zip(groups, own, strict=True):
            group["params"] = params


@dataclass(slots=True)
class ParamShard:
    """What one worker updates of one parameter."""

    slot: ParamSlot
    range: ShardRange
    tensor: torch.nn.Parameter  # in shared memory: in the parameter's shape, or a flat part of it
    shown: torch.Tensor  # the same part as this worker's script sees it
    grad: torch.Tensor  # the same part of the averaged gradients


class ShardedUpdate(Update):
    """Updates this worker's shards; the other workers of the host do theirs at the same time."""

    name = "sharded"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        host: Group,
        engine: _core.Engine,
        slots: Mapping[torch.nn.Parameter, ParamSlot],  # of parameters that the host shares
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._host = host
        self._slots = slots
        self._cut = cut_anywhere if is_elementwise(optimizer) else cut_at_borders
        self._buckets: dict[Bucket, list[ParamSlot]] = {}  # whose parameters are cut into shards
        self._params: list[torch.nn.Parameter] = []  # the same parameters
        self._addresses: list[int] = []  # of the same, as the script should see them
        self._own: dict[torch.nn.Parameter, list[ParamShard]] = {}  # this worker's shards of them
        # As the optimizer had them in the last step, so that nothing is done for each tensor in a
        # step like the one before it.
        self._seen: list[torch.nn.Parameter] = []
        self._sizes: list[int] = []
        self._stepped: list[list[torch.nn.Parameter]] = []  # by group: what this worker updates
        self._stepped_shards: list[ParamShard] = []  # the shards among it
        self._known_state: list[Any] = []  # every entry of the optimizer's state
        self._news = torch.zeros(1, dtype=torch.int32)
        self._all_reduce_news = PreparedAllReduce(host, self._news, "max", self._news)
        self.state = HostState(optimizer, host, engine)
        self._follow_parameters(optimizer)

    def run(self, step: Step) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        self._follow_parameters(optimizer)
        self._wait(
            self._host.blocking_barrier
        )  # other workers may still compute with the old values
        self._apply_edits()
        self._set_gradients()
        with stepping_on(optimizer, self._stepped):
            result = step()
        increment_version(self._params)  # autograd must notice that the parameters changed
        self._news[0] = self._move_new_state(optimizer)
        self._wait(self._all_reduce_news.run)
        if self._news.item():
            self.state.exchange_locations()
        return result

    def _wait(self, collective: Callable[[], object]) -> None:
        start, is_traced, start_s = time.perf_counter(), tracer.on, time.monotonic()
        collective()
        self.waited_s += time.perf_counter() - start
        if is_traced:
            tracer.add("wait", start_s, behind="barrier")

    def _apply_edits(self) -> None:
        """Apply what the script itself did to parameters since the last step.

        Each worker saw its own changes only. As in any data parallel training all are expected to
        have done the same, so the owner of each shard writes it for all.
        """
        if [param.data_ptr() for param in self._params] != self._addresses:
            for slots in self._buckets.values():
                for slot in slots:
                    slot.bring_home()
        for bucket, slots in self._buckets.items():
            assert bucket.host is not None
            if bucket.host.is_changed():
                with torch.no_grad():
                    for shard in chain.from_iterable(self._own[slot.param] for slot in slots):
                        shard.tensor.copy_(shard.shown)
                bucket.host.discard()

    def _set_gradients(self) -> None:
        for shard in self._stepped_shards:
            grad, averaged = shard.slot.param.grad, shard.slot.averaged
            if grad is None:
                shard.tensor.grad = None
                continue
            # The same object, as a rule; else the script put another tensor there.
            if grad is not averaged and grad.data_ptr() != averaged.data_ptr():
                averaged.copy_(grad)
            if shard.tensor.grad is not shard.grad:
                shard.tensor.grad = shard.grad

    def _move_new_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Move state that the optimizer has made or replaced to where the other workers can read
        it; return whether there is news for them. As a rule that is after the first step only."""
        found, known = self._find_state(optimizer), self._known_state
        is_known = len(found) == len(known) and all(map(is_, found, known))
        if is_known and not self.state.loaded:
            return False
        has_news = self.state.move_to_engine_memory()
        self._known_state = self._find_state(optimizer)
        return has_news

    def _find_state(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        found = [entries for entries in optimizer.state.values() if isinstance(entries, dict)]
        return [*chain.from_iterable(map(dict.values, found))]

    def _follow_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow what the optimizer has, and what has joined the shared parameters, since then."""
        by_group = [group["params"] for group in optimizer.param_groups]
        params = [*chain.from_iterable(by_group)]
        sizes = [len(self._slots), *map(len, by_group)]
        if sizes == self._sizes and all(map(is_, params, self._seen)):
            return
        self._seen, self._sizes = params, sizes
        self._cut_new([p for p in params if p in self._slots and p not in self._own])
        self._stepped_shards = [shard for p in params for shard in self._own.get(p, ())]
        self._stepped = [
            [
                tensor
                for p in group  # every worker updates its own copy of what is not shared
                for tensor in ([s.tensor for s in self._own[p]] if p in self._own else [p])
            ]
            for group in by_group
        ]

    def _cut_new(self, params: Sequence[torch.nn.Parameter]) -> None:
        if not params:
            return
        slots = sorted((self._slots[param] for param in params), key=lambda slot: slot.index)
        shards: list[ParamShard] = []
        for part in self._cut([slot.segment.count for slot in slots], self._host.size):
            shards.append(_shard(slots[part.index], part))
            own = self._own.setdefault(shards[-1].slot.param, [])
            if part.owner == self._host.rank:
                own.append(shards[-1])
        for slot in slots:
            self._buckets.setdefault(slot.bucket, []).append(slot)
            self._params.append(slot.param)
            self._addresses.append(slot.shown.data_ptr())
        self.state.add([(shard.slot.param, shard.range, shard.tensor) for shard in shards])


def _shard(slot: ParamSlot, part: ShardRange) -> ParamShard:
    flats = (slot.bucket.params, slot.bucket.shown, slot.bucket.averaged)
    if part.stop - part.start == slot.segment.count:
        tensor, shown, grad = (slot.segment.view(flat) for flat in flats)
    else:
        start, stop = slot.segment.start + part.start, slot.segment.start + part.stop
        tensor, shown, grad = (flat[start:stop] for flat in flats)
    return ParamShard(slot, part, torch.nn.Parameter(tensor), shown, grad)
