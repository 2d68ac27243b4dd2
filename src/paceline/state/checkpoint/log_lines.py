"""Log lines about checkpoints. The first worker logs for all workers.

Threads: the writer's thread calls `on_end`, the main thread everything else.
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
from paceline.state.checkpoint.background_writer import SaveOutcome
from paceline.state.files.load import LoadedCheckpoint

_ALWAYS = 3  # the first saves are always logged; later ones at intervals
_EVERY_S = 30.0


class CheckpointLog:
    """Logs what was saved, what failed, and how long training stalled."""

    def __init__(self, job: Job, root: Path) -> None:
        self._job, self._root = job, root
        self._num_saved = self._num_failed = 0
        self._logged_s = float("-inf")
        self._stalls_s: list[float] = []
        self._last: SaveOutcome | None = None
        job.rendezvous.agent.report(Preemptible(job.env.rank))

    @property
    def _is_first(self) -> bool:
        return self._job.world.rank == 0  # in an elastic job it may change

    def on_resume(self, loaded: LoadedCheckpoint, steps: int, notices: Sequence[str]) -> None:
        """Log the checkpoint that the job resumes from, and what differs."""
        self._job.last_checkpoint = loaded.path
        if not self._is_first:
            return
        mapped = "".join(f"; {notice}" for notice in notices)
        say(f"resumes from {self._shown(loaded.path)}, after step {steps}{mapped}")

    def on_stall(self, stalled_s: float) -> None:
        """Record how long training stalled."""
        self._stalls_s.append(stalled_s)

    def on_end(self, outcome: SaveOutcome) -> None:
        """Log the result of a save."""
        now_s = time.monotonic()
        if outcome.error is not None and self._is_first:  # the first worker logs for all
            self._num_failed += 1
            warn(
                f"checkpoint after step {outcome.step} FAILED: {outcome.error}; training continues,"
                f" {self._what_is_kept()}"
            )
        if outcome.path is None:
            return  # another worker has published it, or none has
        self._job.last_checkpoint = outcome.path
        self._num_saved += 1
        self._last = outcome
        if self._num_saved <= _ALWAYS or now_s - self._logged_s >= _EVERY_S:
            self._logged_s = now_s
            say(
                f"saved {self._shown(outcome.path)}: {data_size(outcome.num_bytes)} in"
                f" {outcome.took_s:.1f} s, training stalled for {short_duration(outcome.stalled_s)}"
            )

    def on_preemption(self, steps: int) -> None:
        """Log that the job stops as requested."""
        if self._is_first:
            say(f"stops after step {steps} as requested: saved; start the job again to resume")

    def close(self) -> None:
        """Log totals of all saves, if not every save was logged."""
        if not self._is_first or self._num_saved <= _ALWAYS or self._last is None:
            return
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        say(
            f"{self._num_saved} checkpoints saved{failed}, the last after step {self._last.step};"
            f" training stalled for {short_duration(median_high(self._stalls_s))} each (median), at"
            f" most {short_duration(max(self._stalls_s))}"
        )

    def _what_is_kept(self) -> str:
        last = self._last
        return f"the one of step {last.step} is kept" if last is not None else "older ones are kept"

    def _shown(self, path: Path) -> str:
        return f"{self._root.name}/{path.name}"
