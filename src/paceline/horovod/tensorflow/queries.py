"""barrier and join, and the job's numbers as tensors that are asked for each time a graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.horovod import session
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.tensorflow.host import on_host, tf
from paceline.horovod.torch import operations


def join(name: str | None = None, ignore_name_scope: bool = False) -> Any:
    """Take part in the other ranks' allreduces with zeros until all ranks have joined.

    Returns the rank that joined last. Meanwhile `allgather` and `broadcast` fail on other ranks.
    """
    del name, ignore_name_scope
    return _number(operations.join)


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Wait until every rank of the set has called this."""
    del name

    def wait() -> int:
        operations.barrier(process_set)
        return 0

    _number(wait)


def _number(ask: Callable[[], int | None]) -> Any:
    def run() -> list[np.ndarray]:
        found = ask()
        return [np.array(-1 if found is None else found, np.int32)]

    return on_host(run, [], [tf.int32], [[]])[0]


def rank_op(name: str | None = None) -> Any:
    """Return this process's rank as a tensor."""
    del name
    return _number(session.rank)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set as a tensor."""
    del name
    if process_set_id == 0:
        return _number(session.size)
    from paceline.horovod.process_sets import get_process_set_by_id

    return _number(lambda: get_process_set_by_id(process_set_id).size())


def local_rank_op(name: str | None = None) -> Any:
    """Return this process's number among the ranks of its host as a tensor."""
    del name
    return _number(session.local_rank)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host as a tensor."""
    del name
    return _number(session.local_size)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this process is in a process set, else 0, as a tensor."""
    del name
    from paceline.horovod.process_sets import get_process_set_by_id

    return _number(lambda: int(bool(get_process_set_by_id(process_set_id).included())))
