"""This process in its job, under Horovod's names: init, shutdown, rank, size.

Framework-neutral: the modules for torch and others use the same job and the same process sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import UsageError
from paceline.runtime import job as runtime
from paceline.runtime.job import Job

_job: Job | None = None
_incarnation = 0  # counts the calls of init() that formed a job; the same on all ranks
_on_shutdown: list[Callable[[], None]] = []  # what ends with the job


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; without effect if that has happened. `process_sets`: sets to add at once.

    Horovod's `comm` is not supported: use process sets.
    """
    global _job, _incarnation
    if comm is not None and list(comm) != []:
        raise UsageError(
            "hvd.init(comm=...) is not supported: start the job with the ranks that it needs, and"
            " use hvd.ProcessSet for a part of them"
        )
    if is_initialized():
        return
    from paceline.horovod.process_sets import open_global_set
    from paceline.horovod.timeline import start_from_environment

    _job = runtime.init()
    _incarnation += 1
    open_global_set(process_sets)
    start_from_environment()


def shutdown() -> None:
    """Leave the job. `init()` may be called again afterwards."""
    global _job
    if _job is None:
        return
    from paceline.horovod.process_sets import close_sets

    for end in _on_shutdown:
        end()
    close_sets()
    was, _job = _job, None
    if runtime.joined() is was:
        runtime.shutdown()


def at_shutdown(end: Callable[[], None]) -> None:
    """Call a function before the job is left."""
    _on_shutdown.append(end)


def is_initialized() -> bool:
    """Return whether init() has been called, and shutdown() not since then."""
    return _job is not None and runtime.joined() is _job


def current() -> Job:
    """Return the job; UsageError before init() and after shutdown()."""
    if _job is None or runtime.joined() is not _job:
        raise UsageError("Horovod has not been initialized; use hvd.init().")
    return _job


def incarnation() -> int:
    """Return the number of jobs that this process has joined."""
    return _incarnation


def rank() -> int:
    """Return this process's rank. In an elastic job it may change."""
    current()
    return runtime.rank()


def size() -> int:
    """Return the number of ranks. In an elastic job it may change."""
    current()
    return runtime.world_size()


def local_rank() -> int:
    """Return this process's number among the ranks of its host."""
    return _host_ranks()[current().fabric.me.host_id].index(current().fabric.rank)


def local_size() -> int:
    """Return the number of ranks on this host."""
    return len(_host_ranks()[current().fabric.me.host_id])


def cross_rank() -> int:
    """Return the number of this host among those that have a process of this local rank."""
    here = current().fabric.me.host_id
    return [host for host in _host_ranks() if len(_host_ranks()[host]) > local_rank()].index(here)


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    return sum(len(ranks) > local_rank() for ranks in _host_ranks().values())


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return len({len(ranks) for ranks in _host_ranks().values()}) == 1


def _host_ranks() -> dict[str, list[int]]:
    """Return the ranks of each host, in order of the hosts' first ranks."""
    membership, hosts = current().fabric.membership, dict[str, list[int]]()
    for rank in membership.workers:
        hosts.setdefault(membership.member(rank).host_id, []).append(rank)
    hosts.setdefault(current().fabric.me.host_id, [current().fabric.rank])  # a newcomer
    return hosts


# -- what Horovod was built with: Paceline has its own engine ---------------------------------


def mpi_enabled() -> bool:
    """Return False: Paceline does not use MPI."""
    return False


mpi_built = mpi_threads_supported = mpi_enabled
ddl_built = ccl_built = cuda_built = rocm_built = mpi_enabled


def gloo_built() -> bool:
    """Return True: like Horovod with gloo, Paceline needs no MPI."""
    return True


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Return 0: the engine moves CPU tensors."""
    return 0


def is_elastic() -> bool:
    """Return whether ranks may join and leave."""
    return current().elastic.is_on
