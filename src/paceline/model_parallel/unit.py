"""MeshUnit: the processes that together hold one copy of a model, as torch's world.

torch.distributed's world is the unit: what torch does with the shards of a model (DTensor, stages,
FSDP) stays among these processes, and is independent of other copies, which may join and leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.comm.group import Group
from paceline.comm.object_collectives import broadcast_object
from paceline.comm.torch.process_group import EngineProcessGroup
from paceline.errors import UsageError
from paceline.runtime.job import Job
from paceline.runtime.mesh import Mesh


class MeshUnit:
    """This process's unit. Creating one is collective among its processes."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self.mesh, self.number = mesh, job.env.number
        self.ranks = job.unit
        self.rank, self.size = mesh.unit_index(self.number), mesh.unit_size
        self._agent = job.rendezvous.agent
        self._join(job)
        # For our own messages: torch's group has an order of its own.
        self.group = Group(job.unit_fabric, self.ranks)
        self.device_mesh: DeviceMesh = init_device_mesh(
            "cpu",
            tuple(size for _, size in mesh.inner),
            mesh_dim_names=tuple(axis for axis, _ in mesh.inner),
        )
        for axis, _ in mesh.inner:  # torch communicates over these during forward and backward
            group = cast(EngineProcessGroup, self.axis(axis).get_group())
            group.waiting = job.reporter.waiting

    def _join(self, job: Job) -> None:
        if not dist.is_initialized():
            dist.init_process_group("paceline")
            job.closers.append(_leave)
            return
        found, size = dist.get_backend(), dist.get_world_size()
        if (found, size) != ("paceline", self.size):
            raise UsageError(
                f"mesh {self.mesh}: torch.distributed was initialised before, with backend {found}"
                f" and {size} processes; on a mesh its world is one copy of the model"
                f" ({self.size} processes): leave out init_process_group, or start the job with"
                f" --mesh {self.mesh} and use backend 'paceline'"
            )

    def agree_once(self, what: str, choose: Callable[[], list[str]]) -> list[str]:
        """Return what one unit has chosen, on all units of the job and on those that join later:
        two units that measure do not find the same. Collective."""
        chosen, problem = list[str](), ""
        if self.rank == 0:
            key = f"paceline/chosen: {what}"
            try:
                if not self._agent.store_check([key]):
                    encoded = msgspec.msgpack.encode(choose())
                    self._agent.store_compare_set(key, b"", encoded)
                chosen = msgspec.msgpack.decode(self._agent.store_get(key), type=list[str])
            except UsageError as error:  # the other processes wait for the broadcast
                problem = str(error)
        chosen, problem = broadcast_object(self.group, [chosen, problem])
        if problem:
            raise UsageError(problem)
        return list(chosen)

    def index(self, axis: str) -> int:
        """Return this process's index on an axis."""
        return self.mesh.index(self.number, axis)

    def axis(self, axis: str) -> DeviceMesh:
        """Return one axis of the unit, as torch's functions take it."""
        return self.device_mesh[axis]

    def any_of(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether any process of the unit has set it. Collective."""
        combined = torch.tensor(flags, dtype=torch.float32)
        self.group.all_reduce(combined, "max")
        return [bool(one) for one in combined.tolist()]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
