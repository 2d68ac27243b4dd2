"""Which directory keeps a run: --log-dir, else PACELINE_LOG_DIR, else runs/<id>; "none" for none.

    runs/20261117-071204-train-3f2a/      date and time, the script, the job's id
        config.json     what was asked for, and by whom: the command line, the environment ...
        events.jsonl    everything that happened (telemetry/record.py)
        rank-0.log ...  what each process printed
        tb/             for `tensorboard --logdir runs`

With --log-dir DIR these files are in DIR itself.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.config import requested_log_dir
from paceline.errors import ConfigError
from paceline.launcher.elastic.facts import job_name
from paceline.launcher.spec import RunSpec

ROOT = Path("runs")
OFF = "none"  # a directory of that name is ./none
_LONGEST_NAME = 100


def run_name(spec: RunSpec, job_id: str) -> str:
    """Name a run: "20261117-071204-train-3f2a". Runs are listed in the order of their start."""
    name = re.sub(r"[^\w.+-]", "_", job_name(spec, job_id))
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{name[-_LONGEST_NAME:]}"


def run_directory(spec: RunSpec, environ: Mapping[str, str], job_id: str) -> Path | None:
    """Choose where a run is kept, or None. Nothing is made yet."""
    if spec.log_dir is not None and str(spec.log_dir) != OFF:
        return spec.log_dir
    if spec.is_detached and spec.log_dir is not None:
        raise ConfigError(
            "--log-dir none with --detach: what a job in the background prints has to go to files;"
            " leave out --log-dir, or name a directory"
        )
    exported = requested_log_dir(environ)
    if exported not in (None, OFF) and spec.log_dir is None:
        return Path(exported or "")
    if (spec.log_dir is not None or exported == OFF) and not spec.is_detached:
        return None
    return ROOT / run_name(spec, job_id)
