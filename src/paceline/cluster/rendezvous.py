"""How the processes of a job find each other, whoever started them.

    our launcher           it runs the coordinator; address and secret file are in the environment
    another, one host      rank 0 runs it and publishes it in a private file (`published.py`)
    another, many hosts    rank 0 runs it at the address that PACELINE_COORDINATOR names
    a given key-value store  rank 0 publishes through it: torch.distributed's own rendezvous
    one process            no coordinator, no socket: `LocalAgent`

The result is a connected agent; joining comes later, when the member knows where its links listen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from paceline.cluster.agent import Agent
from paceline.cluster.coordinator import CoordinatorThread
from paceline.cluster.local_agent import LocalAgent
from paceline.cluster.published import Published, publish, wait_for
from paceline.cluster.secret_file import load_secret, new_secret
from paceline.cluster.sockets import split_address
from paceline.config import EngineConfig, JobEnv
from paceline.errors import ConfigError, RendezvousError

AnyAgent: TypeAlias = Agent | LocalAgent

_STORE_KEY = "paceline/rendezvous"
_LEAVE_S = 5.0  # rank 0 keeps the coordinator up for those who leave a little later


class KeyValue(Protocol):
    """What is needed of a foreign store, torch.distributed's among them."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...


@dataclass
class Rendezvous:
    """A connected agent, the job's secret, and the coordinator if this process runs it."""

    agent: AnyAgent
    secret: bytes
    job_id: str
    coordinator: CoordinatorThread | None = None
    published: Published | None = None

    def close(self, grace_s: float = _LEAVE_S) -> None:
        """Leave the job; if it runs here, the coordinator gives the others `grace_s` to leave."""
        if self.published is not None:
            self.published.remove()
        self.agent.close()
        if self.coordinator is not None:
            self.coordinator.stop(grace_s)


def establish(env: JobEnv, config: EngineConfig) -> Rendezvous:
    """Find or start the job's coordinator and connect to it. Blocks up to `join_timeout_s`."""
    if env.world_size == 1 and env.coordinator is None:
        return Rendezvous(LocalAgent(), new_secret(), env.job_id)
    if env.coordinator is not None:
        return _at_known_address(env, config, env.coordinator)
    if env.local_world_size < env.world_size:
        raise ConfigError(
            f"rank {env.rank}: {env.source} started {env.world_size} processes,"
            f" {env.local_world_size} of them on this host; on several hosts every process needs"
            " PACELINE_COORDINATOR=HOST:PORT (an address of rank 0's host and a free port),"
            " PACELINE_SECRET_FILE=FILE (mode 0600, the same content on every host) and"
            " PACELINE_BIND=ADDRESS (this host's address in the job's network)"
        )
    return _through_private_file(env, config)


def establish_from_store(
    store: KeyValue,
    rank: int,
    world_size: int,
    *,
    job_id: str = "store",
    bind_address: str = "127.0.0.1",
    config: EngineConfig | None = None,
) -> Rendezvous:
    """Meet through a key-value store that all ranks share already.

    The secret travels through that store, so the job is as private as the store is.
    """
    config = config or EngineConfig()
    if rank != 0:
        shared = json.loads(store.get(_STORE_KEY))
        address, secret = str(shared["address"]), bytes.fromhex(shared["secret"])
        return _connect(address, secret, job_id, rank, "worker", config)
    secret = new_secret()
    coordinator = CoordinatorThread(job_id, secret, world_size, config.join_timeout_s)
    address = coordinator.start(bind_address)
    store.set(_STORE_KEY, json.dumps({"address": address, "secret": secret.hex()}))
    return _connect(address, secret, job_id, rank, "worker", config, coordinator)


def _at_known_address(env: JobEnv, config: EngineConfig, address: str) -> Rendezvous:
    if env.secret_file is None:
        raise ConfigError(
            f"rank {env.rank}: PACELINE_COORDINATOR={address} is set but PACELINE_SECRET_FILE is"
            " not; name the job's secret file (mode 0600)"
        )
    secret = load_secret(env.secret_file)
    coordinator = None
    if env.rank == 0 and env.source != "paceline":
        coordinator = _start(env, config, secret)
        coordinator.start(*split_address(address))
    return _connect(address, secret, env.job_id, env.rank, env.role, config, coordinator)


def _through_private_file(env: JobEnv, config: EngineConfig) -> Rendezvous:
    if env.rank != 0:
        found = wait_for(env, config.join_timeout_s)
        return _connect(found.address, found.secret, env.job_id, env.rank, env.role, config)
    secret = load_secret(env.secret_file) if env.secret_file else new_secret()
    coordinator = _start(env, config, secret)
    address = coordinator.start(env.bind_address)
    try:
        published = publish(env, address, secret)
    except RendezvousError:
        coordinator.stop()
        raise
    met = _connect(address, secret, env.job_id, env.rank, env.role, config, coordinator)
    met.published = published
    return met


def _start(env: JobEnv, config: EngineConfig, secret: bytes) -> CoordinatorThread:
    return CoordinatorThread(
        env.job_id, secret, env.world_size, config.join_timeout_s, liveness_s=config.liveness_s
    )


def _connect(
    address: str,
    secret: bytes,
    job_id: str,
    rank: int,
    role: str,
    config: EngineConfig,
    coordinator: CoordinatorThread | None = None,
) -> Rendezvous:
    agent = Agent.connect(address, secret, job_id, rank, role, timeout_s=config.join_timeout_s)
    return Rendezvous(agent, secret, job_id, coordinator)
