"""The resources of a job: its directory, secret, ports, guard, and the output of its processes.

A job in the foreground ends with its launcher: its directory is removed, a guard ends its processes
if the launcher is killed, and their output goes through pipes. A detached job outlives its
supervisor: its directory stays, it has no guard, and its processes write to files. If its
supervisor is killed, another one ADOPTS the job, with these resources and its processes.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from paceline.control.transport.auth import create_secret_file
from paceline.control.transport.sockets import split_address
from paceline.launcher.environment import JobAddresses
from paceline.launcher.job_directory import JobDirectory
from paceline.launcher.job_registry import (
    FoundJob,
    JobFacts,
    ProcessRecord,
    facts_of,
    recorded_processes,
    write_facts,
)
from paceline.launcher.processes.guard import Guard, Sessions
from paceline.launcher.processes.process import ProcessOutput
from paceline.launcher.spec import RunSpec
from paceline.runtime.config import runtime_dir
from paceline.runtime.process_names import ProcessName


def hold_port(host: str = "127.0.0.1") -> socket.socket:
    """Bind a free port without listening; close the socket at the end of the job.

    The port is MASTER_PORT, for scripts that open torch's own store. A free port that is merely
    looked up can be taken by another job a moment later, so the launcher keeps it bound. With
    SO_REUSEADDR on both sides the script can still listen there, and the kernel gives the number to
    no process that asks for any free port.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


class JobResources:
    """The resources of one job; `adopted` is a detached job whose supervisor was killed."""

    def __init__(
        self, spec: RunSpec, environ: Mapping[str, str], job_id: str, adopted: FoundJob | None
    ) -> None:
        self._spec, self._environ, self._job_id, self._adopted = spec, environ, job_id, adopted
        self.coordinator_port = 0  # any free port
        if adopted is not None:
            self.coordinator_port = split_address(adopted.facts.coordinator)[1]
        self.directory: Path
        self.secret_file: Path
        self.master_port: int
        self.guard: Sessions
        self.facts: JobFacts

    def open(self, held: ExitStack) -> None:
        """Create or take over everything; raises LaunchError. It is held while `held` is open."""
        if self._adopted is not None:
            facts = self._adopted.facts
            directory = held.enter_context(JobDirectory.take_over(self._adopted.directory))
            self.secret_file, self.master_port = Path(facts.secret_file), facts.master_port
        else:
            directory = held.enter_context(JobDirectory(Path(runtime_dir(self._environ))))
            self.secret_file = create_secret_file(directory.path)
            self.master_port = held.enter_context(hold_port()).getsockname()[1]
            if self._spec.is_detached:
                directory.keep(self._job_id)
        self.directory = directory.path
        is_guarded = not self._spec.is_detached
        self.guard = Guard(self._job_id, directory.path) if is_guarded else Sessions()

    def publish(self, coordinator: str) -> JobAddresses:
        """Write job.json, with which commands find the job; return the job's addresses."""
        addresses = JobAddresses(
            job_id=self._job_id,
            coordinator=coordinator,
            secret_file=str(self.secret_file),
            master_port=self.master_port,
        )
        self.facts = facts_of(self._spec, addresses)
        self._write_facts()
        return addresses

    def show_hosts(self, states: Mapping[str, str]) -> None:
        """Write the states of hosts into job.json: of those that leave."""
        names = [one.partition(" ")[0] for one in self.facts.hosts]
        hosts = tuple(f"{one} ({states[one]})" if one in states else one for one in names)
        self.facts = msgspec.structs.replace(self.facts, hosts=hosts)
        self._write_facts()

    def _write_facts(self) -> None:
        is_detached = self._spec.is_detached
        facts = self.facts.with_spec(self._spec, self._environ) if is_detached else self.facts
        write_facts(self.directory, facts)

    def output(self, name: ProcessName) -> ProcessOutput:
        """Return where a process writes its output."""
        if not self._spec.is_detached:
            return ProcessOutput.pipes()
        assert self._spec.log_dir is not None, "the output of a detached job goes to files"
        return ProcessOutput.file(self._spec.log_dir / name.log_name)

    def adopted_processes(self) -> Sequence[ProcessRecord] | None:
        """Return the processes that a former supervisor started; None if there was none."""
        return None if self._adopted is None else recorded_processes(self.directory)
