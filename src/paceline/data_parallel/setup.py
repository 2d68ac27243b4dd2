"""Groundwork: what the training of a model stands on, before any of its parameters is touched.

Pace and options choose it: the groups, the servers or a method of local steps, and how gradients
are exchanged. Which of them there are decides where parameters and averages live.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence

import torch

from paceline.comm.group import Group
from paceline.comm.shared_memory import allocate
from paceline.compress.codec import Allocate
from paceline.compress.registry import CodecSpec, parse_codec
from paceline.data_parallel.bucket import Bucket
from paceline.data_parallel.bucket_allocator import Housing
from paceline.data_parallel.update.model_averaging import make_method
from paceline.data_parallel.update.optimizer_state import HostState
from paceline.data_parallel.update.ownership import is_elementwise
from paceline.data_parallel.update.server_tables import Serving
from paceline.data_parallel.update.step import ReplicatedUpdate, ShardedUpdate, Update
from paceline.options.table import Options, wire_dtype
from paceline.pace.allreduce import AllReduce
from paceline.pace.centre import Centre
from paceline.pace.compressed import CompressedAllReduce, Journeys
from paceline.pace.exchange import Exchange, OwnGradients
from paceline.pace.host_first import HostFirst
from paceline.pace.method import Method, Setting
from paceline.pace.parse import PaceSpec
from paceline.pace.registry import needs_servers
from paceline.runtime.job import Job


class Groundwork:
    """What one training stands on. `lay` is collective; `close` may follow at any point of it."""

    exchange: Exchange

    def __init__(
        self,
        job: Job,
        group: Group,
        pace: PaceSpec,
        options: Options,
        label: str,  # alike on all workers, and of this training alone
    ) -> None:
        self.job, self.group, self.pace, self.options = job, group, pace, options
        self.name = f"training {label}"  # for groups and participants
        self._label = label
        self._groups: list[Group] = []  # those of this training
        self.serving: Serving | None = None
        self.method: Method | None = None
        self.centre: Centre | None = None
        self._host_state: HostState | None = None
        self.shares_params = self.is_common = False

    def lay(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose and form everything."""
        job, pace = self.job, self.pace
        self.host = _host_group(job)
        self._groups.append(self.host)
        if needs_servers(pace.name) and job.servers:
            self.serving = Serving(job, self.group, optimizer, pace, self.options, self._label)
        self.method = self._choose_method(optimizer)
        self.shares_params = self._wants_sharing(optimizer)
        self.is_common = self.method is not None and self.method.shares_params
        if self.is_common and job.elastic.is_on:  # there all workers are on one host
            self.host = self.form("host")
        self.exchange = self._choose_exchange()

    def close(self) -> None:
        """Let go of servers and groups, also if only some are there."""
        if self._host_state is not None:
            self._host_state.close()
        if self.serving is not None:
            self.serving.close()
        for group in self._groups:
            group.close()

    def form(self, use: str) -> Group:
        """Form a group of all workers. Collective."""
        self._groups.append(self.job.worker_group(f"{self.name} {use}"))
        return self._groups[-1]

    def memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return fresh memory of the engine."""
        return allocate(self.job.fabric.engine, (count,), dtype)

    def make_housing(self, optimizer: torch.optim.Optimizer) -> Housing:
        """Return what finds parameters their places."""
        views = self.serving is not None and self.serving.watches_edits
        return Housing(
            self.job.fabric.engine,
            Group(self.job.fabric, [self.job.env.rank]) if views else self.host,
            optimizer,
            bucket_mb=self.options.bucket_mb,
            is_shared=self.shares_params or views or self.is_common,
            averages=self._choose_averages(),
            is_common=self.is_common,
        )

    def make_update(self, optimizer: torch.optim.Optimizer, housing: Housing) -> Update:
        """Return what runs the optimizer's steps."""
        if self.serving is not None:
            return self.serving.update
        if not self.shares_params:
            return ReplicatedUpdate()
        engine, slot_of = self.job.fabric.engine, housing.shared_slots.get
        sharded = ShardedUpdate(optimizer, self.host, engine, slot_of)
        self._host_state = sharded.state
        return sharded

    @property
    def buffers_mode(self) -> str:
        """How buffers are brought together."""
        is_alone = self.method is not None and self.method.is_free
        return "local" if is_alone else self.options.buffers

    @property
    def is_free(self) -> bool:
        """Whether workers take their steps without all of the others."""
        if self.method is not None:
            return self.method.is_free
        return self.serving is not None and not self.serving.rule.is_lockstep

    @property
    def may_part(self) -> bool:
        """Whether one worker may take more steps than another, as many as it likes."""
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
                open_books=self.job.reporter.books.open,
            )
        )

    def _choose_exchange(self) -> Exchange:
        if self.serving is not None:
            return self.serving.exchange
        if self.method is None:
            spec = choose_codec(self.job, self.options)
            if not spec.is_on:
                return AllReduce(self.group)
            makes = (self.form, self._groups.append, self.memory)
            return compressed_average(self.job, self.group, self.host, spec, *makes)
        return self.method.exchange() or OwnGradients()

    def _choose_averages(self) -> str:
        """Say where averaged gradients are, in the words of bucket_allocator.py."""
        if self.serving is not None:
            return self.serving.averages
        # Nobody else holds this part of the model: what is here is the average.
        is_alone = bool(self.job.place) and self.group.size == 1 and not self.job.elastic.is_on
        return "none" if is_alone and self.exchange.traits.is_collective else "own"

    def _wants_sharing(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.serving is not None:
            return self.serving.shares_memory
        if self.method is not None:
            return False  # workers have different values most of the time
        if self.options.update == "replicated" or self.job.elastic.is_on:
            return False  # elastic: nobody's part of the optimizer's state may be lost with it
        if self.options.update == "sharded":
            return True
        can_see_edits = os.access("/proc/self/pagemap", os.R_OK)  # see private_view.h
        return self.host.size > 1 and is_elementwise(optimizer) and can_see_edits


def _host_group(job: Job) -> Group:
    """Form the group of the workers of this host; in an elastic job nobody shares memory."""
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
    """Return how all workers average gradients with a codec.

    `form` makes groups of all workers; other groups are given to `keep`, which closes them.
    """
    books, is_elastic = job.reporter.books, job.elastic.is_on
    leaders = [] if is_elastic else _leaders(job)

    def among_leaders(name: str) -> Group:
        del name
        group = Group(job.fabric, leaders)
        keep(group)
        return group

    if not leaders:
        journeys = Journeys(spec, allocate, group, form, is_elastic=is_elastic)
        books.open(str(spec), journeys.accounts)
        return CompressedAllReduce(group, journeys)
    theirs: Journeys | None = None
    if host.rank == 0:
        first = among_leaders("first hop")
        theirs = Journeys(spec, allocate, first, among_leaders, is_elastic=False)
        books.open(str(spec), theirs.accounts)
    return HostFirst(group, host, len(leaders), spec, theirs, allocate)


def choose_codec(job: Job, options: Options) -> CodecSpec:
    """Return what gradients go over: what was chosen, or what follows from the precision."""
    spec, follows = parse_codec(options.compress), wire_dtype(options.precision)
    if spec.name != "auto" or follows == "fp32" or len(_firsts(job)) == 1:
        return spec
    return CodecSpec(follows)


def left_out(
    exchange: Exchange, buckets: Sequence[Bucket]
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return what of gradients has not been sent yet, by parameter."""
    found = [(bucket, exchange.left_out(bucket)) for bucket in buckets]
    return {
        slot.param: slot.place.view(left).clone()
        for bucket, left in found
        if left is not None
        for slot in bucket.slots
    }


def _leaders(job: Job) -> list[int]:
    """The first worker of each host, where some hosts have several; else nobody."""
    firsts = _firsts(job)
    return firsts if 1 < len(firsts) < len(job.fabric.membership.workers) else []


def _firsts(job: Job) -> list[int]:
    membership = job.fabric.membership
    firsts: dict[str, int] = {}
    for rank in membership.workers:
        firsts.setdefault(membership.member(rank).host_id, rank)
    return list(firsts.values())
