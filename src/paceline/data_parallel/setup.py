"""TrainingSetup: the groups, the servers or the method, and the exchange of one training.

Pace and options choose them, before any parameter is touched. They decide where parameters and
averages are stored.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

import torch

from paceline.comm.device_group import ByPlace
from paceline.comm.devices import is_on_device
from paceline.comm.group import Group
from paceline.comm.shared_memory import allocate
from paceline.comm.worker_group import HostWorkers
from paceline.compress.codec import Allocate
from paceline.compress.registry import CodecSpec, parse_codec
from paceline.data_parallel.bucket import Bucket
from paceline.data_parallel.bucket_allocator import BucketAllocator
from paceline.data_parallel.checks.placement import device_of
from paceline.data_parallel.device_setup import DeviceSetup
from paceline.data_parallel.reducer import Reducer
from paceline.data_parallel.update.elastic_sharding import ElasticShardedUpdate
from paceline.data_parallel.update.optimizer_state import HostState
from paceline.data_parallel.update.ownership import is_elementwise
from paceline.data_parallel.update.served import ServedUpdate
from paceline.data_parallel.update.server_tables import Serving
from paceline.data_parallel.update.step import ReplicatedUpdate, ShardedUpdate, Update
from paceline.observe.telemetry.events import LEARNING_RATE, STALENESS
from paceline.options.table import Options, wire_dtype
from paceline.pace.allreduce import AllReduce
from paceline.pace.center import Centre
from paceline.pace.compressed import BucketReductions, CompressedAllReduce
from paceline.pace.exchange import Exchange, OwnGradients
from paceline.pace.hierarchical import HostFirst
from paceline.pace.method import Method, Setting, make_method
from paceline.pace.parse import PaceSpec
from paceline.pace.registry import needs_servers
from paceline.pace.through_host.encoded import EncodedThroughHost
from paceline.pace.through_host.exchange import HostBuckets, ThroughHost
from paceline.runtime.job import Job


class TrainingSetup:
    """What one training uses. `prepare` is collective; `close` may be called at any time."""

    exchange: Exchange

    def __init__(
        self,
        job: Job,
        group: Group,
        pace: PaceSpec,
        options: Options,
        label: str,  # the same on all workers, and of this training alone
    ) -> None:
        self.job, self.group, self.pace, self.options = job, group, pace, options
        self.name = f"training {label}"  # prefix of the names of groups and elastic parts
        self._label = label
        self._groups: list[Group] = []  # closed with this training
        self.serving: Serving | None = None
        self.method: Method | None = None
        self.centre: Centre | None = None
        self._host_state: HostState | None = None
        self.elastic_update: ElasticShardedUpdate | None = None
        self.shares_params = self.is_common = False
        self.on_device: DeviceSetup | None = None  # if the model has parameters on one

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Choose and create everything."""
        job, pace = self.job, self.pace
        if (device := device_of(model)) is not None:
            self.on_device = DeviceSetup(
                job, self.group, model, device, self.options, self.name, self.form
            )
        self.host = _host_group(job)
        self._groups.append(self.host)
        if needs_servers(pace.name) and job.servers:
            where = (self._label, self.hosts)
            self.serving = Serving(job, self.group, optimizer, pace, self.options, *where)
        self.method = self._choose_method(optimizer)
        self.shares_params = self._wants_sharing(optimizer)
        self.is_common = self.method is not None and self.method.shares_params
        if self.is_common and job.elastic.is_on:  # then all workers are on one host
            self.host = self.form("host")
        self.exchange = self._choose_exchange()

    def close(self) -> None:
        """Release servers and groups, also if only some were created."""
        if self._host_state is not None:
            self._host_state.close()
        if self.elastic_update is not None:
            self.elastic_update.close()
        if self.serving is not None:
            self.serving.close()
        if self.on_device is not None:
            self.on_device.close()
        for group in self._groups:
            group.close()

    @property
    def hosts(self) -> HostBuckets | None:
        """What paces see of parameters on a device, in engine memory; None: there are none."""
        return None if self.on_device is None else self.on_device.hosts

    def form(self, use: str) -> Group:
        """Create a group of all workers. Collective."""
        self._groups.append(self.job.worker_group(f"{self.name} {use}"))
        return self._groups[-1]

    def form_for_statistics(self) -> Group | ByPlace:
        """Create the group that adds up the statistics of batch norms. Collective."""
        group = self.form("statistics")
        return group if self.on_device is None else self.on_device.form_by_place(group)

    def _form_on_host(self, use: str) -> Group:
        """Create a group of the workers of this host, which follows changes. Collective there."""
        self._groups.append(HostWorkers(self.job.fabric, f"{self.name} {use}"))
        return self._groups[-1]

    def memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new engine memory."""
        return allocate(self.job.fabric.engine, (count,), dtype)

    def make_allocator(self, optimizer: torch.optim.Optimizer) -> BucketAllocator:
        """Return the allocator of buckets."""
        views = self.serving is not None and self.serving.watches_edits
        return BucketAllocator(
            self.job.fabric.engine,
            Group(self.job.fabric, [self.job.env.rank]) if views else self.host,
            optimizer,
            bucket_mb=self.options.bucket_mb,
            is_shared=self.shares_params or views or self.is_common,
            averages=self._choose_averages(),
            is_common=self.is_common,
        )

    def make_update(self, optimizer: torch.optim.Optimizer, allocator: BucketAllocator) -> Update:
        """Return the update that runs the optimizer's steps."""
        if self.serving is not None:
            return self.serving.update
        if self._shares_elastically(optimizer):
            self.elastic_update = ElasticShardedUpdate(
                optimizer,
                self.job.elastic,
                self.form("update"),
                self._form_on_host("host"),
                self.job.fabric.engine,
                allocator.slots,
            )
            return self.elastic_update
        if not self.shares_params:
            return ReplicatedUpdate()
        engine, slots = self.job.fabric.engine, allocator.shared_slots
        sharded = ShardedUpdate(optimizer, self.host, engine, slots)
        self._host_state = sharded.state
        return sharded

    @property
    def buffers_mode(self) -> str:
        """How buffers are synchronised."""
        is_alone = self.method is not None and self.method.is_free
        return "local" if is_alone else self.options.buffers

    @property
    def is_free(self) -> bool:
        """Whether workers step without waiting for all of the others."""
        if self.method is not None:
            return self.method.is_free
        return self.serving is not None and not self.serving.rule.is_lockstep

    @property
    def may_diverge(self) -> bool:
        """Whether one worker may take any number of steps more than another."""
        if self.serving is None or not self.is_free:
            return self.is_free
        return self.serving.rule.bound is None and not self.serving.rule.backup

    # -- choosing -----------------------------------------------------------------------------

    def _choose_method(self, optimizer: torch.optim.Optimizer) -> Method | None:
        if needs_servers(self.pace.name):
            return None
        workers = self.form("pace")
        if self.job.servers and self.pace.uses_servers:
            self.centre = Centre(self.job, workers, f"centre {self._label}", self.memory)
        options, own = self.options.own, weakref.ref(optimizer)

        def another(name: str) -> Group:
            return self.form(f"pace {name}")

        return make_method(
            Setting(
                *(self.pace, workers, options, own, self.memory, another, self.centre),
                is_elastic=self.job.elastic.is_on,
                open_books=self.job.reporter.compression.open,
            )
        )

    def _choose_exchange(self) -> Exchange:
        if self.serving is not None:
            return self.serving.exchange
        if self.method is None:
            spec = choose_codec(self.job, self.options)
            if self.on_device is not None and not spec.is_on:
                return self.on_device.choose_exchange()
            if not spec.is_on:
                return AllReduce(self.group)
            memory = self.memory if self.hosts is None else self.hosts.allocate
            makes = (self.form, self._groups.append, memory)
            average = compressed_average(self.job, self.group, self.host, spec, *makes)
            if self.on_device is None:
                return average
            collectives = self.on_device.form_for_codec(spec)
            return EncodedThroughHost(average, self.on_device.hosts, collectives)
        own = self.method.exchange()
        if own is not None and self.hosts is not None:
            return ThroughHost(own, self.hosts)
        return own or OwnGradients()

    def _choose_averages(self) -> str:
        """Return where averaged gradients are stored; bucket_allocator.py lists the words."""
        if self.serving is not None:
            return self.serving.averages
        if self.on_device is not None:
            return self.on_device.averages
        # No other process holds these shards: their gradients are the averages.
        is_alone = (
            bool(self.job.part_suffix) and self.group.size == 1 and not self.job.elastic.is_on
        )
        return "none" if is_alone and self.exchange.traits.is_collective else "own"

    def _shares_elastically(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the workers of a host share memory between changes of an elastic job.

        The same on all workers, also on those that join later.
        """
        if not self.job.elastic.is_on or self.serving is not None or self.method is not None:
            return False
        if self.on_device is not None or self.job.part_suffix:
            return False
        wanted = self.options.update
        return wanted == "sharded" or (wanted == "auto" and is_elementwise(optimizer))

    def _wants_sharing(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.serving is not None:
            return self.serving.shares_memory
        if self.on_device is not None:
            return False  # memory of a device is not shared
        if self.method is not None:
            return False  # workers have different values most of the time
        if self.options.update == "replicated" or self.job.elastic.is_on:
            return False  # elastic: what is shared changes with the workers
        if self.options.update == "sharded":
            return True
        can_see_edits = os.access("/proc/self/pagemap", os.R_OK)  # see private_view.h
        return self.host.size > 1 and is_elementwise(optimizer) and can_see_edits


def _host_group(job: Job) -> Group:
    """Create the group of this host's workers; in an elastic job no memory is shared."""
    if job.elastic.is_on:
        return Group(job.fabric, (job.env.rank,))
    membership = job.fabric.membership
    here = [r for r in membership.workers if membership.member(r).host_id == job.env.host_id]
    return Group(job.fabric, here)


def compressed_average(
    job: Job,
    group: Group,
    host: Group,
    spec: CodecSpec,
    form: Callable[[str], Group],
    keep: Callable[[Group], None],
    allocate: Allocate,
) -> Exchange:
    """Return the exchange that averages gradients of all workers with a codec.

    `form` creates groups of all workers; `keep` gets other groups, to close them.
    """
    books, is_elastic = job.reporter.compression, job.elastic.is_on
    leaders = [] if is_elastic else _leaders(job)

    def among_leaders(name: str) -> Group:
        del name
        group = Group(job.fabric, leaders)
        keep(group)
        return group

    if not leaders:
        reductions = BucketReductions(spec, allocate, group, form, is_elastic=is_elastic)
        books.open(str(spec), reductions.accounts)
        return CompressedAllReduce(group, reductions)
    theirs: BucketReductions | None = None
    if host.rank == 0:
        first = among_leaders("first hop")
        theirs = BucketReductions(spec, allocate, first, among_leaders, is_elastic=False)
        books.open(str(spec), theirs.accounts)
    return HostFirst(group, host, len(leaders), spec, theirs, allocate)


def choose_codec(job: Job, options: Options) -> CodecSpec:
    """Return the codec of gradients: the chosen one, or the one that the precision implies."""
    spec, follows = parse_codec(options.compress), wire_dtype(options.precision)
    if spec.name != "auto" or follows == "fp32" or len(_firsts(job)) == 1:
        return spec
    return CodecSpec(follows)


def left_out(
    exchange: Exchange, buckets: Sequence[Bucket]
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return the part of gradients that has not been sent yet, by parameter."""
    found = [(bucket, exchange.left_out(bucket)) for bucket in buckets]
    return {
        slot.param: slot.segment.view(left).clone()
        for bucket, left in found
        if left is not None
        for slot in bucket.slots
    }


def _leaders(job: Job) -> list[int]:
    """Return the first worker of each host, if some hosts have several; otherwise none."""
    firsts = _firsts(job)
    return firsts if 1 < len(firsts) < len(job.fabric.membership.workers) else []


def _firsts(job: Job) -> list[int]:
    membership = job.fabric.membership
    firsts: dict[str, int] = {}
    for rank in membership.workers:
        firsts.setdefault(membership.member(rank).host_id, rank)
    return list(firsts.values())


# -- what the user sees ---------------------------------------------------------------------------


def describe(setup: TrainingSetup, reducer: Reducer, way: str, num_global_norms: int) -> str:
    """Return in one line what was set up; `way`: how steps are taken."""
    params, options = sum(p.numel() for p in reducer.params), setup.options
    parts = [
        f"{_count(params)} parameters in {_plural(len(reducer.buckets), 'bucket')}",
        _plural(setup.group.size, "worker"),
        way,
        f"buffers {setup.buffers_mode}",
    ]
    if options.precision != "fp32":
        parts.append(f"computes in {options.precision}")
    if setup.serving is not None:
        parts.append(setup.serving.balance)
    if setup.centre is not None:
        parts.append(setup.centre.describe())
    if num_global_norms:
        parts.append(f"global statistics in {num_global_norms} batch norms")
    return ", ".join(parts)


def report_figures(setup: TrainingSetup, optimizer: torch.optim.Optimizer) -> None:
    """Report the learning rate with each step, and the staleness of free-running updates."""
    optimized, reporter = weakref.ref(optimizer), setup.job.reporter
    reporter.watch(LEARNING_RATE, lambda: _rate_of(optimized()))
    if setup.on_device is not None:
        setup.on_device.report_figures(reporter)
    if setup.serving is not None and setup.is_free:
        served = weakref.ref(setup.serving.update)
        reporter.watch(STALENESS, lambda: _staleness_of(served()))


def _rate_of(optimizer: torch.optim.Optimizer | None) -> float | None:
    """Return the learning rate of the first parameters, if there is one."""
    rate = optimizer.param_groups[0].get("lr") if optimizer and optimizer.param_groups else None
    if isinstance(rate, torch.Tensor) and is_on_device(rate):
        return None  # to read it would wait for the device
    return float(rate) if isinstance(rate, int | float | torch.Tensor) else None


def _staleness_of(update: ServedUpdate | None) -> int | None:
    return None if update is None else update.staleness


def _count(number: int) -> str:
    """Write 25185280 as '25.2 M'."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)


def _plural(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
