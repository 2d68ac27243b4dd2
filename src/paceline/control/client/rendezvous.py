"""How the processes of a job find each other, whoever started them.

    our launcher           it runs the coordinator; address and secret file are in the environment
    another, one host      rank 0 runs it and publishes it in a private file
                           (`control/transport/secret_file.py`)
    another, many hosts    rank 0 runs it at the address that PACELINE_COORDINATOR names
    a given key-value store  rank 0 publishes through it: torch.distributed's own rendezvous
    one process            no coordinator, no socket: `LocalAgent`

The result is a connected agent; joining comes later, when the member knows where its links listen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec

from paceline.control.client.agent import Agent
from paceline.control.client.local_agent import LocalAgent
from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.membership.policy import Policy
from paceline.control.transport.loop_thread import LoopThread
from paceline.control.transport.secret_file import (
    Published,
    load_secret,
    new_secret,
    publish,
    wait_for,
)
from paceline.control.transport.sockets import split_address
from paceline.errors import AuthError, ConfigError, PacelineError, RendezvousError
from paceline.observe.telemetry.events import Event
from paceline.runtime.config import DEFAULT_BIND_ADDRESS, EngineConfig, JobEnv

AnyAgent: TypeAlias = Agent | LocalAgent

_STORE_KEY = "paceline/rendezvous"
_LEAVE_S = 5.0  # rank 0 keeps the coordinator up for those who leave a little later


class KeyValue(Protocol):
    """What is needed of a foreign store; torch.distributed's stores have it."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...  # waits until the key is set


class _InStore(msgspec.Struct, frozen=True):
    """What rank 0 puts into a foreign store."""

    address: str
    secret_hex: str


class CoordinatorThread:
    """A coordinator in a thread of its own, for rank 0 of a job that another launcher started."""

    def __init__(
        self,
        job_id: str,
        secret: bytes,
        world_size: int,
        join_timeout_s: float = 60.0,
        on_event: Callable[[Event], None] | None = None,
        *,
        liveness_s: float = 5.0,
        policy: Policy | None = None,
    ) -> None:
        self._thread = LoopThread("paceline-coordinator")
        self.coordinator = Coordinator(
            job_id,
            secret,
            world_size,
            join_timeout_s,
            on_event,
            liveness_s=liveness_s,
            policy=policy,
        )

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; return "host:port". The thread ends when that fails."""
        try:
            return self._thread.call(self.coordinator.start(host, port))
        except PacelineError:
            self._thread.stop()
            raise

    def stop(self, grace_s: float = 0.0) -> None:
        """Give the members `grace_s` to leave, then end. May be called twice."""
        if self._thread.is_running:
            self._thread.call(self.coordinator.wait_until_alone(grace_s))
            self._thread.call(self.coordinator.stop())
            self._thread.stop()


@dataclass
class Rendezvous:
    """A connected agent, the job's secret, and the coordinator if this process runs it."""

    agent: AnyAgent
    secret: bytes
    job_id: str
    bind_address: str  # where links may listen, so that the other members can reach them
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
    if env.num_processes == 1 and env.coordinator is None:
        return Rendezvous(LocalAgent(), new_secret(), env.job_id, env.bind_address)
    if env.coordinator is not None:
        return _at_known_address(env, config, env.coordinator)
    if env.local_world_size < env.world_size:
        raise ConfigError(
            f"rank {env.rank}: {env.source} started {env.world_size} processes,"
            f" {env.local_world_size} of them on this host; for several hosts export in every"
            " process PACELINE_COORDINATOR=HOST:PORT (an address of rank 0's host and a free port"
            " there) and PACELINE_SECRET_FILE=FILE (mode 0600, the same content on every host)"
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
    meeting = _Meeting(rank, world_size, job_id, "worker", bind_address, config)
    if rank != 0:
        try:
            found = msgspec.json.decode(store.get(_STORE_KEY), type=_InStore)
            secret = bytes.fromhex(found.secret_hex)
        except ValueError as error:  # msgspec's errors are ValueErrors as well
            raise RendezvousError(
                f"rank {rank}: key {_STORE_KEY!r} of the given store was not written by Paceline's"
                f" rank 0: {error}; use a fresh store or a prefix"
            ) from None
        return meeting.attend(found.address, secret)
    secret = new_secret()

    def announce(address: str) -> None:
        store.set(_STORE_KEY, msgspec.json.encode(_InStore(address, secret.hex())).decode())

    return meeting.host(secret, bind_address, 0, announce)


def _at_known_address(env: JobEnv, config: EngineConfig, address: str) -> Rendezvous:
    if env.secret_file is None:
        raise ConfigError(
            f"rank {env.rank}: PACELINE_COORDINATOR={address} is set but PACELINE_SECRET_FILE is"
            " not; name the job's secret file (mode 0600)"
        )
    meeting, secret = _Meeting.of(env, config), load_secret(env.secret_file)
    if env.rank == 0 and env.source != "paceline":  # no launcher of ours that would run it
        return meeting.host(secret, *split_address(address))
    try:
        return meeting.attend(address, secret)
    except AuthError as error:
        raise AuthError(f"{error} (PACELINE_SECRET_FILE={env.secret_file})") from None


def _through_private_file(env: JobEnv, config: EngineConfig) -> Rendezvous:
    meeting = _Meeting.of(env, config)
    if env.rank != 0:
        found = wait_for(env, config.join_timeout_s)
        return meeting.attend(found.address, found.secret)
    secret = load_secret(env.secret_file) if env.secret_file else new_secret()
    return meeting.host(secret, env.bind_address, 0, lambda address: publish(env, address, secret))


@dataclass(frozen=True)
class _Meeting:
    """One process's way into the job, once it is clear where the coordinator runs."""

    rank: int
    world_size: int
    job_id: str
    role: str
    bind_address: str
    config: EngineConfig
    num_workers: int | None = None
    num_servers: int | None = None
    is_elastic: bool = False

    @classmethod
    def of(cls, env: JobEnv, config: EngineConfig) -> _Meeting:
        place = (env.rank, env.num_processes, env.job_id, env.role, env.bind_address)
        return cls(
            *place,
            config,
            num_workers=env.world_size,
            num_servers=None if env.is_elastic else env.num_servers,  # newcomers come behind
            is_elastic=env.is_elastic,
        )

    def attend(self, address: str, secret: bytes) -> Rendezvous:
        """Connect to the coordinator that another process runs."""
        agent = Agent.connect(
            address,
            secret,
            self.job_id,
            self.rank,
            self.role,
            timeout_s=self.config.join_timeout_s,
            is_lasting=self.is_elastic,
        )
        agent.num_workers, agent.num_servers = self.num_workers, self.num_servers
        # Unless told otherwise, links listen where the coordinator's network sees this process.
        is_chosen = self.bind_address != DEFAULT_BIND_ADDRESS
        bind_address = self.bind_address if is_chosen else agent.local_address
        return Rendezvous(agent, secret, self.job_id, bind_address)

    def host(
        self,
        secret: bytes,
        host: str,
        port: int,
        announce: Callable[[str], Published | None] = lambda _: None,
    ) -> Rendezvous:
        """Run the coordinator here, tell the others where, and connect to it."""
        coordinator = CoordinatorThread(
            self.job_id,
            secret,
            self.world_size,
            self.config.join_timeout_s,
            liveness_s=self.config.liveness_s,
        )
        published = None
        try:
            address = coordinator.start(host, port)
            published = announce(address)
            if published is not None:
                # Nobody else can join then, so a killed job leaves no file behind.
                coordinator.coordinator.on_membership = lambda _: published.remove()
            met = self.attend(address, secret)
        except BaseException:
            coordinator.stop()
            if published is not None:
                published.remove()
            raise
        met.coordinator, met.published = coordinator, published
        return met
