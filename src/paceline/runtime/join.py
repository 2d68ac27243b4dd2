"""Joining: from a rendezvous to a job, with an engine that is linked to its neighbours."""

from __future__ import annotations

import os
import socket

import msgspec

from paceline import _core
from paceline.comm.endpoint import Endpoint
from paceline.comm.fabric import Fabric, JobScope
from paceline.comm.group import Group
from paceline.control.client.agent import Agent
from paceline.control.client.rendezvous import AnyAgent, Rendezvous
from paceline.control.member import Member, Membership
from paceline.control.transport.peer_connections import LinkListener
from paceline.control.wait_notice import WaitWatch
from paceline.observe.telemetry.reporter import Reporter
from paceline.observe.telemetry.trace import TracedSteps, tracer
from paceline.ps.client import session
from paceline.runtime.config import EngineConfig, JobEnv, natural_host_id, times_steps
from paceline.runtime.console import warn
from paceline.runtime.elastic.session import Elastic
from paceline.runtime.job_state import Job, mates_of, open_column, worker_group
from paceline.runtime.launch_context import PACELINE
from paceline.runtime.mesh import Mesh


def form(env: JobEnv, config: EngineConfig, rendezvous: Rendezvous) -> Job:
    """Join the others, and return what this process holds of the job. Blocks until all are in."""
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
        endpoint = Endpoint(env.rank, engine, listener, me, config.timeout_s, presence)
        fabric = Fabric(endpoint, JobScope(membership))
        if not env.is_newcomer:  # who is linked when it has been let in
            fabric.link_neighbours()
        report = rendezvous.agent.report
        reporter = Reporter(env.rank, report, engine.bytes_sent, times_steps=times_steps())
        _plan_trace(env, rendezvous.agent)
        mesh = Mesh.parse(env.mesh) if env.mesh and env.role == "worker" else None
        mates: Fabric | None = None
        peers = fabric  # from whom a newcomer has its state: who hold the same part of the model
        if mesh is not None and mesh.unit_size > 1 and env.is_elastic:
            numbers = open_column(mesh, env.number)
            peers = fabric.data_parallel_view(numbers, f"column {numbers[0]}")
            mates = mates_of(fabric, mesh, env.number)
            if env.is_newcomer:
                mates = _meet_mates(env, mesh, fabric, rendezvous.agent, config.join_timeout_s)
        elastic = Elastic(peers, rendezvous.agent, env, mates)
        elastic.next_step = lambda: reporter.steps_done + 1
        if env.role != "worker":  # it works with each worker, and with nobody as a group
            alone = Group(fabric, (env.rank,))
            return Job(env, rendezvous, fabric, alone, reporter, elastic)
        world = worker_group(fabric, "world", elastic.is_on)
        agent = rendezvous.agent if elastic.is_on else None
        servers = session.establish(fabric, agent, elastic.interrupt_wait)
        job = Job(env, rendezvous, fabric, world, reporter, elastic, servers, mesh=mesh)
        job.mates = mates
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
        warn(
            f"PACELINE_TRACE={steps}: no trace of a job that {env.source} started; use"
            f" `paceline run --trace {steps} ...`"
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


def _meet_mates(
    env: JobEnv, mesh: Mesh, fabric: Fabric, agent: AnyAgent, timeout_s: float
) -> Fabric:
    """Meet the other newcomers of this unit, through the coordinator: none of them is in yet.

    The ranks of a unit are in a row (control/membership/numbers.py), and never given to others.
    """
    first = env.rank - mesh.place_of(env.number)
    agent.store_set(_mate_key(env.rank), msgspec.msgpack.encode(fabric.me))
    others = [rank for rank in range(first, first + mesh.unit_size) if rank != env.rank]
    found = [agent.store_get(_mate_key(rank), timeout_s) for rank in others]
    return fabric.unit_view(
        [fabric.me, *(msgspec.msgpack.decode(one, type=Member) for one in found)]
    )


def _mate_key(rank: int) -> str:
    return f"paceline/mate {rank}"


def _listen(env: JobEnv, rendezvous: Rendezvous) -> LinkListener:
    several_hosts = env.local_world_size < env.world_size or env.host_id != natural_host_id()
    return LinkListener(
        rendezvous.secret,
        rendezvous.job_id,
        env.rank,
        rendezvous.bind_address,
        want_tcp=several_hosts or not rendezvous.bind_address.startswith("127."),
    )
