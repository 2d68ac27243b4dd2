"""The environment of each process: Paceline's variables, and for workers also torchrun's.

Scripts written for torchrun, Lightning or Accelerate read RANK, WORLD_SIZE and so on; scripts that
use Paceline read PACELINE_*. The launcher sets both, and they agree. It removes the variables of
other launchers (it may run inside a batch job), because a rank with two answers must refuse to run.
Servers are no ranks of the script, so they get none of torchrun's variables. Data workers run the
script, with ranks after all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.launcher.hosts.placement import HostPlace
from paceline.launcher.spec import RESERVED, RunSpec
from paceline.runtime.config import natural_host_id
from paceline.runtime.process_names import ProcessName

# Task-level variables of other launchers. Job-level ones (SLURM_JOB_ID ...) stay: many scripts use
# them for names, and they hold no ranks.
_FOREIGN_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "HYDRA_", "MV2_COMM_WORLD_", "MPI_LOCAL", "PET_")
_FOREIGN_NAMES = {
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_GTIDS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_TASK_PID",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
}
# A server waits until its workers join or the job ends: a script may read its data first.
SERVER_PATIENCE_S = 7 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class JobAddresses:
    """Where the processes of one job find each other."""

    job_id: str
    coordinator: str
    secret_file: str
    master_port: int


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """What a process of a job on several hosts is given about its host."""

    place: HostPlace
    address: str  # of its host, which the other hosts reach
    master_address: str  # of the host of rank 0
    cores: int  # of its host


def without_foreign_ranks(base: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `base` without the rank variables of any launcher."""
    return {
        name: value
        for name, value in base.items()
        if name not in RESERVED
        and name not in _FOREIGN_NAMES
        and not name.startswith((*_FOREIGN_PREFIXES, "TORCHELASTIC_"))
    }


def process_variables(
    name: ProcessName,
    num_workers: int,
    num_servers: int,
    where: JobAddresses,
    data_workers: Sequence[int] = (),
    host: HostSettings | None = None,
) -> dict[str, str]:
    """Return the rank, role and addresses of one process; `host` None: the job is on one host."""
    n, r = str(num_workers), str(name.number)
    place = HostPlace(0, 1, name.number, num_workers) if host is None else host.place
    ours = {
        "PACELINE_RANK": str(name.rank) if name.is_newcomer else r,
        "PACELINE_WORLD_SIZE": n,
        "PACELINE_LOCAL_RANK": str(place.local_rank),
        "PACELINE_LOCAL_WORLD_SIZE": str(place.local_world_size),
        "PACELINE_ROLE": name.role,
        "PACELINE_COORDINATOR": where.coordinator,
        "PACELINE_JOB": where.job_id,
        "PACELINE_SECRET_FILE": where.secret_file,
    }
    if host is not None:
        ours["PACELINE_BIND"] = host.address
    if num_servers:
        ours["PACELINE_SERVERS"] = str(num_servers)
    if data_workers:
        ours["PACELINE_DATA_WORKERS"] = ",".join(map(str, data_workers))
    if name.is_newcomer:
        ours |= {"PACELINE_JOINS": "1", "PACELINE_NUMBER": r}
    if name.is_data_worker:  # its script may read them; no process group contains it
        local = name.rank if host is None else place.local_world_size + place.local_rank
        return {**ours, "RANK": str(name.rank), "WORLD_SIZE": n, "LOCAL_RANK": str(local)}
    if name.is_server:
        return ours
    master = "127.0.0.1" if host is None else host.master_address
    return {**ours, **_as_torchrun(r, n, where, place), "MASTER_ADDR": master}


def _as_torchrun(r: str, n: str, where: JobAddresses, place: HostPlace) -> dict[str, str]:
    return {
        "RANK": r,
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.host_index),
        "GROUP_WORLD_SIZE": str(place.num_hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": r,
        "ROLE_WORLD_SIZE": n,
        "MASTER_PORT": str(where.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": where.job_id,
    }


def process_environ(
    base: Mapping[str, str],
    spec: RunSpec,
    name: ProcessName,
    where: JobAddresses,
    *,
    cores: int,
    host: HostSettings | None = None,
) -> dict[str, str]:
    """Return the complete environment of one process of the job; `host` None: it is on one host.

    Threads of a worker: the option wins, then what the user exported, then an even share of the
    cores; without a limit every rank would start one thread per core and compete for the cores.
    Mesh, pace and precision: the option, else what the user exported; raises ConfigError if that is
    unknown. Servers get the mesh too: it says which workers share a table. For a process on another
    host `base` is what travels (hosts/host_environment.py), and the cores are those of its host.
    """
    num_workers = spec.num_workers
    if host is not None:
        cores, num_workers = host.cores, max(1, host.place.local_world_size)
    environ = without_foreign_ranks(base)
    # The lines of a killed rank must not be lost in its buffer, and the screen shows them live.
    environ.setdefault("PYTHONUNBUFFERED", "1")
    # A crash in native code then leaves a Python stack for the report.
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    counts = (spec.num_workers, spec.num_servers)
    environ.update(process_variables(name, *counts, where, spec.data_workers, host))
    links = spec.emulated_links_in(base)
    if links is not None:
        environ["PACELINE_HOST_ID"] = links.host_id(natural_host_id(), name.rank)
    if not spec.encrypt:
        environ["PACELINE_ENCRYPT"] = "off"
    if spec.elastic is not None:
        environ.update(spec.elastic.variables(spec.servers))
    mesh = spec.mesh_in(base)
    if mesh is not None:
        environ["PACELINE_MESH"] = str(mesh)
    trace = spec.trace_in(base)
    if trace is not None:
        environ["PACELINE_TRACE"] = str(trace)
    devices = spec.devices_in(base)
    if devices is not None:
        environ["PACELINE_DEVICES"] = str(devices)
    if name.is_server:
        return for_server(environ, spec.env, spec.servers.threads)
    if name.is_data_worker:
        environ["OMP_NUM_THREADS"] = "1"  # one core per data worker; start more of them to use more
    elif spec.threads_per_worker is not None:
        environ["OMP_NUM_THREADS"] = str(spec.threads_per_worker)
    else:
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_workers)))
    environ.update(spec.env)
    pace = spec.pace_in(base)
    if pace is not None:
        environ["PACELINE_PACE"] = str(pace)
    max_wire = spec.max_wire_in(base)
    if max_wire is not None:
        environ["PACELINE_MAX_WIRE"] = max_wire
    precision = spec.precision_in(base)
    if precision is not None:
        environ["PACELINE_PRECISION"] = precision
    return environ


def template_environ(
    base: Mapping[str, str], spec: RunSpec, job_id: str, *, cores: int
) -> dict[str, str]:
    """Return the environment in which the template imports: a worker's, without rank."""
    nowhere = JobAddresses(job_id=job_id, coordinator="", secret_file="", master_port=0)
    worker = process_environ(base, spec, spec.process_names[0], nowhere, cores=cores)
    return {**without_foreign_ranks(worker), "PACELINE_JOB": job_id}


def for_server(
    environ: dict[str, str], env: Mapping[str, str], threads: int | None
) -> dict[str, str]:
    """Add what only servers get. Two threads by default: while a server updates, the workers that
    wait for it leave their cores free."""
    environ["OMP_NUM_THREADS"] = "2"
    # `python -m` looks into the working directory first, and would find the user's queue.py there.
    environ.setdefault("PYTHONSAFEPATH", "1")
    environ.update(env)
    if threads is not None:
        environ["OMP_NUM_THREADS"] = str(threads)
    environ["PACELINE_JOIN_TIMEOUT_S"] = str(SERVER_PATIENCE_S)
    for name in (
        "PACELINE_PACE",
        "PACELINE_MAX_WIRE",
        "PACELINE_PRECISION",
    ):  # the workers send these
        environ.pop(name, None)
    return environ
