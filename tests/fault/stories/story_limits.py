"""Control groups (version 1) for stories: memory, a share of a core, a number of processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def control_group(kind: str, **settings: object) -> Iterator[Path]:
    """Make a control group, for example `control_group("pids", max=20)`; empty it at the end."""
    base = ROOT / kind
    if os.geteuid() != 0 or not base.is_dir():
        pytest.skip(f"needs root and control groups of version 1 ({kind})")
    path = base / f"paceline-story-{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir()
    try:
        for name, value in settings.items():
            (path / f"{kind}.{name}").write_text(str(value))
        yield path
    finally:
        deadline_s = time.monotonic() + 10
        while True:
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (base / "cgroup.procs").write_text(pid)
            try:
                path.rmdir()
                break
            except OSError:  # what was killed in it may not be gone yet
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)


def enter(group: Path, pid: int) -> None:
    """Move a process into a control group."""
    (group / "cgroup.procs").write_text(str(pid))
