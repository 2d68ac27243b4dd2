"""The run directory: where the record of a run is kept, and the first line of events.jsonl.

The directory: --log-dir, else PACELINE_LOG_DIR, else runs/<id>; "none" for none.

    runs/20261117-071204-train-3f2a/      date and time, the script, the job's id
        config.json     every setting and its origin: the command line, the environment ...
        events.jsonl    everything that happened (observe/telemetry/file_formats.py)
        rank-0.log ...  what each process printed
        tb/             for `tensorboard --logdir runs`

With --log-dir DIR these files are in DIR itself.
"""

from __future__ import annotations

import re
import shlex
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from paceline.errors import ConfigError
from paceline.launcher.job_registry import job_name
from paceline.launcher.run_configuration import configuration, encode
from paceline.launcher.spec import RunSpec
from paceline.observe.record.files import RunFiles
from paceline.observe.record.prometheus import Metrics
from paceline.observe.record.recorder import RunRecorder
from paceline.observe.record.sampling import Sampler
from paceline.observe.telemetry import clock
from paceline.observe.telemetry.events import RunStarted
from paceline.observe.telemetry.file_formats import EVENTS_FILE, EventReader
from paceline.runtime.config import requested_log_dir
from paceline.runtime.machine import installed_version

ROOT = Path("runs")
OFF = "none"  # write ./none for a directory of that name
_LONGEST_NAME = 100


def run_name(spec: RunSpec, job_id: str) -> str:
    """Return the name of a run: "20261117-071204-train-3f2a". Names sort by start time."""
    name = re.sub(r"[^\w.+-]", "_", job_name(spec, job_id))
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{name[-_LONGEST_NAME:]}"


def run_directory(spec: RunSpec, environ: Mapping[str, str], job_id: str) -> Path | None:
    """Return where a run is kept, or None. Creates nothing."""
    if spec.log_dir is not None and str(spec.log_dir) != OFF:
        return spec.log_dir
    if spec.is_detached and spec.log_dir is not None:
        raise ConfigError(
            "--log-dir none with --detach: the output of a job in the background goes to files;"
            " leave out --log-dir, or name a directory"
        )
    exported = requested_log_dir(environ)
    if exported not in (None, OFF) and spec.log_dir is None:
        return Path(exported or "")
    if (spec.log_dir is not None or exported == OFF) and not spec.is_detached:
        return None
    return ROOT / run_name(spec, job_id)


def begin_record(
    spec: RunSpec, environ: Mapping[str, str], *, is_resumed: bool = False
) -> RunRecorder | None:
    """Create the recorder of a run in `spec.log_dir`; None if nothing is kept.

    Writes nothing yet, but opens --metrics-port; raises ConfigError if the port is taken.
    """
    metrics = None if spec.metrics_port is None else Metrics(spec.metrics_port)
    directory, cwd = spec.log_dir, Path.cwd()
    if directory is None:
        return None if metrics is None else RunRecorder(None, Sampler(spec.process_names), metrics)
    files = RunFiles(
        directory,
        spec.process_names,
        lambda decided: encode(configuration(spec, environ, directory, cwd, decided)),
        keeps_logs=not spec.is_detached,  # the processes of a detached job write their own
        is_resumed=is_resumed,
    )
    started = _started(directory) if is_resumed else None
    clock_s = clock.now_s() if started is None else started.clock_s
    recorder = RunRecorder(files, Sampler(spec.process_names), metrics, clock_s=clock_s)
    if started is None:
        recorder.record(_first_line(spec, environ, directory, clock_s))
    return recorder


def _started(directory: Path) -> RunStarted | None:
    """Return the first line of a run that is in progress."""
    with suppress(OSError):
        line = next(EventReader(directory / EVENTS_FILE).lines(), None)
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
        version=installed_version("paceline") or "",
        clock_s=clock_s,
    )


def _command(spec: RunSpec) -> str:
    """Return the command without the values of --env: some are passwords."""
    words = ["paceline", "run", "-n", str(spec.num_workers)]
    if spec.num_servers:
        words += ["-s", str(spec.num_servers)]
    options = (("--pace", spec.pace), ("--max-wire", spec.max_wire), ("--mesh", spec.mesh))
    for option, value in options:
        words += [] if value is None else [option, str(value)]
    return shlex.join([*words, *["-m"] * spec.is_module, spec.target, *spec.arguments])


def _valid(text: str) -> str:
    """Escape arguments that are not UTF-8, which JSON requires."""
    return text.encode("utf-8", errors="backslashreplace").decode()
