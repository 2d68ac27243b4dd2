"""The job that this process belongs to: `pl.init()` and the functions that ask about it.

A process has at most one job. `init()` finds out from the environment which rank this is, meets the
others through the control plane, links the engine to its neighbours and forms the world group.
Alone (`python train.py`) the same path leads to a world of one, without any socket.
"""

from __future__ import annotations

import atexit
import operator
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from paceline import _core
from paceline.cluster.agent import Agent
from paceline.cluster.links import LinkListener
from paceline.cluster.member import Member, Membership
from paceline.cluster.rendezvous import (
    AnyAgent,
    KeyValue,
    Rendezvous,
    establish,
    establish_from_store,
)
from paceline.cluster.wait_watch import WaitWatch
from paceline.collectives.column import Column
from paceline.collectives.group import Group
from paceline.collectives.mates import Mates
from paceline.collectives.memory import allocate
from paceline.collectives.topology import Fabric
from paceline.config import (
    EngineConfig,
    JobEnv,
    describe,
    job_env,
    natural_host_id,
    times_steps,
    told_env,
)
from paceline.contribution import Contribution
from paceline.elastic.carried import Carried
from paceline.elastic.session import Elastic
from paceline.errors import ConfigError, SetupError, UsageError
from paceline.mesh import Mesh
from paceline.place import PACELINE
from paceline.ps import connection
from paceline.ps.lasting import connect
from paceline.ps.link import ServerLink
from paceline.stopping import Stopping
from paceline.telemetry.reporter import Reporter
from paceline.telemetry.stacks import show_on_request
from paceline.telemetry.trace import TracedSteps, tracer
from paceline.torch_plugin import register as register_with_torch

register_with_torch()  # again, for those who are not installed: `import torch` found no plugin


@dataclass
class Job:
    """Everything that this process holds of its job."""

    env: JobEnv
    rendezvous: Rendezvous
    fabric: Fabric
    world: Group
    reporter: Reporter
    elastic: Elastic
    servers: tuple[ServerLink, ...] = ()  # lines to the parameter servers
    contribution: Contribution = field(default_factory=Contribution)
    stopping: Stopping = field(default_factory=Stopping)
    carried: dict[str, Any] = field(default_factory=dict)  # the script's objects, by name
    closers: list[Callable[[], None]] = field(default_factory=list)  # called before it is left
    num_checkpoints: int = 0  # that the script has made, for their names
    mesh: Mesh | None = None  # how the workers share data and model; None: each has a whole model
    # On a mesh: of each of these notes, whether anybody has it who holds a part of the same model.
    ask_unit: Callable[[list[bool]], list[bool]] = lambda notes: notes
    has_shared_data: bool = False  # pl.shard was called: who gets which batches is settled
    _mates: Mates | None = None  # this process's unit, when it is known
    _views: dict[str, Job] = field(default_factory=dict)
    _whole: Job | None = None  # of a view: what it is a view of

    def worker_group(self, name: str) -> Group:
        """Form a group of all workers for one use; in an elastic job it follows their changes."""
        return worker_group(self.fabric, name, self.elastic.is_on)

    # -- meshes -------------------------------------------------------------------------------

    def use(self, mesh: Mesh) -> None:
        """Settle how the workers share data and model; the same for the whole life of the job."""
        if self.mesh == mesh:
            return
        if self.mesh is not None:
            raise UsageError(
                f"mesh {mesh}: this job has the mesh {self.mesh} already, and a job has one; give"
                " all models the same, or train them in jobs of their own"
            )
        mesh.require(self.env.world_size)
        if self.elastic.is_on and mesh.unit_size > 1:
            raise UsageError(
                f"mesh {mesh} in an elastic job: who is lost and replaced together must be known"
                f" from the start; start it with --mesh {mesh}"
            )
        if self.has_shared_data and mesh.unit_size > 1:
            raise UsageError(
                f"mesh {mesh}: pl.shard was called before pl.distribute(..., mesh=...), when every"
                " worker was to get batches of its own; call it behind, or start the job with"
                f" --mesh {mesh}"
            )
        self.mesh = mesh

    @property
    def column(self) -> Job:
        """The job as those see it who hold the same part of the model."""
        if self.mesh is None or self.mesh.unit_size == 1:
            return self
        return self._among(self.mesh.column(self.env.number), "column")

    @property
    def sharers(self) -> Job:
        """The job as those see it of whom each has batches of its own: one of every pipeline or
        tensor group."""
        if self.mesh is None or self.mesh.pp * self.mesh.tp == 1:
            return self
        if self.mesh.fsdp == 1:
            return self.column
        return self._among(self.mesh.sharers(self.env.number), "sharers")

    @property
    def whole(self) -> Job:
        """The job with all of its workers."""
        return self._whole or self

    def _among(self, numbers: Sequence[int], what: str) -> Job:
        if what not in self._views:
            seen = numbers
            if self.mesh is not None and what == "column":
                seen = _open_column(self.mesh, self.env.number)
            fabric = Column(self.fabric, seen, f"{what} {numbers[0]}")
            self._views[what] = replace(
                self,
                env=replace(self.env, world_size=len(numbers)),
                fabric=fabric,
                world=worker_group(fabric, "world", self.elastic.is_on),
                _whole=self.whole,
            )
        return self._views[what]

    @property
    def place(self) -> str:
        """What to add to a name that must not be the same for different parts of a model."""
        if self.mesh is None or self.mesh.unit_size == 1:
            return ""
        return f" part {self.mesh.place_of(self.env.number)}"

    @property
    def speaks(self) -> bool:
        """Whether this worker speaks for all: the first there is."""
        has_first_part = self.mesh is None or self.mesh.place_of(self.env.number) == 0
        return self.world.rank == 0 and has_first_part

    @property
    def counts_batches(self) -> bool:
        """Whether this worker speaks for its batches: on a mesh several get the same ones."""
        mesh, number = self.mesh, self.env.number
        return mesh is None or all(mesh.index(number, axis) == 0 for axis in ("pp", "tp"))

    @property
    def unit(self) -> tuple[int, ...]:
        """The ranks of those who hold one copy of the model between them; without a mesh all."""
        return self.world.ranks if self.mesh is None else self.unit_fabric.membership.ranks

    @property
    def unit_fabric(self) -> Fabric:
        """The job as they see it, whoever else comes and goes: for groups among them."""
        if self.mesh is None:
            return self.fabric
        if self._mates is None:
            self._mates = _mates(self.fabric, self.mesh, self.env.number)
        return self._mates

    @property
    def steps_done(self) -> int:
        """How many optimizer steps `distribute` has counted."""
        return self.reporter.steps_done

    def step_done(self, values: Mapping[str, float] | None = None, waited_s: float = 0.0) -> None:
        """Count an optimizer step, in which this worker waited so long for others to exchange
        gradients or parameters; `values` are shown beside the script's."""
        self.reporter.step_done(values or {}, waited_s=waited_s)
        if tracer.is_planned:
            tracer.step_done(self.reporter.steps_done)


_ALL = 1 << 30  # more than there are workers
_job: Job | None = None
_lock = threading.Lock()


def init() -> Job:
    """Join the job that the environment names; alone, form a world of one. Blocks until all ranks
    are there. A second call returns the same job.

    >>> import paceline as pl
    >>> job = pl.init()
    >>> pl.rank(), pl.world_size()
    (0, 1)
    """
    env = job_env()
    return _start(env, lambda config: establish(env, config), EngineConfig.from_environ())


def join_through(store: KeyValue, rank: int, world_size: int, timeout_s: float) -> Job:
    """Form a job with the processes that share a key-value store; for torch.distributed.

    The store must be fresh: no earlier job may have met through the same keys.
    """
    env = told_env(rank, world_size, "torch.distributed")

    def meet(config: EngineConfig) -> Rendezvous:
        if world_size == 1:
            return establish(env, config)
        _refuse_unreachable(store, env)
        return establish_from_store(
            store,
            rank,
            world_size,
            job_id=env.job_id,
            bind_address=env.bind_address,
            config=config,
        )

    return _start(env, meet, replace(EngineConfig.from_environ(), join_timeout_s=timeout_s))


def _refuse_unreachable(store: KeyValue, env: JobEnv) -> None:
    """Say at once when rank 0 listens where this rank cannot reach it, instead of trying long."""
    key, here = "paceline/host", natural_host_id()
    if env.rank == 0:
        store.set(key, f"{here} {env.bind_address}")
        return
    host, _, address = store.get(key).decode().rpartition(" ")
    if host != here and address.startswith("127."):
        raise ConfigError(
            f"rank {env.rank} is on another host than rank 0, which listens on {address} only;"
            " export PACELINE_BIND=ADDRESS for rank 0, its host's address in the network of the job"
        )


def _start(env: JobEnv, meet: Callable[[EngineConfig], Rendezvous], config: EngineConfig) -> Job:
    global _job
    with _lock:
        if _job is None:
            if env.source == PACELINE.name:
                show_on_request()  # of the launcher, when others wait for this process
            try:
                rendezvous = meet(config)
                try:
                    _job = _form(env, config, rendezvous)
                except BaseException:
                    rendezvous.close(grace_s=0.0)
                    raise
            except OSError as error:  # descriptors, threads: the machine's limits
                raise SetupError(
                    f"rank {env.rank} of {env.world_size} cannot join: {error}; `paceline doctor`"
                    " shows this machine's limits"
                ) from error
            if env.rank == 0 and env.source != "alone":
                sys.stderr.write(f"[paceline] {describe(env)}\n")
                sys.stderr.flush()
        return _job


def _form(env: JobEnv, config: EngineConfig, rendezvous: Rendezvous) -> Job:
    has_peers = env.num_processes > 1 or env.is_elastic  # in an elastic job they may come
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
        engine = _core.Engine(env.rank, num_local, *limits)
        watch.sources.append(engine.long_waits)
        presence = rendezvous.agent.presence
        fabric = Fabric(env.rank, engine, listener, me, membership, config.timeout_s, presence)
        if not env.is_newcomer:  # who is linked when it has been let in
            fabric.link_neighbours()
        report = rendezvous.agent.report
        reporter = Reporter(env.rank, report, engine.bytes_sent, times_steps=times_steps())
        _plan_trace(env, rendezvous.agent)
        mesh = Mesh.parse(env.mesh) if env.mesh and env.role == "worker" else None
        mates: Mates | None = None
        peers = fabric  # from whom a newcomer has its state: who hold the same part of the model
        if mesh is not None and mesh.unit_size > 1 and env.is_elastic:
            numbers = _open_column(mesh, env.number)
            peers = Column(fabric, numbers, f"column {numbers[0]}")
            mates = _mates(fabric, mesh, env.number)
            if env.is_newcomer:
                mates = _meet_mates(env, mesh, fabric, rendezvous.agent, config.join_timeout_s)
        elastic = Elastic(peers, rendezvous.agent, env, mates)
        elastic.next_step = lambda: reporter.steps_done + 1
        if env.role != "worker":  # it works with each worker, and with nobody as a group
            alone = Group(fabric, (env.rank,))
            return Job(env, rendezvous, fabric, alone, reporter, elastic)
        world = worker_group(fabric, "world", elastic.is_on)
        news = rendezvous.agent if elastic.is_on else None
        servers = connect(fabric, news, elastic.interrupt_wait)
        connection.establish(fabric, servers)
        job = Job(env, rendezvous, fabric, world, reporter, elastic, servers, mesh=mesh)
        job._mates = mates
        elastic.wants_stop = job.stopping.is_wanted
        return job
    except BaseException:
        if listener is not None:
            listener.close()
        raise


def _plan_trace(env: JobEnv, agent: AnyAgent) -> None:
    """Get ready to record the steps that were asked for; the launcher collects them."""
    if not env.trace:
        return
    steps = TracedSteps.parse(env.trace, "PACELINE_TRACE")
    if env.source == PACELINE.name:
        tracer.plan(steps, env.rank, agent.report)
    elif env.rank == 0:
        sys.stderr.write(
            f"[paceline] PACELINE_TRACE={steps}: no trace of a job that {env.source} started; use"
            f" `paceline run --trace {steps} ...`\n"
        )


def _watch_waits(env: JobEnv, agent: AnyAgent, config: EngineConfig) -> WaitWatch:
    """Let the launcher know for whom this process waits, from now on; see launcher/hang.py."""
    watch = WaitWatch(env.rank, agent.report, config.warn_s)
    if isinstance(agent, Agent):  # else there is nobody to wait for
        watch.sources.append(agent.waits_to_join)
        agent.thread.start(watch.run())
    return watch


def _membership(env: JobEnv, agent: AnyAgent, me: Member, timeout_s: float) -> Membership:
    """Join the job; a newcomer only looks at it, until it has something to join with."""
    return agent.look() if env.is_newcomer else agent.join(me, timeout_s)


def _open_column(mesh: Mesh, number: int) -> range:
    """Return the numbers of a worker's column, those of units that may come later among them."""
    return range(mesh.place_of(number), _ALL, mesh.unit_size)


def _mates(fabric: Fabric, mesh: Mesh, number: int) -> Mates:
    """Find a worker's unit in the membership."""
    numbers, members = mesh.unit(number), fabric.membership.members
    return Mates(fabric, [one for one in members if one.role == "worker" and one.number in numbers])


def _meet_mates(
    env: JobEnv, mesh: Mesh, fabric: Fabric, agent: AnyAgent, timeout_s: float
) -> Mates:
    """Meet the other newcomers of this unit, through the coordinator: none of them is in yet.

    The ranks of a unit are in a row (cluster/places.py), and never given to others.
    """
    first = env.rank - mesh.place_of(env.number)
    agent.store_set(_mate_key(env.rank), msgspec.msgpack.encode(fabric.me))
    others = [rank for rank in range(first, first + mesh.unit_size) if rank != env.rank]
    found = [agent.store_get(_mate_key(rank), timeout_s) for rank in others]
    return Mates(fabric, [fabric.me, *(msgspec.msgpack.decode(one, type=Member) for one in found)])


def _mate_key(rank: int) -> str:
    return f"paceline/mate {rank}"


def worker_group(fabric: Fabric, name: str, is_elastic: bool) -> Group:
    """Form a group of all workers; in an elastic job it follows their changes."""
    return fabric.worker_group(name) if is_elastic else Group(fabric, fabric.membership.workers)


def _listen(env: JobEnv, rendezvous: Rendezvous) -> LinkListener:
    several_hosts = env.local_world_size < env.world_size or env.host_id != natural_host_id()
    return LinkListener(
        rendezvous.secret,
        rendezvous.job_id,
        env.rank,
        rendezvous.bind_address,
        want_tcp=several_hosts or not rendezvous.bind_address.startswith("127."),
    )


def shutdown() -> None:
    """Leave the job in good order; called by itself when the process ends. May be called twice."""
    global _job
    with _lock:
        job, _job = _job, None
        if job is None:
            return
        for close in job.closers:
            close()
        job.reporter.flush()
        tracer.flush()
        tracer.stop()
        connection.drop()
        for link in job.servers:
            link.leave()
        job.fabric.engine.say_goodbye()
        job.world.close()
        if job.fabric.listener is not None:
            job.fabric.listener.close()
        # A script that ended with an error has not done its work: the job may want another.
        job.rendezvous.agent.leave(is_finished=not hasattr(sys, "last_value"))
        job.rendezvous.close()


_inherited: list[Job] = []


def _let_go_in_child() -> None:
    """In a forked child: the job is the parent's, and so are the threads that could end it."""
    global _job, _lock
    _lock = threading.Lock()
    if _job is not None:
        _job.fabric.engine.close_after_fork()
        _inherited.append(_job)  # never taken down here
        tracer.stop()
        _job = None
        connection.drop()


atexit.register(shutdown)
os.register_at_fork(after_in_child=_let_go_in_child)


def joined() -> Job | None:
    """Return the job of this process, or None before `init()`."""
    return _job


def current() -> Job:
    """Return the job of this process; UsageError before `init()`."""
    if _job is None:
        raise UsageError("this process has not joined a job yet: call paceline.init() first")
    return _job


def rank() -> int:
    """Return this process's rank: 0 to world_size() - 1, more on a data worker. In an elastic job
    it may change."""
    job = current()
    if job.elastic.is_candidate:
        members = map(job.fabric.membership.member, job.fabric.membership.workers)
        return sum(member.number < job.env.number for member in members)
    return job.world.rank if job.elastic.is_on else job.env.rank


def world_size() -> int:
    """Return the number of workers in the job. In an elastic job it may change."""
    job = current()
    if job.env.is_data_worker:
        return job.env.world_size
    return len(job.fabric.membership.workers) + 1 if job.elastic.is_candidate else job.world.size


def is_data_worker() -> bool:
    """Say whether this process makes batches for the workers (`paceline run --data-workers`): it
    runs the script up to its first loop over a `pl.shard(..., mode="pipeline")`, and no further.

    >>> pl.is_data_worker()
    False
    """
    return current().env.is_data_worker


def local_rank() -> int:
    """Return this process's number among the workers of its host."""
    return current().env.local_rank


def world() -> Group:
    """Return the group of all workers."""
    return current().world


def should_stop() -> bool:
    """Say whether to stop behind the step that was just done: true on all workers alike, once
    SIGTERM has reached one of them. Asking means that the first SIGTERM no longer ends the process.

    >>> pl.should_stop()
    False
    """
    job = current()
    return job.stopping.should_stop(alone=job.world.size == 1)


def carry(**objects: Any) -> None:
    """Let newcomers of an elastic job receive the state of these, besides the model's and the
    optimizer's: learning-rate schedulers, a GradScaler, averages of weights; whatever has
    `state_dict()` and `load_state_dict()`. The names are the same on all workers.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    >>> pl.carry(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=10))
    """
    job = current()
    for name, thing in objects.items():
        job.elastic.register(f"carried {name}", Carried(name, thing))
        job.carried[name] = thing


def new_group(ranks: Sequence[int]) -> Group:
    """Form a group of some ranks, which get ranks 0, 1, ... in it in the given order.

    Collective among those ranks only; each of them names the same ranks in the same order.
    """
    job, chosen = current(), tuple(ranks)
    if len(set(chosen)) != len(chosen) or not chosen:
        raise UsageError(f"new_group({list(chosen)}): name each rank once, and at least one")
    missing = [r for r in chosen if r not in range(job.world.size)]
    if missing:
        raise UsageError(
            f"new_group({list(chosen)}): {missing} are not ranks of this job (0 to"
            f" {world_size() - 1})"
        )
    if rank() not in chosen:
        raise UsageError(
            f"new_group({list(chosen)}): rank {rank()} is not in it; call it on its members only"
        )
    return Group(job.fabric, [job.world.ranks[r] for r in chosen])


def empty(*shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised tensor in engine memory: collectives use it where it lies.

    >>> pl.empty(2, 3).shape
    torch.Size([2, 3])
    """
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return allocate(current().fabric.engine, tuple(sizes), dtype or torch.get_default_dtype())  # type: ignore[arg-type]


def report(step: int | None = None, **values: float) -> None:
    """Tell the launcher how far this rank is; shown live. Never blocks.

    Without a step number the steps that `distribute` has counted are shown. At most ten reports a
    second are sent; of those in between, the newest value of each name counts.

    >>> pl.report(loss=0.25)
    """
    job = current()
    try:
        shown = None if step is None else operator.index(step)
    except TypeError as error:
        raise UsageError(
            f"report({step!r:.60}): the step is a whole number; name a value: report(loss=0.25)"
        ) from error
    job.reporter.report(shown, {name: float(value) for name, value in values.items()})
