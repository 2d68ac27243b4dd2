"""`paceline run`: runs a job, shows and records it, and returns its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

from paceline.cli.detach import detach
from paceline.launcher.elastic.event_log import stamped
from paceline.launcher.elastic.job import ElasticJob
from paceline.launcher.job import LocalJob
from paceline.launcher.job_registry import new_job_id
from paceline.launcher.outcome import JobOutcome, state_words
from paceline.launcher.run_directory import begin_record, run_directory
from paceline.launcher.spec import RunSpec
from paceline.observe.display.display import Display, choose_screen
from paceline.observe.display.lines import printable
from paceline.observe.display.summary import ClosingSummary
from paceline.observe.record.recorder import RunRecorder
from paceline.observe.record.trace_file import require_directory
from paceline.observe.telemetry.events import RunEnded
from paceline.observe.telemetry.traffic import describe_compression, describe_traffic
from paceline.runtime.config import inherited_environ, set_encryption
from paceline.runtime.console import say

# After Ctrl-C: how long to wait for a stopped terminal or a slow reader.
_PATIENCE_S = 1.5
# Of an elastic job that loses processes during setup.
_MAX_STARTS = 4
# Loggers that print through the display: Paceline's own, and failed tasks of the loop.
_LOGGERS = ("paceline", "asyncio")


class _DisplayHandler(logging.Handler):
    """Prints records through the display, the only writer to the terminal."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.say(f"paceline: {self.format(record)}")


def run(spec: RunSpec) -> int:
    """Run a job and return its exit code; raises PacelineError."""
    set_encryption(spec.encryption_in(inherited_environ()))
    environ, job_id = inherited_environ(), new_job_id()
    spec = replace(spec, log_dir=run_directory(spec, environ, job_id))
    require_directory(spec.trace_in(environ), spec.log_dir)
    if spec.is_detached:
        return detach(spec, job_id)
    kind = LocalJob if spec.elastic is None else ElasticJob
    job_ids = chain((job_id,), repeat(""))  # each restart gets a new id
    return supervise(
        spec,
        begin_record(spec, environ),
        lambda display: kind(spec, environ, display, next(job_ids)),
    )


def supervise(
    spec: RunSpec, recorder: RunRecorder | None, make: Callable[[Display], LocalJob]
) -> int:
    """Run a job in this process, show and record it, and return its exit code."""
    display = Display(choose_screen(), recorder)
    handler = _DisplayHandler(display)
    before = {name: logging.getLogger(name).handlers for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).handlers = [handler]
    patience_s: float | None = _PATIENCE_S
    try:
        job, outcome = _run_job(make, display)
        most = spec.elastic.restarts if spec.elastic is not None else 0
        for count in range(1, most + 1):
            if not job.may_start_again(outcome):
                break
            display.say(_restart_line(outcome, f"restart {count} of {most}"))
            former = job
            job, outcome = _run_job(make, display)
            job.take_over_trace(former)
        _print_end(job, outcome, display, spec, recorder)
        if outcome.interrupted_by is None:
            patience_s = None  # a slow reader gets every line, as from any other command
    finally:
        for name, handlers in before.items():
            logging.getLogger(name).handlers = handlers
        if recorder is not None:
            recorder.close(patience_s=_PATIENCE_S)  # if the job did not start
        was_shown = _close(display, patience_s)
    if not was_shown:
        os._exit(outcome.exit_code)
    return outcome.exit_code


def _run_job(make: Callable[[Display], LocalJob], display: Display) -> tuple[LocalJob, JobOutcome]:
    for _ in range(_MAX_STARTS - 1):
        job = make(display)
        outcome = asyncio.run(job.run())
        if not job.was_lost_at_start(outcome):
            return job, outcome
        lost = outcome.lost[0] if outcome.lost else outcome.first
        name = f"{lost.name.role} {lost.name.number} ({lost.status})" if lost else "a process"
        display.say(stamped(f"{name} was lost before the first step: restarting all processes"))
    job = make(display)
    return job, asyncio.run(job.run())


def _restart_line(outcome: JobOutcome, which: str) -> str:
    """Return a line about a restart of all processes, and the loss that caused it."""
    lost = outcome.lost[-1]
    name = f"{lost.name.role} {lost.name.number} ({lost.status})"
    words = f"too few workers are left after the loss of {name}: restarting all processes from the"
    return stamped(f"{words} last checkpoint ({which})")


def _close(display: Display, patience_s: float | None) -> bool:
    try:
        return display.close(timeout_s=patience_s)
    except KeyboardInterrupt:  # the job is over and cleaned up; only its output is held up
        os._exit(128 + signal.SIGINT)


def _print_end(
    job: LocalJob,
    outcome: JobOutcome,
    display: Display,
    spec: RunSpec,
    recorder: RunRecorder | None,
) -> None:
    for result in outcome.results:
        job.set_state(result.name, state_words(result, outcome.first))
    picture, state = job.picture(), job.board.state
    traffic, compression = sorted(state.traffic.items()), sorted(state.compression.items())
    closing = ClosingSummary(
        command=shlex.join((Path(spec.target).name, *spec.arguments)),
        board=job.board,
        sentences=[
            *describe_traffic([one for _, one in traffic]),
            *describe_compression([one for _, one in compression]),
        ],
    )
    display.summary(closing.lines)
    history = job.history_lines()
    if picture is not None or state.tables or history or outcome.interrupted_by is not None:
        display.say(outcome.closing_line())
        if recorder is not None and recorder.is_writing:
            say(f"logs, events and TensorBoard files are in {spec.log_dir}")
    is_planned = spec.max_wire is not None or (spec.pace is not None and spec.pace.first.is_auto)
    if is_planned and not state.has_model and outcome.exit_code == 0:
        option = f"--pace {spec.pace}" if spec.max_wire is None else f"--max-wire {spec.max_wire}"
        display.say(
            f"paceline: {option} had no effect: the script never called pl.distribute"
            " (docs/guides/first-steps.md)"
        )
    trace = job.write_trace(spec.log_dir)
    if trace is not None:
        say(printable(trace.encode(errors="backslashreplace")))
    for line in history:
        display.say(printable(line.encode()))
    for line in outcome.late_failures():
        display.say(line)
    for line in _close_record(outcome, recorder):
        display.say(line)
    has_logs = spec.is_detached or (recorder is not None and recorder.is_writing)
    failure = outcome.failure_text(spec.log_dir if has_logs else None)
    if failure is not None:
        display.say(failure)


def _close_record(outcome: JobOutcome, recorder: RunRecorder | None) -> list[str]:
    """Write the last line of the record; return lines about what could not be recorded."""
    if recorder is None:
        return []
    ended = RunEnded(outcome.exit_code, round(outcome.wall_s, 3), outcome.closing_line())
    return recorder.close(ended, patience_s=None if outcome.interrupted_by is None else _PATIENCE_S)
