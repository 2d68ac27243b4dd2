"""Jobs in the background: `paceline run --detach`, and following one with `paceline attach`.

A supervisor process runs the job (launcher/elastic/job.py) in a session of its own, and writes what
would be on the terminal to job.log. `attach` prints that file, and then what is added to it, like
`tail -f`. If the supervisor was killed, `attach` first starts another one.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.errors import ConfigError, LaunchError, PacelineError
from paceline.launcher.elastic.job import ElasticJob
from paceline.launcher.job import LocalJob
from paceline.launcher.job_registry import FoundJob, find_job, job_name
from paceline.launcher.run_directory import begin_record
from paceline.launcher.spec import RunSpec
from paceline.observe.display.display import Display
from paceline.observe.record.files import LogFiles
from paceline.observe.record.recorder import RunRecorder
from paceline.runtime.config import inherited_environ
from paceline.runtime.console import say
from paceline.runtime.machine import process_start

JOB_LOG, EXIT_CODE = "job.log", "exit-code"
_POLL_S = 0.1
_TAIL_BYTES = 4096


def detach(spec: RunSpec, job_id: str) -> int:
    """Start a job in the background; return when its processes have been started."""
    name = job_name(spec, job_id)
    assert spec.log_dir is not None, "the output of a detached job goes to files"
    directory = spec.log_dir.absolute()
    spec = replace(spec, log_dir=directory)
    _make_files(spec, directory)
    environ = inherited_environ()
    start_supervisor(
        spec,
        lambda: begin_record(spec, environ),
        lambda display: ElasticJob(spec, environ, display, job_id),
    )
    say(f"job {name} runs in the background; its output is in {spec.log_dir}")
    say(f"follow it with: paceline attach {name}")
    sys.stdout.write(f"{name}\n")
    return 0


def _make_files(spec: RunSpec, directory: Path) -> None:
    """Create the files to which the processes of the job append their output."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        LogFiles(directory).begin(spec.process_names)
        (directory / EXIT_CODE).unlink(missing_ok=True)
        (directory / JOB_LOG).write_bytes(b"")
    except OSError as error:
        raise ConfigError(
            f"--log-dir {directory}: {error.strerror}; a job in the background needs a writable"
            " directory"
        ) from error


def start_supervisor(
    spec: RunSpec,
    begin: Callable[[], RunRecorder | None],
    make: Callable[[Display], LocalJob],
) -> None:
    """Run a job in a new process in the background; raises LaunchError if it does not start.

    The new process calls `begin` and `make`.
    """
    assert spec.log_dir is not None
    log = spec.log_dir / JOB_LOG
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(read_end)
        os.setsid()
        if os.fork() == 0:
            _supervise(spec, begin, make, log, write_end)
        os._exit(0)
    os.close(write_end)
    os.waitpid(between, 0)
    with open(read_end, "rb") as pipe:
        is_up = pipe.read() == b"up"
    if not is_up:
        words = log.read_text(errors="replace").strip().splitlines()[-20:]
        raise LaunchError("\n".join(["the job did not start:", *words]))


def _supervise(
    spec: RunSpec,
    begin: Callable[[], RunRecorder | None],
    make: Callable[[Display], LocalJob],
    log: Path,
    write_end: int,
) -> None:
    """In the supervisor: write output to the log and run the job; ends the process."""
    from paceline.cli.run import supervise

    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)

    unsent = [write_end]  # once: after a restart the descriptor is another file's

    def notify() -> None:
        while unsent:
            _notify_started(unsent.pop())

    def made(display: Display) -> LocalJob:
        job = make(display)
        job.on_started = notify
        return job

    code = 1
    try:
        code = supervise(spec, begin(), made)
        (log.parent / EXIT_CODE).write_text(f"{code}\n")
    except PacelineError as error:
        os.write(2, f"paceline: error: {error}\n".encode())
    except Exception:  # a bug of Paceline: no caller would show it
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _notify_started(write_end: int) -> None:
    with suppress(OSError):  # the command that started this process may be gone
        os.write(write_end, b"up")
    os.close(write_end)


def attach(name: str | None) -> int:
    """Follow a detached job to its end and return its exit code; Ctrl-C only stops following."""
    found = find_job(name, inherited_environ())
    facts = found.facts
    if not facts.is_detached:
        raise LaunchError(
            f"job {facts.name} runs in the foreground (process {facts.supervisor}); attach works"
            " only for jobs that were started with --detach"
        )
    if not found.is_supervised:
        replace_supervisor(found)
        found = find_job(facts.job_id, inherited_environ())
    try:
        return _follow(found)
    except KeyboardInterrupt:
        say(f"no longer attached; job {facts.name} continues")
        return 0


def replace_supervisor(found: FoundJob) -> None:
    """Start another supervisor for a job whose supervisor was killed."""
    facts = found.facts
    os.chdir(facts.cwd)
    spec = facts.run_spec()
    start_supervisor(
        spec,
        lambda: begin_record(spec, facts.environ, is_resumed=True),
        lambda display: ElasticJob(spec, facts.environ, display, facts.job_id, found),
    )
    say(f"the supervisor of job {facts.name} was gone; another one has taken over")


def _follow(found: FoundJob) -> int:
    """Print job.log until the job has ended; return its exit code."""
    log_dir, supervisor = Path(found.facts.log_dir), found.facts.supervisor
    born = process_start(supervisor)
    with open(log_dir / JOB_LOG, "rb") as log:
        size = os.fstat(log.fileno()).st_size
        if size > _TAIL_BYTES:
            log.seek(size - _TAIL_BYTES)
            log.readline()
        while True:
            is_last = born is None or process_start(supervisor) != born
            while data := log.read(1 << 16):
                sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            if is_last:
                break
            time.sleep(_POLL_S)
    try:
        return int((log_dir / EXIT_CODE).read_text())
    except (OSError, ValueError):
        name = found.facts.name
        raise LaunchError(
            f"the supervisor of job {name} was killed; `paceline attach {name}` starts another one"
        ) from None
