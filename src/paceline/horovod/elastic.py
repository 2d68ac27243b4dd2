"""Horovod's elastic training on Paceline's membership: State, ObjectState, run.

    state.commit()       keeps a copy of the state; new workers join here
    a worker is lost     operations raise HorovodInternalError; `run` restores the last copy and
                         calls the function again with the workers that are left
    a worker joins       `run` sends rank 0's state to all, and calls the function again

`pl.distribute` needs none of this: it repeats the interrupted step without a copy.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from paceline.comm.tensors import Buffer, op_code
from paceline.errors import HorovodInternalError, PeerError
from paceline.horovod import session
from paceline.horovod.handles import translated
from paceline.horovod.objects import broadcast_object
from paceline.horovod.process_sets import global_process_set

Result = TypeVar("Result")


class HostsUpdatedInterrupt(RuntimeError):
    """Workers join or leave: `run` enters the new membership and calls the function again."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the membership of the job changes")
        self.skip_sync = skip_sync


class State:
    """What all workers have in common, and how to keep, restore and send it."""

    def __init__(self, **kwargs: Any) -> None:
        del kwargs
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these after every change of the workers, for example to adapt a learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to other workers."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, *_: Any) -> None:
        """Do nothing: the membership is asked for in `check_host_updates`."""

    def commit(self) -> None:
        """Keep a copy of the state, and let workers that wait join. Collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all workers if workers join or are to leave."""
        elastic = session.current().elastic
        if not elastic.is_on:
            return
        due = np.array([elastic.is_change_due], dtype=np.int64)
        buffer = Buffer(due)
        with translated():
            global_process_set.named.all_reduce(
                "elastic.check_host_updates", buffer, buffer, op_code("max", buffer.dtype), 0
            )
        if due[0]:
            raise HostsUpdatedInterrupt()

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Send rank 0's state to all. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to other workers before the callbacks do; nothing by default."""


class ObjectState(State):
    """Plain values as attributes: numbers, strings, lists, dicts, tensors, arrays."""

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] = session.rank,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._bcast_object, self._rank = bcast_object, get_rank
        self._saved_state = dict(kwargs)
        self._set_attrs()
        self._saved_state = copy.deepcopy(self._saved_state)

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def run(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let `function(state, ...)` survive changes of the workers: it is called again after each."""

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        elastic = session.current().elastic
        was_joining = elastic.is_joining
        elastic.join_running_job()
        if was_joining:
            _meet()
            _renew(state)
        needs_sync = True
        while True:
            try:
                if needs_sync:
                    state.sync()
                return function(state, *args, **kwargs)
            except HorovodInternalError as error:
                _meet(_find_loss(error))
                state.restore()
                needs_sync = True
            except HostsUpdatedInterrupt as change:
                elastic.enter_due_generation(agreed=True)
                _meet()
                needs_sync = not change.skip_sync
            _renew(state)

    return wrapper


run_fn = run


def _find_loss(error: HorovodInternalError) -> PeerError:
    """Return the loss or change that caused an error; raise the error if there was none."""
    if not session.current().elastic.is_on or error.peer_error is None:
        raise error
    return error.peer_error


def _meet(error: PeerError | None = None) -> None:
    """Meet the other workers of the present membership, after an error of the next one.

    Some workers learn of a change by an error, others are told; all take this one step together.
    """
    job, failures = session.current(), [] if error is None else [error]

    def attempt() -> None:
        if failures:
            raise failures.pop()
        job.world.barrier()

    job.elastic.run_step(attempt)


def _renew(state: State) -> None:
    global_process_set.restart_names()  # a newcomer has started none
    state.on_reset()
