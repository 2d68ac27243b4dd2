"""A story: a real `paceline run` job, something that happens to it, and what must follow.

    story.start("-n", "3", "--min", "1", steps=200)
    story.wait_for_step(20)
    story.kill("worker 1")
    story.expect_detection(r"worker 1 .* lost: killed by signal 9", within_s=2)
    story.expect_resume(within_s=2)
    story.expect_success()

The last thing that was done to the job (kill, stop, ...) is the FAULT. Detection is the time from
it to the line that names the culprit, resume the time to the next step that counts. Both are
written into the test's report, from which docs/failures.md is made (table.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import story_diary
import story_inquiry
import story_processes

SCRIPT = Path(__file__).with_name("story_script.py")
COMMAND = (sys.executable, "-m", "paceline")
START_S = 60.0  # many processes import torch at once
# A busy machine is no fault of the job: PACELINE_STORY_PATIENCE=3 makes all limits 3 times longer.
PATIENCE = float(os.environ.get("PACELINE_STORY_PATIENCE", "1"))


@dataclass(frozen=True)
class Line:
    """Something that the launcher printed, and when."""

    at_s: float
    text: str


@dataclass
class Figures:
    """What is measured in a story."""

    detection_s: list[float] = field(default_factory=list)
    resume_s: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Story:
    """One job; made by the `story` fixture, which also cleans up."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runtime, self.diaries = directory / "runtime", directory / "diaries"
        self.runtime.mkdir(mode=0o700)
        self.diaries.mkdir()
        self.environ = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)}
        self.prefix: Sequence[str] = ()  # a command in front of the launcher's
        self.figures = Figures()
        self.lines: list[Line] = []
        self.fault_s = 0.0
        self._launcher: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._stopped: set[int] = set()
        self._seen: set[int] = set()  # pids to look for at the end

    # -- what is done ---------------------------------------------------------------------------

    def start(
        self,
        *options: str,
        env: Mapping[str, str] | None = None,
        script: Path = SCRIPT,
        **arguments: object,
    ) -> None:
        """Start the job; `steps=200` becomes --steps 200 of the script."""
        of_script = [w for k, v in arguments.items() for w in (f"--{k}", str(v))]
        if script == SCRIPT:
            of_script += ["--diary", str(self.diaries)]
        self._launch("run", *options, str(script), *of_script, env=env)

    def attach(self) -> None:
        """Follow a detached job from now on."""
        self._launch("attach")

    def _launch(self, *words: str, env: Mapping[str, str] | None = None) -> None:
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

    def command(self, *words: str, timeout_s: float = 30.0) -> str:
        """Run `paceline WORDS` beside the job, such as scale or status; return what it prints."""
        done = subprocess.run(
            [*COMMAND, *words],
            cwd=self.directory,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"paceline {words}: {done.stdout}{done.stderr}{self}"
        return done.stdout + done.stderr

    def kill(self, *who: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to processes: the fault."""
        pids = [self.pid(one) for one in who]
        self.happens()
        for pid in pids:
            os.kill(pid, number)

    def stop(self, who: str) -> int:
        """Stop a process (SIGSTOP); return its pid for `go_on`."""
        pid = self.pid(who)
        self._stopped.add(pid)
        self.happens()
        os.kill(pid, signal.SIGSTOP)
        return pid

    def go_on(self, pid: int) -> bool:
        """Continue a stopped process; False when it is gone."""
        self._stopped.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            return True
        return False

    def tell(self, number: int, order: str) -> None:
        """Have worker NUMBER do something strange after its next step (see story_script.py)."""
        draft = self.diaries / f"draft-{number}"
        draft.write_text(order)
        self.happens()
        draft.rename(self.diaries / f"do-{number}")

    def happens(self) -> None:
        """Note that the fault happens now."""
        self.fault_s = time.monotonic()

    # -- who and how far ------------------------------------------------------------------------

    def pid(self, who: str) -> int:
        """Find a process by name: "worker 2", "server 0", "coordinator", "launcher"."""
        found = self.pid_or_none(who)
        assert found is not None, f"there is no {who}{self}"
        self._seen.add(found)
        return found

    def pid_or_none(self, who: str) -> int | None:
        root = self._launcher.pid if self._launcher is not None else self.supervisor()
        found = story_processes.find(who, root, self.runtime)
        return found[-1] if found else None

    def note_processes(self, *who: str) -> None:
        """Remember processes, to see later that they are gone."""
        for one in who:
            self.pid(one)

    def supervisor(self) -> int:
        """Return the pid of whoever supervises the job: the launcher, or a keeper."""
        job = story_inquiry.facts(self.runtime)
        assert job is not None, f"no job is written down{self}"
        return job.supervisor

    def is_complete(self, workers: int, servers: int) -> bool:
        """Say whether the job has all its members and copies, and nothing is changing."""
        return story_inquiry.is_complete(self.runtime, workers, servers)

    def workers(self) -> list[story_diary.Worker]:
        return story_diary.read(self.diaries)

    def newest(self, number: int) -> story_diary.Worker:
        """Return the diary of whoever is worker NUMBER now."""
        return [worker for worker in self.workers() if worker.number == number][-1]

    def world_size(self) -> int:
        """How many workers took part in the newest step."""
        done = [w.steps[-1] for w in self.workers() if w.steps]
        return max(done, key=lambda step: step.at_s).world_size if done else 0

    def rate_of(self, worker: story_diary.Worker, from_s: float, to_s: float) -> float:
        """Count a worker's steps per second in a time relative to the fault."""
        begin, end = self.fault_s + from_s, self.fault_s + to_s
        return sum(begin <= step.at_s < end for step in worker.steps) / (to_s - from_s)

    def last_step(self) -> int:
        return max((w.steps[-1].number for w in self.workers() if w.steps), default=0)

    def wait_for_step(self, step: int, within_s: float = START_S) -> None:
        """Wait until some worker has done that step."""
        self._wait(lambda: self.last_step() >= step, within_s, f"step {step}")

    def until(self, is_true: Callable[[], bool], within_s: float) -> None:
        self._wait(is_true, within_s, "what was waited for")

    # -- what must follow -----------------------------------------------------------------------

    def expect_line(self, pattern: str, within_s: float, since_s: float | None = None) -> Line:
        """Wait for a line of the launcher that came after the fault."""
        since_s = self.fault_s if since_s is None else since_s
        found: list[Line] = []

        def look() -> bool:
            found[:] = [
                line
                for line in self.lines
                if line.at_s >= since_s and re.search(pattern, line.text)
            ]
            return bool(found)

        self._wait(look, within_s, f"a line with {pattern!r}")
        return found[0]

    def expect_no_line(self, pattern: str) -> None:
        said = [line.text for line in self.lines if re.search(pattern, line.text)]
        assert not said, f"{said}{self}"

    def expect_detection(self, pattern: str, within_s: float) -> None:
        """Expect the line that names the culprit; its delay counts as detection."""
        line = self.expect_line(pattern, within_s)
        self.figures.detection_s.append(line.at_s - self.fault_s)
        self.figures.notes.append(line.text)

    def expect_resume(self, within_s: float) -> None:
        """Expect a step beyond those that had been done when the fault happened."""
        before = self._step_at(self.fault_s)

        def next_s() -> float | None:
            done = [
                step.at_s
                for worker in self.workers()
                for step in worker.steps
                if step.at_s > self.fault_s and step.number > before
            ]
            return min(done, default=None)

        self._wait(lambda: next_s() is not None, within_s + 5, "the next step")
        took_s = (next_s() or 0.0) - self.fault_s
        self.figures.resume_s.append(took_s)
        assert took_s <= within_s * PATIENCE, f"the next step took {took_s:.2f} s{self}"

    def expect_end(self, code: int, within_s: float = START_S) -> None:
        """Expect the launcher to end with this code, and to leave nothing."""
        found = self._end(within_s)
        assert found == code, f"it ended with {found}{self}"

    def expect_end_of_launcher(self, code: int, within_s: float = START_S) -> None:
        """Expect that it ends and the job stays."""
        launcher = self._launcher
        assert launcher is not None
        assert launcher.wait(within_s) == code, f"it ended with {launcher.returncode}{self}"
        self._launcher = None

    def expect_end_with_error(self, within_s: float = START_S) -> None:
        found = self._end(within_s)
        assert found > 0, f"it ended with {found}{self}"
        self.expect_no_line("Traceback")

    def _end(self, within_s: float) -> int:
        launcher, reader = self._launcher, self._reader
        assert launcher is not None and reader is not None
        self._wait(lambda: launcher.poll() is not None, within_s, "the end")
        reader.join(10)
        self.expect_no_process_left()
        left = [path.name for path in self.runtime.glob("paceline-*-job-*")]
        assert not left, f"left behind: {left}{self}"
        return launcher.returncode

    def expect_success(self, within_s: float = START_S) -> None:
        self.expect_end(0, within_s)

    def expect_no_process_left(self, within_s: float = 5.0) -> None:
        """Expect that every process of the job ends: all have its directory in their environ."""
        marks = {f"XDG_RUNTIME_DIR={self.runtime}"}

        def left() -> list[int]:
            known = self._seen | {worker.pid for worker in self.workers()}
            return [*filter(story_processes.is_alive, known), *story_processes.having(marks)]

        self._wait(lambda: not left(), within_s, f"the end of {left()}")

    def expect_agreement(self) -> None:
        """Expect that every step was done once, and left the same parameters on all workers."""
        story_diary.require_agreement(self.workers())

    def expect_every_sample_once(self, epochs: int) -> None:
        """Expect that each sample of the first epochs counted once.

        Only of a job without kills: a killed worker may not have noted its last step.
        """
        for epoch in range(epochs):
            counts = story_diary.samples_of(self.workers(), epoch)
            wrong = {sample: count for sample, count in counts.items() if count != 1}
            assert not wrong, f"epoch {epoch}: {wrong}{self}"

    # -- plumbing -------------------------------------------------------------------------------

    def _step_at(self, at_s: float) -> int:
        """The highest step that anybody had done at that time."""
        return max((s.number for w in self.workers() for s in w.steps if s.at_s <= at_s), default=0)

    def _wait(self, is_true: Callable[[], bool], within_s: float, what: str) -> None:
        deadline_s, has_ended = time.monotonic() + within_s * PATIENCE, False
        while not is_true():
            if not has_ended and self._launcher is not None and self._launcher.poll() is not None:
                has_ended = True  # but its last lines may still be on their way
                deadline_s = min(deadline_s, time.monotonic() + 5)
            assert time.monotonic() < deadline_s, f"{what} did not come in {within_s:g} s{self}"
            time.sleep(0.01)

    def _read(self, launcher: subprocess.Popen[bytes]) -> None:
        assert launcher.stdout is not None
        with launcher.stdout as output:
            for data in output:
                self.lines.append(Line(time.monotonic(), data.decode(errors="replace").rstrip()))

    def record(self, record_property: Callable[[str, object], None]) -> None:
        """Write what was measured into the test's report."""
        figures = self.figures
        for name, values in (("detection", figures.detection_s), ("resume", figures.resume_s)):
            for value in values:
                record_property(name, f"{value:.3f}")
        for note in figures.notes:
            record_property("note", note)

    def close(self) -> None:
        """End whatever is left of the job."""
        for pid in list(self._stopped):
            self.go_on(pid)
        launcher = self._launcher
        if launcher is None:
            return
        below = list(story_processes.descendants(launcher.pid))
        if launcher.poll() is None:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(10)
            launcher.kill()
            launcher.wait()
        for pid in {*below, *self._seen}:
            if story_processes.is_alive(pid) and pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def __str__(self) -> str:
        last = self.lines[-60:]
        told = [f"\n    {line.at_s - self.fault_s:+8.3f} s | {line.text}" for line in last]
        return "".join(["\n  the launcher said (times from the fault):", *told])
