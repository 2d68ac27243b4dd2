"""DeviceSetup: what a training needs if the model has parameters on a device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from paceline.comm.device_group import ByPlace, DeviceGroup
from paceline.comm.device_timing import DeviceLaps
from paceline.comm.devices import collective_backend, is_on_device, peak_memory_of
from paceline.comm.group import Group
from paceline.comm.host_route import HostRoute
from paceline.comm.shared_memory import allocate
from paceline.comm.torch.store import control_store
from paceline.compress.registry import CodecSpec
from paceline.observe.telemetry.events import COPY_SHARE, DEVICE_MEMORY, DEVICE_TIME
from paceline.observe.telemetry.reporter import Reporter
from paceline.options.table import Options
from paceline.pace.allreduce import AllReduce
from paceline.pace.device_allreduce import ByPlacement, DeviceAllReduce, HostStaged
from paceline.pace.exchange import Exchange
from paceline.pace.through_host.exchange import HostBuckets, ThroughHost
from paceline.runtime.console import say
from paceline.runtime.job import Job


class DeviceSetup:
    """The device of a model, and the ways to it: its own collectives, or through engine memory."""

    def __init__(
        self,
        job: Job,
        group: Group,
        model: nn.Module,
        device: torch.device,
        options: Options,
        name: str,  # the same on all workers, and of this training alone
        form: Callable[[str], Group],  # creates groups of all workers
    ) -> None:
        self._job, self._group, self._options = job, group, options
        self._name, self._form = name, form
        self.device = device
        trainable = [param for param in model.parameters() if param.requires_grad]
        self.is_mixed = not all(map(is_on_device, trainable))  # others are on the CPU
        self.collectives: DeviceGroup | None = None  # for gradients
        self._formed: list[DeviceGroup] = []
        self._route: HostRoute | None = None
        self._hosts: HostBuckets | None = None
        self.laps = DeviceLaps(device)

    @property
    def route(self) -> HostRoute:
        """The route between the device and engine memory; made when it is first used."""
        if self._route is None:
            rank = self._job.env.rank
            self._route = HostRoute(self.device, self._allocate, who=f"rank {rank}")
        return self._route

    @property
    def hosts(self) -> HostBuckets:
        """What paces, codecs and servers see of the buckets, in engine memory."""
        if self._hosts is None:
            self._hosts = HostBuckets(lambda: self.route)
        return self._hosts

    def choose_exchange(self) -> Exchange:
        """Return how gradients are averaged. Collective."""
        if self._job.elastic.is_on:  # its group follows the members, the device's does not
            return ThroughHost(AllReduce(self._group), self.hosts)
        backend = collective_backend(self.device) if self._options.via != "host" else None
        exchange: Exchange
        if backend is not None:
            self.collectives = self._form_on_device(backend, "gradients")
            exchange = DeviceAllReduce(self._group, self.collectives)
        else:
            inner = AllReduce(self._form("host route"))
            exchange = HostStaged(self._group, self.route, inner, in_place=True)
            if self._options.via == "auto" and self._job.env.rank == 0:
                say(
                    f"{self.device.type} has no collective backend in this build of torch:"
                    " gradients are exchanged through host memory (via=host)"
                )
        return ByPlacement(AllReduce(self._group), exchange) if self.is_mixed else exchange

    @property
    def averages(self) -> str:
        """Where averaged gradients are stored; bucket_allocator.py lists the words."""
        # The device's backend adds up in place, unless a check looks at what each worker had.
        in_place = self.collectives is not None and not self.is_mixed
        return "none" if in_place and self._options.nonfinite == "ignore" else "own"

    def report_figures(self, reporter: Reporter) -> None:
        """Report the device's time, memory and copies with each message. Never waits."""
        reporter.watch(DEVICE_TIME, self.laps.mean_ms)
        reporter.watch(DEVICE_MEMORY, self._memory_mb)
        reporter.watch(COPY_SHARE, self._copy_percent)

    def _memory_mb(self) -> float | None:
        peak = peak_memory_of(self.device)
        return None if peak is None else peak / 1e6

    def _copy_percent(self) -> float | None:
        route, total_ms = self._route, self.laps.total_ms
        return None if route is None or not total_ms else 100 * route.copied_ms / total_ms

    def form_by_place(self, group: Group) -> ByPlace:
        """Add a group on the device to one on the host. Collective."""
        backend = collective_backend(self.device)
        assert backend is not None, "placement.py refuses batchnorm=global without one"
        return ByPlace(group, self._form_on_device(backend, "statistics"))

    def form_for_codec(self, spec: CodecSpec) -> DeviceGroup | None:
        """Form the group of a codec that exchanges on the device; None: it does not. Collective."""
        backend = collective_backend(self.device)
        is_asked = spec.name == "powersgd" and self._options.via != "host"
        if backend is None or self._job.elastic.is_on or not is_asked:
            return None
        return self._form_on_device(backend, "codec")

    def _form_on_device(self, backend: str, use: str) -> DeviceGroup:
        job, group = self._job, self._group
        name = f"{self._name} {use}{job.part_suffix}"
        key = f"paceline/device/{name}/{group.ranks}/{group.generation}"
        store = PrefixStore(key, control_store(job.rendezvous.agent))
        made = DeviceGroup(backend, self.device, store, group.ranks, group.rank, group.timeout_s)
        self._formed.append(made)
        return made

    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new engine memory on pages of its own."""
        return allocate(self._job.fabric.engine, (count,), dtype, apart=True)

    def close(self) -> None:
        """Release memory, threads and the group on the device."""
        if self._route is not None:
            self._route.close()
        for formed in self._formed:
            formed.close()
