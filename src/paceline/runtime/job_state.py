"""What a process holds of its job (`Job`), and how it joins: `join_job`.

On a mesh, parts of the system see only some of the workers (`data_parallel_view`, `batch_view`): a
view is a Job too, with a world group of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline import _core
from paceline.comm.devices import CPU
from paceline.comm.endpoint import Endpoint
from paceline.comm.fabric import Fabric, JobScope
from paceline.comm.group import Group
from paceline.control.client.agent import Agent
from paceline.control.client.rendezvous import AnyAgent, Rendezvous
from paceline.control.member import Member, Membership
from paceline.control.transport.peer_connections import LinkListener
from paceline.control.wait_notice import WaitWatch
from paceline.errors import UsageError
from paceline.observe.telemetry.reporter import Reporter
from paceline.observe.telemetry.trace import TracedSteps, tracer
from paceline.ps.client import session
from paceline.ps.client.link import ServerLink
from paceline.runtime.batch_weight import Contribution
from paceline.runtime.config import EngineConfig, JobEnv, natural_host_id, times_steps
from paceline.runtime.console import warn
from paceline.runtime.elastic.session import ElasticSession
from paceline.runtime.emulated_links import require_emulated_host
from paceline.runtime.launch_context import PACELINE
from paceline.runtime.mesh import Mesh
from paceline.runtime.preemption import Stopping

_ALL = 1 << 30  # more than there are workers


@dataclass(eq=False)
class Job:
    """Everything that this process holds of its job."""

    env: JobEnv
    rendezvous: Rendezvous
    fabric: Fabric
    world: Group
    reporter: Reporter
    elastic: ElasticSession
    servers: tuple[ServerLink, ...] = ()  # links to the parameter servers
    contribution: Contribution = field(default_factory=Contribution)
    stopping: Stopping = field(default_factory=Stopping)
    carried: dict[str, Any] = field(default_factory=dict)  # the script's objects, by name
    closers: list[Callable[[], None]] = field(default_factory=list)  # called before leaving
    num_checkpoints: int = 0  # made by the script, for their names
    last_checkpoint: Path | None = None  # that was saved, or from which this job resumed
    mesh: Mesh | None = None  # None: each worker has a full model
    device: torch.device = CPU  # of this process
    # On a mesh: for each flag, whether it is set on any process of this unit.
    ask_unit: Callable[[list[bool]], list[bool]] = lambda flags: flags
    has_shared_data: bool = False  # pl.shard or pl.data_rank was called
    unit_peers: Fabric | None = None  # this process's unit, once known
    _views: dict[str, Job] = field(default_factory=dict)
    _full_view: Job | None = None  # of a view: the job with all workers

    def worker_group(self, name: str) -> Group:
        """Create a group of all workers for one use; in an elastic job it follows changes."""
        return _worker_group(self.fabric, name, self.elastic.is_on)

    # -- meshes -------------------------------------------------------------------------------

    def set_mesh(self, mesh: Mesh) -> None:
        """Set the mesh of the job; it stays the same for its whole life."""
        if self.mesh == mesh:
            return
        if self.mesh is not None:
            raise UsageError(
                f"mesh {mesh}: this job already has the mesh {self.mesh}, and a job has one; give"
                " all models the same mesh, or train them in separate jobs"
            )
        mesh.require(self.env.world_size)
        if self.elastic.is_on and mesh.unit_size > 1:
            raise UsageError(
                f"mesh {mesh} in an elastic job: the workers that are replaced together must be"
                f" known from the start; start it with --mesh {mesh}"
            )
        if self.has_shared_data and mesh.unit_size > 1:
            raise UsageError(
                f"mesh {mesh}: pl.shard or pl.data_rank was called before pl.distribute(...,"
                " mesh=...), when every worker was to get its own batches; call it afterwards, or"
                f" start the job with --mesh {mesh}"
            )
        self.mesh = mesh

    @property
    def data_parallel_view(self) -> Job:
        """The job with the workers that hold the same part of the model."""
        if self.mesh is None or self.mesh.unit_size == 1:
            return self
        return self._view(self.mesh.data_parallel_numbers(self.env.number), "column")

    @property
    def batch_view(self) -> Job:
        """The job with workers that have different batches: one per pipeline or tensor group."""
        if self.mesh is None or self.mesh.pp * self.mesh.tp == 1:
            return self
        if self.mesh.fsdp == 1:
            return self.data_parallel_view
        return self._view(self.mesh.batch_numbers(self.env.number), "sharers")

    @property
    def full_view(self) -> Job:
        """The job with all of its workers."""
        return self._full_view or self

    def _view(self, numbers: Sequence[int], what: str) -> Job:
        if what not in self._views:
            seen = numbers
            if self.mesh is not None and what == "column":
                seen = _data_parallel_numbers(self.mesh, self.env.number)
            fabric = self.fabric.data_parallel_view(seen, f"{what} {numbers[0]}")
            self._views[what] = replace(
                self,
                env=replace(self.env, world_size=len(numbers)),
                fabric=fabric,
                world=_worker_group(fabric, "world", self.elastic.is_on),
                _full_view=self.full_view,
            )
        return self._views[what]

    @property
    def part_suffix(self) -> str:
        """A suffix for names that must differ between parts of a model; "" without a mesh."""
        if self.mesh is None or self.mesh.unit_size == 1:
            return ""
        return f" part {self.mesh.unit_index(self.env.number)}"

    @property
    def is_first_worker(self) -> bool:
        """Whether this worker prints and reports for all: it is the first one."""
        has_first_part = self.mesh is None or self.mesh.unit_index(self.env.number) == 0
        return self.world.rank == 0 and has_first_part

    @property
    def is_first_of_batch(self) -> bool:
        """Whether this worker counts its batches: on a mesh several workers get the same ones."""
        mesh, number = self.mesh, self.env.number
        return mesh is None or all(mesh.index(number, axis) == 0 for axis in ("pp", "tp"))

    @property
    def data_number(self) -> int:
        """This worker's number for random draws: on a mesh that of its batches."""
        return self.env.number if self.mesh is None else self.mesh.data_index(self.env.number)

    @property
    def unit(self) -> tuple[int, ...]:
        """The ranks that hold one copy of the model together; without a mesh all workers."""
        return self.world.ranks if self.mesh is None else self.unit_fabric.membership.ranks

    @property
    def unit_fabric(self) -> Fabric:
        """The fabric of this unit, whatever happens to other members: for groups inside it."""
        if self.mesh is None:
            return self.fabric
        if self.unit_peers is None:
            self.unit_peers = _find_unit(self.fabric, self.mesh, self.env.number)
        return self.unit_peers

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps that `distribute` has counted."""
        return self.reporter.steps_done

    def step_done(self, values: Mapping[str, float] | None = None, waited_s: float = 0.0) -> None:
        """Count an optimizer step, in which this worker waited `waited_s` for other workers to
        exchange gradients or parameters; `values` are shown beside the script's."""
        self.reporter.step_done(values or {}, waited_s=waited_s)
        if tracer.is_planned:
            tracer.step_done(self.reporter.steps_done)


def _worker_group(fabric: Fabric, name: str, is_elastic: bool) -> Group:
    """Create a group of all workers; in an elastic job it follows changes."""
    return fabric.worker_group(name) if is_elastic else Group(fabric, fabric.membership.workers)


def _data_parallel_numbers(mesh: Mesh, number: int) -> range:
    """Return the numbers of a worker's data-parallel group, with units that may join later."""
    return range(mesh.unit_index(number), _ALL, mesh.unit_size)


def _find_unit(fabric: Fabric, mesh: Mesh, number: int) -> Fabric:
    """Return the fabric of a worker's unit, from the membership."""
    numbers, members = mesh.unit(number), fabric.membership.members
    return fabric.unit_view(
        [one for one in members if one.role == "worker" and one.number in numbers]
    )


def join_job(env: JobEnv, config: EngineConfig, rendezvous: Rendezvous) -> Job:
    """Join the job and form its engine and groups. Blocks until all ranks have joined."""
    has_peers = env.num_processes > 1 or env.is_elastic  # in an elastic job they may join later
    listener = _listen(env, rendezvous) if has_peers else None
    try:
        me = Member(
            rank=env.rank,
            role=env.role,
            host_id=env.host_id,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            local_rank=env.local_rank,
            unix=listener.unix_name if listener else "",
            tcp=listener.tcp_address if listener else "",
            number=env.number,
        )
        watch = _watch_waits(env, rendezvous.agent, config)
        membership = _membership(env, rendezvous.agent, me, config.join_timeout_s)
        num_local = sum(member.host_id == env.host_id for member in membership.members)
        limits = (config.timeout_s, config.liveness_s, config.warn_s)
        require_emulated_host(env.emulated_links, env.host_id)
        remote_s = remote_liveness_s(config, is_elastic=env.is_elastic)
        engine = _core.Engine(env.rank, num_local, *limits, env.emulated_links, remote_s)
        watch.sources.append(engine.long_waits)
        presence = rendezvous.agent.presence
        endpoint = Endpoint(
            env.rank, engine, listener, me, config.timeout_s, presence, config.liveness_s
        )
        fabric = Fabric(endpoint, JobScope(membership))
        if not env.is_newcomer:  # a newcomer is linked once it is admitted
            fabric.link_neighbours()
        report = rendezvous.agent.report
        reporter = Reporter(env.rank, report, engine.bytes_sent, times_steps=times_steps())
        _plan_trace(env, rendezvous.agent)
        mesh = Mesh.parse(env.mesh) if env.mesh and env.role == "worker" else None
        unit: Fabric | None = None
        peers = fabric  # the workers with the same part of the model: a newcomer's sources
        if mesh is not None and mesh.unit_size > 1 and env.is_elastic:
            numbers = _data_parallel_numbers(mesh, env.number)
            peers = fabric.data_parallel_view(numbers, f"column {numbers[0]}")
            unit = _find_unit(fabric, mesh, env.number)
            if env.is_newcomer:
                unit = _join_unit(env, mesh, fabric, rendezvous.agent, config.join_timeout_s)
        elastic = ElasticSession(peers, rendezvous.agent, env, unit)
        elastic.next_step = lambda: reporter.steps_done + 1
        if env.role != "worker":  # it is in no group with other processes
            alone = Group(fabric, (env.rank,))
            return Job(env, rendezvous, fabric, alone, reporter, elastic)
        world = _worker_group(fabric, "world", elastic.is_on)
        agent = rendezvous.agent if elastic.is_on else None
        servers = session.establish(fabric, agent, elastic.interrupt_wait)
        job = Job(env, rendezvous, fabric, world, reporter, elastic, servers, mesh=mesh)
        job.unit_peers = unit
        elastic.wants_stop = job.stopping.is_wanted
        return job
    except BaseException:
        if listener is not None:
            listener.close()
        raise


def _plan_trace(env: JobEnv, agent: AnyAgent) -> None:
    """Prepare to trace the requested steps; the launcher collects the spans."""
    if not env.trace:
        return
    steps = TracedSteps.parse(env.trace, "PACELINE_TRACE")
    if env.source == PACELINE.name:
        tracer.plan(steps, env.rank, agent.report)
    elif env.rank == 0:
        warn(
            f"PACELINE_TRACE={steps}: no trace of a job that {env.source} started; use"
            f" `paceline run --trace {steps} ...`"
        )


def remote_liveness_s(config: EngineConfig, *, is_elastic: bool) -> float:
    """Return the limit for a silent peer on another host: in an elastic job the lease, after which
    it is replaced, unless PACELINE_LIVENESS_S is set."""
    is_default = config.liveness_s == EngineConfig.liveness_s
    return config.lease_s if is_elastic and is_default else config.liveness_s


def _watch_waits(env: JobEnv, agent: AnyAgent, config: EngineConfig) -> WaitWatch:
    """Report this process's long waits to the launcher from now on; see launcher/hang.py."""
    watch = WaitWatch(env.rank, agent.report, config.warn_s)
    if isinstance(agent, Agent):  # else there is no other process to wait for
        watch.sources.append(agent.waits_to_join)
        agent.thread.start(watch.run())
    return watch


def _membership(env: JobEnv, agent: AnyAgent, me: Member, timeout_s: float) -> Membership:
    """Join the job; a newcomer only reads the membership, and joins when its model is built."""
    return agent.look() if env.is_newcomer else agent.join(me, timeout_s)


def _join_unit(
    env: JobEnv, mesh: Mesh, fabric: Fabric, agent: AnyAgent, timeout_s: float
) -> Fabric:
    """Return the fabric of a newcomer's unit. Its peers, which have not joined yet either, exchange
    their addresses through the coordinator's store.

    The ranks of a unit are consecutive (control/membership/state.py) and never reused.
    """
    first = env.rank - mesh.unit_index(env.number)
    agent.store_set(_unit_key(env.rank), msgspec.msgpack.encode(fabric.me))
    others = [rank for rank in range(first, first + mesh.unit_size) if rank != env.rank]
    found = [agent.store_get(_unit_key(rank), timeout_s) for rank in others]
    return fabric.unit_view(
        [fabric.me, *(msgspec.msgpack.decode(one, type=Member) for one in found)]
    )


def _unit_key(rank: int) -> str:
    return f"paceline/mate {rank}"


def _listen(env: JobEnv, rendezvous: Rendezvous) -> LinkListener:
    several_hosts = env.local_world_size < env.world_size or env.host_id != natural_host_id()
    return LinkListener(
        rendezvous.secret,
        rendezvous.job_id,
        env.rank,
        rendezvous.bind_address,
        want_tcp=several_hosts or not rendezvous.bind_address.startswith("127."),
        choose_cipher=_core.preferred_cipher,
    )
