"""ElasticShardedUpdate: the sharded update in a job whose workers change.

Between changes the workers of a host share one copy of the parameters and of the optimizer state,
and each updates its part of it (host_copy.py). For a change of the membership every worker goes
back to a copy of its own, with everything: newcomers, lagging workers and checkpoints find what a
replicated update has. The first steps after a change run on these own copies, because sharing again
costs as much as it saves in several steps, and a loss is soon followed by a replacement. Then the
workers share again. On own copies runs any other step, too, that could not be repeated otherwise:
if the script has changed parameters, loaded state or changed settings that decide which state there
is.

A step is a retryable step of its own, after the exchange of the gradients. It begins with an
exchange of flags among all workers: no worker updates parameters with which another still computes,
and none is more than one retryable step ahead. If the members change in it, every worker finishes
the step in its own copy (`pause`), before any of them sends its state; it is not repeated.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any

import torch
from torch.autograd.graph import increment_version

from paceline import _core
from paceline.comm.group import Group
from paceline.comm.shared_memory import allocate
from paceline.data_parallel.bucket import ParamSlot
from paceline.data_parallel.update.chunks import (
    has_step_hooks,
    is_shareable,
    params_of,
    plan_chunks,
)
from paceline.data_parallel.update.host_copy import HostCopy
from paceline.data_parallel.update.optimizer_state import FullState
from paceline.data_parallel.update.ownership import cut_anywhere, cut_at_borders, is_elementwise
from paceline.data_parallel.update.step import Step, Update
from paceline.errors import SharedMemoryError
from paceline.observe.telemetry.trace import tracer
from paceline.runtime.console import say
from paceline.runtime.elastic.session import ElasticSession
from paceline.state.protocol import Change, Part, State

_CHUNK_ELEMENTS = 1 << 18  # with Adam 4 MB; smaller chunks call the optimizer more often
_STEPS_AFTER_CHANGE = 8  # that run on own copies (ADR 91)
_MOST_STEPS_APART = 1024  # how long a script that changes parameters in each step is not shared


class ElasticShardedUpdate(Update, Part):
    """Runs the steps of one optimizer. Also the part of the job's state that says in which."""

    name = "sharded"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        session: ElasticSession,
        everyone: Group,
        host: Group,
        engine: _core.Engine,
        slots: Mapping[torch.nn.Parameter, ParamSlot],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._session, self._everyone, self._host = session, everyone, host
        self._engine, self._slots = engine, slots
        self._can_share = os.access("/proc/self/pagemap", os.R_OK)  # see private_view.h
        self._memory: HostCopy | None = None
        self._flags = torch.zeros(3)
        self._step: Step | None = None  # the one under way
        self._is_done = False  # it has been taken
        self._result: Any = None
        self._apart, self._longest_apart = 0, 1  # steps until the workers share again
        self._settings: list[Any] = []  # with which the state was made
        self._params: list[torch.nn.Parameter] = []  # of the same step
        self._with_grads: set[torch.nn.Parameter] = set()
        self.is_change_agreed = False  # after the last step
        self.was_late = False  # since the last step began, a state was received that has it
        self.state_view = _SharedState(optimizer, self)

    def close(self) -> None:
        """Give the optimizer back with all of its state, and with parameters of this worker."""
        self._leave(None)
        self.state_view.close()

    @property
    def memory(self) -> HostCopy | None:
        """What the workers of this host share at the moment."""
        return self._memory

    @property
    def has_uncounted(self) -> bool:
        """Whether there is a step under way that is not in this worker's number of steps."""
        return self._step is not None and not self.was_late

    # -- steps --------------------------------------------------------------------------------

    def run(self, step: Step) -> Any:
        self._take(step)
        return self._result

    def _take(self, step: Step) -> None:
        self._step, self._is_done, self._result = step, False, None
        self.was_late = False
        if self._memory is not None:
            self._memory.begin_step()
        is_cut: list[bool] = []  # the members have changed in it, and that has ended it
        try:
            end = partial(is_cut.append, True)
            changes = self._session.run_step(self._attempt, end, settles=True)
        finally:
            self._step = None
        self.is_change_agreed = not is_cut and changes

    def _attempt(self) -> bool:
        """Take the step; return whether a membership change is due."""
        must_leave = self._memory is not None and not self._is_done and self._must_leave()
        self._flags[0] = float(must_leave)
        self._flags[1] = float(self._apart > 0 or not self._can_share)
        self._flags[2] = float(self._session.is_change_due)
        self._wait(partial(self._everyone.all_reduce, self._flags, "max"))
        leaves, stays_apart, changes = (bool(flag) for flag in self._flags.tolist())
        if leaves:  # if that goes on, sharing again and again would cost more than it saves
            has_lasted = self._memory is not None and self._memory.steps > _MOST_STEPS_APART
            self._apart = 1 if has_lasted else self._longest_apart
            self._longest_apart = min(2 * self._apart, _MOST_STEPS_APART)
        if not self._is_done:
            self._run(leaves)
        if self._memory is not None:
            self._wait(self._host.barrier)
        elif not stays_apart and not leaves:
            self._share()
        return changes

    def _run(self, leaves: bool) -> None:
        assert self._step is not None
        if self._memory is not None and not leaves:
            self._result = self._memory.run(self._step)
            increment_version(self._params)
        else:
            self._leave(None)
            self._apart = max(self._apart - 1, 0)
            self._run_here()
        self._is_done = True

    def _run_here(self) -> None:
        """Update everything in this worker's own copy."""
        assert self._step is not None
        self._result = self._step()
        increment_version(params_of(self._opt))

    def _must_leave(self) -> bool:
        """Return whether this step cannot be taken in the shared memory."""
        assert self._memory is not None
        optimizer = self._opt
        params = params_of(optimizer)
        is_same = len(params) == len(self._params) and all(map(is_, params, self._params))
        if not is_same or self.state_view.has_loaded or has_step_hooks(optimizer):
            return True
        if _settings_of(optimizer) != self._settings:
            return True
        for param in params:
            grad, averaged = param.grad, self._slots[param].averaged
            if grad is None or grad is averaged:
                continue
            if grad.data_ptr() != averaged.data_ptr():  # the script has put another there
                averaged.copy_(grad)
        if any(param.grad is not None and param not in self._with_grads for param in params):
            return True
        return self._memory.is_edited()

    def _wait(self, collective: Callable[[], object]) -> None:
        start, is_traced, start_s = time.perf_counter(), tracer.on, time.monotonic()
        collective()
        self.waited_s += time.perf_counter() - start
        if is_traced:
            tracer.add("wait", start_s, behind="barrier")

    # -- sharing ------------------------------------------------------------------------------

    def _share(self) -> None:
        """Share one copy with the workers of this host. Collective among them."""
        optimizer = self._opt
        if self._host.size == 1 or not is_shareable(optimizer, self._slots):
            return
        self._params = params_of(optimizer)
        self._with_grads = {p for p in self._params if p.grad is not None or optimizer.state.get(p)}
        self._settings = _settings_of(optimizer)
        splits = is_elementwise(optimizer)
        slots = sorted((self._slots[param] for param in self._params), key=lambda s: s.index)
        cut = cut_anywhere if splits else cut_at_borders
        owned = plan_chunks(slots, cut, self._host.size, _CHUNK_ELEMENTS, splits=splits)
        try:
            self._memory = HostCopy(self._engine, self._host, optimizer, self._slots, owned)
        except SharedMemoryError as error:  # on all workers of this host
            say(
                f"each worker keeps its own copy of the parameters and the optimizer state: {error}"
            )
            self._can_share = False
            return
        self.state_view.has_loaded = False

    def _leave(self, step: Step | None) -> None:
        """Use a copy of this worker's own; with `step`: finish the step that others have begun."""
        memory, self._memory = self._memory, None
        if memory is not None:
            own = partial(_allocate, self._engine)
            memory.leave(own, step, keeps_state=self.state_view.has_loaded)

    # -- Part ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """Finish the step under way, in this worker's own copy."""
        if self._memory is not None:
            has_begun = self._step is not None and self._memory.has_begun()
            self._leave(self._step if has_begun else None)
            self._is_done = self._is_done or has_begun
        if self._step is not None and not self._is_done:
            self._run_here()
            self._is_done = True
        self._apart = max(self._apart, _STEPS_AFTER_CHANGE - 1)

    def load(self, state: State, change: Change | None) -> None:  # noqa: ARG002
        self.was_late = True

    @property
    def _opt(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer


class _SharedState(FullState):
    """The optimizer state, as the script sees it: complete, wherever it is."""

    def __init__(self, optimizer: torch.optim.Optimizer, update: ElasticShardedUpdate) -> None:
        super().__init__(optimizer)
        self._update = weakref.ref(update)
        self.has_loaded = False  # state that is not shared yet

    def _full(self, mine: dict[Any, Any]) -> defaultdict[torch.Tensor, Any]:
        update = self._update()
        full: defaultdict[torch.Tensor, Any] = defaultdict(dict, mine)
        if update is not None and update.memory is not None and not self.has_loaded:
            full |= update.memory.full_state()
        return full

    def _load_state_dict(self, load_state_dict: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(state_dict)
        for entries in self._opt.state.values():  # it may have been a view of the shared memory
            for key, value in entries.items():
                entries[key] = value.clone() if isinstance(value, torch.Tensor) else value
        self.has_loaded = True


def _settings_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what may decide which state an optimizer keeps. Learning rates change all the time."""
    return [
        [(key, bool(value) if isinstance(value, float | int) else value) for key, value in items]
        for items in (
            [(key, value) for key, value in group.items() if key not in ("params", "lr")]
            for group in optimizer.param_groups
        )
    ]


def _allocate(engine: _core.Engine, count: int, dtype: torch.dtype) -> torch.Tensor:
    return allocate(engine, (count,), dtype)
