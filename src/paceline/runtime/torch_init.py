"""From `dist.init_process_group("paceline")` to a job.

    under `paceline run`, after `pl.init()`   the job exists; torch's groups are groups of it, and
                                              env:// yields a store over its control plane
    torchrun, file://, an explicit store      rank 0 publishes the job's address and secret through
                                              that store; the default group's end is the job's

The first process group of torch spans the whole job; its ranks are the job's ranks. On a mesh it
spans the processes of one unit (runtime/mesh.py), which hold one copy of the model together, so
torch's model-parallel operations stay inside the unit. Both kinds can be destroyed and initialised
again in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from paceline import _core
from paceline.comm.group import Group
from paceline.comm.torch.backend import PacelineProcessGroup
from paceline.comm.torch.part import PacelinePart
from paceline.comm.torch.requested import has_several
from paceline.comm.torch.store import control_store, fresh_prefix
from paceline.errors import UsageError
from paceline.runtime import job
from paceline.runtime.config import is_launched_by_us

_LONGEST_JOIN_S = 24 * 3600.0


def control_plane_rendezvous(url: str) -> Iterator[tuple[Store, int, int]] | None:
    """Return the job's own store for torch's env://; None if there is no Paceline job."""
    if job.joined() is None and not is_launched_by_us():
        return None
    asked = parse_qs(urlparse(url).query)
    mine = job.init()
    unit = mine.unit
    rank, world_size = unit.index(mine.env.rank), len(unit)
    for name, number in (("rank", rank), ("world_size", world_size)):
        if int(asked.get(name, [number])[0]) != number:
            return None  # a rendezvous among other processes than the job's
    purpose = "torch" if mine.mesh is None else f"torch {unit[0]}"
    store, _ = fresh_prefix(control_store(mine.rendezvous.agent), purpose, world_size)
    return iter([(store, rank, world_size)])


def create_group(options: Any, pg_options: Any = None) -> PacelineProcessGroup | PacelinePart:
    """Create what torch asks for: a process group, or the CPU's part of one with several backends.

    Every member calls this.
    """
    if pg_options is not None:
        raise UsageError(
            f"pg_options={pg_options!r}: the paceline backend has none; its settings are the"
            " PACELINE_... variables and the group's timeout"
        )
    ranks = list(options.global_ranks_in_group)
    timeout_s = min(options.timeout / timedelta(seconds=1), _LONGEST_JOIN_S)
    _patch_monitored_barrier()
    if ranks:
        mine = job.current()
        members = [mine.unit[rank] for rank in ranks]
        whole = PacelineProcessGroup(Group(mine.unit_fabric, members, timeout_s), options.store)
    else:
        whole = _create_default(options, timeout_s)
    return PacelinePart(whole) if has_several() else whole


def _create_default(options: Any, timeout_s: float) -> PacelineProcessGroup:
    rank, world_size = options.group_rank, options.group_size
    mine, is_torchs_own = job.joined(), False
    if mine is None and is_launched_by_us():
        mine = job.init()
    if mine is None:
        mine, is_torchs_own = _join(options.store, rank, world_size, timeout_s), True
    unit = mine.unit
    if (unit.index(mine.env.rank), len(unit)) != (rank, world_size):
        raise UsageError(
            f"init_process_group(rank={rank}, world_size={world_size}) in a process that is rank"
            f" {unit.index(mine.env.rank)} of {len(unit)} of a Paceline job: the first process"
            " group spans the whole job (on a mesh: one copy of the model); call"
            " init_process_group() without them"
        )
    # Each step allocates gradients and activations of the same sizes. By default malloc returns
    # large blocks to the kernel, and the next step waits for fresh, zeroed pages.
    _core.keep_freed_memory()
    group = Group(mine.unit_fabric, unit, timeout_s)
    return PacelineProcessGroup(group, options.store, job.shutdown if is_torchs_own else None)


def _join(store: Store, rank: int, world_size: int, timeout_s: float) -> job.Job:
    prefixed, counter = fresh_prefix(store, "job", world_size)
    try:
        return job.join_through(prefixed, rank, world_size, timeout_s)
    except BaseException:
        store.add(counter, -1)
        raise


def _patch_monitored_barrier() -> None:
    """Let `dist.monitored_barrier` accept our groups: torch refuses all but gloo by name."""
    theirs = distributed_c10d.monitored_barrier
    if getattr(theirs, "knows_paceline", False):
        return

    def monitored_barrier(
        group: Any = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        chosen = distributed_c10d._get_default_group() if group is None else group
        if not isinstance(chosen, PacelineProcessGroup):
            theirs(group, timeout, wait_all_ranks)
            return
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        chosen.monitored_barrier(timeout, wait_all_ranks)

    monitored_barrier.__doc__ = theirs.__doc__
    monitored_barrier.knows_paceline = True  # type: ignore[attr-defined]
    distributed_c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier
