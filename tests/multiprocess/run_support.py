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
from typing import IO

from paceline.runtime.machine import cgroup_dirs

COMMAND = [sys.executable, "-m", "paceline"]
# Waits end as soon as there is what they wait for. So their limits are for machines on which other
# tests leave a process without a core for seconds.
END_S = 90.0


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
            timeout=END_S,
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
        texts: list[str] = []

        def are_written() -> bool:  # what is read later may be half of the next text
            texts[:] = [p.read_text() if p.exists() else "" for p in paths]
            return all(text.endswith("\n") for text in texts)

        wait_until(are_written, within_s=END_S)  # torch may be imported many times at once
        return [text.strip() for text in texts]

    def left_behind(self) -> list[str]:
        return sorted(p.name for p in self.runtime.glob("paceline-*-job-*"))


def read_until(stream: IO[str] | None, words: str) -> str:
    """Read lines until one has these words; return all of them.

    What follows is to be read from the same stream: `communicate` would miss what it holds.
    """
    assert stream is not None
    said = ""
    while words not in said:
        line = stream.readline()
        assert line, f"it ended without {words!r}: {said}"
        said += line
    return said


def wait_until(is_true: Callable[[], bool], within_s: float = 60.0) -> None:
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
