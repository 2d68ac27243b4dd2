"""The job of a story: a real `paceline run`, what it prints, who is in it, how far it is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import story_inquiry
import story_processes
from story_diary import Diaries, Worker

SCRIPT = Path(__file__).with_name("story_script.py")
COMMAND = (sys.executable, "-m", "paceline")
START_S = 60.0  # many processes import torch at once
# A busy machine is no fault of the job: PACELINE_STORY_PATIENCE=3 makes all limits 3 times longer.
# Beside other tests (pytest -n) it is busy.
_ALONE, _BESIDE_OTHERS = "1", "6"
PATIENCE = float(
    os.environ.get("PACELINE_STORY_PATIENCE")
    or (_BESIDE_OTHERS if "PYTEST_XDIST_WORKER" in os.environ else _ALONE)
)
_LOOK_S = 0.02
_STEPS_TO_END = 40  # all must hear of the end before they are there


@dataclass(frozen=True)
class Line:
    """Something that the launcher printed, and when."""

    at_s: float
    text: str


class Job:
    """Starts the processes and watches them; nothing survives `close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runtime, self.diaries = directory / "runtime", directory / "diaries"
        self.runtime.mkdir(mode=0o700)
        self.diaries.mkdir()
        self.environ = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)}
        self.prefix: Sequence[str] = ()  # a command in front of the launcher's
        self.lines: list[Line] = []
        self._diaries = Diaries(self.diaries)
        self._launcher: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    # -- start and end --------------------------------------------------------------------------

    def start(
        self,
        *options: str,
        env: Mapping[str, str] | None = None,
        **arguments: object,
    ) -> None:
        """Start the job; `pause=0` becomes --pause 0 of the script."""
        of_script = [w for k, v in arguments.items() for w in (f"--{k}", str(v))]
        of_script += ["--diary", str(self.diaries)]
        self._launch("run", *options, str(SCRIPT), *of_script, env=env)

    def attach(self) -> None:
        """Follow a detached job from now on."""
        self._launch("attach")

    def _launch(self, *words: str, env: Mapping[str, str] | None = None) -> None:
        if self._launcher is not None:
            self._launcher.wait(10 * PATIENCE)  # it was killed, and is still to be reaped
        self._launcher = subprocess.Popen(
            [*self.prefix, *COMMAND, *words],
            cwd=self.directory,
            env={**self.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, args=(self._launcher,), daemon=True)
        self._reader.start()

    def _read(self, launcher: subprocess.Popen[bytes]) -> None:
        assert launcher.stdout is not None
        with launcher.stdout as output:
            for data in output:
                self.lines.append(Line(time.monotonic(), data.decode(errors="replace").rstrip()))

    def command(self, *words: str, timeout_s: float = 30.0) -> str:
        """Run `paceline WORDS` beside the job, such as scale or status; return what it prints."""
        done = subprocess.run(
            [*COMMAND, *words],
            cwd=self.directory,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s * PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"paceline {words}: {done.stdout}{done.stderr}{self}"
        return done.stdout + done.stderr

    def finish(self) -> None:
        """Have all workers end in good order, some steps from now."""
        draft = self.diaries / "finish-draft"
        draft.write_text(str(self.last_step() + _STEPS_TO_END))
        draft.rename(self.diaries / "finish")

    def wait_for_end(self, within_s: float, *, of_all: bool = True) -> int:
        """Wait for the launcher, and for all that it started; return its exit code."""
        launcher, reader = self._launcher, self._reader
        assert launcher is not None and reader is not None
        self.until(lambda: launcher.poll() is not None, within_s, "the end of the launcher")
        reader.join(10 * PATIENCE)
        self._launcher = None
        if of_all:
            self.until(lambda: not self.processes(), 5, "the end of all processes")
        return launcher.returncode

    def close(self) -> None:
        """End whatever is left of the job."""
        launcher = self._launcher
        if launcher is not None and launcher.poll() is None:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(10)
            launcher.kill()
            launcher.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- who ------------------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Return all living processes of the job: they have its directory in their environ."""
        return story_processes.having({f"XDG_RUNTIME_DIR={self.runtime}"})

    def pid(self, who: str) -> int:
        """Find a process by name: "worker 2", "server 0", "coordinator", "launcher"."""
        found = self.pid_or_none(who)
        assert found is not None, f"there is no {who}{self}"
        return found

    def pid_or_none(self, who: str) -> int | None:
        root = self._launcher.pid if self._launcher is not None else self.supervisor()
        found = story_processes.find(who, root, self.runtime)
        return found[-1] if found else None

    def supervisor(self) -> int:
        """Return the pid of the launcher, or of the supervisor of a detached job."""
        job = story_inquiry.facts(self.runtime)
        assert job is not None, f"no job is written down{self}"
        return job.supervisor

    def is_complete(self, workers: int, servers: int) -> bool:
        """Say whether the job has all its members and copies, and nothing is changing."""
        return story_inquiry.is_complete(self.runtime, workers, servers)

    # -- how far --------------------------------------------------------------------------------

    def workers(self) -> list[Worker]:
        """Return the diaries of all workers that ever were."""
        return self._diaries.read()

    def newest(self, number: int) -> Worker:
        """Return the diary of whoever is worker NUMBER now."""
        return [worker for worker in self.workers() if worker.number == number][-1]

    def last_step(self) -> int:
        return max((w.steps[-1].number for w in self.workers() if w.steps), default=0)

    def world_size(self) -> int:
        """How many workers took part in the newest step."""
        done = [w.steps[-1] for w in self.workers() if w.steps]
        return max(done, key=lambda step: step.at_s).world_size if done else 0

    def wait_for_step(self, step: int, within_s: float = START_S) -> None:
        """Wait until some worker has done that step."""
        self.until(lambda: self.last_step() >= step, within_s, f"step {step}")

    def until(self, is_true: Callable[[], bool], within_s: float, what: str = "it") -> None:
        """Wait until something is true."""
        deadline_s, has_ended = time.monotonic() + within_s * PATIENCE, False
        while not is_true():
            if not has_ended and self._launcher is not None and self._launcher.poll() is not None:
                has_ended = True  # but its last lines may still be on their way
                deadline_s = min(deadline_s, time.monotonic() + 5 * PATIENCE)
            assert time.monotonic() < deadline_s, f"{what} did not come in {within_s:g} s{self}"
            time.sleep(_LOOK_S)
