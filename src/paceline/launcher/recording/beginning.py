"""How the record of a run begins: what is written, where, and what its first line says."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from paceline.launcher.recording.configuration import configuration, encode, version_of
from paceline.launcher.recording.files import RunFiles
from paceline.launcher.recording.prometheus import Metrics
from paceline.launcher.recording.recorder import Recorder
from paceline.launcher.recording.sampling import Sampler
from paceline.launcher.spec import RunSpec
from paceline.telemetry import clock
from paceline.telemetry.record import EVENTS_FILE, Reading, RunStarted


def begin_record(
    spec: RunSpec, environ: Mapping[str, str], *, is_resumed: bool = False
) -> Recorder | None:
    """Make the recorder of a run whose directory was chosen; None when nothing is to be kept.

    Nothing is written yet, only a port is taken; ConfigError when that is not possible.
    """
    metrics = None if spec.metrics_port is None else Metrics(spec.metrics_port)
    directory, cwd = spec.log_dir, Path.cwd()
    if directory is None:
        return None if metrics is None else Recorder(None, Sampler(spec.seats), metrics)
    files = RunFiles(
        directory,
        spec.seats,
        lambda settled: encode(configuration(spec, environ, directory, cwd, settled)),
        keeps_logs=not spec.is_detached,  # whose processes write to their files themselves
        is_resumed=is_resumed,
    )
    started = _started(directory) if is_resumed else None
    clock_s = clock.now_s() if started is None else started.clock_s
    recorder = Recorder(files, Sampler(spec.seats), metrics, clock_s=clock_s)
    if started is None:
        recorder.record(_first_line(spec, environ, directory, clock_s))
    return recorder


def _started(directory: Path) -> RunStarted | None:
    """Return the first line of a run that is under way."""
    with suppress(OSError):
        line = next(Reading(directory / EVENTS_FILE).lines(), None)
        if line is not None and isinstance(line.event, RunStarted):
            return line.event
    return None


def _first_line(
    spec: RunSpec, environ: Mapping[str, str], directory: Path, clock_s: float
) -> RunStarted:
    return RunStarted(
        run=_valid(directory.absolute().name),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=_valid(_command(spec)),
        script=_valid(spec.target),
        workers=spec.num_workers,
        servers=spec.num_servers,
        data_workers=sum(spec.data_workers),
        pace=str(spec.pace_in(environ) or ""),
        mesh=str(spec.mesh_in(environ) or ""),
        host=socket.gethostname(),
        version=version_of("paceline") or "",
        clock_s=clock_s,
    )


def _command(spec: RunSpec) -> str:
    """Write the command for people, without the values of --env: some are passwords."""
    words = ["paceline", "run", "-n", str(spec.num_workers)]
    if spec.num_servers:
        words += ["-s", str(spec.num_servers)]
    for option, value in (("--pace", spec.pace), ("--mesh", spec.mesh)):
        words += [] if value is None else [option, str(value)]
    return shlex.join([*words, *["-m"] * spec.is_module, spec.target, *spec.arguments])


def _valid(text: str) -> str:
    """Arguments may be bytes that are no UTF-8; JSON has to be."""
    return text.encode("utf-8", errors="backslashreplace").decode()
