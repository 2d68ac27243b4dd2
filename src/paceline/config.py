"""What the environment says: which process of which job this is, and the engine's settings.

This is the only module that reads `os.environ`. It understands our own launcher and those of other
people: a process started by torchrun, srun, Open MPI or MPICH finds its rank here. Launchers nest
(torchrun inside srun is ordinary), so each one found is read, the most specific one wins, and two
that disagree about rank or world size are an error: guessing would form a job of the wrong shape.

Nothing here opens a socket or decides how ranks meet: that is `cluster/rendezvous.py`.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from paceline.errors import ConfigError

DEFAULT_BIND_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class JobEnv:
    """Which process this is, and how it may find the others.

    Workers have ranks 0 to world_size - 1, parameter servers the ranks behind those.
    """

    rank: int
    world_size: int  # workers
    local_rank: int
    local_world_size: int
    source: str
    role: str = "worker"
    num_servers: int = 0
    job_id: str
    coordinator: str | None
    secret_file: str | None
    host_id: str
    bind_address: str

    @property
    def num_processes(self) -> int:
        """Workers and servers together."""
        return self.world_size + self.num_servers


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of the engine; each can be set as PACELINE_<NAME>, for example PACELINE_TIMEOUT_S."""

    timeout_s: float = 600.0  # one operation
    liveness_s: float = 5.0  # a peer without heartbeat for so long counts as stopped
    warn_s: float = 2.0  # a longer wait says on whom
    join_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{field.name} must be a finite number above 0 (got {value!r})")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> EngineConfig:
        """Read PACELINE_TIMEOUT_S and its siblings; what is absent keeps its default."""
        environ = os.environ if environ is None else environ
        values: dict[str, float] = {}
        for field in fields(cls):
            variable = f"PACELINE_{field.name.upper()}"
            if environ.get(variable, ""):
                values[field.name] = _number(environ, variable, float)
        return cls(**values)


class _Launcher(NamedTuple):
    """The variables in which one launcher tells a process its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_TORCH_STYLE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OWN_SETTINGS = (
    *("ROLE", "JOB", "COORDINATOR", "SECRET_FILE", "HOST_ID", "BIND", "PACE", "SERVERS"),
)
_PACELINE = _Launcher("paceline", *(f"PACELINE_{name}" for name in _TORCH_STYLE))
_TORCHRUN = _Launcher("torchrun", *_TORCH_STYLE)
_BY_HAND = _Launcher("environment", *_TORCH_STYLE)
_SLURM = _Launcher("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE")
_OPEN_MPI = _Launcher(
    "openmpi", *(f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
_MPICH = _Launcher("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


class _Place(NamedTuple):
    launcher: _Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def job_env(environ: Mapping[str, str] | None = None) -> JobEnv:
    """Read this process's place in the job from the environment (default: `os.environ`).

    Raises ConfigError for values that make no sense and for launchers that contradict each other.
    """
    environ = os.environ if environ is None else environ
    _refuse_misspelling(environ)
    role, num_servers = _role(environ), _num_servers(environ)
    if role == "server":
        places = [_server_place(environ, num_servers)]
    else:
        places = [_place(environ, launcher) for launcher in _launchers(environ)]
        _refuse_disagreement(environ, places)
    place = places[0] if places else None
    source = place.launcher.name if place else "alone"
    return JobEnv(
        rank=place.rank if place else 0,
        world_size=place.world_size if place else 1,
        local_rank=place.local_rank if place else 0,
        local_world_size=place.local_world_size if place else 1,
        source=source,
        role=role,
        num_servers=num_servers,
        job_id=environ.get("PACELINE_JOB") or _job_id(environ, source),
        coordinator=_coordinator(environ),
        secret_file=environ.get("PACELINE_SECRET_FILE") or None,
        host_id=environ.get("PACELINE_HOST_ID") or natural_host_id(),
        bind_address=_bind_address(environ),
    )


def told_env(
    rank: int, world_size: int, source: str, environ: Mapping[str, str] | None = None
) -> JobEnv:
    """Describe a process whose rank was told by its caller (`source`), not by the environment.

    torch.distributed's own launchers leave variables that are half set; only those that agree with
    what was told are believed.
    """
    environ = os.environ if environ is None else environ
    _refuse_misspelling(environ)
    local_rank, local_world_size = rank, world_size
    if (environ.get("RANK"), environ.get("WORLD_SIZE")) == (str(rank), str(world_size)):
        local_rank, local_world_size = _local_place(environ, _BY_HAND, rank, world_size)
    return JobEnv(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        source=source,
        job_id=source,
        coordinator=None,
        secret_file=None,
        host_id=environ.get("PACELINE_HOST_ID") or natural_host_id(),
        bind_address=_bind_address(environ),
    )


def inherited_environ() -> dict[str, str]:
    """Return the environment that a launcher passes on to what it starts."""
    return dict(os.environ)


def adopt_environ(environ: Mapping[str, str]) -> None:
    """Make this the environment of a process that was forked, and so could not be given one."""
    os.environ.clear()
    os.environ.update(environ)


def is_launched_by_us(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether `paceline run` started this process."""
    return _present(os.environ if environ is None else environ, _PACELINE)


def requested_pace(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the pace that PACELINE_PACE asks for, or None; it wins over the script's own."""
    environ = os.environ if environ is None else environ
    return environ.get("PACELINE_PACE", "").strip() or None


def describe(env: JobEnv) -> str:
    """Say in one line who this process is: 'rank 1 of 4 (torchrun)'."""
    if env.role == "server":
        return f"server {env.rank - env.world_size} of {env.num_servers} ({env.source})"
    return f"rank {env.rank} of {env.world_size} ({env.source})"


def runtime_dir(environ: Mapping[str, str] | None = None) -> str:
    """Name the directory for short-lived private files: XDG_RUNTIME_DIR, or the temp directory."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("XDG_RUNTIME_DIR", "")
    if chosen and os.path.isdir(chosen) and os.access(chosen, os.W_OK):
        return chosen
    return tempfile.gettempdir()


def _refuse_misspelling(environ: Mapping[str, str]) -> None:
    """Refuse PACELINE_TIMOUT_S: a setting that is silently ignored is worse than none."""
    known = [f"PACELINE_{field.name.upper()}" for field in fields(EngineConfig)]
    known += [f"PACELINE_{name}" for name in (*_TORCH_STYLE, *_OWN_SETTINGS)]
    for name in environ:
        if name.startswith("PACELINE_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            if near:
                raise ConfigError(f"unknown variable {name}, did you mean {near[0]}?")


def _launchers(environ: Mapping[str, str]) -> list[_Launcher]:
    """Return the launchers whose variables are present and meant for this process, inner first."""
    found: list[_Launcher] = []
    if _present(environ, _PACELINE):
        found.append(_PACELINE)
    if environ.get("TORCHELASTIC_RUN_ID"):
        found.append(_TORCHRUN)
        return found  # whatever surrounds torchrun started torchrun, not us
    if _present(environ, _BY_HAND):
        found.append(_BY_HAND)
    mpi = [x for x in (_OPEN_MPI, _MPICH) if environ.get(x.rank) and environ.get(x.world_size)]
    # Inside a batch script, but outside of srun, Slurm sets SLURM_PROCID=0 and the task count of
    # the whole job for what is only one process; the step id is what srun adds. And mpirun may have
    # been started by srun, whose numbers are then mpirun's own: only equal ones are about us.
    in_batch_script = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    around_mpi = mpi and environ.get(_SLURM.rank) != environ.get(mpi[0].rank)
    if environ.get(_SLURM.rank) and environ.get(_SLURM.world_size):
        found += [] if in_batch_script or around_mpi else [_SLURM]
    found += mpi
    return found


def _present(environ: Mapping[str, str], launcher: _Launcher) -> bool:
    rank, world_size = environ.get(launcher.rank), environ.get(launcher.world_size)
    if bool(rank) != bool(world_size):
        have, lack = launcher.rank, launcher.world_size
        if world_size:
            have, lack = lack, have
        raise ConfigError(f"{have}={environ[have]} is set but {lack} is not; set both or neither")
    return bool(rank)


def _place(environ: Mapping[str, str], launcher: _Launcher) -> _Place:
    """Read and check one launcher's four numbers."""
    rank = _number(environ, launcher.rank, int)
    world_size = _number(environ, launcher.world_size, int)
    if world_size < 1:
        raise ConfigError(f"{launcher.world_size}={world_size}: a job has at least 1 process")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{launcher.rank}={rank} is not in 0..{world_size - 1}"
            f" ({launcher.world_size}={world_size})"
        )
    local_rank, local_world_size = _local_place(environ, launcher, rank, world_size)
    if not 0 <= local_rank < local_world_size <= world_size:
        raise ConfigError(
            f"{launcher.local_rank}={local_rank} and {launcher.local_world_size}="
            f"{local_world_size} do not fit {launcher.world_size}={world_size}:"
            " expected 0 <= local rank < local world size <= world size"
        )
    return _Place(launcher, rank, world_size, local_rank, local_world_size)


def _role(environ: Mapping[str, str]) -> str:
    role = environ.get("PACELINE_ROLE") or "worker"
    if role not in ("worker", "server"):
        raise ConfigError(f"PACELINE_ROLE={role!r} is neither worker nor server")
    return role


def _num_servers(environ: Mapping[str, str]) -> int:
    if not environ.get("PACELINE_SERVERS"):
        return 0
    count = _number(environ, "PACELINE_SERVERS", int)
    if count < 0:
        raise ConfigError(f"PACELINE_SERVERS={count}: expected a number >= 0")
    return count


def _server_place(environ: Mapping[str, str], num_servers: int) -> _Place:
    """Read a server's place: its number among the servers is PACELINE_RANK."""
    index = _number(environ, _PACELINE.rank, int)
    num_workers = _number(environ, _PACELINE.world_size, int)
    if num_workers < 1 or not 0 <= index < num_servers:
        raise ConfigError(
            f"server {index} of PACELINE_SERVERS={num_servers} for PACELINE_WORLD_SIZE="
            f"{num_workers} workers: expected 0 <= server < servers, and at least 1 worker"
        )
    return _Place(_PACELINE, num_workers + index, num_workers, index, num_workers)


def _local_place(
    environ: Mapping[str, str], launcher: _Launcher, rank: int, world_size: int
) -> tuple[int, int]:
    """Return (local rank, local world size); a launcher that says neither means one host."""
    if not environ.get(launcher.local_rank):
        return rank, world_size
    local_rank = _number(environ, launcher.local_rank, int)
    if not environ.get(launcher.local_world_size):
        return local_rank, world_size
    if launcher is not _SLURM:
        return local_rank, _number(environ, launcher.local_world_size, int)
    return local_rank, _slurm_tasks_here(environ)


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Expand '2(x3),1' (three nodes with 2 tasks, one with 1) and pick this node's count."""
    variable = "SLURM_STEP_TASKS_PER_NODE"
    text = environ.get(variable) or environ[_SLURM.local_world_size]
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{_SLURM.local_world_size}={text!r}: expected a form like '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID", int) if environ.get("SLURM_NODEID") else 0
    if not 0 <= node < len(counts):
        raise ConfigError(f"SLURM_NODEID={node} but SLURM_TASKS_PER_NODE={text} has no such node")
    return counts[node]


def _refuse_disagreement(environ: Mapping[str, str], places: list[_Place]) -> None:
    for other in places[1:]:
        first = places[0]
        if (first.rank, first.world_size) != (other.rank, other.world_size):
            told = [
                f"{x.name} ({x.rank}={environ[x.rank]}, {x.world_size}={environ[x.world_size]})"
                for x in (first.launcher, other.launcher)
            ]
            raise ConfigError(
                f"two launchers disagree about this process: {told[0]} against {told[1]};"
                f" unset the variables of the one that did not start it"
            )


def _number(environ: Mapping[str, str], variable: str, parse: type[int] | type[float]) -> int:
    text = environ.get(variable, "")
    try:
        return parse(text)  # type: ignore[return-value]  # callers ask for the type they want
    except ValueError:
        kind = "an integer" if parse is int else "a number"
        raise ConfigError(f"{variable}={text!r} is not {kind}") from None


def _coordinator(environ: Mapping[str, str]) -> str | None:
    address = environ.get("PACELINE_COORDINATOR") or None
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"PACELINE_COORDINATOR={address!r} is not of the form host:port")
    return address


def _bind_address(environ: Mapping[str, str]) -> str:
    address = environ.get("PACELINE_BIND") or DEFAULT_BIND_ADDRESS
    if address in ("0.0.0.0", "::", "[::]", "*"):
        raise ConfigError(
            f"PACELINE_BIND={address} would listen on every interface; name the address of the"
            " interface that the other hosts of the job can reach"
        )
    return address


def _job_id(environ: Mapping[str, str], source: str) -> str:
    """Name the job equally on all its ranks, and differently from any other job on this host."""
    parts: list[str] = []
    if source == "torchrun":
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        parts = [environ.get(name, "") for name in names]
    elif source == "environment" and environ.get("MASTER_PORT"):
        parts = [environ.get("MASTER_ADDR", ""), environ["MASTER_PORT"]]
    elif source == "slurm" and environ.get("SLURM_JOB_ID"):
        parts = [environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "")]
    elif source == "openmpi" and environ.get("PMIX_NAMESPACE"):
        parts = [environ["PMIX_NAMESPACE"]]
    elif source == "alone":
        parts = [str(os.getpid())]
    else:  # the local ranks share the parent that started them; its start time outlives pid reuse
        parts = [str(os.getppid()), process_start(os.getppid()) or ""]
    return "-".join([source, *parts])


def process_start(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot, or None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            after_name = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # Fields after the name start at number 3; 22 is the start time. A zombie no longer acts.
    return None if after_name[0] in "ZX" else after_name[19]


def natural_host_id() -> str:
    """Name the kernel and network namespace: equal names can share memory and Unix sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
        return f"{boot_id.read().strip()}-{os.stat('/proc/self/ns/net').st_ino}"
