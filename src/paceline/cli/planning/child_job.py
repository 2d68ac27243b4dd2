"""Start `paceline run` as a child for a while, and stop it as Ctrl-C does.

A planning command measures jobs. Nothing of a job stays but its directory, which has the record of
the run and, in the file `output`, what the launcher printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.errors import UsageError
from paceline.runtime.config import inherited_environ
from paceline.runtime.console import say

STOPPED = (0, -signal.SIGINT, 130)  # exit codes of a job that was not at fault
_OWN = ("PACELINE_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_END_S = 15.0
_QUIET_S, _EVERY_S = 2.0, 10.0

Child = subprocess.Popen[bytes]


def start_job(
    words: Sequence[str],
    directory: Path,
    *,
    environ: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Child:
    """Start `paceline run WORDS` with its record in `directory`; `prefix` begins the command."""
    directory.mkdir(parents=True)
    command = [*prefix, sys.executable, "-m", "paceline", "run", "--log-dir", str(directory)]
    clean = {key: value for key, value in inherited_environ().items() if not key.startswith(_OWN)}
    with open(directory / "output", "wb") as output:
        return subprocess.Popen(
            [*command, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean, **(environ or {})},
            start_new_session=True,  # Ctrl-C is for this process, which stops the job
        )


def stop_jobs(started: Sequence[Child]) -> None:
    """Stop jobs and wait for their end; a job that does not end is killed."""
    for one in started:
        if one.poll() is None:
            one.send_signal(signal.SIGINT)
    for one in started:
        _wait_or_kill(one)


def _wait_or_kill(one: Child) -> None:
    try:
        one.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()


class Progress:
    """Reports what a command waits for: after 2 s, and then every 10 s."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._next_s = time.monotonic() + _QUIET_S

    def show(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _EVERY_S
            say(f"{self._what}: {text}")


@contextlib.contextmanager
def running(child: Child) -> Iterator[Child]:
    """Stop the job when the block is left."""
    try:
        yield child
    finally:
        stop_jobs([child])


def last_output(directory: Path, lines: int = 8) -> str:
    """Return what the script printed last; what the launcher printed if it printed nothing."""
    for name in ("rank-0.log", "output"):
        path = directory / name
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if text.strip():
            return "\n".join(text.strip().splitlines()[-lines:])
    return ""


def require_script(script: str, *, is_module: bool) -> None:
    """Raise UsageError if there is no such script."""
    if not is_module and not Path(script).is_file():
        raise UsageError(f"there is no script {script!r}; name a Python file, or a module with -m")


def require_training(
    name: str, child: Child, directory: Path, steps: int, least: int, who: str
) -> None:
    """Raise UsageError if a job took fewer than `least` steps: why, with what it printed."""
    if steps >= least:
        return
    if child.returncode not in STOPPED:
        raise UsageError(
            f"{name} failed {who}, with exit code {child.returncode}; it printed last:\n"
            f"{last_output(directory)}"
        )
    events = directory / "events.jsonl"
    recorded = events.read_text(encoding="utf-8", errors="replace") if events.is_file() else ""
    if not steps and '"settled"' not in recorded:
        raise UsageError(
            f"{name} never called pl.distribute, so there is no step to measure; it must train with"
            " Paceline (docs/guides/first-steps.md)"
        )
    if not steps:
        raise UsageError(
            f"{name} called pl.distribute but took no optimizer step: it trains on nothing; is its"
            " data empty?"
        )
    raise UsageError(f"{name} ended after {steps} steps; {least} are needed: let it train longer")
