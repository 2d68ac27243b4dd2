"""What people hear of checkpoints: the first worker speaks for all.

Threads: `on_end` is called on the thread that writes, everything else on the main thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median_high

from paceline.observe.telemetry.events import Preemptible
from paceline.runtime.console import say, warn
from paceline.runtime.formatting import data_size, short_duration
from paceline.runtime.job import Job
from paceline.state.checkpoint.writer import Outcome
from paceline.state.files.reading import Loaded

_ALWAYS = 3  # saves that are told in any case
_EVERY_S = 30.0


class Teller:
    """Says what was saved, what was not, and what it cost."""

    def __init__(self, job: Job, root: Path) -> None:
        self._job, self._root = job, root
        self._num_saved = self._num_failed = 0
        self._told_s = float("-inf")
        self._stalls_s: list[float] = []
        self._last: Outcome | None = None
        job.rendezvous.agent.report(Preemptible(job.env.rank))

    @property
    def _is_first(self) -> bool:
        return self._job.world.rank == 0  # in an elastic job it may change

    def on_resume(self, loaded: Loaded, steps: int, notices: Sequence[str]) -> None:
        """Say from where the job goes on, and what is not as it was."""
        if not self._is_first:
            return
        mapped = "".join(f"; {notice}" for notice in notices)
        say(f"goes on from {self._shown(loaded.path)}, behind step {steps}{mapped}")

    def on_stall(self, stalled_s: float) -> None:
        """Note how long training stood still."""
        self._stalls_s.append(stalled_s)

    def on_end(self, outcome: Outcome) -> None:
        """Say what became of a save."""
        now_s = time.monotonic()
        if outcome.error is not None and self._is_first:  # else the first one has heard of it
            self._num_failed += 1
            warn(
                f"checkpoint behind step {outcome.step} FAILED: {outcome.error}; training goes on,"
                f" {self._what_stays()}"
            )
        if outcome.path is None:
            return  # another worker has published it, or nobody
        self._num_saved += 1
        self._last = outcome
        if self._num_saved <= _ALWAYS or now_s - self._told_s >= _EVERY_S:
            self._told_s = now_s
            say(
                f"saved {self._shown(outcome.path)}: {data_size(outcome.num_bytes)} in"
                f" {outcome.took_s:.1f} s, training stalled for {short_duration(outcome.stalled_s)}"
            )

    def on_preemption(self, steps: int) -> None:
        """Say that the job ends here for now."""
        if self._is_first:
            say(f"stops behind step {steps}, as asked: saved; start it again to go on")

    def close(self) -> None:
        """Say what all saves came to, if there were more than have been told."""
        if not self._is_first or self._num_saved <= _ALWAYS or self._last is None:
            return
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        say(
            f"{self._num_saved} checkpoints saved{failed}, the last behind step {self._last.step};"
            f" training stalled for {short_duration(median_high(self._stalls_s))} each (median), at"
            f" most {short_duration(max(self._stalls_s))}"
        )

    def _what_stays(self) -> str:
        last = self._last
        return f"the one of step {last.step} stays" if last is not None else "older ones stay"

    def _shown(self, path: Path) -> str:
        return f"{self._root.name}/{path.name}"
