"""What of a job ends with its launcher, and what outlives it.

A job in the foreground has a directory that goes with it, a guard that ends its processes when the
launcher is killed, and pipes for their output. A detached job outlives whoever supervises it (its
keeper, see elastic/keeper.py): its directory stays, nobody guards it, and its processes write to
files. Another keeper takes over what the first one has made.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from paceline.control.transport.secret_file import create_secret_file
from paceline.control.transport.sockets import split_address
from paceline.launcher.elastic.job_facts import FoundJob, JobFacts
from paceline.launcher.job_directory import JobDirectory
from paceline.launcher.processes.lifeline import Guard, Sessions, hold_port
from paceline.launcher.processes.pipes import Outlet
from paceline.launcher.spec import RunSpec
from paceline.runtime.config import runtime_dir
from paceline.runtime.process_names import Seat


class Foreground:
    """Holds a job that ends with its launcher."""

    coordinator_port = 0  # any

    def directory(self, environ: Mapping[str, str], job_id: str) -> JobDirectory:
        """Open the job's directory; raises LaunchError."""
        del job_id  # a directory that stays is marked with it
        return JobDirectory(Path(runtime_dir(environ)))

    def secret_file(self, directory: JobDirectory) -> Path:
        return create_secret_file(directory.path)

    def master_port(self, held: ExitStack) -> int:
        """Return a port for torch's own store; nobody else gets it while `held` is open."""
        port: int = held.enter_context(hold_port()).getsockname()[1]
        return port

    def guard(self, job_id: str, directory: JobDirectory) -> Sessions:
        """Return what ends the job's processes if the launcher cannot."""
        return Guard(job_id, directory.path)

    def facts(self, facts: JobFacts, spec: RunSpec, environ: Mapping[str, str]) -> JobFacts:
        """Complete what is written down about the job."""
        del spec, environ
        return facts

    def outlet(self, spec: RunSpec, seat: Seat) -> Outlet:
        """Return where a process writes its output."""
        del spec, seat
        return Outlet.pipes()


class Detached(Foreground):
    """Holds a job that outlives its launcher."""

    def directory(self, environ: Mapping[str, str], job_id: str) -> JobDirectory:
        directory = super().directory(environ, job_id)
        directory.keep(job_id)
        return directory

    def guard(self, job_id: str, directory: JobDirectory) -> Sessions:
        del job_id, directory
        return Sessions()

    def facts(self, facts: JobFacts, spec: RunSpec, environ: Mapping[str, str]) -> JobFacts:
        return facts.with_plan(spec, environ)

    def outlet(self, spec: RunSpec, seat: Seat) -> Outlet:
        assert spec.log_dir is not None, "the output of a detached job goes to files"
        return Outlet.file(spec.log_dir / seat.log_name)


class TakenOver(Detached):
    """Holds a detached job whose keeper was killed."""

    def __init__(self, found: FoundJob) -> None:
        self._found = found
        self.coordinator_port = split_address(found.facts.coordinator)[1]

    def directory(self, environ: Mapping[str, str], job_id: str) -> JobDirectory:
        del environ, job_id
        return JobDirectory.take_over(self._found.directory)

    def secret_file(self, directory: JobDirectory) -> Path:
        del directory
        return Path(self._found.facts.secret_file)

    def master_port(self, held: ExitStack) -> int:
        del held  # rank 0 may listen there, so it cannot be held again
        return self._found.facts.master_port
