"""A story: a real `paceline run` job, something that happens to it, and what must follow.

    story.start("-n", "3", "--min", "1")
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
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import story_diary
from story_job import PATIENCE, START_S, Job, Line


@dataclass
class Figures:
    """What is measured in a story."""

    detection_s: list[float] = field(default_factory=list)
    resume_s: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Story(Job):
    """One job; made by the `story` fixture, which also cleans up."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.figures = Figures()
        self.fault_s = self._detected_s = 0.0
        self._stopped: set[int] = set()

    # -- what happens ---------------------------------------------------------------------------

    def kill(self, *who: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to processes: the fault."""
        pids = [self.pid(one) for one in who]  # before: looking takes time
        self.happens()
        for pid in pids:
            # If the launcher is one of them, the kernel kills the others with it.
            with contextlib.suppress(ProcessLookupError):
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

    # -- what must follow -----------------------------------------------------------------------

    def expect_line(self, pattern: str, within_s: float) -> Line:
        """Wait for a line of the launcher that came after the fault."""
        found: list[Line] = []

        def look() -> bool:
            later = [line for line in list(self.lines) if line.at_s >= self.fault_s]
            found[:] = [line for line in later if re.search(pattern, line.text)]
            return bool(found)

        self.until(look, within_s, f"a line with {pattern!r}")
        return found[0]

    def expect_no_line(self, pattern: str) -> None:
        said = [line.text for line in self.lines if re.search(pattern, line.text)]
        assert not said, f"{said}{self}"

    def expect_detection(self, pattern: str, within_s: float) -> None:
        """Expect the line that names the culprit; its delay counts as detection."""
        line = self.expect_line(pattern, within_s)
        self._detected_s = line.at_s
        self.figures.detection_s.append(line.at_s - self.fault_s)
        self.figures.notes.append(line.text)

    def expect_resume(self, within_s: float) -> None:
        """Expect that steps go on: behind the longest pause since the fault, and its detection.

        The step under way may have been past the point at which it needed the victim.
        """
        since_s = max(self.fault_s, self._detected_s)

        def commits() -> list[float]:
            first: dict[int, float] = {}
            for step in (step for worker in self.workers() for step in worker.steps):
                first[step.number] = min(step.at_s, first.get(step.number, step.at_s))
            return sorted(at_s for at_s in first.values() if at_s > self.fault_s)

        self.until(lambda: commits()[-1:] > [since_s], within_s + 5, "the next step")
        times = [self.fault_s, *commits()]
        _, resumed_s = max(zip(times, times[1:], strict=False), key=lambda gap: gap[1] - gap[0])
        took_s = resumed_s - self.fault_s
        self.figures.resume_s.append(took_s)
        assert took_s <= within_s * PATIENCE, f"the next step took {took_s:.2f} s{self}"

    def rate_of(self, worker: story_diary.Worker, from_s: float, to_s: float) -> float:
        """Count a worker's steps per second in a time relative to the fault."""
        begin, end = self.fault_s + from_s, self.fault_s + to_s
        return sum(begin <= step.at_s < end for step in worker.steps) / (to_s - from_s)

    def expect_end(self, code: int, within_s: float = START_S) -> None:
        """Expect the launcher to end with this code, and the job to leave nothing (oracle O5)."""
        found = self.wait_for_end(within_s)
        assert found == code, f"it ended with {found}{self}"
        left = [path.name for path in self.runtime.glob("paceline-*-job-*")]
        assert not left, f"left behind: {left}{self}"

    def expect_success(self, within_s: float = START_S) -> None:
        """Let the job come to its end now, and expect that it is a good one."""
        self.finish()
        self.expect_end(0, within_s)

    def expect_end_with_error(self, within_s: float = START_S) -> None:
        """Expect that the launcher ends with an error in words.

        Scripts may print tracebacks: they fail in `pl.init()` when a resource is used up.
        """
        self.expect_end(1, within_s)
        self.expect_no_line("^Traceback")
        self.expect_line(r"^paceline: error: LaunchError: ", within_s)

    def expect_no_process_left(self, within_s: float = 5.0) -> None:
        self.until(lambda: not self.processes(), within_s, f"the end of {self.processes()}")

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

    # -- end ------------------------------------------------------------------------------------

    def record(self, record_property: Callable[[str, object], None]) -> None:
        """Write what was measured into the test's report."""
        figures = self.figures
        for name, values in (("detection", figures.detection_s), ("resume", figures.resume_s)):
            for value in values:
                record_property(name, f"{value:.3f}")
        for note in figures.notes:
            record_property("note", note)

    def close(self) -> None:
        for pid in list(self._stopped):
            self.go_on(pid)
        super().close()

    def __str__(self) -> str:
        last = self.lines[-60:]
        told = [f"\n    {line.at_s - self.fault_s:+8.3f} s | {line.text}" for line in last]
        return "".join(["\n  the launcher said (times from the fault):", *told])
