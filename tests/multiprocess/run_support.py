"""Start `paceline run` the way a user does, and look at what is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.launcher.machine import cgroup_dirs

COMMAND = [sys.executable, "-m", "paceline"]


class Workbench:
    """A directory for scripts, with a runtime directory of its own that must end up empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runtime = path / "runtime"
        self.runtime.mkdir(mode=0o700)
        path_list = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        self.environ = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.runtime),
            "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in path_list if p),
        }

    def script(self, text: str, name: str = "script.py") -> str:
        (self.path / name).write_text(textwrap.dedent(text))
        return name

    def run(self, *arguments: str, **more_env: str) -> subprocess.CompletedProcess[str]:
        """Run to the end; output that is no UTF-8 would be an error of ours."""
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.path,
            env={**self.environ, **more_env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run in the background; the launcher is gone when the block ends."""
        launcher = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.path,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with launcher:
            try:
                yield launcher
            finally:
                if launcher.poll() is None:
                    launcher.send_signal(signal.SIGTERM)

    def wait_for_files(self, *names: str) -> list[str]:
        """Wait until scripts have written these files; return what is in them."""
        paths = [self.path / name for name in names]

        def are_written() -> bool:
            return all(p.exists() and p.read_text().endswith("\n") for p in paths)

        wait_until(are_written, within_s=60.0)  # torch may be imported many times at once
        return [p.read_text().strip() for p in paths]

    def left_behind(self) -> list[str]:
        return sorted(p.name for p in self.runtime.glob("paceline-*-job-*"))


def wait_until(is_true: Callable[[], bool], within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_alive(pid: int | str) -> bool:
    """Tell whether a process runs; a zombie that nobody has reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def memory_cgroup(limit_bytes: int, name: str = "test") -> Path | None:
    """Make a control group beside ours, in either version; None where that is not allowed."""
    for directory in cgroup_dirs("memory"):
        group = directory / f"paceline-{name}-{os.getpid()}"
        try:
            group.mkdir()
            for name in ("memory.max", "memory.limit_in_bytes"):
                if (group / name).exists():
                    (group / name).write_text(str(limit_bytes))
                    return group
            group.rmdir()
        except OSError:
            continue
    return None
