"""The job that this process belongs to: `pl.init()` and the functions that ask about it.

A process has at most one job. `init()` reads the rank from the environment, finds the other ranks
through the control plane, links the engine to its neighbours and forms the world group. Alone
(`python train.py`) the same path leads to a world of one, without any socket.
"""

from __future__ import annotations

import atexit
import operator
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.comm import devices
from paceline.comm.group import Group
from paceline.comm.object_collectives import all_gather_object
from paceline.comm.shared_memory import allocate
from paceline.control.client.rendezvous import KeyValue, Rendezvous, establish, establish_from_store
from paceline.errors import ConfigError, SetupError, UsageError, is_caused_by_loss
from paceline.observe.telemetry.trace import tracer
from paceline.observe.telemetry.wait_reports import print_stacks_on_signal
from paceline.ps.client import session
from paceline.runtime.config import (
    EngineConfig,
    JobEnv,
    explicit_env,
    job_env,
    natural_host_id,
    visible_devices,
)
from paceline.runtime.console import say, warn
from paceline.runtime.device_request import DeviceRequest, parse_devices
from paceline.runtime.heap import keep_memory_of_xla
from paceline.runtime.job_state import Job as Job
from paceline.runtime.job_state import join_job
from paceline.runtime.launch_context import PACELINE
from paceline.runtime.mesh import Mesh
from paceline.runtime.torch_plugin import register as register_with_torch
from paceline.state.protocol import UserObject

register_with_torch()  # again: `import torch` finds no plugin if Paceline is not installed


_job: Job | None = None
_num_left = 0  # jobs that this process has left with shutdown()
_left_for_good = ""  # why it cannot join again
_lock = threading.Lock()


def init() -> Job:
    """Join the job that the environment names; alone, form a world of one. Blocks until all ranks
    have joined. A second call returns the same job. After shutdown() on all ranks the job can be
    joined again, any number of times; only an elastic job, or one with servers, is left for good.

    >>> import paceline as pl
    >>> job = pl.init()
    >>> pl.rank(), pl.world_size()
    (0, 1)
    """
    env = job_env()
    if _num_left and env.source not in (PACELINE.name, "alone"):
        # Rank 0 runs another coordinator each time: wait for that one.
        env = replace(env, job_id=f"{env.job_id}.{_num_left}", is_again=True)
    return _start(env, lambda config: establish(env, config), EngineConfig.from_environ())


def join_through(store: KeyValue, rank: int, world_size: int, timeout_s: float) -> Job:
    """Form a job with the processes that share a key-value store; for torch.distributed.

    The store must be fresh: no earlier job may have used the same keys.
    """
    env = explicit_env(rank, world_size, "torch.distributed")

    def connect(config: EngineConfig) -> Rendezvous:
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

    return _start(env, connect, replace(EngineConfig.from_environ(), join_timeout_s=timeout_s))


def _refuse_unreachable(store: KeyValue, env: JobEnv) -> None:
    """Raise ConfigError at once if rank 0 listens where this rank cannot reach it."""
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


def _start(env: JobEnv, connect: Callable[[EngineConfig], Rendezvous], config: EngineConfig) -> Job:
    global _job
    with _lock:
        if _job is None:
            if _left_for_good and env.source == PACELINE.name:
                raise UsageError(f"init() after shutdown(): {_left_for_good}")
            if env.source == PACELINE.name:
                print_stacks_on_signal()  # of the launcher, when other processes wait for this one
            keep_memory_of_xla()
            request = parse_devices(env.devices, "PACELINE_DEVICES")
            device = _choose_device(env, request)
            try:
                rendezvous = connect(config)
                try:
                    _job = join_job(env, config, rendezvous)
                    _job.device = device
                    _require_own_device(_job, request)
                except BaseException:
                    rendezvous.close(grace_s=0.0)
                    raise
            except OSError as error:  # descriptors, threads: the machine's limits
                raise SetupError(
                    f"rank {env.rank} of {env.world_size} cannot join: {error}; `paceline doctor`"
                    " shows this machine's limits"
                ) from error
            if env.rank == 0 and env.source != "alone":
                say(f"rank {env.rank} of {env.world_size} ({env.source}){_describe(device)}")
            if env.rank == 0 and device.type != "cpu" and (remark := devices.untested_version()):
                warn(remark)
        return _job


def _choose_device(env: JobEnv, request: DeviceRequest) -> torch.device:
    """Choose the device of this process and make it the current one; before it joins the job."""
    if env.role != "worker":  # servers and data workers compute on the CPU
        return devices.CPU
    is_own_choice = env.source in ("alone", "torch.distributed") and request == DeviceRequest()
    if is_own_choice and devices.accelerator() is not None:
        return devices.current_device()  # the script may have selected one before
    chosen = devices.choose_device(
        request, env.local_rank, env.local_world_size, sees_some=bool(visible_devices())
    )
    devices.select_device(chosen)
    return chosen


def _require_own_device(job: Job, request: DeviceRequest) -> None:
    """Raise ConfigError on all ranks if two of them have one device by accident. Collective."""
    is_told = bool(request.indices) or job.env.source == "torch.distributed"
    if job.device.type == "cpu" or is_told or job.elastic.is_on:
        return
    host = f"{job.env.host_id} {visible_devices()}"
    identities = all_gather_object(job.world, (host, str(job.device)))
    devices.require_own_devices([(there, name) for there, name in identities])


def _describe(device: torch.device) -> str:
    return "" if device.type == "cpu" else f", {device}"


def shutdown() -> None:
    """Leave the job cleanly; called automatically when the process exits. May be called twice."""
    global _job, _num_left, _left_for_good
    with _lock:
        job, _job = _job, None
        if job is None:
            return
        for close in job.closers:
            close()
        job.fabric.staging.close()
        job.reporter.flush()
        tracer.flush()
        tracer.stop()
        session.drop()
        for link in job.servers:
            link.leave()
        job.world.close()
        job.fabric.engine.say_goodbye()
        if job.fabric.listener is not None:
            job.fabric.listener.close()
        # A script that ended with an error has not finished: the job may start a replacement.
        failure = getattr(sys, "last_value", None)
        has_lost_peer = is_caused_by_loss(failure)
        job.rendezvous.agent.leave(is_finished=failure is None, has_lost_peer=has_lost_peer)
        job.rendezvous.close()
        if job.env.num_processes > 1 or job.elastic.is_on:
            _num_left += 1
        if job.elastic.is_on:
            _left_for_good = "an elastic job is left for good, others may have replaced this worker"
        elif job.env.num_servers:
            _left_for_good = "a job with parameter servers is left for good; they have ended"


_inherited: list[Job] = []


def _forget_in_child() -> None:
    """Forget the job in a forked child: job and threads are the parent's."""
    global _job, _lock
    _lock = threading.Lock()
    if _job is not None:
        _job.fabric.engine.close_after_fork()
        _inherited.append(_job)  # never destroyed here
        tracer.stop()
        _job = None
        session.drop()


atexit.register(shutdown)
os.register_at_fork(after_in_child=_forget_in_child)


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
    if job.elastic.is_joining:
        members = map(job.fabric.membership.member, job.fabric.membership.workers)
        return sum(member.number < job.env.number for member in members)
    return job.world.rank if job.elastic.is_on else job.env.rank


def world_size() -> int:
    """Return the number of workers in the job. In an elastic job it may change."""
    job = current()
    if job.env.is_data_worker:
        return job.env.world_size
    return len(job.fabric.membership.workers) + 1 if job.elastic.is_joining else job.world.size


def data_rank() -> int:
    """Return which part of the data belongs to this process: 0 to data_world_size() - 1. Without a
    mesh it is rank(); the processes of `tp` and `pp`, which train on one batch, have the same. For
    scripts that split the data themselves, without pl.shard.

    >>> list(range(10))[pl.data_rank() :: pl.data_world_size()]
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    mesh = _mesh_of_data()
    return rank() if mesh is None else mesh.data_index(rank())


def data_world_size() -> int:
    """Return the number of parts of the data: the number of workers, on a mesh divided by `tp` and
    `pp`. In an elastic job it may change.

    >>> pl.data_world_size()
    1
    """
    mesh = _mesh_of_data()
    if mesh is None:
        return world_size()
    job = current()
    coming = mesh.unit_size if job.elastic.is_joining else 0
    return (len(job.fabric.membership.workers) + coming) // (mesh.pp * mesh.tp)


def _mesh_of_data() -> Mesh | None:
    job = current()
    job.has_shared_data = True  # another mesh would make it wrong
    return job.mesh


def is_data_worker() -> bool:
    """Return whether this process makes batches for the workers (`paceline run --data-workers`): it
    runs the script up to its first loop over a `pl.shard(..., mode="pipeline")`, and no further.

    >>> pl.is_data_worker()
    False
    """
    return current().env.is_data_worker


def local_rank() -> int:
    """Return this process's number among the workers of its host."""
    return current().env.local_rank


def device() -> torch.device:
    """Return the device of this process: an accelerator if the machine has one for each worker of
    the host, else the CPU; `paceline run --devices` chooses others.

    >>> model = torch.nn.Linear(2, 2).to(pl.device())
    """
    return current().device


def world() -> Group:
    """Return the group of all workers."""
    return current().world


def should_stop() -> bool:
    """Return whether to stop after the last step: True on all workers after the same step, once
    SIGTERM has reached one of them. If a script calls this, the first SIGTERM no longer ends the
    process.

    >>> pl.should_stop()
    False
    """
    job = current()
    return job.stopping.should_stop(alone=job.world.size == 1)


def carry(**objects: Any) -> None:
    """Send the state of these objects to newcomers of an elastic job, besides the model's and the
    optimizer's: learning-rate schedulers, a GradScaler, averages of weights; any object with
    `state_dict()` and `load_state_dict()`. The names are the same on all workers.

    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    >>> pl.carry(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=10))
    """
    job = current()
    for name, thing in objects.items():
        job.elastic.register(f"carried {name}", UserObject(name, thing))
        job.carried[name] = thing


def new_group(ranks: Sequence[int]) -> Group:
    """Create a group of some ranks, which get ranks 0, 1, ... in it in the given order.

    Collective among these ranks only; each of them passes the same ranks in the same order.
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
    """Return an uninitialised tensor in engine memory, which collectives use without a copy.

    >>> pl.empty(2, 3).shape
    torch.Size([2, 3])
    """
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return allocate(current().fabric.engine, tuple(sizes), dtype or torch.get_default_dtype())  # type: ignore[arg-type]


def report(step: int | None = None, **values: float) -> None:
    """Report the progress of this rank to the launcher, which shows it live. Never blocks.

    Without a step number the steps that `distribute` has counted are shown. At most five reports a
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
