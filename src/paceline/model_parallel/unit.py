"""MeshUnit: the processes that together hold one copy of a model, as torch's world.

torch.distributed's world is the unit: what torch does with the shards of a model (DTensor, stages,
FSDP) stays among these processes, and is independent of other copies, which may join and leave.

If the model is on a device, each axis also has a group of the device's own backend (NCCL for CUDA):
tensors on the device are exchanged there, on streams. The world and messages between hosts stay on
the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.comm.device_group import DeviceGroup
from paceline.comm.devices import CPU, collective_backend
from paceline.comm.group import Group
from paceline.comm.object_collectives import broadcast_object
from paceline.comm.torch.process_group import EngineProcessGroup
from paceline.comm.torch.store import control_store
from paceline.errors import SetupError, UsageError
from paceline.runtime.job import Job
from paceline.runtime.mesh import Mesh


class MeshUnit:
    """This process's unit. Creating one is collective among its processes."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self.mesh, self.number = mesh, job.env.number
        self.ranks = job.unit
        self.rank, self.size = mesh.unit_index(self.number), mesh.unit_size
        self._job, self._agent = job, job.rendezvous.agent
        self.device = CPU  # of the model
        self._join(job)
        # For our own messages: torch's group has an order of its own.
        self.group = Group(job.unit_fabric, self.ranks)
        sizes = tuple(size for _, size in mesh.inner)
        self._axes = tuple(axis for axis, _ in mesh.inner)
        self._grid = torch.arange(self.size).view(sizes)  # numbers of the unit's processes
        self._host_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=self._axes)
        self.device_mesh: DeviceMesh = self._host_mesh  # where the model's tensors are exchanged
        for axis in self._axes:  # torch communicates over these during forward and backward
            group = cast(EngineProcessGroup, self.host_axis(axis).get_group())
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

    def use_device(self, device: torch.device) -> None:
        """Exchange the model's tensors on this device, with its own backend. Collective."""
        self.device, backend = device, collective_backend(device)
        limit, groups = timedelta(seconds=self.group.timeout_s), list[dist.ProcessGroup]()
        for axis in self._axes:
            for ranks in self._rows(axis):  # torch wants all of them to be made by all processes
                made = dist.new_group(ranks, limit, backend, group_desc=f"mesh_{axis}")
                if self.rank in ranks:
                    groups.append(made)
        self.device_mesh = DeviceMesh.from_group(
            groups, device.type, self._grid, mesh_dim_names=self._axes
        )
        for axis, group in zip(self._axes, groups, strict=True):
            self._try(axis, group)

    def _try(self, axis: str, group: dist.ProcessGroup) -> None:
        """Add a number of each process: connections are made now, and not in a forward pass."""
        who = f"rank {self._job.env.rank}: mesh {self.mesh}, axis {axis} on {self.device}"
        try:
            one = torch.ones(1, device=self.device)
            dist.all_reduce(one, group=group)
            if (found := one.item()) != group.size():
                raise RuntimeError(f"1 of each of {group.size()} processes add up to {found}")
        except (RuntimeError, ValueError) as error:
            raise SetupError(
                f"{who}: its collectives do not work: {error}; look at the output of the other"
                " processes, or train with --devices cpu"
            ) from error

    def all_reduce_on_device(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType
    ) -> torch.Tensor:
        """Reduce a tensor on the device over all processes, one axis after the other. In place."""
        for axis in self._axes:
            dist.all_reduce(tensor, op, group=self.axis(axis).get_group())
        return tensor

    def form_link(self, name: str, axis: str, pair: tuple[int, int]) -> DeviceGroup:
        """Return a link on the device from one process of this axis to another; this is one of
        them. `name` is new, and the same in both. Collective among them; blocks."""
        row = next(row for row in self._rows(axis) if self.rank in row)
        ranks = tuple(self.ranks[row[index]] for index in pair)
        backend = collective_backend(self.device)
        assert backend is not None, "use_device was called"
        key = f"paceline/device/{name}/{ranks}/{self.group.generation}"
        store, mine = PrefixStore(key, control_store(self._agent)), ranks.index(self._job.env.rank)
        limit_s = self.group.timeout_s
        link = DeviceGroup(backend, self.device, store, ranks, mine, limit_s, is_link=True)
        self._job.closers.append(link.close)
        return link

    def _rows(self, axis: str) -> list[list[int]]:
        """Return the processes of the unit along an axis, of each of its lines."""
        dim = self._axes.index(axis)
        rows: list[list[int]] = (
            self._grid.movedim(dim, -1).reshape(-1, self._grid.shape[dim]).tolist()
        )
        return rows

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
        """Return one axis of the unit, as torch's functions take it: for the model's tensors."""
        return self.device_mesh[axis]

    def host_axis(self, axis: str) -> DeviceMesh:
        """Return one axis of the unit on the engine: for tensors on the CPU."""
        return self._host_mesh[axis]

    def any_of(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether any process of the unit has set it. Collective."""
        combined = torch.tensor(flags, dtype=torch.float32)
        self.group.all_reduce(combined, "max")
        return [bool(one) for one in combined.tolist()]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
