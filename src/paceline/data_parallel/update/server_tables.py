"""Serving: puts buckets of parameters on the servers, as tables.

The first worker creates the tables with its values and its optimizer's state; then the others open
them. Where all workers and servers share one host, and the pace is lockstep, the parameters exist
once: in memory that all of them map, which the servers update and the workers compute with.
Otherwise every worker has memory of its own. In elastic jobs it shows the memory of the servers of
its host, as long as they serve (ps/client/mapping.py); values of other servers, and of free-running
ones, are copied to it after each step.

A worker that joins a running job creates the same tables, but opens them only when it is admitted
(`resume`): then it reads the values, and continues at the clock of its worker number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec
import torch

from paceline.comm.group import Group
from paceline.comm.shared_memory import allocate
from paceline.compress.registry import parse_codec
from paceline.data_parallel.bucket import Bucket, ParamSlot
from paceline.data_parallel.checks.free_running import LossWatch, remedies, update_notice
from paceline.data_parallel.checks.model import not_in_optimizer
from paceline.data_parallel.update.optimizer_state import ServedState
from paceline.data_parallel.update.ownership import is_elementwise
from paceline.data_parallel.update.served import ServedUpdate, settings_of
from paceline.data_parallel.update.served_variants import LayerwiseUpdate, LocalOptimizer
from paceline.errors import UsageError
from paceline.options.table import Options
from paceline.pace.parameter_server import ServerExchange
from paceline.pace.parse import PaceSpec
from paceline.pace.through_host.exchange import HostBuckets
from paceline.pace.through_host.served import DeviceServerExchange
from paceline.ps.client.items import Item, ItemParam
from paceline.ps.client.remote_table import RemoteTable
from paceline.ps.client.subscription import Subscription
from paceline.ps.packing import Packing, mean_codec_of
from paceline.ps.server.precision import kept_dtype
from paceline.ps.spec import OptimizerSpec, Rule, rule_of
from paceline.runtime.console import say, warn
from paceline.runtime.job import Job
from paceline.state.protocol import Change, Part, State


class Serving(Part):
    """The servers' part in the training of one model. Its methods are collective.

    It is a part of the job's state (state/protocol.py): newcomers need little from a peer, because
    the servers have values and clocks.
    """

    def __init__(
        self,
        job: Job,
        workers: Group,
        optimizer: torch.optim.Optimizer,
        pace: PaceSpec,
        options: Options,
        label: str,
        hosts: HostBuckets | None = None,  # of parameters on a device
    ) -> None:
        self._job = job
        self._hosts = hosts
        self._workers = workers
        self._optimizer = optimizer
        self._wire = options.wire
        self._name = f"model {label}"
        self.rule = _rule(pace, options, is_elastic=job.elastic.is_on)
        # See private_view.h. On a device each worker has its own copy, and versions show edits.
        can_see_edits = hosts is None and os.access("/proc/self/pagemap", os.R_OK)
        self.shares_memory = (
            can_see_edits
            and not job.elastic.is_on  # a process that maps it may be lost during a write
            and self.rule.aggregate
            and not self.rule.backup  # a late worker computes while the others update
            and _is_one_host(job)
            and _are_kept_as_they_are(optimizer, self.rule)
        )
        # Otherwise the script sees its own memory through a private view, for the same reason. With
        # push=delta and push=params the script's own optimizer writes to everything anyway.
        self.watches_edits = can_see_edits and self.rule.push == "grad" and not self.shares_memory
        self.maps_memory = (
            self.watches_edits
            and job.elastic.is_on
            and self.rule.aggregate
            and not self.rule.backup
            and _are_kept_as_they_are(optimizer, self.rule)
        )
        # One server decides which workers are in a round; elastic servers hold many partitions.
        self._links = job.servers[:1] if self.rule.backup else job.servers
        self.packing = self._choose_packing(options)
        self.exchange = (
            ServerExchange(self.rule, self.packing)
            if hosts is None
            else DeviceServerExchange(self.rule, self.packing, hosts)
        )
        self._by_layer = options.wait == "layer"
        kind: type[ServedUpdate] = LayerwiseUpdate if self._by_layer else ServedUpdate
        if self.rule.push != "grad":
            kind = LocalOptimizer
        membership = job.fabric.membership
        self.update = kind(
            optimizer, self.exchange, job.fabric.me.number, self.rule, len(membership.servers)
        )
        self.update.position = lambda: job.elastic.num_passed
        self.optimizer_state = (
            ServedState(optimizer, self.update.settle) if self.rule.push == "grad" else None
        )
        self.committed_steps = 0  # of this worker's number, when it opened its tables
        self._unopened: list[tuple[RemoteTable, Sequence[Bucket]]] = []  # of a newcomer
        self._settled: list[int] = []  # by table: the last step before a newcomer's first one
        if job.elastic.is_on:
            job.elastic.register(f"{self._name} on servers", self)
        self._watch = self._explain(pace)

    def _explain(self, pace: PaceSpec) -> LossWatch | None:
        """Log on one worker what a free-running update is, and watch the reported loss."""
        workers = len(self._job.fabric.membership.workers)
        notice = update_notice(self.rule, workers, self._optimizer.param_groups)
        if not notice or self._workers.rank:
            return None
        say(f"{pace}: {notice}")
        watch = LossWatch(warn, f"pace {pace}; try {remedies(self.rule, workers)}")
        self._job.reporter.listener = watch
        return watch

    @property
    def averages(self) -> str:
        """Where averaged gradients are stored; bucket_allocator.py lists the words."""
        if self.rule.aggregate:
            return "host" if self.shares_memory or self.watches_edits else "own"
        # Servers of this host read gradients at the commit, as the script left them.
        are_sent = not (
            self.exchange.pushes_late or all(link.is_local for link in self._job.servers)
        )
        return "view" if self.watches_edits and are_sent else "none"

    @property
    def balance(self) -> str:
        """How much each server holds, for the line at the start."""
        return "; ".join(table.balance for table in self.exchange.tables)

    def subscribe(self, after: int) -> Subscription:
        """Only watch from now on; return an iterable of new versions."""
        if self.rule.aggregate:
            raise UsageError(
                "model.subscribe() is for free-running paces (async, ssp): in lockstep every worker"
                " takes part in every step, and has the newest parameters anyway"
            )
        (table,) = self.exchange.tables
        table.stand_aside()
        return Subscription(table, after)

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Put these buckets on the servers."""
        if not buckets:
            return
        # wait=layer: a table for each bucket, because all values of a table arrive together.
        for part in [[bucket] for bucket in buckets] if self._by_layer else [buckets]:
            self._make_table(part)

    def _make_table(self, buckets: Sequence[Bucket]) -> None:
        groups = _groups_of(self._optimizer)
        settings = tuple(settings_of(group) for group in self._optimizer.param_groups)
        number = len(self.exchange.tables)
        table = RemoteTable(
            self._links,
            self._job.fabric.membership.worker_numbers,
            f"{self._name}.{number}" if number else self._name,
            [self._item(bucket, groups) for bucket in buckets],
            OptimizerSpec(type(self._optimizer).__name__, settings),
            self.rule,
            cut_anywhere=self.rule.push != "grad" or is_elementwise(self._optimizer),
            wire=self._wire,
            packing=self.packing,
        )
        is_first = self._workers.rank == 0 and not self._job.elastic.is_joining
        if self._job.elastic.is_joining:
            self._unopened.append((table, buckets))
        else:
            self._set_up(table, len(buckets), is_first)
        self.exchange.add(buckets, table)
        self.update.add(buckets)
        if self.optimizer_state is not None:
            self.optimizer_state.add(table, buckets, is_first)
        self._workers.barrier()

    def _set_up(self, table: RemoteTable, num_items: int, is_first: bool) -> None:
        if is_first:
            table.open()
            for number in range(num_items):
                table.assign(number)
        self._workers.barrier()
        if not is_first:
            table.open()
        if not self.rule.aggregate:
            table.pull().wait()  # servers remember from which values each worker computes

    def finish(self) -> None:
        """Read the servers' newest values on every worker, after its last step."""
        self.update.settle()
        self._workers.barrier()  # all workers have finished their last step
        self.update.pull()

    def close(self) -> None:
        """Release model and optimizer."""
        self._job.elastic.unregister(f"{self._name} on servers")
        if self._watch is not None and self._job.reporter.listener is self._watch:
            self._job.reporter.listener = None
        self.update.close()
        if self.optimizer_state is not None:
            self.optimizer_state.close()

    # -- newcomers ----------------------------------------------------------------------------

    def state(self) -> State:
        """Return which workers send changes to averages for all, and which steps are finished.

        A step that this worker has committed, but after which not all have agreed yet, is not.
        """
        position = self._job.elastic.num_passed
        settled = [
            table.clock - (self.update.committed_at == position) for table in self.exchange.tables
        ]
        return State(passing={"speakers": sorted(self.exchange.speakers), "clocks": settled})

    def load(self, state: State, change: Change | None) -> None:  # noqa: ARG002
        """Load it from a peer."""
        self.exchange.speakers = set(state.passing["speakers"])
        self._settled = state.passing["clocks"]

    def resume(self, change: Change) -> None:
        """Open a newcomer's tables; the servers have noticed lost workers by themselves."""
        for table, buckets in self._unopened:
            table.open(self._job.fabric.membership.worker_numbers)
            table.pull().wait()
            self.update.begin_with_values(buckets)
        tables = [table for table, _ in self._unopened]
        if self.rule.is_lockstep:
            # The first step is the one that the others are in, whether they have committed it or
            # not: servers that have finished it already only reply.
            for table, clock in zip(tables, self._settled, strict=False):
                table.clock = clock
            if change.joined:
                self._workers.barrier()  # no worker begins a step before all tables are open
        if tables:
            self.committed_steps = min(table.clock for table in tables)
            self._job.elastic.committed_steps = self.committed_steps
        self._unopened.clear()

    # -- the contents of a table --------------------------------------------------------------

    def _choose_packing(self, options: Options) -> Packing | None:
        spec, fabric = parse_codec(options.compress), self._job.fabric
        if not spec.is_on:
            return None
        packing = Packing(
            spec,
            lambda count, dtype: allocate(fabric.engine, (count,), dtype),
            worker=fabric.me.number,
            num_workers=len(fabric.membership.workers),
        )
        self._job.reporter.compression.open(str(spec), packing.accounts)
        return packing

    def _item(self, bucket: Bucket, groups: Mapping[int, int]) -> Item:
        held = [self._held(slot, groups) for slot in bucket.slots]
        if self.shares_memory:
            assert bucket.host is not None and bucket.host_averaged is not None
            shared = (bucket.host.shared, bucket.host_averaged.shared)
            is_owner = self._workers.rank == 0
            return Item(
                bucket.label,
                held,
                bucket.grads,
                bucket.params,
                bucket.averaged,
                is_shared=True,
                shared_memory=shared if is_owner else None,
            )
        if self._hosts is not None:
            copy = self._hosts.of(bucket)
            copy.fetch_params()
            average = copy.averaged if self.rule.aggregate else None
            return Item(bucket.label, held, copy.grads, copy.received_params, average)
        outbox = bucket.grads
        if self.rule.push != "grad":
            outbox = allocate(self._job.fabric.engine, bucket.grads.shape, bucket.grads.dtype)
        average, views = None, None
        if self.rule.aggregate:
            host = bucket.host_averaged
            average = bucket.averaged if host is None else host.shared
            if self.maps_memory and bucket.host is not None and host is not None:
                views = (bucket.host, host)
        return Item(bucket.label, held, outbox, bucket.params, average, views=views)

    def _held(self, slot: ParamSlot, groups: Mapping[int, int]) -> ItemParam:
        param = slot.param
        group = groups.get(id(param))
        if group is None:  # it was thawed later
            raise UsageError(not_in_optimizer(slot.name))
        shape = tuple(param.shape)
        if not param.is_contiguous():
            if not is_elementwise(self._optimizer):
                raise UsageError(
                    f"{slot.name} is not contiguous, and {type(self._optimizer).__name__} uses its"
                    " rows and columns; make the parameter contiguous"
                )
            shape = (slot.segment.count,)
        return ItemParam(slot.name, group, slot.segment.start, slot.segment.count, shape)


def _rule(pace: PaceSpec, options: Options, *, is_elastic: bool) -> Rule:
    rule = rule_of(pace.name, int(pace.value), options, is_elastic=is_elastic)
    codec = parse_codec(options.compress)
    if rule.aggregate and codec.is_on:
        rule = msgspec.structs.replace(rule, mean_codec=mean_codec_of(codec))
    return rule


def _groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    groups = enumerate(optimizer.param_groups)
    return {id(param): number for number, group in groups for param in group["params"]}


def _is_one_host(job: Job) -> bool:
    return len({member.host_id for member in job.fabric.membership.members}) == 1


def _are_kept_as_they_are(optimizer: torch.optim.Optimizer, rule: Rule) -> bool:
    """Return whether servers keep all parameters in the workers' dtype."""
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    return all(kept_dtype(dtype, rule.server_dtype) is dtype for dtype in dtypes)
