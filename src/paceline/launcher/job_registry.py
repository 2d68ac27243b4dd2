"""The registry of running jobs, with which commands of the same user find a job.

`job.json` in the job directory (0700, see job_directory.py) has what does not change: the address
of the coordinator, the pid of the supervisor, the options of the job. `processes` has a line for
every process that was started; the next supervisor of a detached job reads them from there.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from paceline.control.transport.auth import write_private
from paceline.errors import ConfigError, LaunchError, UsageError
from paceline.launcher.environment import JobAddresses
from paceline.launcher.job_directory import directories, is_held
from paceline.launcher.processes.guard_main import job_processes
from paceline.launcher.spec import RunSpec
from paceline.runtime.config import encryption, runtime_dir
from paceline.runtime.machine import process_start
from paceline.runtime.process_names import ProcessName

_FACTS, _PROCESSES = "job.json", "processes"


def new_job_id() -> str:
    """Return a new random id, which marks the processes of a job."""
    return secrets.token_hex(8)


def job_name(spec: RunSpec, job_id: str) -> str:
    """Return the name of a job for people: "train-3f2a"."""
    last = spec.target.rpartition(".")[2] if spec.is_module else Path(spec.target).stem
    return f"{last or 'job'}-{job_id[:4]}"


def encode_spec(spec: RunSpec) -> msgspec.Raw:
    """Return the options of a job as JSON, for another supervisor or the agent of a host."""
    return msgspec.Raw(msgspec.json.encode(spec, enc_hook=str))


def decode_spec(raw: msgspec.Raw) -> RunSpec:
    """Return the options of a job; call in its working directory. Raises ConfigError."""
    try:
        return msgspec.json.decode(raw, type=RunSpec, dec_hook=lambda _, text: Path(text))
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's and Unicode's
        raise ConfigError(f"the recorded options of a job cannot be read: {error}") from None


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One running job."""

    name: str
    job_id: str
    coordinator: str  # host:port
    secret_file: str
    master_port: int
    supervisor: int  # pid of the launcher, or of the background process of a detached job
    cwd: str
    command: str  # for people
    pace: str = ""  # if it was given on the command line
    precision: str = ""  # the same
    max_wire: str = ""  # the same
    encryption: str = "on"  # PACELINE_ENCRYPT in its processes
    log_dir: str = ""
    is_detached: bool = False
    hosts: tuple[str, ...] = ()  # of a job on several hosts
    host: str = ""  # which wrote this: the launcher's, or that of an agent
    launcher_host: str = ""  # where the launcher runs, in the facts that an agent keeps
    grace_s: float
    stop_signal: int = int(signal.SIGTERM)  # with which `paceline stop` asks the supervisor
    # Of a detached job, for its next supervisor: the options, and what new processes inherit.
    spec: msgspec.Raw = msgspec.Raw(b"null")
    environ: dict[str, str] = {}

    def with_spec(self, spec: RunSpec, environ: Mapping[str, str]) -> JobFacts:
        """Return these facts with what another supervisor needs to take over."""
        return msgspec.structs.replace(self, spec=encode_spec(spec), environ=dict(environ))

    def run_spec(self) -> RunSpec:
        """Return the options of the job; call in its working directory, where its script is."""
        return decode_spec(self.spec)


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process that was started; `born` distinguishes it from a later one with the same pid."""

    rank: int
    number: int
    is_server: bool
    is_newcomer: bool
    pid: int
    born: str | None

    @property
    def name(self) -> ProcessName:
        return ProcessName(self.rank, self.number, self.is_server, self.is_newcomer)

    @property
    def is_alive(self) -> bool:
        return self.born is not None and process_start(self.pid) == self.born


def facts_of(spec: RunSpec, where: JobAddresses) -> JobFacts:
    """Return the facts of a job that this process supervises."""
    return JobFacts(
        name=job_name(spec, where.job_id),
        job_id=where.job_id,
        coordinator=where.coordinator,
        secret_file=where.secret_file,
        master_port=where.master_port,
        supervisor=os.getpid(),
        cwd=os.getcwd(),
        command=shlex.join((spec.target, *spec.arguments)),
        pace=str(spec.pace or ""),
        precision=spec.precision or "",
        max_wire=spec.max_wire or "",
        encryption=encryption(),
        log_dir=str(spec.log_dir.absolute()) if spec.log_dir else "",
        is_detached=spec.is_detached,
        hosts=tuple(host.name for host in spec.hosts),
        host=socket.gethostname(),
        grace_s=spec.grace_s,
    )


def write_facts(directory: Path, facts: JobFacts) -> None:
    """Write or replace the facts atomically."""
    draft = directory / f"{_FACTS}.{os.getpid()}"
    write_private(draft, msgspec.json.encode(facts))
    draft.rename(directory / _FACTS)


def read_facts(directory: Path) -> JobFacts | None:
    """Return the facts; None if there are none: the job is starting or ending."""
    try:
        return msgspec.json.decode((directory / _FACTS).read_bytes(), type=JobFacts)
    except (OSError, ValueError, RecursionError):  # ValueError: msgspec's and Unicode's
        return None


def record_process(directory: Path, name: ProcessName, pid: int) -> None:
    """Record that a process was started."""
    born = process_start(pid)
    line = ProcessRecord(name.rank, name.number, name.is_server, name.is_newcomer, pid, born)
    with open(directory / _PROCESSES, "ab", opener=_private) as file:
        file.write(msgspec.json.encode(line) + b"\n")


def recorded_processes(directory: Path) -> list[ProcessRecord]:
    """Return all processes that were started, each once, in order."""
    try:
        lines = (directory / _PROCESSES).read_bytes().splitlines()
    except OSError:
        return []
    found = [one for one in map(_decoded, lines) if one is not None]
    return list({one.rank: one for one in found}.values())


def _decoded(line: bytes) -> ProcessRecord | None:
    """Return a record; None if its writer was killed, or had no space, before the line's end."""
    try:
        return msgspec.json.decode(line, type=ProcessRecord)
    except (ValueError, RecursionError):  # ValueError: msgspec's and Unicode's
        return None


class FoundJob(msgspec.Struct, frozen=True):
    """A job of this user on this host. Without a supervisor no lost process is replaced."""

    directory: Path
    facts: JobFacts
    is_supervised: bool


def jobs(environ: Mapping[str, str]) -> Iterator[FoundJob]:
    """Yield the running jobs of this user on this host, each once.

    The launcher and agents of the same job may share a directory (containers, a common /tmp): the
    facts of this host count, else those of the launcher.
    """
    found = [(path, read_facts(path)) for path in directories(Path(runtime_dir(environ)))]
    here = socket.gethostname()
    best: dict[str, tuple[bool, bool]] = {}  # by job id
    for _, facts in found:
        if facts is not None:
            rank = (facts.host == here, not facts.launcher_host)
            best[facts.job_id] = max(rank, best.get(facts.job_id, (False, False)))
    for path, facts in found:
        if facts is None or (facts.host == here, not facts.launcher_host) != best[facts.job_id]:
            continue
        if is_held(path):
            yield FoundJob(path, facts, True)
        elif facts.is_detached and any(job_processes(facts.job_id, ())):
            yield FoundJob(path, facts, False)


def find_job(name: str | None, environ: Mapping[str, str]) -> FoundJob:
    """Return the job with this name, or whose name begins so; without a name the only job."""
    found = sorted(jobs(environ), key=lambda job: job.facts.name)
    names = ", ".join(job.facts.name for job in found)
    if not found:
        raise LaunchError(
            "no job of yours runs on this host; start one with `paceline run` (--detach: in the"
            " background)"
        )
    if name is None:
        if len(found) > 1:
            raise UsageError(f"{len(found)} jobs are running; name one of {names}")
        return found[0]
    exact = [job for job in found if name in (job.facts.name, job.facts.job_id)]
    near = exact or [job for job in found if job.facts.name.startswith(name)]
    if len(near) != 1:
        problem = "is no running job" if not near else "matches several jobs"
        raise UsageError(f"{name[:60]} {problem}; running: {names}")
    return near[0]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
