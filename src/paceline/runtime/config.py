"""Settings from the environment: which process of which job this is, and the engine's limits.

This is the only module that reads `os.environ`. It reads the variables of Paceline's launcher and
of others: torchrun, srun, Open MPI, MPICH (runtime/launch_context.py).

PACELINE_TELEMETRY=off: workers do not time their steps and report no learning rate, to measure what
that costs (bench/telemetry.py). Progress is still shown.

Nothing here opens a socket or connects ranks.
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
    data_worker_context,
    data_worker_counts,
    find_launchers,
    is_present,
    local_ranks,
    newcomer_context,
    parse_number,
    read_context,
    require_agreement,
    server_context,
)
from paceline.runtime.machine import boot_id, process_start

DEFAULT_BIND_ADDRESS = "127.0.0.1"
HOROVOD = "PACELINE_HOROVOD"  # set to 1: `import horovod` uses paceline.horovod


@dataclass(frozen=True, kw_only=True)
class JobEnv:
    """Which process this is, and how it finds the other processes of its job.

    Workers have ranks 0 to world_size - 1, parameter servers the next ranks, then data workers,
    then newcomers. `world_size` is the number of workers with which the job was started.
    """

    rank: int
    world_size: int  # workers
    local_rank: int
    local_world_size: int
    source: str
    role: str = "worker"
    num_servers: int = 0
    data_workers: tuple[int, ...] = ()  # their number in each stage
    number: int = 0  # within its role; see control/member.py
    is_newcomer: bool = False  # it joins a running job
    is_again: bool = False  # this process has left the job, and joins it again
    is_elastic: bool = False  # the membership may change
    on_loss: str = "shrink"  # continue without a lost worker, or wait for one to "replace" it
    num_partitions: int = 0  # of the servers' tables
    replicas: int = 1  # servers that hold each partition
    mesh: str = ""  # as requested, "dp=2,tp=2"; see runtime/mesh.py
    trace: str = ""  # as requested, "20:30"; see observe/telemetry/trace.py
    devices: str = "auto"  # as requested, "cuda:0,1"; see runtime/device_request.py
    job_id: str
    coordinator: str | None
    secret_file: str | None
    host_id: str
    bind_address: str
    emulated_links: str = ""  # a file; see runtime/emulated_links.py

    @property
    def num_processes(self) -> int:
        """Number of workers, servers and data workers together."""
        return self.world_size + self.num_servers + sum(self.data_workers)

    @property
    def is_data_worker(self) -> bool:
        """Whether this process makes batches for the workers, and does not train."""
        return self.role == "data"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of the engine; each can be set as PACELINE_<NAME>, for example PACELINE_TIMEOUT_S."""

    timeout_s: float = 600.0  # one operation
    liveness_s: float = 5.0  # a peer without heartbeat for this long counts as stopped
    lease_s: float = 4.0  # in an elastic job: a member stopped or silent for this long is lost
    warn_s: float = 2.0  # a longer wait prints which ranks it waits for
    join_timeout_s: float = 60.0
    stacks_after_s: float = 30.0  # after a longer wait the launcher prints the missing rank's stack

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{field.name} must be a finite number above 0 (got {value!r})")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> EngineConfig:
        """Return the limits in PACELINE_TIMEOUT_S and the like; others have their default."""
        environ = os.environ if environ is None else environ
        values: dict[str, float] = {}
        for field in fields(cls):
            variable = f"PACELINE_{field.name.upper()}"
            if environ.get(variable, ""):
                values[field.name] = parse_number(environ, variable, float)
        return cls(**values)


_OWN_SETTINGS = (
    *("ROLE", "JOB", "COORDINATOR", "SECRET_FILE", "HOST_ID", "BIND", "PACE", "SERVERS"),
    *("NUMBER", "JOINS", "ELASTIC", "ON_LOSS", "PARTITIONS", "REPLICAS", "PRECISION", "AS_GLOO"),
    *("DATA_WORKERS", "MESH", "TELEMETRY", "TEMPLATE", "TRACE", "LOG_DIR", "ENCRYPT"),
    *("DEVICES", "HOROVOD", "MAX_WIRE", "PROBE", "EMULATE_LINKS"),
)
# With these the runtimes of accelerators hide devices from a process.
_VISIBILITY = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"),
)
ON_LOSS, _ENCRYPTION = ("shrink", "replace"), ("on", "off", "always")
_ROLES = ("worker", "server", "data")


def job_env(environ: Mapping[str, str] | None = None) -> JobEnv:
    """Return which process of which job this is, from the environment (default: `os.environ`).

    Raises ConfigError for invalid values and for launchers that contradict each other.
    """
    environ = os.environ if environ is None else environ
    _refuse_misspelling(environ)
    role, num_servers = _choice(environ, "ROLE", _ROLES), _count(environ, "SERVERS", 0)
    data_workers = data_worker_counts(environ)
    is_newcomer = _is_set(environ, "JOINS")
    if is_newcomer:
        contexts = [newcomer_context(environ)]
    elif role == "server":
        contexts = [server_context(environ, num_servers)]
    elif role == "data":
        contexts = [data_worker_context(environ, num_servers, sum(data_workers))]
    else:
        contexts = [read_context(environ, launcher) for launcher in find_launchers(environ)]
        require_agreement(environ, contexts)
    context = contexts[0] if contexts else None
    source = context.launcher.name if context else "alone"
    rank = context.rank if context else 0
    return JobEnv(
        rank=rank,
        world_size=context.world_size if context else 1,
        local_rank=context.local_rank if context else 0,
        local_world_size=context.local_world_size if context else 1,
        source=source,
        role=role,
        num_servers=num_servers,
        data_workers=data_workers,
        number=context.number if context and context.number is not None else rank,
        is_newcomer=is_newcomer,
        is_elastic=_is_set(environ, "ELASTIC"),
        on_loss=_choice(environ, "ON_LOSS", ON_LOSS),
        num_partitions=_count(environ, "PARTITIONS", num_servers),
        replicas=_count(environ, "REPLICAS", 1),
        mesh=requested_mesh(environ) or "",
        trace=requested_trace(environ) or "",
        devices=requested_devices(environ) or "auto",
        job_id=environ.get("PACELINE_JOB") or _job_id(environ, source),
        coordinator=_coordinator(environ),
        secret_file=environ.get("PACELINE_SECRET_FILE") or None,
        host_id=environ.get("PACELINE_HOST_ID") or natural_host_id(),
        bind_address=bind_address(environ),
        emulated_links=_text(environ, "EMULATE_LINKS") or "",
    )


def explicit_env(
    rank: int, world_size: int, source: str, environ: Mapping[str, str] | None = None
) -> JobEnv:
    """Return the JobEnv of a process whose caller (`source`) passes its rank explicitly.

    torch.distributed's own launchers leave some variables unset; only those that agree with the
    given rank and world size are used.
    """
    environ = os.environ if environ is None else environ
    _refuse_misspelling(environ)
    local_rank, local_world_size = rank, world_size
    if (environ.get("RANK"), environ.get("WORLD_SIZE")) == (str(rank), str(world_size)):
        local_rank, local_world_size = local_ranks(environ, BY_HAND, rank, world_size)
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
    """Return the environment that a launcher passes on to its processes."""
    return dict(os.environ)


def adopt_environ(environ: Mapping[str, str]) -> None:
    """Replace the environment of a forked process, which could not be started with one."""
    os.environ.clear()
    os.environ.update(environ)


def set_unless_set(name: str, value: str) -> None:
    """Set a variable for libraries in this process, unless the user has set it."""
    os.environ.setdefault(name, value)


def is_launched_by_us(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether `paceline run` started this process."""
    return is_present(os.environ if environ is None else environ, PACELINE)


def requested_pace(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the pace in PACELINE_PACE, or None; it overrides the script's."""
    return _text(environ, "PACE")


def requested_max_wire(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the budget in PACELINE_MAX_WIRE, such as "200mbit", or None."""
    return _text(environ, "MAX_WIRE")


def requested_precision(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the precision in PACELINE_PRECISION, or None; it overrides the script's."""
    return _text(environ, "PRECISION")


def requested_mesh(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the mesh in PACELINE_MESH, or None; it overrides the script's."""
    return _text(environ, "MESH")


def requested_log_dir(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the run directory in PACELINE_LOG_DIR, "none" for none; None: the default."""
    return _text(environ, "LOG_DIR")


def requested_trace(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the steps to trace from PACELINE_TRACE, "20:30", or None."""
    return _text(environ, "TRACE")


def requested_devices(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the devices in PACELINE_DEVICES, "cuda:0,1", or None."""
    return _text(environ, "DEVICES")


def requested_probe(environ: Mapping[str, str] | None = None) -> str | None:
    """Return what PACELINE_PROBE asks of this worker (runtime/probe_spec.py), or None."""
    return _text(environ, "PROBE")


def visible_devices(environ: Mapping[str, str] | None = None) -> str:
    """Return which devices the runtimes of accelerators show to this process; "" if all."""
    environ = os.environ if environ is None else environ
    return " ".join(f"{name}={environ[name]}" for name in _VISIBILITY if name in environ)


def times_steps(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether workers time their steps: PACELINE_TELEMETRY is "on" (default) or "off"."""
    return _choice(os.environ if environ is None else environ, "TELEMETRY") == "on"


def uses_template(environ: Mapping[str, str]) -> bool:
    """Return whether processes may be forked from a template: PACELINE_TEMPLATE, "on" or "off"."""
    return _choice(environ, "TEMPLATE") == "on"


def encryption(environ: Mapping[str, str] | None = None) -> str:
    """Return PACELINE_ENCRYPT: "on" (default) encrypts what leaves the machine, "always" also what
    stays on it, "off" nothing."""
    return _choice(os.environ if environ is None else environ, "ENCRYPT", _ENCRYPTION)


def set_encryption(setting: str) -> None:
    """Use the setting of a job in this process and its children."""
    if encryption() != setting:
        os.environ["PACELINE_ENCRYPT"] = setting


def runtime_dir(environ: Mapping[str, str] | None = None) -> str:
    """Return the directory for short-lived private files: XDG_RUNTIME_DIR or the temp directory."""
    environ = os.environ if environ is None else environ
    chosen = environ.get("XDG_RUNTIME_DIR", "")
    if chosen and os.path.isdir(chosen) and os.access(chosen, os.W_OK):
        return chosen
    return tempfile.gettempdir()


def _refuse_misspelling(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for PACELINE_TIMOUT_S: a setting must not be ignored silently."""
    known = [f"PACELINE_{field.name.upper()}" for field in fields(EngineConfig)]
    known += [f"PACELINE_{name}" for name in (*TORCH_STYLE, *_OWN_SETTINGS)]
    for name in environ:
        if name.startswith("PACELINE_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
            if near:
                raise ConfigError(f"unknown variable {name}, did you mean {near[0]}?")


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    variable = f"PACELINE_{name}"
    if not environ.get(variable):
        return default
    count = parse_number(environ, variable, int)
    if count < 0:
        raise ConfigError(f"{variable}={count}: expected a number >= 0")
    return count


def _text(environ: Mapping[str, str] | None, name: str) -> str | None:
    environ = os.environ if environ is None else environ
    return environ.get(f"PACELINE_{name}", "").strip() or None


def _choice(environ: Mapping[str, str], name: str, choices: tuple[str, ...] = ("on", "off")) -> str:
    """Return the value of PACELINE_<name>; the first choice is the default."""
    wanted = environ.get(f"PACELINE_{name}") or choices[0]
    if wanted not in choices:
        *others, last = choices
        raise ConfigError(f"PACELINE_{name}={wanted!r}: expected {', '.join(others)} or {last}")
    return wanted


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(f"PACELINE_{name}", "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"PACELINE_{name}={text!r}: expected 0 or 1")
    return text == "1"


def _coordinator(environ: Mapping[str, str]) -> str | None:
    address = environ.get("PACELINE_COORDINATOR") or None
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"PACELINE_COORDINATOR={address!r} is not of the form host:port")
    return address


def bind_address(environ: Mapping[str, str]) -> str:
    """Return the address on which this process listens: PACELINE_BIND, else loopback."""
    address = environ.get("PACELINE_BIND") or DEFAULT_BIND_ADDRESS
    if address in ("0.0.0.0", "::", "[::]", "*"):
        raise ConfigError(
            f"PACELINE_BIND={address} would listen on every interface; name the address of the"
            " interface that the other hosts of the job can reach"
        )
    return address


def _job_id(environ: Mapping[str, str], source: str) -> str:
    """Return a job id: the same on all ranks, different from any other job on this host."""
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


def natural_host_id() -> str:
    """Return an id of kernel and network namespace: equal ids can share memory and Unix sockets."""
    return f"{boot_id()}-{os.stat('/proc/self/ns/net').st_ino}"


def clock_id(environ: Mapping[str, str] | None = None) -> str:
    """Return an id of the monotonic clock: processes with equal ids have the same time."""
    environ = os.environ if environ is None else environ
    host = environ.get("PACELINE_HOST_ID") or boot_id()
    try:
        return f"{host}-{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return host  # a kernel before 5.6 has one clock for all
