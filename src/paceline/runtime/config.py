"""What the environment says: which process of which job this is, and the engine's settings.

This is the only module that reads `os.environ`. It understands our own launcher and those of other
people: a process started by torchrun, srun, Open MPI or MPICH finds its rank
(runtime/launch_context.py).

PACELINE_TELEMETRY=off: workers do not time their steps and tell no learning rate, to find out what
that costs (bench/telemetry.py). Progress is shown as ever.

Nothing here opens a socket or decides how ranks meet: that is `control/client/rendezvous.py`.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields

from paceline.errors import ConfigError
from paceline.runtime.launch_context import (
    BY_HAND,
    PACELINE,
    TORCH_STYLE,
    data_place,
    is_present,
    launchers,
    local_place,
    newcomer_place,
    number_in,
    place_of,
    refuse_disagreement,
    server_place,
)

DEFAULT_BIND_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class JobEnv:
    """Which process this is, and how it may find the others.

    Workers have ranks 0 to world_size - 1, parameter servers the ranks behind those, then come data
    workers, and newcomers behind all. `world_size` is what the job was started with.
    """

    rank: int
    world_size: int  # workers
    local_rank: int
    local_world_size: int
    source: str
    role: str = "worker"
    num_servers: int = 0
    data_workers: tuple[int, ...] = ()  # how many of them do each stage
    number: int = 0  # among those of its role; see control/member.py
    is_newcomer: bool = False  # it comes to a job that is under way
    is_elastic: bool = False  # the membership may change
    on_loss: str = "shrink"  # of a worker: go on without it, or wait for one to "replace" it
    num_partitions: int = 0  # of the servers' tables
    replicas: int = 1  # servers that hold each partition
    mesh: str = ""  # as it was asked for, "dp=2,tp=2"; see runtime/mesh.py
    trace: str = ""  # the same, "20:30"; see observe/telemetry/trace.py
    job_id: str
    coordinator: str | None
    secret_file: str | None
    host_id: str
    bind_address: str

    @property
    def num_processes(self) -> int:
        """Workers, servers and data workers together."""
        return self.world_size + self.num_servers + sum(self.data_workers)

    @property
    def is_data_worker(self) -> bool:
        """Whether this process makes batches for others, and does not train."""
        return self.role == "data"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of the engine; each can be set as PACELINE_<NAME>, for example PACELINE_TIMEOUT_S."""

    timeout_s: float = 600.0  # one operation
    liveness_s: float = 5.0  # a peer without heartbeat for so long counts as stopped
    lease_s: float = 4.0  # in an elastic job: who is stopped or silent for so long is lost
    warn_s: float = 2.0  # a longer wait says on whom
    join_timeout_s: float = 60.0
    stacks_after_s: float = 30.0  # a longer wait has the launcher show where the missing one is

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
                values[field.name] = number_in(environ, variable, float)
        return cls(**values)


_OWN_SETTINGS = (
    *("ROLE", "JOB", "COORDINATOR", "SECRET_FILE", "HOST_ID", "BIND", "PACE", "SERVERS"),
    *("NUMBER", "JOINS", "ELASTIC", "ON_LOSS", "PARTITIONS", "REPLICAS", "PRECISION"),
    *("DATA_WORKERS", "MESH", "TELEMETRY", "TEMPLATE", "TRACE", "LOG_DIR"),
)
ON_LOSS = ("shrink", "replace")


def job_env(environ: Mapping[str, str] | None = None) -> JobEnv:
    """Read this process's place in the job from the environment (default: `os.environ`).

    Raises ConfigError for values that make no sense and for launchers that contradict each other.
    """
    environ = os.environ if environ is None else environ
    _refuse_misspelling(environ)
    role, num_servers = _role(environ), _count(environ, "SERVERS", 0)
    data_workers = _data_workers(environ)
    is_newcomer = _is_set(environ, "JOINS")
    if is_newcomer:
        places = [newcomer_place(environ)]
    elif role == "server":
        places = [server_place(environ, num_servers)]
    elif role == "data":
        places = [data_place(environ, num_servers, sum(data_workers))]
    else:
        places = [place_of(environ, launcher) for launcher in launchers(environ)]
        refuse_disagreement(environ, places)
    place = places[0] if places else None
    source = place.launcher.name if place else "alone"
    rank = place.rank if place else 0
    return JobEnv(
        rank=rank,
        world_size=place.world_size if place else 1,
        local_rank=place.local_rank if place else 0,
        local_world_size=place.local_world_size if place else 1,
        source=source,
        role=role,
        num_servers=num_servers,
        data_workers=data_workers,
        number=place.local_rank if place and (is_newcomer or role != "worker") else rank,
        is_newcomer=is_newcomer,
        is_elastic=_is_set(environ, "ELASTIC"),
        on_loss=_on_loss(environ),
        num_partitions=_count(environ, "PARTITIONS", num_servers),
        replicas=_count(environ, "REPLICAS", 1),
        mesh=requested_mesh(environ) or "",
        trace=requested_trace(environ) or "",
        job_id=environ.get("PACELINE_JOB") or _job_id(environ, source),
        coordinator=_coordinator(environ),
        secret_file=environ.get("PACELINE_SECRET_FILE") or None,
        host_id=environ.get("PACELINE_HOST_ID") or natural_host_id(),
        bind_address=bind_address(environ),
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
        local_rank, local_world_size = local_place(environ, BY_HAND, rank, world_size)
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
        bind_address=bind_address(environ),
    )


def inherited_environ() -> dict[str, str]:
    """Return the environment that a launcher passes on to what it starts."""
    return dict(os.environ)


def adopt_environ(environ: Mapping[str, str]) -> None:
    """Make this the environment of a process that was forked, and so could not be given one."""
    os.environ.clear()
    os.environ.update(environ)


def set_unless_set(name: str, value: str) -> None:
    """Set a variable for libraries in this process, unless a person has."""
    os.environ.setdefault(name, value)


def is_launched_by_us(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether `paceline run` started this process."""
    return is_present(os.environ if environ is None else environ, PACELINE)


def requested_pace(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the pace that PACELINE_PACE asks for, or None; it wins over the script's own."""
    environ = os.environ if environ is None else environ
    return environ.get("PACELINE_PACE", "").strip() or None


def requested_precision(environ: Mapping[str, str] | None = None) -> str | None:
    """Return what PACELINE_PRECISION asks for, or None; it wins over the script's own."""
    environ = os.environ if environ is None else environ
    return environ.get("PACELINE_PRECISION", "").strip() or None


def requested_mesh(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the mesh that PACELINE_MESH asks for, or None; it wins over the script's own."""
    environ = os.environ if environ is None else environ
    return environ.get("PACELINE_MESH", "").strip() or None


def requested_log_dir(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the run directory that PACELINE_LOG_DIR names, "none" for none; None: the default."""
    environ = os.environ if environ is None else environ
    return environ.get("PACELINE_LOG_DIR", "").strip() or None


def requested_trace(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the steps that PACELINE_TRACE asks to be traced, "20:30", or None."""
    environ = os.environ if environ is None else environ
    return environ.get("PACELINE_TRACE", "").strip() or None


def times_steps(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether workers time their steps: PACELINE_TELEMETRY is "on", as by default, or "off"."""
    environ = os.environ if environ is None else environ
    wanted = environ.get("PACELINE_TELEMETRY") or "on"
    if wanted not in ("on", "off"):
        raise ConfigError(f"PACELINE_TELEMETRY={wanted!r}: expected on or off")
    return wanted == "on"


def uses_template(environ: Mapping[str, str]) -> bool:
    """Tell whether processes may be forked from a template: PACELINE_TEMPLATE is "on" or "off"."""
    wanted = environ.get("PACELINE_TEMPLATE") or "on"
    if wanted not in ("on", "off"):
        raise ConfigError(f"PACELINE_TEMPLATE={wanted!r}: expected on or off")
    return wanted == "on"


def describe(env: JobEnv) -> str:
    """Say in one line who this process is: 'rank 1 of 4 (torchrun)'."""
    if env.role == "server":
        return f"server {env.number} of {env.num_servers} ({env.source})"
    if env.is_data_worker:
        return f"data worker {env.number} of {sum(env.data_workers)} ({env.source})"
    if env.is_newcomer:
        return f"worker {env.number}, a newcomer ({env.source})"
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
    known += [f"PACELINE_{name}" for name in (*TORCH_STYLE, *_OWN_SETTINGS)]
    for name in environ:
        if name.startswith("PACELINE_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            if near:
                raise ConfigError(f"unknown variable {name}, did you mean {near[0]}?")


def _role(environ: Mapping[str, str]) -> str:
    role = environ.get("PACELINE_ROLE") or "worker"
    if role not in ("worker", "server", "data"):
        raise ConfigError(f"PACELINE_ROLE={role!r} is neither worker nor server nor data")
    return role


def _data_workers(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Read "2,1": two data workers for the first stage, one for the second."""
    text = environ.get("PACELINE_DATA_WORKERS", "")
    words = text.split(",") if text else []
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(
            f"PACELINE_DATA_WORKERS={text!r}: expected numbers above 0, as in 2 or 2,1"
        )
    return tuple(map(int, words))


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    variable = f"PACELINE_{name}"
    if not environ.get(variable):
        return default
    count = number_in(environ, variable, int)
    if count < 0:
        raise ConfigError(f"{variable}={count}: expected a number >= 0")
    return count


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(f"PACELINE_{name}", "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"PACELINE_{name}={text!r}: expected 0 or 1")
    return text == "1"


def _on_loss(environ: Mapping[str, str]) -> str:
    policy = environ.get("PACELINE_ON_LOSS") or ON_LOSS[0]
    if policy not in ON_LOSS:
        raise ConfigError(f"PACELINE_ON_LOSS={policy!r}: expected one of {', '.join(ON_LOSS)}")
    return policy


def _coordinator(environ: Mapping[str, str]) -> str | None:
    address = environ.get("PACELINE_COORDINATOR") or None
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"PACELINE_COORDINATOR={address!r} is not of the form host:port")
    return address


def bind_address(environ: Mapping[str, str]) -> str:
    """Return the address at which this process may be reached: PACELINE_BIND, else loopback."""
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


def clock_id(environ: Mapping[str, str] | None = None) -> str:
    """Name the monotonic clock of this process: equal names show the same time."""
    environ = os.environ if environ is None else environ
    host = environ.get("PACELINE_HOST_ID", "")
    if not host:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
            host = boot_id.read().strip()
    try:
        return f"{host}-{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:  # a kernel before 5.6 has one clock for all
        return host
