"""What is written down about a running elastic job, so that others of this user can find it.

`job.json` in the job directory (0700, see launcher/job_directory.py) has what does not change:
where the coordinator is, who supervises, what was asked for. `processes` has a line for every
process that was started; whoever takes over the supervision of a detached job reads them from
there.
"""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from paceline.control.transport.secret_file import write_private
from paceline.errors import LaunchError, UsageError
from paceline.launcher.environment import JobAddresses
from paceline.launcher.job_directory import directories, is_held
from paceline.launcher.processes.guard import job_processes
from paceline.launcher.spec import RunSpec
from paceline.runtime.config import process_start, runtime_dir
from paceline.runtime.process_names import Seat

_FACTS, _PROCESSES = "job.json", "processes"


def new_job_id() -> str:
    """Make the random word by which a job's processes are told from all others."""
    return secrets.token_hex(8)


def job_name(spec: RunSpec, job_id: str) -> str:
    """Name a job for people: "train-3f2a"."""
    last = spec.target.rpartition(".")[2] if spec.is_module else Path(spec.target).stem
    return f"{last or 'job'}-{job_id[:4]}"


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One running job."""

    name: str
    job_id: str
    coordinator: str  # host:port
    secret_file: str
    master_port: int
    supervisor: int  # pid of the launcher, or of the keeper of a detached job
    cwd: str
    command: str  # for people
    pace: str = ""  # if the launcher was given one
    precision: str = ""  # the same
    log_dir: str = ""
    is_detached: bool = False
    grace_s: float
    # Of a detached job, for whoever supervises it next: what was asked for, what newcomers inherit.
    spec: msgspec.Raw = msgspec.Raw(b"null")
    environ: dict[str, str] = {}

    def with_plan(self, spec: RunSpec, environ: Mapping[str, str]) -> JobFacts:
        """Return the facts of a job that somebody else may have to go on with."""
        raw = msgspec.Raw(msgspec.json.encode(spec, enc_hook=str))
        return msgspec.structs.replace(self, spec=raw, environ=dict(environ))

    def plan(self) -> RunSpec:
        """Read what was asked for; call in the job's own directory, where its script is."""
        return msgspec.json.decode(self.spec, type=RunSpec, dec_hook=lambda _, text: Path(text))


class Record(msgspec.Struct, frozen=True):
    """One process that was started; `born` tells it from a later one with the same pid."""

    rank: int
    number: int
    is_server: bool
    is_newcomer: bool
    pid: int
    born: str | None

    @property
    def seat(self) -> Seat:
        return Seat(self.rank, self.number, self.is_server, self.is_newcomer)

    @property
    def is_alive(self) -> bool:
        return self.born is not None and process_start(self.pid) == self.born


def facts_of(spec: RunSpec, where: JobAddresses) -> JobFacts:
    """Return the facts of the job that this process supervises."""
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
        log_dir=str(spec.log_dir.absolute()) if spec.log_dir else "",
        is_detached=spec.is_detached,
        grace_s=spec.grace_s,
    )


def write_facts(directory: Path, facts: JobFacts) -> None:
    """Write or replace the facts, whole or not at all."""
    draft = directory / f"{_FACTS}.{os.getpid()}"
    write_private(draft, msgspec.json.encode(facts))
    draft.rename(directory / _FACTS)


def read_facts(directory: Path) -> JobFacts | None:
    """Read the facts; None when there are none: the job is not elastic, or just ending."""
    try:
        return msgspec.json.decode((directory / _FACTS).read_bytes(), type=JobFacts)
    except (OSError, msgspec.MsgspecError):
        return None


def record(directory: Path, seat: Seat, pid: int) -> None:
    """Note that a process was started."""
    born = process_start(pid)
    line = Record(seat.rank, seat.number, seat.is_server, seat.is_newcomer, pid, born)
    with open(directory / _PROCESSES, "ab", opener=_private) as file:
        file.write(msgspec.json.encode(line) + b"\n")


def recorded(directory: Path) -> list[Record]:
    """Return all processes that were started, once each, in order."""
    try:
        lines = (directory / _PROCESSES).read_bytes().splitlines()
    except OSError:
        return []
    found = [msgspec.json.decode(line, type=Record) for line in lines]
    return list({one.rank: one for one in found}.values())


class FoundJob(msgspec.Struct, frozen=True):
    """A job of this user on this host. Without a supervisor nobody watches its processes."""

    directory: Path
    facts: JobFacts
    is_supervised: bool


def jobs(environ: Mapping[str, str]) -> Iterator[FoundJob]:
    """Find this user's jobs."""
    for path in directories(Path(runtime_dir(environ))):
        facts = read_facts(path)
        if facts is None:
            continue
        if is_held(path):
            yield FoundJob(path, facts, True)
        elif facts.is_detached and any(job_processes(facts.job_id, ())):
            yield FoundJob(path, facts, False)


def find_job(name: str | None, environ: Mapping[str, str]) -> FoundJob:
    """Find one job by its name or the beginning of it; the only one without a name."""
    found = sorted(jobs(environ), key=lambda job: job.facts.name)
    names = ", ".join(job.facts.name for job in found)
    if not found:
        raise LaunchError(
            "no job of yours runs on this host; start one with `paceline run` (--detach: in the"
            " background)"
        )
    if name is None:
        if len(found) > 1:
            raise UsageError(f"{len(found)} jobs are running: say which of {names}")
        return found[0]
    exact = [job for job in found if name in (job.facts.name, job.facts.job_id)]
    near = exact or [job for job in found if job.facts.name.startswith(name)]
    if len(near) != 1:
        problem = "is no running job" if not near else "could be several jobs"
        raise UsageError(f"{name[:60]} {problem}; running: {names}")
    return near[0]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
