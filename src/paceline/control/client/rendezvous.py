"""How the processes of a job find each other, whichever launcher started them.

    our launcher             it runs the coordinator; address and secret file are in the environment
    another, one host        rank 0 runs it and publishes its address in a private file
    another, many hosts      rank 0 runs it at the address that PACELINE_COORDINATOR names
    a given key-value store  rank 0 publishes through it: torch.distributed's own rendezvous
    one process              no coordinator, no socket: `LocalAgent`

The result is a connected agent. It joins later, when the member knows where its links listen.

The private file is named after the job. It is in a directory of mode 0700 that belongs to this
user, and appears atomically. It names the process that wrote it (pid and start time), so that the
file of a killed job is recognised: readers ignore it, and the next rank 0 with that job name
replaces it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from paceline.control.client.agent import Agent
from paceline.control.client.local_agent import LocalAgent
from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.transport.auth import load_secret, new_secret, read_private, write_private
from paceline.control.transport.loop_thread import LoopThread
from paceline.control.transport.sockets import split_address
from paceline.control.wait_notice import WaitNotice
from paceline.errors import AuthError, ConfigError, PacelineError, RendezvousError
from paceline.runtime.config import (
    DEFAULT_BIND_ADDRESS,
    EngineConfig,
    JobEnv,
    runtime_dir,
)
from paceline.runtime.machine import process_start

AnyAgent: TypeAlias = Agent | LocalAgent

_STORE_KEY = "paceline/rendezvous"
_LEAVE_S = 5.0  # rank 0 keeps the coordinator up for members that leave a little later
_POLL_S = 0.02


class KeyValue(Protocol):
    """The methods of a foreign store that are used; torch.distributed's stores have them."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...  # waits until the key is set


class _InStore(msgspec.Struct, frozen=True):
    """The value that rank 0 puts into a foreign store."""

    address: str
    secret_hex: str


class CoordinatorThread:
    """A coordinator in a thread of its own, for rank 0 of a job that another launcher started."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._thread = LoopThread("paceline-coordinator")
        self.coordinator = coordinator

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; return "host:port". The thread ends if that fails."""
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
    published: PublishedFile | None = None

    def close(self, grace_s: float = _LEAVE_S) -> None:
        """Leave the job; a coordinator in this process gives other members `grace_s` to leave."""
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
    """Rendezvous through a key-value store that all ranks share already.

    The secret travels through that store, so the job is as private as the store is.
    """
    config = config or EngineConfig()
    entry = _Entry(rank, world_size, job_id, "worker", bind_address, config)
    if rank != 0:
        try:
            found = msgspec.json.decode(store.get(_STORE_KEY), type=_InStore)
            secret = bytes.fromhex(found.secret_hex)
        except ValueError as error:  # msgspec's errors are ValueErrors as well
            raise RendezvousError(
                f"rank {rank}: key {_STORE_KEY!r} of the given store was not written by Paceline's"
                f" rank 0: {error}; use a fresh store or a prefix"
            ) from None
        return entry.connect(found.address, secret)
    secret = new_secret()

    def announce(address: str) -> None:
        store.set(_STORE_KEY, msgspec.json.encode(_InStore(address, secret.hex())).decode())

    return entry.run_coordinator(secret, bind_address, 0, announce)


def _at_known_address(env: JobEnv, config: EngineConfig, address: str) -> Rendezvous:
    if env.secret_file is None:
        raise ConfigError(
            f"rank {env.rank}: PACELINE_COORDINATOR={address} is set but PACELINE_SECRET_FILE is"
            " not; name the job's secret file (mode 0600)"
        )
    entry, secret = _Entry.of(env, config), load_secret(env.secret_file)
    if env.rank == 0 and env.source != "paceline":  # our launcher would run it
        return entry.run_coordinator(secret, *split_address(address))
    deadline_s = time.monotonic() + config.join_timeout_s
    while True:
        try:
            return entry.connect(address, secret)
        except AuthError as error:  # noqa: PERF203
            # After shutdown() rank 0 runs another coordinator there, perhaps not yet.
            if not env.is_again or time.monotonic() > deadline_s:
                raise AuthError(f"{error} (PACELINE_SECRET_FILE={env.secret_file})") from None
            time.sleep(_POLL_S)


def _through_private_file(env: JobEnv, config: EngineConfig) -> Rendezvous:
    entry = _Entry.of(env, config)
    if env.rank != 0:
        found = wait_for(env, config.join_timeout_s)
        return entry.connect(found.address, found.secret)
    secret = load_secret(env.secret_file) if env.secret_file else new_secret()
    return entry.run_coordinator(
        secret, env.bind_address, 0, lambda address: publish(env, address, secret)
    )


@dataclass(frozen=True)
class _Entry:
    """How one process connects to the job, once it is known where the coordinator runs."""

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
    def of(cls, env: JobEnv, config: EngineConfig) -> _Entry:
        return cls(
            env.rank,
            env.num_processes,
            env.job_id,
            env.role,
            env.bind_address,
            config,
            num_workers=env.world_size,
            num_servers=None if env.is_elastic else env.num_servers,  # newcomers have higher ranks
            is_elastic=env.is_elastic,
        )

    def connect(self, address: str, secret: bytes) -> Rendezvous:
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
        # By default links listen at this host's address in the coordinator's network.
        is_chosen = self.bind_address != DEFAULT_BIND_ADDRESS
        bind_address = self.bind_address if is_chosen else agent.local_address
        return Rendezvous(agent, secret, self.job_id, bind_address)

    def run_coordinator(
        self,
        secret: bytes,
        host: str,
        port: int,
        announce: Callable[[str], PublishedFile | None] = lambda _: None,
    ) -> Rendezvous:
        """Run the coordinator here, announce its address, and connect to it."""
        coordinator = CoordinatorThread(
            Coordinator(
                self.job_id,
                secret,
                self.world_size,
                self.config.join_timeout_s,
                liveness_s=self.config.liveness_s,
            )
        )
        published = None
        try:
            address = coordinator.start(host, port)
            published = announce(address)
            if published is not None:
                # After the first membership no rank needs the file. A killed job leaves none.
                coordinator.coordinator.on_membership = lambda _: published.remove()
            joined = self.connect(address, secret)
        except BaseException:
            coordinator.stop()
            if published is not None:
                published.remove()
            raise
        joined.coordinator, joined.published = coordinator, published
        return joined


class CoordinatorInfo(msgspec.Struct, frozen=True):
    """The contents of the file: where the coordinator is."""

    address: str
    secret_hex: str
    pid: int
    start: str  # of that process, see `process_start`

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.secret_hex)

    @property
    def is_current(self) -> bool:
        return process_start(self.pid) == self.start


@dataclass(frozen=True)
class PublishedFile:
    """The file that this process wrote; removed when the job no longer needs it."""

    path: Path
    pid: int

    def remove(self) -> None:
        if os.getpid() == self.pid:  # a forked child that cleans up must not remove it
            self.path.unlink(missing_ok=True)


def publish(env: JobEnv, address: str, secret: bytes) -> PublishedFile:
    """Write the file of this job; RendezvousError if another live process has written it."""
    path = _path(env)
    _sweep(path.parent)
    pid = os.getpid()
    contents = CoordinatorInfo(address, secret.hex(), pid, process_start(pid) or "")
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    write_private(draft, msgspec.json.encode(contents))
    try:
        while not _appear(draft, path):
            other = _read(path)
            if other is not None and other.is_current:
                raise RendezvousError(
                    f"rank 0 of job {env.job_id} is already running as pid {other.pid}, found by"
                    f" pid {pid}; give each job its own name with PACELINE_JOB"
                )
            path.unlink(missing_ok=True)
    finally:
        draft.unlink()
    return PublishedFile(path, pid)


def wait_for(env: JobEnv, timeout_s: float) -> CoordinatorInfo:
    """Wait until rank 0 has published the coordinator; return where it is."""
    path = _path(env)
    deadline = time.monotonic() + timeout_s
    notice = WaitNotice(f"rank {env.rank} waits for rank 0 of job {env.job_id} to start")
    while time.monotonic() < deadline:
        contents = _read(path)
        if contents is not None and contents.is_current:
            return contents
        notice.check()
        time.sleep(_POLL_S)
    raise RendezvousError(
        f"rank {env.rank} waited {timeout_s:g} s for rank 0 of job {env.job_id} to write {path};"
        " see why it did not start; if it did, give all ranks the same PACELINE_JOB"
    )


def _sweep(directory: Path) -> None:
    """Remove the files of all killed jobs."""
    for path in directory.glob("job-*"):
        contents = _read(path)
        if contents is not None and not contents.is_current:
            path.unlink(missing_ok=True)


def _appear(draft: Path, path: Path) -> bool:
    """Give the finished file its name; return False if the name is taken."""
    try:
        os.link(draft, path, follow_symlinks=False)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> CoordinatorInfo | None:
    """Return the file's contents, None if there is none; AuthError if other users can use it."""
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(read_private(path), type=CoordinatorInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # not written by Paceline: treated as stale
    except AuthError:
        if not path.exists():
            return None  # removed between the two checks
        raise


def _path(env: JobEnv) -> Path:
    digest = hashlib.sha256(env.job_id.encode()).hexdigest()[:32]
    return _private_directory() / f"job-{digest}.json"


def _private_directory() -> Path:
    """Return paceline-<uid> in the runtime directory, created or checked to be private."""
    path = Path(runtime_dir()) / f"paceline-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
        raise AuthError(
            f"{path} must be a directory of uid {os.getuid()} with mode 0700, found uid"
            f" {status.st_uid} and mode {mode:04o}; remove it, or set XDG_RUNTIME_DIR"
        )
    return path
